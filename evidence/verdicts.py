"""Write every number that a page may use: tables.md and arms.csv.

    python evidence/verdicts.py

The claims are in claims.py.
"""

import numpy as np
import pandas
from claims import CLAIMS, count, reached
from runs import (
    ARMS,
    FOLDER,
    LEVELS,
    NAMES,
    PAIR,
    RUN,
    RUNS,
    SEEDS,
    SHARES,
    TASKS,
    effect,
    terms,
    values,
)
from scipy.stats import t
from stats import contrast, judge, permutation_p, span

RIVALS = [arm for arm in ARMS if arm != "freshper"]
OTHERS = [task for task in TASKS if task not in ("nq_search", "cliffwalking")]
LEFT_OUT = "without NQ Search (stand-in), CliffWalking"
DIFFERENCES = {f"FreshPER minus {ARMS[arm]}": f"freshper - {arm}" for arm in RIVALS}
DIFFERENCES["uniform up to an age minus on-policy"] = "uniform - on_policy"
# The two-by-two: priority and age factor, priority, age factor, none. A base priority of |r| + 1e6
# is the same for all.
CELLS = "freshper - no_decay @ 0.5 - freshper --epsilon 1e6 - per --beta 0 --alpha 0 @ 0.5"
FACTORS = {
    "age factor": f"{CELLS} (0.5, -0.5, 0.5, -0.5)",
    "priority": f"{CELLS} (0.5, 0.5, -0.5, -0.5)",
    "interaction": f"{CELLS} (1, -1, -1, 1)",
    "age factor, with priority": "freshper - no_decay @ 0.5",
    "age factor alone": "freshper --epsilon 1e6 - per --beta 0 --alpha 0 @ 0.5",
    "priority, with age factor": "freshper - freshper --epsilon 1e6",
    "priority alone": "no_decay @ 0.5 - per --beta 0 --alpha 0 @ 0.5",
}
# FreshPER without the age factor, and its learning rate
NO_DECAY = {"no_decay @ 0.5": "FreshPER's", "no_decay": "doubled"}
COLUMNS = """final last peak normalised curve updates cpu_s unreadable replay_age ess r2 c late
age_rank age_r2""".split()
COLUMNS += [f"{name} {level}" for level in LEVELS for name in ("log until", "reach")]


# -- tables: their rows, the header first


def described(parts):
    """Return the effects of a claim. Many are counted: they stand in another table."""
    if len(parts) > 4:
        own = parts["estimate"]
        return f"{len(parts)}: {own.min():.3f} to {own.max():.3f}; {count(parts)}"
    rows = parts.itertuples(index=False)
    return "; ".join(f"{row.name}: {span(row)} {row.answer}".strip() for row in rows)


def claims():
    """Return each claim, with its verdict and the numbers behind it."""
    yield "", "claim", "verdict", "effects"
    for claim in CLAIMS:
        first, *_ = claim.__doc__.split("\n\n")
        number, says = " ".join(first.split()).split(": ", 1)
        answer, *families = claim()
        parts = pandas.concat(families)
        yield number, says, f"**{answer(parts)}**", described(parts)


def over_tasks(formula):
    """Return an effect by task, and over all nine: the median task, means with their intervals,
    and p of a permutation of the runs within each task and pair of arms."""
    arms, weights = terms(formula)
    groups = np.array([values(TASKS, arm) for arm in arms])
    effects = contrast(groups, weights)
    for own, answer in zip(zip(*effects), judge(effects)):
        yield f"{span(own)} {answer}"
    yield f"{np.median(effects.estimate):.3f}"
    for tasks, column in ((TASKS, "final"), (TASKS, "normalised"), (OTHERS, "final")):
        yield span(effect(tasks, formula, column))
    p = permutation_p(groups[weights > 0], groups[weights < 0])
    # An interaction exchanges nothing.
    yield "" if formula == FACTORS["interaction"] else "at most 0.00001" if p < 2e-5 else f"{p:.5f}"


def compared(differences):
    yield "success", *differences
    names = [NAMES[task] for task in TASKS]
    names += ["median task", "mean", "mean, normalised", f"mean {LEFT_OUT}", "permutation p"]
    yield from zip(names, *map(over_tasks, differences.values()), strict=True)


def success():
    """Return the final success of the random policy and of the arms, by task."""
    yield "final success", "random", *ARMS.values()
    for task in TASKS:
        runs = [values([task], "freshper", "random"), *(values([task], arm) for arm in ARMS)]
        yield NAMES[task], *(f"{of_arm.mean():.2f}" for of_arm in runs)


def tuning():
    """Return success by learning rate, a factor on the preset's: the mean over two tasks (of
    Config A and its rivals: text alone) and two seeds, 1 for the optimal policy and 0 for the
    random one."""
    runs = RUNS.loc[PAIR].query("seed in (401, 402)")["normalised"]
    means = runs.groupby(["arm", "rate"]).mean().unstack()
    yield "success, by rate (nan: not tried)", *means
    for arm, row in means.iterrows():
        yield arm, *map("{:.3f}".format, row)


