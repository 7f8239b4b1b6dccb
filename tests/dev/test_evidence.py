"""Numbers of the pages recomputed from runs.csv by other code; statistics against SciPy and closed
forms."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats as reference

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))

import stats
import verdicts
from runs import ARMS, FOLDER, NAMES, RATES

LEFT_OUT = ("NQ Search (stand-in)", "CliffWalking")  # of some means
KEYS = {name: task for task, name in NAMES.items()}
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def rows():
    return pandas.read_csv(FOLDER / "runs.csv")


def finals(rows, task, arm, rate):
    """Return the final success of seeds 501 to 505."""
    runs = rows.query("task == @task and arm == @arm and rate == @rate and 501 <= seed <= 505")
    return runs["final"].to_numpy()


def test_a_mean_and_a_difference_are_those_of_student_and_welch():
    x, y = RNG.normal(0.7, 0.1, 5), RNG.normal(0.5, 0.3, 7)
    for effect, test in (
        (stats.contrast([x], [1.0]), reference.ttest_1samp(x, 0.0)),
        (stats.contrast([x, y], [1.0, -1.0]), reference.ttest_ind(x, y, equal_var=False)),
    ):
        interval = test.confidence_interval()
        expected = [interval.low, interval.high, test.pvalue, test.df]
        assert np.allclose([effect.low, effect.high, effect.p, effect.df], expected)


def test_holm_and_the_bound_from_below():
    p = [0.01, 0.04, 0.03, 0.005]
    assert np.allclose(stats.holm(p), [0.03, 0.06, 0.06, 0.02])  # Holm 1979
    x = RNG.normal(0.0, 0.05, 5)
    expected = reference.ttest_1samp(x, 0.03, alternative="less").pvalue
    assert np.isclose(stats.p_at_least(stats.contrast([x], [1.0]), 0.03), expected)


def test_verdicts_of_an_effect():
    near = np.array([-0.002, -0.001, 0.0, 0.001, 0.002])
    groups = (near, near + 0.1, 200 * near)
    effects = [stats.contrast([group], [1.0]) for group in groups]
    assert stats.judge(effects) == ["no", "yes", "undecided"]
    assert stats.judge_equal(effects) == ["yes", "no", "undecided"]


def test_the_permutation_test_of_one_stratum_is_scipys():
    x, y = RNG.normal(0.5, 1.0, 5), RNG.normal(0.0, 1.0, 5)
    mean = lambda a, b, axis: a.mean(axis) - b.mean(axis)  # noqa: E731
    exact = reference.permutation_test((x, y), mean, n_resamples=np.inf).pvalue
    assert abs(stats.permutation_p([x], [y]) - exact) < 0.01


def test_the_rates_are_the_best_of_the_tuning(rows):
    tuning = rows.query("seed in [401, 402] and task in ['frozenlake', 'nq_search']")
    success = (tuning["final"] - tuning["random"]) / (1 - tuning["random"])
    means = success.groupby([tuning["arm"], tuning["rate"]]).mean()
    assert dict(means.groupby("arm").idxmax()) == {arm: (arm, RATES.get(arm, 1.0)) for arm in ARMS}
    for name, cell in printed("Tuning"):
        arm, rate = name.split(" @ ")
        assert_printed([cell], [means[arm, float(rate)]])


def printed(title):
    """Return the rows of a table of tables.md, without its header."""
    text = (FOLDER / "tables.md").read_text()
    lines = text.partition(f"## {title}\n\n")[2].partition("\n\n")[0].splitlines()
    return [line[1:-1].split("|") for line in lines[2:]]


def assert_printed(cells, expected):
    """Compare the numbers of cells, with their intervals if `expected` has these."""
    numbers = [re.findall(r"-?\d+\.\d+", cell)[: np.size(expected[0])] for cell in cells]
    assert np.allclose(
        np.array(numbers, float).squeeze(), np.squeeze(expected), atol=5.1e-4, rtol=0
    )


def interval(groups, weights):
    """Return a weighted sum of means and its 95 % interval, by Welch and Satterthwaite."""
    means, variances, sizes = np.array([(np.mean(g), np.var(g, ddof=1), len(g)) for g in groups]).T
    parts = np.square(weights) * variances / sizes
    df = parts.sum() ** 2 / (parts**2 / (sizes - 1)).sum()
    half = reference.t.ppf(0.975, df) * np.sqrt(parts.sum())
    return np.dot(weights, means) + np.array([0, -half, half])


RIVALS = [(arm, RATES.get(arm, 1.0)) for arm in ARMS if arm != "freshper"]
MINUS = np.column_stack([np.ones(5), -np.eye(5)])
CELLS = [("no_decay", 0.5), ("freshper --epsilon 1e6", 0.5), ("per --beta 0 --alpha 0", 0.5)]
F, N, A, Z = np.eye(4)
FACTORS = [(F - N + A - Z) / 2, (F - A + N - Z) / 2, F - N - A + Z, F - N, A - Z, F - A, N - Z]
WEIGHTS = {  # of the arms' means in the columns of a table, FreshPER's first
    # the last: uniform up to an age minus on-policy
    "Differences of arms": (RIVALS, [*MINUS, MINUS[4] - MINUS[2]]),
    "The two-by-two": (CELLS, FACTORS),
}


@pytest.mark.parametrize("title", WEIGHTS)
def test_a_table_of_effects(rows, title):
    others, weights = WEIGHTS[title]
    arms = [("freshper", 0.5), *others]
    *table, (_, *medians), mean, normalised, without, _ = printed(title)
    groups = {
        name: np.array([finals(rows, KEYS[name], *arm) for arm in arms]) for name, *_ in table
    }
    effects = [[interval(of_task, w) for w in weights] for of_task in groups.values()]
    for (_, *cells), expected in zip(table, effects, strict=True):
        assert_printed(cells, expected)
    assert_printed(medians, np.median(effects, axis=0)[:, 0])

    level = rows.groupby("task")[["random", "optimal"]].mean().T
    low, high = level[[KEYS[name] for name in groups]].to_numpy()[:, :, None, None]
    every = np.array([*groups.values()])
    rest = [group for name, group in groups.items() if name not in LEFT_OUT]
    for (_, *cells), some in (
        (mean, every),
        (normalised, (every - low) / (high - low)),
        (without, rest),
    ):
        flat = np.concatenate(some)
        assert_printed(cells, [interval(flat, np.tile(w, len(some)) / len(some)) for w in weights])


def test_the_second_stage(rows):
    stages = range(501, 506), range(506, 511), range(501, 511)
    groups = []
    for name, formula, *cells, _ in printed("The second stage"):
        if name in KEYS:
            rival = formula.removeprefix("freshper - ").removesuffix(" @ 0.5")
            rate = 1.0 if rival in ("on_policy", "uniform") else 0.5
            of_task = rows[rows["task"] == KEYS[name]].set_index(["arm", "rate", "seed"])["final"]
            groups += [of_task["freshper", 0.5], of_task[rival, rate]]
            expected = [interval([x[seeds] for x in groups[-2:]], [1, -1]) for seeds in stages]
        else:
            weights = np.tile([1, -1], 4) / 4
            expected = [interval([x[seeds] for x in groups], weights) for seeds in stages]
            groups = []
        assert_printed(cells, expected)


@pytest.fixture(scope="module")
def curves():
    return pandas.read_csv(FOLDER / "runs_curves.csv.gz").query("501 <= seed <= 505")


def runs_of(curves, task, arm, rate):
    """Return the curves of five runs."""
    of_arm = curves.query("task == @task and arm == @arm and rate == @rate")
    return [run for _, run in of_arm.groupby("seed")]


def success(curves, task, arm, rate, column, at):
    """Return the mean success of five runs at points of a column."""
    runs = runs_of(curves, task, arm, rate)
    return np.mean([np.interp(at, run[column], run["eval_success"]) for run in runs], axis=0)


def test_no_decay_by_the_share_of_the_episodes(curves):
    for name, rate, *cells in printed("FreshPER minus no decay, by the share of the episodes"):
        left_out = () if name == "nine tasks" else LEFT_OUT
        rate = 0.5 if rate == "FreshPER's" else 1.0
        gains = []
        for task in {*KEYS} - {*left_out, NAMES["small"]}:
            at = np.linspace(0.1, 1, 10) * curves.query("task == @KEYS[@task]")["episodes"].max()
            ours = success(curves, KEYS[task], "freshper", 0.5, "episodes", at)
            gains.append(ours - success(curves, KEYS[task], "no_decay", rate, "episodes", at))
        assert_printed(cells, np.mean(gains, axis=0))


def first(run, level):
    """Return the logarithm of the episodes at which a curve first has a success, or of all."""
    points = run[["episodes", "eval_success"]].to_numpy()
    for (x, y), (later, higher) in pairwise(points):
        if higher >= level:
            return np.log(x + (later - x) * (level - y) / (higher - y))
    return np.log(points[-1, 0])


def test_episodes_and_time_until_a_success(rows, curves):
    ratios = []
    for name, *cells in printed("Episodes and time until a success"):
        name, level = name.rsplit(", ", 1)
        if name == "median":
            assert_printed(cells, np.median(ratios, axis=0))
            ratios = []
            continue

        logs, seconds = [], []
        for arm, rate in [*RIVALS, ("freshper", 0.5)]:
            runs = runs_of(curves, KEYS[name], arm, rate)
            logs.append([first(run, float(level)) for run in runs])
            own = rows.query("task == @KEYS[@name] and arm == @arm and rate == @rate")
            own = own.query("501 <= seed <= 505")
            seconds.append(np.median(own["cpu_s"] / own["episodes"]))
        expected = [np.exp(interval([log, logs[-1]], [1, -1])) for log in logs[:-1]]
        expected.append(expected[4] * seconds[4] / seconds[-1])
        ratios.append([x[0] for x in expected])
        assert_printed(cells, expected)


def claimed(number):
    """Return the effects of a claim as they are printed, without their names."""
    (effects,) = [row[-1] for row in printed("Claims and questions") if row[0] == number]
    return [effect.rpartition(": ")[2] for effect in effects.split("; ")]


def test_smollm2(rows, curves):
    arms = (("freshper", 0.5), ("on_policy", 0.5), ("epochs", 1.0), ("per", 0.5))
    runs = [runs_of(curves, "small", *arm) for arm in arms]
    # Evaluations are equally far apart.
    means = [[run["eval_success"].rolling(2).mean().mean() for run in of_arm] for of_arm in runs]
    logs = [[-first(run, 0.5) for run in of_arm] for of_arm in runs]
    final = [finals(rows, "small", *arm) for arm in arms]
    for number, (ours, *others) in (("i", means), ("i, 0.5", logs), ("i, final", final)):
        expected = [interval([ours, theirs], [1, -1]) for theirs in others]
        assert_printed(claimed(number), np.exp(expected) if number == "i, 0.5" else expected)


def test_after_as_many_updates(curves):
    step = 360  # the last of on-policy training
    groups = [
        [np.interp(step, run["step"], run["eval_success"]) for run in runs_of(curves, *arm)]
        for arm in (
            ("frozenlake", "freshper +constant", 0.5),
            ("frozenlake", "on_policy +constant", 1),
        )
    ]
    assert_printed(claimed("a, updates"), [interval(groups, [1, -1])])


def test_drift_by_age():
    ages = pandas.read_csv(FOLDER / "runs_ages.csv.gz").query("effective >= 30")
    for name, arm, _, *cells in printed("Drift by age"):
        arm, rate = arm.split(" @ ")
        own = ages[ages["task"].eq(KEYS[name]) & ages["arm"].eq(arm) & ages["rate"].eq(float(rate))]
        readings = []
        for _, run in own.groupby("seed"):
            age, kl, drawn = run[["age", "kl_reverse", "trajectories"]].to_numpy().T
            spread = np.cov(age, kl, aweights=drawn)
            (c,), *_ = np.linalg.lstsq(np.outer(age * drawn**0.5, 1), kl * drawn**0.5)
            mean = age @ drawn / drawn.sum()
            logs = np.cov(*np.log([age[kl > 0], kl[kl > 0]]), aweights=drawn[kl > 0])
            steps = (
                spread[0, 0] / spread[0, 1],
                1 / c,
                mean / np.interp(mean, age, kl),
                age[0] / kl[0],
            )
            readings.append([*steps, logs[0, 1] / logs[0, 0]])
        expected = [interval([reading], [1]) for reading in np.transpose(readings)]
        assert_printed(cells, expected)


def test_the_tables_are_those_of_the_data():
    tables = (FOLDER / "tables.md").read_text()
    for make in (verdicts.claims, verdicts.success, verdicts.second_stage, verdicts.drift):
        assert make() in tables
    for formulas in (verdicts.DIFFERENCES, verdicts.FACTORS):
        assert verdicts.compared(formulas) in tables
