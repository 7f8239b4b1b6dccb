"""Print every number that a page may use, and write tables.md and arms.csv.

    python evidence/verdicts.py

claims.csv is the table of the paper's claims (numbers) and of questions of ours (letters), a row
per family of effects that are corrected together. README.md says what its words mean.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas
from runs import ARMS, CELLS, FOLDER, MAIN, NAMES, PAIR, RUN, SEEDS, SUCCESSES, TASKS, Data
from scipy.stats import spearmanr, t
from stats import Effect, contrast, judge, judge_equal, permutation_p

SETS = {"nine": TASKS, "seven": MAIN, "pair": PAIR}
RIVALS = [arm for arm in ARMS if arm != "freshper"]
OTHERS = [task for task in TASKS if task not in ("nq_search", "cliffwalking")]
MINUS = {f"FreshPER minus {ARMS[arm]}": f"freshper - {arm}" for arm in RIVALS}
TWO_BY_TWO = {
    "age factor": "0.5 {F} - 0.5 {N} + 0.5 {A} - 0.5 {Z}",
    "priority": "0.5 {F} - 0.5 {A} + 0.5 {N} - 0.5 {Z}",
    "interaction": "{F} - {N} - {A} + {Z}",
    "age factor, with priority": "{F} - {N}",
    "age factor alone": "{A} - {Z}",
    "priority, with age factor": "{F} - {A}",
    "priority alone": "{N} - {Z}",
}
CELL_EFFECTS = {name: formula.format(**CELLS) for name, formula in TWO_BY_TWO.items()}
# FreshPER without the age factor, and its learning rate
NO_DECAY = {CELLS["N"]: "FreshPER's", "no_decay": "doubled"}
SECOND_SEEDS = (506, 507, 508, 509, 510)
COLUMNS = """final last peak normalised updates cpu_s unreadable replay_age ess r2 c late
age_rank age_r2""".split()
COLUMNS += [f"{name} {x}" for x in SUCCESSES for name in ("reach", "log until")]
POOLED = ["median task", "mean", "mean, normalised", "mean without NQ, Cliff", "permutation p"]
SHARES = np.arange(0.1, 1.01, 0.1)  # of the episodes


class Part(NamedTuple):
    """One effect of a claim."""

    name: str
    effect: Effect
    answer: str


# -- effects and their answers


def span(effect: Effect) -> str:
    """Return an effect with its 95 % interval."""
    estimate, low, high = (f"{number + 0.0:.3f}" for number in np.round(effect[:3], 3))
    return estimate if np.isnan(effect.low) else f"{estimate} [{low}, {high}]"


def beyond(effects: Sequence[Effect], bound: float) -> list[str]:
    """Return whether each interval lies above a bound (yes) or below it (no)."""
    answers = []
    for effect in effects:
        above, below = effect.low > bound, effect.high < bound
        answers.append("yes" if above else "no" if below else "undecided")
    return answers


def special(data: Data, name: str) -> Part:
    """Return the median R² of KL by age of the 45 runs of FreshPER ("line"), or the correlation of
    ranks of on-policy success and FreshPER's gain ("rank")."""
    if name == "line":
        r2 = [data.values(task, "freshper", "r2") for task in TASKS]
        low, value, high = np.quantile(r2, (0.25, 0.5, 0.75))
        yes, no = value >= 0.9, value < 0.7
    else:
        level = [data.values(task, "on_policy", "normalised").mean() for task in TASKS]
        gain = [data.effect("freshper - on_policy", [task]).estimate for task in TASKS]
        low = high = np.nan
        value = spearmanr(level, gain).statistic
        yes, no = value <= -0.68, value > 0
    answer = "yes" if yes else "no" if no else "undecided"
    return Part(name, Effect(value, low, high, np.nan), answer)


def parts_of(data: Data, row: dict[str, str]) -> list[Part]:
    """Return the effects of a row of claims.csv. Raises KeyError if a run has not been made."""
    if row["judge"] in ("line", "rank"):
        return [special(data, row["judge"])]
    tasks = SETS.get(row["tasks"]) or row["tasks"].split()
    shown = SETS.get(row["shown"]) or row["shown"].split() or tasks
    name, _, bound = row["judge"].partition(" ")
    if name == "ratio":
        # Tasks on which each run of FreshPER has this success, and does not begin with it
        column = row["column"].removeprefix("log ")
        tasks = [x for x in tasks if np.isfinite(data.values(x, "freshper", column)).all()]
        shown = tasks

    cells = [(formula, task) for formula in row["effects"].split("; ") for task in tasks]
    effects = [data.effect(formula, [task], row["column"]) for formula, task in cells]
    if name == "above":
        answers = beyond(effects, float(bound))
    elif name == "equal":
        answers = judge_equal(effects)
    elif name == "ratio":
        answers = judge(effects, smallest=0.0)
        effects = [Effect(*np.exp(effect[:3]), effect.p) for effect in effects]
    else:
        answers = judge(effects)
    named = zip(cells, effects, answers, strict=True)
    return [Part(f"{NAMES[x]}, {f}", effect, a) for (f, x), effect, a in named if x in shown]


