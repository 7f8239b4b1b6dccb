"""Verdicts on the claims and questions of docs/plan.md, from the data of the campaign.

Each rule is a function of the data. It returns a verdict, or raises MissingError if a run that it
needs has not been made. CLAIMS is the table of all rules.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import common  # noqa: F401
import numpy as np
from scipy.stats import spearmanr
from stats import SMALLEST_EFFECT, Effect, contrast, difference, holm, p_at_least, verdict
from waves import (
    FACTORS,
    PAIR,
    SEEDS,
    TASKS,
    Row,
    Run,
    best_rates,
    key,
    normalized,
    oracle_arm,
    read_rows,
)

NAMES = {
    "frozenlake": "text FrozenLake",
    "nq_search": "NQ Search",
    "frozenlake_vlm": "image FrozenLake",
    "sokoban_simple": "Sokoban Simple",
    "aime": "AIME",
    "gsm8k": "GSM8K",
    "geoqa": "GeoQA",
    "cliffwalking": "CliffWalking",
    "sokoban_hard": "Sokoban Hard",
    "small": "GSM8K, SmolLM2",
}
ARMS = {
    "on_policy": "on-policy",
    "epochs": "as many updates",
    "uniform": "uniform replay",
    "no_decay": "no decay",
    "per": "Standard PER",
    "freshper": "FreshPER",
}
WORDS = {
    "tau": "tau",
    "beta": "beta",
    "advantage_clip": "advantage clip",
    "dual_clip 0": "no dual clip",
    "kl_loss_coef 0": "no KL loss",
    "kl_loss_coef 0.05": "KL loss 0.05",
    "kl_reward_coef 0.1": "KL in reward 0.1",
    "entropy_coef": "entropy",
    "replay_ratio 1": "1 replay update",
    "replay_ratio 4": "4 replay updates",
    "decay polynomial": "polynomial decay",
    "base_priority advantage": "priority by advantage",
    "capacity": "capacity",
    "eviction lowest_priority": "evicts the lowest",
    "model good": "from a good policy",
    "ppo_epochs 3": "three epochs",
    "constant": "constant rate",
    "buffer_maximum": "buffer's maximum",
    "shuffled": "shuffled ages",
    "oracle": "oracle",
}
# The arms of wave 4, and what each is compared to.
FACTOR_REFERENCES = {arm: "freshper" for arm in FACTORS} | {
    "on_policy +constant": "on_policy",
    "freshper --beta 0.4 +constant": "freshper --beta 0.4",
    "per --epsilon 1e-6": "per",
    "per --epsilon 1e-6 +buffer_maximum": "per --epsilon 1e-6",
    "freshper --capacity 640 --eviction lowest_priority": "freshper --capacity 640",
}
# The seven tasks of the paper's Table 1. GSM8K and CliffWalking are its controls.
MAIN = tuple(task for task in TASKS if task not in ("gsm8k", "cliffwalking"))
SUCCESS = 0.6  # of the time to a success
AT_LEAST = "at least"  # a run never has that success


def arm_words(arm: str) -> list[str]:
    """Return the flags of an arm in words, such as ["beta 0.4", "constant rate"]."""
    words = []
    for flag in re.split(r" --| \+", arm)[1:]:
        name, _, value = flag.partition(" ")
        if flag in WORDS:
            words.append(WORDS[flag])
        else:
            words.append(f"{WORDS.get(name, name)} {value}".strip())
    return words


def arm_name(arm: str) -> str:
    """Return an arm in words, such as "FreshPER (beta 0.4)"."""
    name = ARMS[arm.split()[0]]
    words = arm_words(arm)
    return f"{name} ({', '.join(words)})" if words else name


class MissingError(Exception):
    """A run that a question needs has not been made."""


class Data:
    """The rows, curves and samples of drift of the runs that have been made."""

    def __init__(self, rows: list[Row], points: list[Row], entries: list[Row]):
        self.rows = {key(row): row for row in rows}
        self.points: dict[Run, list[Row]] = {}
        for point in points:
            self.points.setdefault(key(point), []).append(point)
        self.entries: dict[Run, list[Row]] = {}
        for entry in entries:
            self.entries.setdefault(key(entry), []).append(entry)
        self.best = {False: best_rates(rows), True: best_rates(rows, small=True)}
        self.used: set[Run] = set()

    def row(self, run: Run) -> Row:
        """Return the row of a run, and note that it was used."""
        if run not in self.rows:
            raise MissingError(run.name)
        self.used.add(run)
        return self.rows[run]

    def rate(self, arm: str, task: str = "") -> float:
        """Return the best rate of an arm's first word."""
        best = self.best[task == "small"]
        name = arm.split()[0]
        if name not in best:
            raise MissingError(f"the tuning of {name}")
        return best[name]

    def runs(self, task: str, arm: str, rate: float | None = None) -> list[Run]:
        """Return the five runs of an arm, with its best rate unless another is given."""
        rate = self.rate(arm, task) if rate is None else rate
        return [Run(task, arm, rate, seed) for seed in SEEDS]

    def values(
        self, task: str, arm: str, column: str = "final", rate: float | None = None
    ) -> np.ndarray:
        """Return a column for the runs of an arm, [5], NaN where it is empty."""
        rows = [self.row(run) for run in self.runs(task, arm, rate)]
        return np.array([float(row[column] or "nan") for row in rows])

    def need(self, tasks: Sequence[str], arms: Iterable[str]) -> None:
        """Raise MissingError unless all runs of these arms on these tasks have been made."""
        for task in tasks:
            for arm in arms:
                self.values(task, arm)

    def normalized(self, task: str, arm: str) -> np.ndarray:
        """Return the normalised final success of the runs of an arm, [5]."""
        return np.array([normalized(self.row(run)) for run in self.runs(task, arm)])

    def all_normalized(self, arm: str) -> np.ndarray:
        """Return the same for all tasks, [9, 5]."""
        return np.array([self.normalized(task, arm) for task in TASKS])

    def effect(self, task: str, arm: str, other: str, column: str = "final") -> Effect:
        """Return the difference of two arms, arm - other."""
        return difference(self.values(task, arm, column), self.values(task, other, column))

    def curve(self, run: Run) -> dict[str, np.ndarray]:
        """Return the columns of a run's curve, [evaluations] each."""
        self.row(run)
        points = self.points[run]
        names = ("step", "episodes", "wall_s", "eval_success")
        return {name: np.array([float(p[name] or "nan") for p in points]) for name in names}


