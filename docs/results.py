"""Write the tables and figures of README.md, RESULTS.md and docs/ from the campaign.

    python docs/results.py              write what the data has
    python docs/results.py --check      name the pages that are not what this would write

A page has blocks between two marks, and the commits of their runs stand in the first one:

    <!-- results: main, commit 0123456789 -->
    <!-- end -->

A block is written if all of its runs are in docs/reference_runs/runs.csv. Until then it keeps what
it has, below a line that says that this is old. Verdicts and docs/tables.md grow row by row. A
figure is written with its block. Verdicts: benchmarks/claims.py. Statistics: benchmarks/stats.py.
Figures: docs/result_figures.py.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import claims
from claims import ARMS, CLAIMS, FACTOR_REFERENCES, NAMES, Data, MissingError, Part, arm_name
from result_figures import FIGURES, STYLE, changed, interquartile
from stats import Effect, bootstrap, contrast, difference, holm, interquartile_mean
from waves import (
    PAIR,
    QUEUE_TASKS,
    RATES,
    README_RUN,
    SECOND_BEST,
    SEEDS,
    SMALL_ARMS,
    TASKS,
    Run,
    good_run,
    normalized,
    oracle_arm,
    tuning_runs,
)

from freshper.presets import defaults

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "RESULTS.md", "docs/lesson.md", "docs/replay_pays.md", "docs/tables.md")
BLOCK = re.compile(r"<!-- results: (\w+), commit ([^>]*?) -->\n(.*?)<!-- end -->", re.DOTALL)
OLD = (
    "*From older runs (commit {}; other seeds and lengths; means of the last three evaluations), "
    "which are being repeated. docs/tables.md lists each new arm that is complete.*\n\n"
)
ANY_OLD = re.compile(r"\A\*From older runs .*\n\n")
# The best first
FORWARD = tuple(reversed(ARMS))
CONTROLS = ("on_policy", "epochs", "no_decay", "per", "uniform")
# Further columns of runs.csv in the table of every arm.
TUNED = "tuned on text FrozenLake and NQ Search"
COLUMNS = {
    "last": ".3f",
    "peak": ".3f",
    "final_score": ".2f",
    "updates": ".0f",
    "cpu_s": ".0f",
    "unreadable": ".3f",
    "diverged": ".1f",
    "replay_age": ".1f",
}
# Tasks that share a row, and what they are.
DESCRIPTIONS = {
    ("aime",): "three attempts at a number",
    ("gsm8k",): "three attempts at a sum or difference of things",
    ("geoqa",): "three attempts at a number; shows a figure",
    ("nq_search",): "five replies: searches, then an answer; tiny models: one passage per search",
    ("sokoban_simple", "sokoban_hard"): (
        "6x6 cells and one box, 8x8 and two; tiny models: solutions of at most five turns"
    ),
    ("cliffwalking",): "Gymnasium's; tiny models start training along the way to the goal",
}


# -- numbers in words


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def level(values: np.ndarray, digits: int = 3) -> str:
    """Return the mean of runs, and half of its 95 % interval."""
    effect = contrast([values], [1.0])
    return f"{effect.estimate:.{digits}f} ± {effect.high - effect.estimate:.{digits}f}"


def listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence."""
    *others, last = names or ["none"]
    return f"{', '.join(others)} and {last}" if others else last


def span(effect: Effect, form: str = "difference") -> str:
    """Return an effect and its 95 % interval, as claims.Part has it."""
    numbers = np.array(effect[:3])
    sign = "+" if form == "difference" else ""
    if form == "ratio":
        numbers = np.exp(numbers)
    # There is no -0.000.
    estimate, low, high = (f"{number:{sign}.3f}" for number in numbers.round(3) + 0.0)
    return estimate if np.isnan(effect.low) else f"{estimate} ({low} to {high})"


def judged(part: Part) -> str:
    """Return the effect of a part, in bold if its verdict is yes, in italics if it is no."""
    mark = {"yes": "**", "no": "*"}.get(part.answer, "")
    return f"{mark}{span(part.effect, part.form)}{mark}"


def image(name: str, says: str, folder: str = "docs/") -> str:
    return f"![{says}]({folder}results_{name}.png)\n"


# -- the blocks of RESULTS.md, in the order of its sections


def decided(data: Data, claim: claims.Claim) -> tuple[claims.Verdict, int]:
    """Return the verdict of a claim, and how many runs it is made of."""
    before = data.used
    data.used = set()
    try:
        return claim.rule(data), len(data.used)
    finally:
        data.used |= before


