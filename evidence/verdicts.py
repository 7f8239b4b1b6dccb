"""Print every number that a page may use, and write tables.md and arms.csv.

    python evidence/verdicts.py

The claims are in claims.py.
"""

from collections.abc import Sequence

import numpy as np
import pandas
from claims import CLAIMS, Part, count, reached
from runs import ARMS, FOLDER, NAMES, PAIR, RUN, RUNS, SEEDS, TASKS, at, effect, values
from scipy.stats import t
from stats import Effect, contrast, judge, permutation_p

RIVALS = [arm for arm in ARMS if arm != "freshper"]
OTHERS = [task for task in TASKS if task not in ("nq_search", "cliffwalking")]
Difference = tuple[Sequence[str], Sequence[float]]  # arms and their weights
DIFFERENCES: dict[str, Difference] = {
    f"FreshPER minus {ARMS[arm]}": (("freshper", arm), (1, -1)) for arm in RIVALS
}
DIFFERENCES["uniform up to an age minus on-policy"] = (("uniform", "on_policy"), (1, -1))
# The two-by-two: priority and age factor (F), one of them (N, A), none (Z). A base priority of
# |r| + 1e6 is the same for all.
CELLS = ("freshper", "no_decay @ 0.5", "freshper --epsilon 1e6", "per --beta 0 --alpha 0 @ 0.5")
F, N, A, Z = np.eye(4)
FACTORS: dict[str, Difference] = {
    "age factor": (CELLS, (F - N + A - Z) / 2),
    "priority": (CELLS, (F - A + N - Z) / 2),
    "interaction": (CELLS, F - N - A + Z),
    "age factor, with priority": (CELLS, F - N),
    "age factor alone": (CELLS, A - Z),
    "priority, with age factor": (CELLS, F - A),
    "priority alone": (CELLS, N - Z),
}
# FreshPER without the age factor, and its learning rate
NO_DECAY = {"no_decay @ 0.5": "FreshPER's", "no_decay": "doubled"}
SHARES = np.arange(0.1, 1.01, 0.1)  # of the episodes
SECOND_SEEDS = (506, 507, 508, 509, 510)
COLUMNS = """final last peak normalised curve updates cpu_s unreadable replay_age ess r2 c late
age_rank age_r2""".split()
COLUMNS += [column for column in RUNS if column.startswith(("reach", "log until"))]


def span(effect: Effect) -> str:
    """Return an effect with its 95 % interval."""
    estimate, low, high = (f"{number + 0.0:.3f}" for number in np.round(effect[:3], 3))
    return estimate if np.isnan(effect.low) else f"{estimate} [{low}, {high}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def described(parts: list[Part]) -> str:
    """Return the effects of a claim. Many are counted: they stand in another table."""
    if len(parts) > 4:
        estimates = [part.effect.estimate for part in parts]
        return f"{len(parts)}: {min(estimates):.3f} to {max(estimates):.3f}; {count(parts)[0]}"
    named = [f"{NAMES.get(x, '')} {formula}: {span(e)} {a}" for x, formula, e, a in parts]
    return "; ".join(text.strip() for text in named)


def claims() -> str:
    """Return each claim, with its verdict and the numbers behind it."""
    rows = []
    for claim in CLAIMS:
        says, _, _ = claim.__doc__.partition("\n\n")
        number, says = " ".join(says.split()).split(": ", 1)
        answer, parts = claim()
        rows.append([number, says, f"**{answer}**", described(parts)])
    return table(("", "claim", "verdict", "effects"), rows)


def pooled(name: str, arms: Sequence[str], weights: Sequence[float]) -> list[str]:
    """Return an effect over all nine tasks: the median task, means with their intervals, and p of a
    permutation within each task and pair of arms (of an interaction it has no meaning)."""
    median = np.median([effect([task], arms, weights=weights).estimate for task in TASKS])
    means = [effect(TASKS, arms, column, weights) for column in ("final", "normalised")]
    means.append(effect(OTHERS, arms, weights=weights))
    cells = [f"{median:.3f}", *map(span, means)]
    if name == "interaction":
        return [*cells, ""]
    signs = [*zip(arms, weights)]
    more = [values(task, arm) for task in TASKS for arm, weight in signs if weight > 0]
    less = [values(task, arm) for task in TASKS for arm, weight in signs if weight < 0]
    p = permutation_p(more, less)
    return [*cells, f"{'at most ' * (p < 2e-5)}{p:.5f}"]


def compared(differences: dict[str, Difference]) -> str:
    """Return the effects by task, and over all nine."""
    columns = [[NAMES[task] for task in TASKS]]
    columns[0] += [
        "median task",
        "mean",
        "mean, normalised",
        "mean without NQ Search (stand-in), CliffWalking",
        "permutation p",
    ]
    for name, (arms, weights) in differences.items():
        effects = [effect([task], arms, weights=weights) for task in TASKS]
        cells = [f"{span(e)} {a}" for e, a in zip(effects, judge(effects), strict=True)]
        columns.append(cells + pooled(name, arms, weights))
    return table(("success", *differences), [*zip(*columns, strict=True)])


def success() -> str:
    """Return the final success of the random policy and of the arms, by task."""
    rows = []
    for task in TASKS:
        numbers = [values(task, "freshper", "random"), *(values(task, arm) for arm in ARMS)]
        rows.append([NAMES[task], *(f"{number.mean():.2f}" for number in numbers)])
    return table(("final success", "random", *ARMS.values()), rows)