def read_data(folder: Path) -> Data:
    """Read the three tables of a folder. Without them nothing has been made."""
    names = ("runs.csv", "runs_curves.csv.gz", "runs_drift.csv.gz")
    return Data(*[read_rows(folder / name) for name in names])


# -- what a verdict consists of


class Part(NamedTuple):
    """One effect of a claim."""

    name: str
    effect: Effect
    answer: str
    form: str = "difference"  # "ratio": the effect is a logarithm; "number": neither


class Verdict(NamedTuple):
    answer: str  # yes, no or undecided; or how often each
    parts: list[Part]


Effects = dict[str, Effect]


def equal(effect: Effect, corrected_p: float, _: float) -> str:
    """Return whether two arms are equal: yes, no or undecided."""
    if -SMALLEST_EFFECT <= effect.low <= effect.high <= SMALLEST_EFFECT:
        return "yes"
    return "no" if corrected_p < 0.05 else "undecided"


def judge(
    effects: Effects,
    rule: Callable = verdict,
    form: str = "difference",
    smallest: float = SMALLEST_EFFECT,
) -> list[Part]:
    """Return the parts of a family of effects, judged with Holm's correction."""
    above_0 = holm([effect.p for effect in effects.values()])
    at_least = holm([p_at_least(effect, smallest) for effect in effects.values()])
    parts = []
    for (name, effect), *corrected in zip(effects.items(), above_0, at_least, strict=True):
        parts.append(Part(name, effect, rule(effect, *corrected), form))
    return parts