def effects_of(parts: list[Part]) -> str:
    """Return the effects of a claim: each of up to four, or else their range, intervals without 0
    (of ratios, without 1) and answers."""
    if len(parts) <= 4:
        return "; ".join(f"{part.name} {judged(part)}" for part in parts)
    estimates = [part.effect.estimate for part in parts]
    zero = 0
    if parts[0].form == "ratio":
        estimates = np.exp(estimates)
        zero = 1
    above = sum(part.effect.low > 0 for part in parts)
    below = sum(part.effect.high < 0 for part in parts)
    return (
        f"[{len(parts)} effects](docs/tables.md), estimates {min(estimates):.2f} to "
        f"{max(estimates):.2f}; intervals: {above} above {zero}, {below or 'none'} below; "
        f"verdicts: {claims.each(parts).answer}"
    )


def all_decided(data: Data) -> dict[claims.Claim, tuple[claims.Verdict, int]]:
    """Return what `decided` does of each claim whose runs have been made. Raises MissingError if
    there is none."""
    known = {}
    for claim in CLAIMS:
        with suppress(MissingError):
            known[claim] = decided(data, claim)
    if not known:
        raise MissingError("the runs of every claim")
    return known


def verdicts(data: Data) -> str:
    rows = []
    known = all_decided(data)
    for claim, (verdict, n) in known.items():
        section = f"[{claim.section[0]}](#{claim.section})"
        answer = f"**{verdict.answer}**"
        rows.append([claim.number, claim.says, answer, effects_of(verdict.parts), str(n), section])

    missing = [claim.number for claim in CLAIMS if claim not in known]
    rules = "[verdict](docs/plan.md#the-papers-claims-and-their-rules)"
    header = ("", "claim", rules, "effect (95 % interval)", "runs", "section")
    text = table(header, rows)
    if missing:
        text += f"\nRuns are missing for: {'; '.join(missing)}.\n"
    return text


def tuning(data: Data) -> str:
    """The mean of the normalised final success of wave 1, by arm and rate."""
    rates = sorted({run.rate for run in tuning_runs()})
    rows = []
    for arm in FORWARD:
        cells = [ARMS[arm]]
        best = data.rate(arm)
        for rate in rates:
            runs = [run for run in tuning_runs() if (run.arm, run.rate) == (arm, rate)]
            if not runs:
                cells.append("")
                continue
            mean = np.mean([normalized(data.row(run)) for run in runs])
            cells.append(f"**{mean:.3f}**" if rate == best else f"{mean:.3f}")
        rows.append(cells)
    measured = "normalised success; factor on the preset's learning rate:"
    return table((measured, *(f"{rate:g}" for rate in rates)), rows)


def minus_controls(data: Data) -> dict[str, list[Part]]:
    """Return FreshPER minus each control: a judged difference per task."""
    return {arm: claims.judge(claims.differences(data, "freshper", arm)) for arm in CONTROLS}


def who_wins(data: Data) -> str:
    data.need(TASKS, ARMS)
    says = (
        "Success of six arms on nine tasks: runs (dots), means (ticks, diamonds), 95 % intervals "
        "(bars), random policy (dotted line)"
    )
    best: dict[str, list[str]] = {arm: [] for arm in FORWARD}
    for task in TASKS:
        means = {arm: data.values(task, arm).mean() for arm in FORWARD}
        best[max(means, key=means.__getitem__)].append(NAMES[task])
    winners = [f"{ARMS[arm]} on {', '.join(tasks)}" for arm, tasks in best.items() if tasks]

    effects = minus_controls(data).values()
    corrected, above_all, below_one = [], [], []
    for number, task in enumerate(TASKS):
        if all(parts[number].answer == "yes" for parts in effects):
            corrected.append(NAMES[task])
        if all(parts[number].effect.low > 0 for parts in effects):
            above_all.append(NAMES[task])
        if any(parts[number].effect.high < 0 for parts in effects):
            below_one.append(NAMES[task])
    return (
        f"{image('main', says)}Highest mean: {'; '.join(winners)}. FreshPER minus each of the five "
        f"others: all intervals lie above 0 on {listed(above_all or ['no task'])}, all verdicts "
        f"(corrected, section 5) are *yes* on {listed(corrected or ['no task'])}, and an interval "
        f"lies below 0 on {listed(below_one or ['no task'])}.\n"
    )