def tuning() -> str:
    """Return success by learning rate, a factor on the preset's: the mean over two tasks and two
    seeds, 1 for the optimal policy and 0 for the random one."""
    runs = RUNS.loc[PAIR].query("seed in (401, 402)")["normalised"]
    means = runs.groupby(["arm", "rate"]).mean()
    rows = [[f"{arm} @ {rate:g}", f"{mean:.3f}"] for (arm, rate), mean in means.items()]
    return table(("arm", "success"), rows)


def second_stage() -> str:
    """Return the effects by the first five seeds, five more, and all ten. Confirmed: the second
    stage alone has the same sign, and an interval without 0."""
    four = ["frozenlake", "frozenlake_vlm", "sokoban_simple", "aime"]
    groups = {NAMES[task]: [task] for task in four} | {"mean of four": four}
    stages = (SEEDS, SECOND_SEEDS, SEEDS + SECOND_SEEDS)
    rows = []
    for arm in ("on_policy", "uniform", *CELLS[1:3]):
        formula = f"freshper - {arm}"
        for name, tasks in groups.items():
            one, two, ten = (effect(tasks, formula, seeds=seeds) for seeds in stages)
            confirmed = two.low * two.high > 0 and one.estimate * two.estimate > 0
            rows.append([name, formula, span(one), span(two), span(ten), str(confirmed)])
    return table(("task", "effect", "first", "second", "both", "confirmed"), rows)


def decay_pays(tasks: list[str], no_decay: str) -> list[Effect]:
    """Return FreshPER minus an arm without decay at shares of the episodes, means over tasks."""
    groups = []
    for arm in ("freshper", no_decay):
        for task in tasks:
            episodes = values(task, arm, "episodes")[0] * SHARES
            groups.append(at(task, arm, "episodes", episodes))
    weights = np.repeat([1.0, -1.0], len(tasks)) / len(tasks)
    return [contrast([g[:, k] for g in groups], weights) for k in range(len(SHARES))]


def shares() -> str:
    rows = []
    for no_decay, rate in NO_DECAY.items():
        for name, tasks in {
            "nine tasks": TASKS,
            "without NQ Search (stand-in), CliffWalking": OTHERS,
        }.items():
            rows.append([name, rate, *map(span, decay_pays(tasks, no_decay))])
    return table(["", "no decay's rate", *(f"{share:.0%}" for share in SHARES)], rows)


def until(success: float, task: str, arm: str, extra: float | np.ndarray = np.inf) -> Effect:
    """Return an arm's time until a success, as a ratio to FreshPER's, if an episode costs so many
    seconds more than its CPU seconds here (medians). The default counts episodes."""
    logs = effect([task], f"{arm} - freshper", f"log until {success}")
    theirs, own = (np.median(values(task, name, "s")) for name in (arm, "freshper"))
    cost = (theirs + extra) / (own + extra) if np.all(extra < np.inf) else 1.0
    return Effect(*(np.exp(number) * cost for number in logs[:3]), logs.p)


def episodes_and_time() -> str:
    """Return the episodes until a success, and the time of on-policy training if an episode costs
    nothing more than here, as ratios to FreshPER's."""
    rows = []
    for success in (0.5, 0.9):
        effects = []
        for task in reached(success):
            row = [until(success, task, arm) for arm in RIVALS]
            row.append(until(success, task, "on_policy", extra=0.0))
            rows.append([f"{NAMES[task]}, {success}", *map(span, row)])
            effects.append([ratio.estimate for ratio in row])
        rows.append([f"median, {success}", *(f"{x:.3f}" for x in np.median(effects, axis=0))])
    header = ("ratio", *(ARMS[arm] for arm in RIVALS), "on-policy, time")
    return table(header, rows)


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


def drift() -> str:
    rows = []
    ages = pandas.read_csv(FOLDER / "runs_ages.csv.gz")
    for (task, arm, rate), arms in ages.groupby(RUN[:3]):
        runs = [readings(run) for _, run in arms.groupby("seed")]
        if len(runs) > 1:
            cells = [span(contrast([column], [1.0])) for column in np.transpose(runs)]
            rows.append([NAMES[task], f"{arm} @ {rate:g}", str(len(runs)), *cells])
    header = ("1/c in steps", "arm", "runs", "intercept", "origin", "mean age", "youngest", "slope")
    return table(header, rows)


def write_arms() -> None:
    """Write arms.csv: the means of each arm, and half of the 95 % interval of its final success.

    Stage 0 is the tuning, 1 and 2 are the first and the second five seeds."""
    stage = np.searchsorted((500, 505), RUNS.index.get_level_values("seed"))
    groups = RUNS.assign(stage=stage).groupby([*RUN[:3], "stage"])
    runs = groups.size()
    arms = groups[COLUMNS].mean()
    arms.insert(0, "runs", runs)
    arms.insert(1, "final ±", groups["final"].sem() * t.ppf(0.975, runs - 1))
    arms.to_csv(FOLDER / "arms.csv", float_format="%.4g")


def main() -> None:
    sections = {
        "Claims and questions": claims(),
        "Success": success(),
        "Differences of arms": compared(DIFFERENCES),
        "The two-by-two": compared(FACTORS),
        "The second stage": second_stage(),
        "FreshPER minus no decay, by the share of the episodes": shares(),
        "Episodes and time until a success": episodes_and_time(),
        "Tuning": tuning(),
        "Drift by age": drift(),
    }
    text = "# Numbers\n\nWritten by `python evidence/verdicts.py`; [how to read them](README.md).\n"
    for title, body in sections.items():
        text += f"\n## {title}\n\n{body}"
    (FOLDER / "tables.md").write_text(text)
    write_arms()
    print(text)


if __name__ == "__main__":
    main()