def decide(yes: bool, no: bool) -> str:
    """Return the answer of a rule with two conditions. The first one comes first."""
    if yes:
        return "yes"
    return "no" if no else "undecided"


def count(parts: Sequence[Part], answer: str) -> int:
    return sum(part.answer == answer for part in parts)


def every(parts: list[Part]) -> Verdict:
    """Yes: all are yes. No: one is no."""
    return Verdict(decide(count(parts, "yes") == len(parts), count(parts, "no") > 0), parts)


def alike(parts: list[Part]) -> Verdict:
    """Yes: all are yes. No: all are no."""
    answers = [count(parts, answer) == len(parts) for answer in ("yes", "no")]
    return Verdict(decide(*answers), parts)


def most(parts: list[Part]) -> Verdict:
    """Yes: more than half are yes. No: more than half are no."""
    half = len(parts) / 2
    return Verdict(decide(count(parts, "yes") > half, count(parts, "no") > half), parts)


def each(parts: list[Part]) -> Verdict:
    """Say how often each answer occurs, unless all are the same. Of no parts nothing is known."""
    if not parts:
        return Verdict("undecided", parts)
    words = []
    for answer in ("yes", "undecided", "no"):
        n = count(parts, answer)
        if n == len(parts):
            return Verdict(answer, parts)
        if n:
            words.append(f"{answer} {n}")
    return Verdict(", ".join(words), parts)


def opposite(parts: list[Part]) -> Verdict:
    """Yes: the effect is no. No: it is yes."""
    (part,) = parts
    return Verdict({"yes": "no", "no": "yes"}.get(part.answer, "undecided"), parts)


def above(effect: Effect, bound: float) -> str:
    """Return whether an interval lies above a bound: yes, no (below it) or undecided."""
    return decide(effect.low > bound, effect.high < bound)


def differences(
    data: Data, arm: str, *others: str, tasks: Sequence[str] = TASKS, column: str = "final"
) -> Effects:
    """Return the differences of an arm to others on each task, by name."""
    effects = {}
    for task in tasks:
        for other in others:
            name = NAMES[task] if len(others) == 1 else f"{NAMES[task]}, minus {ARMS[other]}"
            effects[name] = data.effect(task, arm, other, column)
    return effects


def on_text(data: Data, *pairs: tuple[str, str], column: str = "final") -> Effects:
    """Return the differences of pairs of arms on text FrozenLake, by name."""
    effects = {}
    for arm, other in pairs:
        name = f"{arm_name(arm)} minus {arm_name(other)}"
        effects[name] = data.effect("frozenlake", arm, other, column)
    return effects


# -- the paper's claims, in the order of docs/plan.md


def best_everywhere(data: Data) -> Verdict:
    return every(judge(differences(data, "freshper", "on_policy", "per", tasks=MAIN)))


def best_peak(data: Data) -> Verdict:
    arms = ("freshper", "on_policy", "per")
    return every(judge(differences(data, *arms, tasks=MAIN, column="peak")))


def per_below(data: Data) -> Verdict:
    return most(judge(differences(data, "on_policy", "per", tasks=MAIN)))


def per_fails(data: Data) -> Verdict:
    tasks = ("sokoban_simple", "nq_search")
    effects = differences(data, "on_policy", "per", tasks=tasks)
    return alike([Part(name, effect, above(effect, 0.2)) for name, effect in effects.items()])


def decay_is_essential(data: Data) -> Verdict:
    return most(judge(differences(data, "freshper", "no_decay", tasks=MAIN)))


def more_than_per(data: Data) -> Verdict:
    return most(judge(differences(data, "freshper", "per", tasks=MAIN)))


def tau_matters(data: Data) -> Verdict:
    """All arms have FreshPER's best rate, that without decay, too."""
    rate = data.rate("freshper")
    effects = {}
    for task in PAIR:
        without = data.values(task, "no_decay", rate=rate)
        for tau, arm in (("tau 20", "freshper"), ("tau 80", "freshper --tau 80")):
            effects[f"{NAMES[task]}, {tau}"] = difference(data.values(task, arm), without)

    short = judge(effects)[::2]
    long = judge(effects, equal)[1::2]
    yes = count(short, "yes") == count(long, "yes") == 2
    words = {"yes": "equal", "no": "not equal", "undecided": "perhaps equal"}
    long = [part._replace(name=f"{part.name} ({words[part.answer]})") for part in long]
    parts = [short[0], long[0], short[1], long[1]]
    return Verdict(decide(yes, count(short, "no") == 2), parts)