def updates(data: Data) -> str:
    data.need((*PAIR, "cliffwalking"), ARMS)
    parts = claims.more_than_updates(data).parts
    answers = []
    for answer in ("yes", "undecided", "no"):
        names = [part.name for part in parts if part.answer == answer]
        if names:
            answers.append(f"{answer} on {listed(names)}")
    arm, rate = SECOND_BEST
    levels = [level(data.values(task, arm, rate=rate)) for task in PAIR]
    ours = []
    for task in PAIR:
        other = data.values(task, arm, rate=rate)
        ours.append(span(difference(data.values(task, "freshper"), other)))
    cliff = {name: level(data.values("cliffwalking", name)) for name in ("epochs", "freshper")}
    ends = " ".join(f"{end:.2g}" for end in data.values("cliffwalking", "on_policy"))
    words = (
        f"FreshPER minus this arm (question a): {'; '.join(answers)}. "
        f"With the factor {rate:g} on the learning rate, which the tuning found as good as "
        f"{data.rate(arm):g}, this arm has {levels[0]} on {NAMES[PAIR[0]]} and {levels[1]} on "
        f"{NAMES[PAIR[1]]}; FreshPER minus it is {ours[0]} and {ours[1]}. Other tasks have only "
        f"{data.rate(arm):g}, so question a may favour FreshPER. On CliffWalking the runs of "
        f"on-policy training end at {ends} (its curve is their mean), those of this arm at "
        f"{cliff['epochs']}, of FreshPER at {cliff['freshper']}: more updates, with the smaller "
        "rate of this arm, suffice there. "
    )
    says = "Success against updates and CPU seconds, means of five runs without intervals"
    return words + image("updates", says)


def without_search(data: Data, arm: str) -> np.ndarray:
    """Return the normalised success of all tasks but NQ Search, [8, 5]."""
    return np.delete(data.all_normalized(arm), TASKS.index("nq_search"), axis=0)