def rule(name: str, answers: list[str]) -> str:
    """Return the answer of a claim from those of its effects. Mixed: they differ."""
    same = answers[0] if len(set(answers)) == 1 else "mixed"
    if name == "every":
        return "no" if "no" in answers else same
    if name == "most":
        often = [answer for answer in answers if answers.count(answer) > len(answers) / 2]
        return often[0] if often else "mixed"
    if name == "not":
        return {"yes": "no", "no": "yes"}.get(same, same)
    if name == "count" and same == "mixed":
        kinds = [kind for kind in ("yes", "undecided", "no") if kind in answers]
        return ", ".join(f"{kind} {answers.count(kind)}" for kind in kinds)
    return same


# -- tables


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def claims(data: Data) -> str:
    """Return each claim, with its verdict and the numbers behind it."""
    claims = pandas.read_csv(FOLDER / "claims.csv", keep_default_na=False)
    rows = []
    for number, own in claims.groupby("claim", sort=False):
        parts = [part for row in own.to_dict("records") for part in parts_of(data, row)]
        numbers = "; ".join(f"{part.name}: {span(part.effect)} {part.answer}" for part in parts)
        estimates = [part.effect.estimate for part in parts]
        if number.startswith("h"):
            medians = np.median(np.split(np.array(estimates), 2), axis=1)
            numbers += "; medians: on_policy {:.3f}, epochs {:.3f}".format(*medians)
        # Those of many tasks stand in another table.
        elif len(parts) > 4:
            above = sum(part.effect.low > 0 for part in parts)
            below = sum(part.effect.high < 0 for part in parts)
            numbers = f"{len(parts)} effects, {min(estimates):.3f} to {max(estimates):.3f}; "
            numbers += f"intervals above 0: {above}, below: {below}"
        says = " ".join(own["says"]).strip()
        answer = rule(own["rule"].iloc[0], [part.answer for part in parts])
        rows.append([number, says, f"**{answer}**", numbers])
    return table(("", "claim", "verdict", "effects"), rows)


def pooled(data: Data, formula: str) -> list[str]:
    """Return an effect over all nine tasks: the median task, means with their intervals, and p of a
    permutation within each task and pair of arms (of an interaction it has no meaning)."""
    terms = data.terms(formula)
    more, less = ([arm for weight, arm in terms if sign * weight > 0] for sign in (1, -1))
    x, y = ([data.values(task, arm) for task in TASKS for arm in arms] for arms in (more, less))
    median = np.median([data.effect(formula, [task]).estimate for task in TASKS])
    means = [data.effect(formula, TASKS), data.effect(formula, TASKS, "normalised")]
    means.append(data.effect(formula, OTHERS))
    p = "" if formula == CELL_EFFECTS["interaction"] else f"{permutation_p(x, y):.5f}"
    return [f"{median:.3f}", *map(span, means), p]


def compared(data: Data, formulas: dict[str, str]) -> str:
    """Return the effects by task, and over all nine."""
    columns = [[NAMES[task] for task in TASKS] + POOLED]
    for formula in formulas.values():
        effects = [data.effect(formula, [task]) for task in TASKS]
        cells = [f"{span(e)} {a}" for e, a in zip(effects, judge(effects), strict=True)]
        columns.append(cells + pooled(data, formula))
    return table(("success", *formulas), [*zip(*columns, strict=True)])


def success(data: Data) -> str:
    """Return the final success of the random policy and of the arms, by task."""
    rows = []
    for task in TASKS:
        numbers = [data.values(task, "freshper", "random").mean()]
        numbers += [data.values(task, arm).mean() for arm in ARMS]
        rows.append([NAMES[task], *(f"{number:.2f}" for number in numbers)])
    return table(("final success", "random", *ARMS.values()), rows)


def second_stage(data: Data) -> str:
    """Return the effects by the first five seeds, five more, and all ten. Confirmed: the second
    stage alone has the same sign, and an interval without 0."""
    rows = []
    for arm in ("on_policy", "uniform", CELLS["N"], CELLS["A"]):
        formula = f"freshper - {arm}"
        for task in data.complete(formula, TASKS, SECOND_SEEDS):
            stages = (SEEDS, SECOND_SEEDS, SEEDS + SECOND_SEEDS)
            one, two, ten = (data.effect(formula, [task], seeds=seeds) for seeds in stages)
            confirmed = two.low * two.high > 0 and one.estimate * two.estimate > 0
            rows.append([NAMES[task], formula, span(one), span(two), span(ten), str(confirmed)])
    return table(("task", "effect", "first", "second", "both", "confirmed"), rows)


def after_updates(data: Data) -> dict[str, dict[str, Effect]]:
    """Return success minus that of on-policy training, by arm and task, when both have made as many
    updates as on-policy training makes in all, a third of the others'."""
    effects: dict[str, dict[str, Effect]] = {"freshper": {}, "per": {}}
    for task in TASKS:
        end = data.values(task, "on_policy", "updates")[:1]
        theirs = data.interpolated(task, "on_policy", "step", end)[:, 0]
        for arm in effects:
            ours = data.interpolated(task, arm, "step", end)[:, 0]
            effects[arm][task] = contrast([ours, theirs], [1.0, -1.0])
    return effects