def every_tau_is_above(data: Data) -> Verdict:
    pairs = [(arm, "on_policy") for arm in ("freshper --tau 5", "freshper", "freshper --tau 80")]
    return every(judge(on_text(data, *pairs)))


def drift_fit(
    data: Data, task: str, arm: str, name: str = "reverse_r2", rate: float | None = None
) -> np.ndarray:
    """Return an R² of the line of KL by age for the runs of an arm, [5]. It is 0 where KL falls
    with age."""
    direction = name.split("_")[0]
    falls = data.values(task, arm, f"{direction}_tau", rate) < 0
    return np.where(falls, 0.0, data.values(task, arm, name, rate))


def kl_is_linear(data: Data) -> Verdict:
    """Of both directions of KL. Eq. 12 names KL(pi_theta || pi_mu), in whose estimate ratios are
    factors. The other one decides."""
    parts = []
    fits = {
        "reverse_r2": "KL(mu, theta), which decides",
        "reverse_r2_all": "with the oldest bin",
        "drift_r2": "KL(theta, mu)",
    }
    for name, words in fits.items():
        r2 = [drift_fit(data, task, "freshper", name) for task in TASKS]
        median = float(np.nanmedian(r2))
        low, high = np.nanquantile(r2, (0.25, 0.75))
        answer = decide(median >= 0.9, median < 0.7)
        effect = Effect(median, low, high, np.nan)
        parts.append(Part(f"{words}: median (quartiles)", effect, answer, "number"))
    return Verdict(parts[0].answer, parts)


def drift_rates(
    data: Data, task: str, arm: str, rate: float | None = None, column: str = "reverse_tau"
) -> np.ndarray:
    """Return c of eq. 12 for the runs of an arm, [5], in nats per 1,000 steps. It is below 0 if KL
    falls with age."""
    return 1000.0 / data.values(task, arm, column, rate)


def drift_follows_rate(data: Data) -> Verdict:
    """Whether a quarter of the rate has a quarter of c, within a factor of two. KL(mu, theta)
    decides."""
    rate = data.rate("freshper")
    parts = []
    for column, words in (("reverse_tau", "nats in 1,000 steps"), ("drift_tau", "KL(theta, mu)")):
        for task in PAIR:
            groups = [drift_rates(data, task, "freshper", r, column) for r in (rate, rate / 4)]
            twice, four, eight = (contrast(groups, [1.0, -factor]) for factor in (2.0, 4.0, 8.0))
            within = twice.low > 0 and eight.high < 0
            answer = decide(within, not four.low <= 0 <= four.high)
            parts.append(Part(f"{NAMES[task]}, c - 4 c', {words}", four, answer))
    return Verdict(alike(parts[:2]).answer, parts)


def tau_follows_drift(data: Data) -> Verdict:
    rate = data.rate("freshper")
    effects = {}
    for task in PAIR:
        groups = []
        for factor in (rate / 4, rate):
            for arm in ("freshper --tau 80", "freshper"):
                groups.append(data.values(task, arm, rate=factor))
        effects[NAMES[task]] = contrast(groups, [1.0, -1.0, -1.0, 1.0])
    return alike(judge(effects))


def is_does_not_raise(data: Data) -> Verdict:
    pair = ("freshper --beta 0.4", "freshper")
    return opposite(judge(on_text(data, pair, column="peak")))