def less(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the difference of two interquartile means."""
    return interquartile_mean(x) - interquartile_mean(y)


def freshness(data: Data) -> str:
    """FreshPER minus each control, a row per task. Of each arm the interquartile mean may leave out
    other tasks, so the median of the tasks' differences stands below it."""
    overall = ["interquartile mean, normalised", "median of the tasks, normalised"]
    columns = [[NAMES[task] for task in TASKS] + overall]
    ours = data.all_normalized("freshper")
    for arm, parts in minus_controls(data).items():
        theirs = data.all_normalized(arm)
        mean = Effect(*bootstrap(less, [ours, theirs]), np.nan)
        median = np.median(ours.mean(1) - theirs.mean(1))
        columns.append([*map(judged, parts), span(mean), f"{median:+.3f}"])
    shuffled = {part.name: judged(part) for part in claims.freshness(data).parts}
    columns.append([shuffled.get(name, "") for name in columns[0]])

    rows = list(zip(*columns, strict=True))
    header = ("FreshPER minus", *(ARMS[arm] for arm in CONTROLS), "shuffled ages")
    says = "FreshPER minus four other arms, 95 % intervals; grey: within 0.03"
    figure = image("freshness", says).strip()

    groups = [without_search(data, arm) for arm in ("freshper", "uniform")]
    mean = Effect(*bootstrap(less, groups), np.nan)
    limit_only = span(data.effect("nq_search", "uniform", "no_decay"))
    unreadable = data.values("nq_search", "uniform", "unreadable").mean()
    paper_epsilon = "per --epsilon 1e-6"
    success = level(data.values("frozenlake", paper_epsilon))
    minus_it = span(data.effect("frozenlake", "freshper", paper_epsilon))
    rate = data.rate("freshper")
    ages = []
    for task in PAIR:
        without = data.values(task, "no_decay", rate=rate)
        ages.append(span(difference(data.values(task, "freshper +shuffled"), without)))
    text = (
        f"Without NQ Search the interquartile mean of FreshPER minus that of uniform replay is "
        f"{span(mean)}. On NQ Search the age limit does not help: uniform replay minus no decay "
        f"is {limit_only}, and {unreadable:.2f} of its replies are unreadable. "
        f"Shuffled ages minus no decay, both at FreshPER's rate: {' and '.join(ages)} on "
        f"{' and '.join(NAMES[task] for task in PAIR)}. All arms have the preset's epsilon, which "
        "was found with FreshPER, on text FrozenLake 0.1. There Standard PER with the paper's 1e-6 "
        f"has {success}, and FreshPER minus it is {minus_it}.\n"
    )
    return "\n".join([table(header, rows), f"{figure} {text}"])


def tau(data: Data) -> str:
    data.need(TASKS, ["freshper"])
    rate = data.rate("freshper")
    oracle = [oracle_arm(task) for task in PAIR]
    names = {
        "freshper --tau 5": "FreshPER, tau 5",
        "freshper": "FreshPER, tau 20",
        "freshper --tau 80": "FreshPER, tau 80",
        "no_decay": "no decay, at FreshPER's rate",
    }
    rows = []
    for arm, name in names.items():
        cells = [name]
        for task in PAIR:
            cells += [level(data.values(task, arm, rate=r)) for r in (rate, rate / 4)]
        rows.append(cells)

    measured = ["c of these four, nats in 1,000 steps"]
    for task in PAIR:
        for r in (rate, rate / 4):
            means = [claims.drift_rates(data, task, arm, r).mean() for arm in names]
            measured.append(", ".join(f"{mean:.1f}" for mean in means))
    rows.append(measured)

    def both(name: str, arms: Sequence[str], column: str = "final") -> list[str]:
        values = [data.values(task, arm, column) for task, arm in zip(PAIR, arms, strict=True)]
        return [name, level(values[0]), "", level(values[1]), ""]

    rows += [
        both("FreshPER, tau auto", ["freshper --tau auto"] * 2),
        both("FreshPER, shuffled ages", ["freshper +shuffled"] * 2),
        both("FreshPER, drift in place of age (oracle)", oracle),
        both("rank correlation of age and drift, single episodes", oracle, "age_rank"),
        both("R² of age and drift, single episodes", oracle, "age_r2"),
    ]

    header = ["mean of five runs"]
    for task in PAIR:
        header += [NAMES[task], "a quarter of the rate"]
    says = "Success against tau, means and 95 % intervals, a curve per learning rate"
    curves = image("tau", says).strip()
    says = "Above: stored episodes of the oracle's runs, a dot each; below: how age predicts drift"
    predictions = image("drift", says)
    return "\n".join([table(header, rows), f"{measured_c(data)}\n{curves} {predictions}"])


def measured_c(data: Data) -> str:
    """1/c beside tau, tau 80 beside other arms, the ages of draws, and where tau auto stood."""
    rate = data.rate("freshper")
    arms = {"freshper --tau 5": 5, "freshper": 20, "freshper --tau 80": 80}
    ratios = []
    for task in PAIR:
        for r in (rate, rate / 4):
            for arm, value in arms.items():
                ratios.append(1000 / claims.drift_rates(data, task, arm, r).mean() / value)

    without, shorter, ages = [], [], []
    for task in PAIR:
        c = claims.drift_rates(data, task, "no_decay", rate).mean()
        without.append(f"{1000 / c:,.0f}")
        for r in (rate, rate / 4):
            pair = [data.values(task, arm, rate=r) for arm in ("freshper", "freshper --tau 80")]
            shorter.append(span(difference(*pair)))
        for arm in (oracle_arm(task), "freshper"):
            ages.append(f"{data.values(task, arm, 'replay_age').mean():.0f}")
    long = data.values("nq_search", "freshper --tau 80", rate=rate)
    below = span(difference(long, data.values("nq_search", "on_policy")))

    quotients = []
    for task in PAIR:
        logs = [np.log(claims.drift_rates(data, task, "freshper", r)) for r in (rate, rate / 4)]
        quotients.append(span(difference(*logs), "ratio"))

    learned: list[str] = []
    for task in PAIR:
        for run in data.runs(task, "freshper --tau auto"):
            learned += [point["tau"] for point in data.points[run][1:]]
    highest = max(learned, key=float)
    return (
        f"1/c is {min(ratios):.0f} to {max(ratios):.0f} times tau in these arms, and without decay "
        f"{without[0]} and {without[1]} steps at the whole rate. c / c' at tau 20: "
        f"{' and '.join(quotients)}. Tau 20 minus tau 80, column by "
        f"column: {', '.join(shorter)}. The oracle's draws have a mean age of {ages[0]} and "
        f"{ages[2]} steps, FreshPER's of {ages[1]} and {ages[3]}. On NQ Search tau 80 minus "
        f"on-policy training is {below}. Tau auto was at its upper bound, {highest}, in "
        f"{learned.count(highest)} of {len(learned)} evaluations."
    )


def factors(data: Data) -> str:
    """One-factor differences on text FrozenLake, and late losses at a constant rate. None of these
    sentences is a verdict of the plan."""
    effects = {}
    for arm, other in FACTOR_REFERENCES.items():
        effects[f'"{changed(arm, other)}"'] = data.effect("frozenlake", arm, other)
    apart = [name for name, effect in effects.items() if effect.low > 0 or effect.high < 0]
    corrected = holm([effect.p for effect in effects.values()])
    significant = [name for name, p in zip(effects, corrected, strict=True) if p < 0.05]

    clip = [
        claims.drift_rates(data, "frozenlake", arm).mean()
        for arm in ("freshper --advantage_clip 0.2", "freshper")
    ]

    losses = []
    for arm in ("freshper +constant", "freshper --beta 0.4 +constant", "on_policy +constant"):
        losses.append(f"{arm_name(arm)} {level(claims.late_loss(data, 'frozenlake', arm))}")
    cosine = level(claims.late_loss(data, "frozenlake", "on_policy"))
    text = (
        f"0 is outside {len(apart)} of {len(effects)} intervals: {listed(apart)}. Significant "
        f"with Holm's correction for {len(effects)} comparisons: {listed(significant)}. A clip "
        f"of 0.2 makes smaller steps, too: c is {clip[0]:.1f} instead of {clip[1]:.1f}. Late loss: "
        f"{', '.join(losses)}; on-policy training with the preset's cosine {cosine}.\n"
    )
    says = "Each setting's effect on text FrozenLake; grey: within 0.03"
    return text + image("factors", says)


def unpaid(data: Data) -> str:
    """Where FreshPER starts from a policy that is already good (claim 20 judges "on-policy" alone),
    and three epochs of the fresh batch on the tasks where the other control replays."""
    arm = "freshper --model good"
    start = float(data.row(good_run({"freshper": data.rate("freshper")}))["final"])
    row = ["GSM8K from a good policy", f"{start:.3f}", level(data.values("gsm8k", arm))]
    header = ["success", "start", "FreshPER"]
    for family in (["on_policy"], ["epochs", "per"]):
        effects = {other: data.effect("gsm8k", arm, f"{other} --model good") for other in family}
        row += map(judged, claims.judge(effects))
        header += [f"minus {ARMS[other]}" for other in family]
    rows = [[*row, ""]]

    effects = {}
    for task in QUEUE_TASKS:
        epochs = data.values(task, "on_policy --ppo_epochs 3", rate=data.rate("epochs"))
        effects[task] = difference(data.values(task, "freshper"), epochs)
    for task, part in zip(QUEUE_TASKS, claims.judge(effects), strict=True):
        values = data.values(task, "freshper")
        rows.append([NAMES[task], "", level(values), "", "", "", judged(part)])

    return table([*header, "minus three epochs"], rows)


def small(data: Data) -> str:
    parts = claims.holds_for_pretrained(data).parts
    minus = dict(zip(("on_policy", "epochs", "per"), map(judged, parts), strict=True))
    rows = []
    for arm in SMALL_ARMS:
        values = data.values("small", arm)
        minutes = data.values("small", arm, "cpu_s").mean() / 60
        rate = f"{data.rate(arm, 'small'):g}"
        rows.append([ARMS[arm], rate, level(values), minus.get(arm, ""), f"{minutes:.0f}"])

    header = ("SmolLM2-135M", "rate factor", "success", "FreshPER minus it", "CPU minutes")
    says = (
        "SmolLM2 on GSM8K: means of five runs on 64 held-out seeds (the table: 256), 95 % "
        "intervals (Student's t)"
    )
    # Runs of equal seed start with the same evaluation in all arms.
    starts = [data.curve(run)["eval_success"][0] for run in data.runs("small", "freshper")]
    ours, on_policy = (data.row(data.runs("small", arm)[0]) for arm in ("freshper", "on_policy"))
    text = (
        f"The model reads full prompts; their problems are not those of section 11. It answers in "
        f"up to three attempts with feedback, the paper's multi-turn form. Before training its "
        f"success is {np.mean(starts):.3f} (mean of five evaluations), that of the random policy "
        f"{float(ours['random']):.3f}. A run has {ours['episodes']} episodes and {ours['updates']} "
        f"updates, in on-policy training {on_policy['updates']}; as many updates means three "
        f"epochs. Rates tried: {listed([f'{rate:g}' for rate in RATES])}, with one run each."
    )
    smallest = [ARMS[arm] for arm in SMALL_ARMS if data.rate(arm, "small") == min(RATES)]
    if smallest:
        text += f" For {listed(smallest)} the smallest was best, so a smaller one may be better."
    return table(header, rows) + "\n" + image("small", says).rstrip() + f" {text}\n"


def main_table(data: Data) -> str:
    rows = []
    for task in TASKS:
        bounds = [data.values(task, "freshper", name)[0] for name in ("random", "optimal")]
        cells = [NAMES[task], f"{bounds[0]:.3f}", f"{bounds[1]:.3g}"]
        rows.append(cells + [level(data.values(task, arm)) for arm in FORWARD])
    means = [span(interquartile(data, arm), "number") for arm in FORWARD]
    rows.append(["interquartile mean, normalised", "0", "1", *means])
    return table(("success", "random", "optimal", *(ARMS[arm] for arm in FORWARD)), rows)


# -- the blocks of the other pages


def readme(data: Data) -> str:
    rows = []
    shown = {
        "freshper": "FreshPER",
        "per": "Standard PER: no age factor, but importance-sampling (IS) weights (`--method per`)",
        "uniform": "uniform replay of episodes up to age 61 (`--alpha 0 --decay limit --tau 61`)",
        "epochs": "on-policy training, as many updates (`--method on_policy --ppo_epochs 3`)",
        "on_policy": "on-policy training, no replay (`--method on_policy`)",
    }
    preset_lr = defaults("tiny", "frozenlake", "freshper")["lr"]
    for arm, words in shown.items():
        levels = [level(data.values(task, arm), 2) for task in ("frozenlake_vlm", "frozenlake")]
        rows.append([words, f"{preset_lr * data.rate(arm):g}", *levels])
    measured = "held-out success of the final policy, five seeds: mean ± half of the 95 % interval"
    header = (measured, "`--lr`", "images", "text (`--env frozenlake`)")
    says = "FrozenLake, four of these methods: means of five runs, 95 % intervals (Student's t)"
    figure = image("frozenlake", says)
    first = data.row(Run(*README_RUN))
    success = float(first["last"])  # as the command prints it
    random, optimal = float(first["random"]), float(first["optimal"])
    arms = ("uniform", "freshper", "on_policy")
    search = {arm: data.values("nq_search", arm).mean() for arm in arms}
    arm, rate = SECOND_BEST
    second = data.values("frozenlake", arm, rate=rate).mean()
    overall = []
    for each in FORWARD:
        words = "FreshPER without decay" if each == "no_decay" else ARMS[each]
        mean = f"{interquartile_mean(data.all_normalized(each)):.2f}"
        if each in ("freshper", "uniform"):
            mean += f" ({interquartile_mean(without_search(data, each)):.2f} without NQ Search)"
        if each == "epochs":
            mean += " (on three tasks with replay of the newest 64 episodes)"
        overall.append(f"{words} {mean}")
    text = (
        f"A random policy has {random:.2f}, the optimal policy {optimal:.2g}. The first command "
        f"ends at {success:.2f} with its default `--lr`, {preset_lr:g}, and one thread "
        "(`OMP_NUM_THREADS=1`; mean of the last three evaluations). Each method has its own "
        f"learning rate, {TUNED} ([how](RESULTS.md#2-how-to-read)). With "
        f"`--lr {preset_lr * rate:g}`, which was as good in the tuning, as many updates has "
        f"{second:.2f} on text. "
        f"On NQ Search uniform replay has {search['uniform']:.2f}, "
        f"FreshPER {search['freshper']:.2f} and on-policy training {search['on_policy']:.2f}. The "
        "mean of the middle half of all runs on [the nine tasks](RESULTS.md#3-who-wins), from 0 "
        f"for the random to 1 for the optimal policy: {'; '.join(overall)}.\n"
    )
    return "\n".join([figure, table(header, rows), text])


def readme_tasks(data: Data) -> str:
    rows = [
        ["`frozenlake`, `frozenlake_vlm`", "maps of 4x4 cells, as text or as an image", "above"]
    ]
    for tasks, words in DESCRIPTIONS.items():
        levels = []
        for task in tasks:
            success = data.values(task, "freshper").mean()
            random = data.values(task, "freshper", "random")[0]
            levels.append(f"{success:.2f} ({random:.2f})")
        rows.append([", ".join(f"`{task}`" for task in tasks), words, ", ".join(levels)])
    measured = "FreshPER (random policy), held-out success, five seeds"
    return table(("`--env`", "what it is", measured), rows)


def lesson(data: Data) -> str:
    rows = []
    for arm in ("freshper", "per", "on_policy"):
        seconds = np.median(data.values("aime", arm, "cpu_s"))
        rows.append([ARMS[arm], level(data.values("aime", arm), 2), f"{seconds:.0f}"])
    random = data.values("aime", "freshper", "random")[0]
    header = ("method", "held-out success", "CPU seconds, median")
    factor = data.rate("freshper")
    text = (
        f"The random policy has {random:.2f}. Each method has a learning rate of its own, {TUNED}. "
        f"The command has the preset's for all; FreshPER's here is {factor:g} times that. It "
        "prints the mean of the last three evaluations, on 256 seeds; these runs end with 1,024."
    )
    return f"{table(header, rows)}\n{text}\n"


def pays(data: Data) -> str:
    """Episodes and seconds until a success, of the tasks on which every run of FreshPER has it."""
    data.need(TASKS, ("freshper", "epochs", "on_policy"))
    ratios = {}
    for part in claims.saves_time(data).parts:
        ratios[part.name.removesuffix(f", {claims.AT_LEAST}")] = part

    rows = []
    left_out = []
    for task in TASKS:
        _, complete = claims.episodes_needed(data, task, "freshper")
        ours_s = claims.seconds_per_episode(data, task, "freshper")
        if not complete:
            left_out.append(NAMES[task])
            continue
        for arm in ("freshper", "epochs", "on_policy"):
            name = f"{NAMES[task]}, {ARMS[arm]}"
            needed, all_have_it = claims.episodes_needed(data, task, arm)
            seconds = claims.seconds_per_episode(data, task, arm)
            times = ["1", "1"] if arm == "freshper" else ["", ""]
            if name in ratios:
                at_least = "" if all_have_it else f"{claims.AT_LEAST} "
                free = np.array(ratios[name].effect[:3]) + np.log(seconds / ours_s)
                times[0] = at_least + span(Effect(*free, np.nan), "ratio")
                times[1] = at_least + judged(ratios[name])
            episodes = " ".join(f"{value:.0f}" for value in needed)
            rows.append([name, episodes, f"{seconds:.4f}", *times])

    header = (
        "task, arm",
        f"episodes until a success of {claims.SUCCESS:g}, per seed",
        "CPU seconds per episode, median",
        "time / FreshPER's, x = 0",
        "time / FreshPER's, large x",
    )
    names = ", ".join(left_out) or "no task"
    never = f"Left out, because not every run of FreshPER has it: {names}.\n"
    says = "Time to a success against the cost of an episode; bands: 95 % intervals"
    figure = image("pays", says, folder="")
    return "\n".join([table(header, rows), never, figure])


def every_arm(data: Data) -> str:
    """A row per arm whose five runs have been made, in all waves but those of tuning."""
    groups: dict[tuple, list] = {}
    for run in data.rows:
        if run.seed in SEEDS:
            groups.setdefault(run[:3], []).append(run)

    rows = []
    for (task, arm, rate), runs in groups.items():
        if len(runs) < len(SEEDS):
            continue
        cells = [NAMES[task], arm_name(arm), f"{rate:g}"]
        cells.append(level(data.values(task, arm, "final", rate)))
        means = []
        for column, form in COLUMNS.items():
            means.append((data.values(task, arm, column, rate).mean(), form))
        for name in ("drift_r2", "reverse_r2"):
            means.append((claims.drift_fit(data, task, arm, name, rate).mean(), ".2f"))
        means.append((claims.drift_rates(data, task, arm, rate).mean(), ".1f"))
        means.append((claims.late_loss(data, task, arm, rate).mean(), ".3f"))
        rows.append(cells + ["" if np.isnan(mean) else f"{mean:{form}}" for mean, form in means])

    if not rows:
        raise MissingError("five runs of any arm")
    names = [name.replace("_", " ") for name in COLUMNS] + ["drift r2", "reverse r2"]
    return table(("task", "arm", "rate factor", "final", *names, "c", "late loss"), rows)


def settings(data: Data) -> str:
    """A row per arm of wave 4 whose runs have been made: its difference to what it changes."""
    rows = []
    for arm, other in FACTOR_REFERENCES.items():
        with suppress(MissingError):
            success = level(data.values("frozenlake", arm))
            effect = span(data.effect("frozenlake", arm, other))
            rows.append([arm_name(arm), success, arm_name(other), effect])
    if not rows:
        raise MissingError("five runs of any arm of wave 4")
    return table(("text FrozenLake", "success", "compared with", "difference"), rows)


def parts(data: Data) -> str:
    """The effects of the claims, a row each."""
    rows = []
    for claim, (verdict, _) in all_decided(data).items():
        for part in verdict.parts:
            rows.append([claim.number, part.name, span(part.effect, part.form), part.answer])
    return table(("claim", "effect", "with its 95 % interval", "verdict"), rows)


BLOCKS = {
    "verdicts": verdicts,
    "tuning": tuning,
    "main": who_wins,
    "updates": updates,
    "freshness": freshness,
    "tau": tau,
    "factors": factors,
    "unpaid": unpaid,
    "small": small,
    "table": main_table,
    "readme": readme,
    "readme_tasks": readme_tasks,
    "lesson": lesson,
    "pays": pays,
    "parts": parts,
    "settings": settings,
    "every_arm": every_arm,
}


# -- pages and figures


def filled(match: re.Match, data: Data, figures: list[str]) -> str:
    """Return a block with what the data says, or marked as old if runs are missing. Adds the names
    of the figures that a block of the data shows."""
    name, commits, body = match.groups()
    data.used.clear()
    if name not in BLOCKS:
        allowed = f"one of {', '.join(BLOCKS)}"
        raise ValueError(f"the block of a page is {name}, but must be {allowed}")
    try:
        body = BLOCKS[name](data)
        commits = ", ".join(sorted({data.rows[run]["commit"] for run in data.used}))
        figures += re.findall(r"\bresults_(\w+)\.png\)", body)
    except MissingError:
        body = ANY_OLD.sub("", body)
        if commits != "none":
            body = OLD.format(commits) + body
    return f"<!-- results: {name}, commit {commits} -->\n{body}<!-- end -->"


def fingerprint(figure: Figure) -> str:
    """Return a digest of what a figure shows: its lines and markers, and its words."""
    digest = hashlib.sha256()
    for axes in figure.axes:
        words = [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        labels = axes.get_xticklabels() + axes.get_yticklabels() + axes.texts
        words += [label.get_text() for label in labels]
        for line in axes.lines:
            numbers = np.asarray(line.get_xydata(), float).ravel()
            look = (line.get_color(), line.get_linestyle(), line.get_marker(), line.get_fillstyle())
            sizes = (line.get_linewidth(), line.get_markersize(), line.get_alpha())
            place = (line.get_zorder(), line.get_clip_on())
            words += [str(line.get_label()), str(look), str(sizes), str(place)]
            words += [f"{number:.4g}" for number in numbers]
        digest.update("\n".join(words).encode())
    return digest.hexdigest()


def draw(name: str, data: Data, path: Path, check: bool) -> bool:
    """Write a figure if the file does not show it, unless only checked. Returns whether it does."""
    with matplotlib.rc_context(STYLE):
        figure = FIGURES[name](data)
        wanted = fingerprint(figure)
        if path.exists() and Image.open(path).info.get("Description") == wanted:
            return True
        if not check:
            figure.savefig(path, metadata={"Description": wanted})
    return False


def write_all(root: Path, data: Data, check: bool = False) -> list[str]:
    """Write the pages and figures below a folder, or only check. Returns those that differed."""
    changed = []
    for name in PAGES:
        page = root / name
        text = page.read_text(encoding="utf-8")
        figures: list[str] = []
        new = BLOCK.sub(partial(filled, data=data, figures=figures), text)
        if new != text:
            changed.append(name)
            if not check:
                page.write_text(new, encoding="utf-8")
        for figure in figures:
            path = f"docs/results_{figure}.png"
            if not draw(figure, data, root / path, check):
                changed.append(path)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if needed")
    args = parser.parse_args()
    data = claims.read_data(ROOT / "docs/reference_runs")
    changed = write_all(ROOT, data, args.check)
    for name in changed:
        print(f"{name} {'is not what the data says' if args.check else 'was written'}")
    return int(args.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