def per_update(data: Data) -> str:
    ours, pers = after_updates(data).values()
    rows = [[NAMES[task], span(ours[task]), span(pers[task])] for task in TASKS]
    return table(("minus on-policy", "FreshPER", "Standard PER"), rows)


def decay_pays(data: Data, tasks: list[str], no_decay: str) -> list[Effect]:
    """Return FreshPER minus an arm without decay at shares of the episodes, means over tasks."""
    groups = []
    for arm in ("freshper", no_decay):
        for task in tasks:
            episodes = data.values(task, arm, "episodes")[0] * SHARES
            groups.append(data.interpolated(task, arm, "episodes", episodes))
    weights = np.repeat([1.0, -1.0], len(tasks)) / len(tasks)
    return [contrast([g[:, k] for g in groups], weights) for k in range(len(SHARES))]


def late_pay(data: Data) -> str:
    groups = {NAMES[task]: [task] for task in TASKS}
    groups |= {"nine tasks": TASKS, "without NQ Search, CliffWalking": OTHERS}
    rows = []
    for no_decay, rate in NO_DECAY.items():
        for name, tasks in groups.items():
            rows.append([name, rate, *map(span, decay_pays(data, tasks, no_decay))])
    return table(["", "no decay's rate", *(f"{share:.0%}" for share in SHARES)], rows)


def plateau(data: Data) -> str:
    """Return who leaves the plateau of NQ Search at 0.55 to 0.60, and after how many episodes."""
    rows = []
    runs = data.runs.loc["nq_search"].query("seed in @SEEDS")
    for (arm, rate), times in runs["until 0.65"].groupby(["arm", "rate"]):
        left = [f"{time:.0f}" for time in times if time < np.inf]
        if len(times) == len(SEEDS):
            rows.append([f"{arm} @ {rate:g}", f"{len(left)} of 5", " ".join(left)])
    return table(("NQ Search", "reach 0.65", "after episodes"), rows)


def readings(ages: pandas.DataFrame) -> list[float]:
    """Return 1/c of a run in steps, from KL(mu, theta) by bin of age: of a line with an intercept,
    of one through the origin, at the mean age drawn, in the youngest bin; and the log-log slope."""
    used = ages[ages["effective"] >= 30]
    age, kl, drawn = used[["age", "kl_reverse", "trajectories"]].to_numpy().T
    root = np.sqrt(drawn)
    there = kl > 0  # noise can bring a small KL below 0
    mean_age = np.average(age, weights=drawn)
    return [
        1 / np.polyfit(age, kl, 1, w=root)[0],
        (drawn @ age**2) / (drawn @ (age * kl)),
        mean_age / np.interp(mean_age, age, kl),
        age[0] / kl[0],
        np.polyfit(np.log(age[there]), np.log(kl[there]), 1, w=root[there])[0],
    ]


def drift(data: Data) -> str:
    rows = []
    for (task, arm, rate), runs in data.ages.items():
        values = np.array([readings(run) for run in runs])
        cells = [span(contrast([column], [1.0])) for column in values.T]
        rows.append([NAMES[task], f"{arm} @ {rate:g}", str(len(runs)), *cells])
    header = ("1/c in steps", "arm", "runs", "intercept", "origin", "mean age", "youngest", "slope")
    return table(header, rows)


def write_arms(data: Data) -> None:
    """Write arms.csv: the means of each arm, and half of the 95 % interval of its final success.

    Stage 0 is the tuning, 1 and 2 are the first and the second five seeds."""
    stage = np.searchsorted((500, 505), data.runs.index.get_level_values("seed"))
    groups = data.runs.assign(stage=stage).groupby([*RUN[:3], "stage"])
    runs = groups.size()
    arms = groups[COLUMNS].mean()
    arms.insert(0, "runs", runs)
    arms.insert(1, "final ±", groups["final"].sem() * t.ppf(0.975, runs - 1))
    arms.to_csv(FOLDER / "arms.csv", float_format="%.4g")


def main() -> None:
    data = Data()
    sections = {
        "Claims and questions": claims(data),
        "Success": success(data),
        "FreshPER minus its rivals": compared(data, MINUS),
        "The two-by-two": compared(data, CELL_EFFECTS),
        "The second stage": second_stage(data),
        "After as many updates as on-policy training": per_update(data),
        "FreshPER minus no decay, by the share of the episodes": late_pay(data),
        "The plateau of NQ Search": plateau(data),
        "Drift by age": drift(data),
    }
    text = "# Numbers\n\nWritten by `python evidence/verdicts.py`; [how to read them](README.md).\n"
    for title, body in sections.items():
        text += f"\n## {title}\n\n{body}"
    (FOLDER / "tables.md").write_text(text)
    write_arms(data)
    print(text)


if __name__ == "__main__":
    main()