def late_loss(data: Data, task: str, arm: str, rate: float | None = None) -> np.ndarray:
    """Return the highest mean of three consecutive evaluations minus that of the last three, [5].

    256 episodes an evaluation leave 0.01 to 0.03 by chance, if the curve is flat."""
    losses = []
    for run in data.runs(task, arm, rate):
        values = np.array(data.row(run)["evaluations"].split(), float)
        means = [values[k : k + 3].mean() for k in range(max(len(values) - 2, 1))]
        losses.append(max(means) - means[-1])
    return np.array(losses)


def is_prevents_loss(data: Data) -> Verdict:
    loss = late_loss(data, "frozenlake", "freshper +constant")
    with_is = late_loss(data, "frozenlake", "freshper --beta 0.4 +constant")
    own = contrast([loss], [1.0])
    (saved,) = judge({"minus that with IS": difference(loss, with_is)})
    cosine = contrast([late_loss(data, "frozenlake", "freshper")], [1.0])

    parts = [Part("late loss, constant rate", own, above(own, SMALLEST_EFFECT)), saved]
    parts.append(Part("late loss, cosine", cosine, above(cosine, SMALLEST_EFFECT)))
    yes = parts[0].answer == saved.answer == "yes"
    return Verdict(decide(yes, parts[0].answer == "no"), parts)


def on_policy_degrades(data: Data) -> Verdict:
    parts = []
    for task in ("sokoban_simple", "geoqa"):
        effect = contrast([late_loss(data, task, "on_policy")], [1.0])
        parts.append(Part(NAMES[task], effect, above(effect, SMALLEST_EFFECT)))
    return alike(parts)


def clip_is_essential(data: Data) -> Verdict:
    return alike(judge(on_text(data, ("freshper --advantage_clip 0.2", "freshper"))))


def without_clips_diverges(data: Data) -> Verdict:
    diverged = data.values("frozenlake", "freshper --dual_clip 0", "diverged")
    answer = "yes" if diverged.sum() >= 3 else "no"
    effect = Effect(float(diverged.mean()), np.nan, np.nan, np.nan)
    return Verdict(answer, [Part("share of runs that diverge", effect, answer, "number")])


def kl_should_be_off(data: Data) -> Verdict:
    off = "freshper --kl_loss_coef 0"
    default = "freshper --kl_loss_coef 0.05 --kl_reward_coef 0.1"
    parts = judge(on_text(data, (off, "freshper"), (off, default)))
    return Verdict(decide(count(parts, "yes") == 2, parts[0].answer == "no"), parts)


def entropy_harms(data: Data) -> Verdict:
    return alike(judge(on_text(data, ("freshper", "freshper --entropy_coef 0.01"))))


def exponential_is_better(data: Data) -> Verdict:
    return alike(judge(on_text(data, ("freshper", "freshper --decay polynomial"))))


def any_priority_will_do(data: Data) -> Verdict:
    return alike(judge(on_text(data, ("freshper --base_priority advantage", "freshper")), equal))


def eviction_is_equal(data: Data) -> Verdict:
    first_in = "freshper --capacity 640"
    lowest = f"{first_in} --eviction lowest_priority"
    return alike(judge(on_text(data, (lowest, first_in)), equal))


def cliff_converges(data: Data) -> Verdict:
    parts = []
    for arm in ("on_policy", "per", "freshper"):
        effect = contrast([data.values("cliffwalking", arm)], [1.0])
        parts.append(Part(ARMS[arm], effect, above(effect, 0.9), "number"))
    return every(parts)


def cliff_needs_no_replay(data: Data) -> Verdict:
    return opposite(judge(differences(data, "freshper", "on_policy", tasks=["cliffwalking"])))


def good_gains_nothing(data: Data) -> Verdict:
    arms = ("freshper --model good", "on_policy --model good")
    return opposite(judge({"GSM8K": data.effect("gsm8k", *arms)}))


def harder_gains_more(data: Data) -> Verdict:
    level = [data.normalized(task, "on_policy").mean() for task in TASKS]
    gain = [effect.estimate for effect in differences(data, "freshper", "on_policy").values()]
    rank = spearmanr(level, gain)
    answer = decide(rank.statistic <= -0.68, rank.statistic > 0)
    effect = Effect(rank.statistic, np.nan, np.nan, rank.pvalue)
    return Verdict(answer, [Part("rank correlation", effect, answer, "number")])