def second_stage():
    """Return the effects by the first five seeds, five more, and all ten. Confirmed: the second
    stage alone has the same sign, and an interval without 0."""
    yield "task", "effect", "first", "second", "both", "confirmed"
    four = ["frozenlake", "frozenlake_vlm", "sokoban_simple", "aime"]
    groups = {NAMES[task]: [task] for task in four} | {"mean of four": four}
    stages = (SEEDS, range(506, 511), range(501, 511))
    for arm in ("on_policy", "uniform", "no_decay @ 0.5", "freshper --epsilon 1e6"):
        formula = f"freshper - {arm}"
        for name, tasks in groups.items():
            effects = [effect(tasks, formula, seeds=seeds) for seeds in stages]
            first, second, _ = effects
            confirmed = second.low * second.high > 0 and first.estimate * second.estimate > 0
            yield name, formula, *map(span, effects), confirmed


def decay_pays(tasks, no_decay):
    """Return FreshPER minus an arm without decay at shares of the episodes, means over tasks."""
    return [effect(tasks, f"freshper - {no_decay}", share) for share in SHARES]


def shares():
    yield "", "no decay's rate", *SHARES
    for no_decay, rate in NO_DECAY.items():
        for name, tasks in (("nine tasks", TASKS), (LEFT_OUT, OTHERS)):
            yield name, rate, *map(span, decay_pays(tasks, no_decay))


def until(success, task, arm, extra=1e9):
    """Return an arm's time until a success, as a ratio to FreshPER's, and its interval, if an
    episode costs so many seconds more than its CPU seconds here (medians). With the default only
    the number of episodes counts."""
    logs = effect([task], f"{arm} - freshper", f"log until {success}")
    theirs, own = (np.median(values([task], name, "s")) for name in (arm, "freshper"))
    return np.multiply.outer(np.exp(logs[:3]), (theirs + extra) / (own + extra))


def episodes_and_time():
    """Return the episodes until a success, and the time of on-policy training if an episode costs
    nothing more than here, as ratios to FreshPER's."""
    yield "ratio", *(ARMS[arm] for arm in RIVALS), "on-policy, time"
    for success in (0.5, 0.9):
        table = []
        for task in reached(success):
            ratios = [until(success, task, arm) for arm in RIVALS]
            ratios.append(until(success, task, "on_policy", extra=0))
            yield f"{NAMES[task]}, {success}", *map(span, ratios)
            table.append(ratios)
        medians = np.median(table, axis=0)[:, 0]
        yield f"median, {success}", *map("{:.3f}".format, medians)


def readings(run):
    """Return 1/c of a run in steps, from KL(mu, theta) by bin of age: of a line with an intercept,
    of one through the origin, at the mean age drawn, in the youngest bin; and the log-log slope."""
    age, kl, drawn = run[["age", "kl_reverse", "trajectories"]].to_numpy().T
    root = np.sqrt(drawn)
    mean_age = np.average(age, weights=drawn)
    # Noise can bring a small KL below 0. Its logarithm gets no weight.
    logs = np.log(age), np.log(kl.clip(1e-9))
    return [
        1 / np.polyfit(age, kl, 1, w=root)[0],
        drawn @ age**2 / (drawn @ (age * kl)),
        mean_age / np.interp(mean_age, age, kl),
        age[0] / kl[0],
        np.polyfit(*logs, 1, w=root * (kl > 0))[0],
    ]


def drift():
    yield "1/c in steps", "arm", "runs", "intercept", "origin", "mean age", "youngest", "slope"
    ages = pandas.read_csv(FOLDER / "runs_ages.csv.gz")
    # Neither tuning nor the third campaign, whose runs are not all made
    ages = ages.query("effective >= 30 and 500 < seed < 600")
    for (task, arm, rate), runs in ages.groupby(RUN).apply(readings).groupby(RUN[:3]):
        estimates, _, highs, *_ = contrast([np.stack(runs, axis=1)], [1])
        cells = map("{:.2f}±{:.2f}".format, estimates, highs - estimates)
        yield NAMES[task], f"{arm} @ {rate:g}", len(runs), *cells


def tables():
    """Return the text of tables.md."""
    sections = {
        "Claims and questions": claims(),
        "Success": success(),
        "Differences of arms": compared(DIFFERENCES),
        "The two-by-two": compared(FACTORS),
        "The second stage": second_stage(),
        "FreshPER minus `no decay`, by the share of the episodes": shares(),
        "Episodes and time until a success": episodes_and_time(),
        "Tuning": tuning(),
        "Drift by age": drift(),
    }
    text = "# Numbers\n\nWritten by `python evidence/verdicts.py`; [how to read them](README.md).\n"
    for title, (header, *rows) in sections.items():
        text += f"\n## {title}\n\n"
        for row in (header, ["---"] * len(header), *rows):
            text += f"|{'|'.join(map(str, row))}|\n"
    return text


def arms():
    """Return the text of arms.csv: the means of each arm, and half of the 95 % interval of its
    final success.

    Stage 0 is the tuning, 1 and 2 are the first and the second five seeds."""
    groups = RUNS.eval("stage = 1 * (seed > 500) + (seed > 505)").groupby([*RUN[:3], "stage"])
    means = groups[COLUMNS].mean()
    means.insert(0, "runs", groups.size())
    half = groups["final"].sem() * t.ppf(0.975, means["runs"] - 1)
    means.insert(1, "final ±", half)
    return means.to_csv(float_format="%.4g")


if __name__ == "__main__":
    (FOLDER / "tables.md").write_text(tables())
    (FOLDER / "arms.csv").write_text(arms())