def carries_to_images(data: Data) -> Verdict:
    tasks = ("frozenlake_vlm", "geoqa")
    return every(judge(differences(data, "freshper", "on_policy", tasks=tasks)))


# -- our questions


def more_than_updates(data: Data) -> Verdict:
    return each(judge(differences(data, "freshper", "epochs")))


def more_than_age(data: Data) -> Verdict:
    return each(judge(differences(data, "freshper", "uniform")))


def freshness(data: Data) -> Verdict:
    return each(judge(differences(data, "freshper", "freshper +shuffled", tasks=PAIR)))


def drift_beats_age(data: Data) -> Verdict:
    effects = {NAMES[task]: data.effect(task, oracle_arm(task), "freshper") for task in PAIR}
    return each(judge(effects))


def auto_tau_is_equal(data: Data) -> Verdict:
    return each(judge(differences(data, "freshper --tau auto", "freshper", tasks=PAIR), equal))


def more_replay(data: Data) -> Verdict:
    one, four = "freshper --replay_ratio 1", "freshper --replay_ratio 4"
    return each(judge(on_text(data, ("freshper", one), (four, "freshper"))))


def maximum_matters(data: Data) -> Verdict:
    of_batch = "per --epsilon 1e-6"
    return each(judge(on_text(data, (of_batch, f"{of_batch} +buffer_maximum"))))


def episodes_until(success: float, curve: dict[str, np.ndarray]) -> float:
    """Return how many episodes a run needs until an evaluation has this success, or NaN."""
    episodes = curve["episodes"]
    successes = curve["eval_success"]
    if not (successes >= success).any():
        return np.nan

    first = int(np.argmax(successes >= success))
    if first == 0:
        return 0.0
    around = slice(first - 1, first + 1)
    return float(np.interp(success, successes[around], episodes[around]))


def episodes_needed(data: Data, task: str, arm: str) -> tuple[np.ndarray, bool]:
    """Return the episodes that each run of an arm needs until SUCCESS, [5], and whether all runs
    have it at some time. A run that has it never counts with all its episodes, as "at least".

    A run that begins with it says nothing of an arm: NaN."""
    counts = []
    complete = True
    for run in data.runs(task, arm):
        curve = data.curve(run)
        needed = episodes_until(SUCCESS, curve)
        if np.isnan(needed):
            complete = False
            needed = curve["episodes"][-1]
        counts.append(needed or np.nan)
    return np.array(counts), complete


def seconds_per_episode(data: Data, task: str, arm: str) -> float:
    """Return the median over runs of the CPU seconds of an episode, all that a run does
    included."""
    return float(np.median(data.values(task, arm, "cpu_s") / data.values(task, arm, "episodes")))


def saves_time(data: Data) -> Verdict:
    """Of the tasks on which every run of FreshPER has the success at some time."""
    effects = {}
    for task in TASKS:
        ours, complete = episodes_needed(data, task, "freshper")
        if not complete:
            continue
        for arm in ("on_policy", "epochs"):
            theirs, all_have_it = episodes_needed(data, task, arm)
            effect = difference(np.log(theirs), np.log(ours))
            if not np.isnan(effect.estimate):
                name = f"{NAMES[task]}, {ARMS[arm]}"
                effects[name if all_have_it else f"{name}, {AT_LEAST}"] = effect
    return each(judge(effects, form="ratio", smallest=0.0))


def holds_for_pretrained(data: Data) -> Verdict:
    others = ("on_policy", "epochs", "per")
    return each(judge(differences(data, "freshper", *others, tasks=["small"])))


class Claim(NamedTuple):
    number: str  # of docs/plan.md; a letter: a question of ours
    says: str
    rule: Callable[[Data], Verdict]
    section: str  # of RESULTS.md, as in a link


# Sections of RESULTS.md.
WINS = "3-who-wins"
UPDATES = "4-is-it-only-more-updates"
FRESHNESS = "5-is-it-freshness"
TAU = "6-what-sets-tau"
SETTINGS = "7-which-settings-matter"
UNPAID = "8-where-it-does-not-pay"
REAL = "9-a-real-model"


CLAIMS = (
    Claim("1", "FreshPER beats both on all seven tasks (Table 1)", best_everywhere, WINS),
    Claim("1, peak", "the same of the highest evaluation", best_peak, WINS),
    Claim("2", "Standard PER is mostly below on-policy (4.2): on-policy minus it", per_below, WINS),
    Claim(
        "3", "Standard PER fails on two tasks (4.2): on-policy minus it above 0.2", per_fails, WINS
    ),
    Claim(
        "4",
        "age decay helps on most tasks (4.3: is essential): minus no decay",
        decay_is_essential,
        FRESHNESS,
    ),
    Claim("4, IS", "the same minus Standard PER, which adds IS weights", more_than_per, FRESHNESS),
    Claim("5", "tau matters, a long tau is no decay (4.3, B.1): minus it", tau_matters, TAU),
    Claim("6", "text FrozenLake: every tau is above on-policy (Fig. 5b)", every_tau_is_above, TAU),
    Claim("7", "KL grows linearly with age (eq. 12): R²", kl_is_linear, TAU),
    Claim("8", "at 1/4 of the rate c is 1/4, within a factor of 2 (3.3)", drift_follows_rate, TAU),
    Claim("9", "tau should be 1/c (eq. 13): less drift favours tau 80", tau_follows_drift, TAU),
    Claim("10", "peak: IS correction does not raise it (B.2)", is_does_not_raise, SETTINGS),
    Claim("11", "late loss: without IS, training degrades (Fig. 7)", is_prevents_loss, SETTINGS),
    Claim("12", "late loss: on-policy training degrades (4.3)", on_policy_degrades, WINS),
    Claim("13", "an advantage clip of 0.2 is essential (App. E)", clip_is_essential, SETTINGS),
    Claim("13, clip 20", "clip 20, no dual clip: it diverges", without_clips_diverges, SETTINGS),
    Claim("14", "KL terms should be off (App. E)", kl_should_be_off, SETTINGS),
    Claim("15", "an entropy bonus is counterproductive (App. E)", entropy_harms, SETTINGS),
    Claim("16", "does exponential beat polynomial decay?", exponential_is_better, SETTINGS),
    Claim("17", "abs(A) as base priority (3.4) equals abs(r)?", any_priority_will_do, SETTINGS),
    Claim("18", "evicting the lowest priority (A.1) is equal?", eviction_is_equal, SETTINGS),
    Claim("19", "CliffWalking: all converge (B.3)", cliff_converges, WINS),
    Claim(
        "19, gain",
        "CliffWalking: replay adds nothing to on-policy (B.3)",
        cliff_needs_no_replay,
        WINS,
    ),
    Claim("20", "a saturated model gains nothing from replay (B.3)", good_gains_nothing, UNPAID),
    Claim("21", "the harder the task, the larger the gain (4.3)", harder_gains_more, WINS),
    Claim("22", "FreshPER also beats on-policy from images (4.3)", carries_to_images, WINS),
    Claim("a", "is it more than updates? Minus as many updates", more_than_updates, UPDATES),
    Claim("b", "do priorities add to an age limit? Minus uniform replay", more_than_age, FRESHNESS),
    Claim("c", "is it freshness? Minus shuffled ages", freshness, FRESHNESS),
    Claim("d", "does drift itself beat age? The oracle minus FreshPER", drift_beats_age, TAU),
    Claim("e", "is automatic tau equal to tau 20?", auto_tau_is_equal, TAU),
    Claim("f", "does more replay bring more?", more_replay, SETTINGS),
    Claim("g", "epsilon 1e-6: the batch's IS weights beat the buffer's", maximum_matters, SETTINGS),
    Claim("h", "episodes until a success of 0.6: other arm / FreshPER", saves_time, UNPAID),
    Claim("i", "does it hold for a pretrained model? FreshPER minus", holds_for_pretrained, REAL),
)
