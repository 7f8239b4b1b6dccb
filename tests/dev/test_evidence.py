"""Numbers of the pages recomputed from runs.csv by other code; statistics against SciPy and closed
forms."""

import re
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats as reference

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))

import stats
import verdicts
from runs import ARMS, FOLDER, NAMES, RATES, Data

LEFT_OUT = ("NQ Search", "CliffWalking")  # of some means
KEYS = {name: task for task, name in NAMES.items()}
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def data():
    return Data()


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
CELLS = [("no_decay", 0.5), ("freshper --epsilon 1e6", 0.5), ("per --beta 0 --alpha 0", 0.5)]
F, N, A, Z = np.eye(4)
FACTORS = [(F - N + A - Z) / 2, (F - A + N - Z) / 2, F - N - A + Z, F - N, A - Z, F - A, N - Z]
WEIGHTS = {  # of the arms' means in the columns of a table, FreshPER's first
    "FreshPER minus its rivals": (RIVALS, np.column_stack([np.ones(5), -np.eye(5)])),
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
    for name, formula, *cells, _ in printed("The second stage"):
        rival = formula.removeprefix("freshper - ").removesuffix(" @ 0.5")
        rate = 1.0 if rival in ("on_policy", "uniform") else 0.5
        of_task = rows[rows["task"] == KEYS[name]].set_index(["arm", "rate", "seed"])["final"]
        ours, theirs = of_task["freshper", 0.5], of_task[rival, rate]
        stages = range(501, 506), range(506, 511), range(501, 511)
        assert_printed(cells, [interval([ours[seeds], theirs[seeds]], [1, -1]) for seeds in stages])


@pytest.fixture(scope="module")
def curves():
    return pandas.read_csv(FOLDER / "runs_curves.csv.gz").query("501 <= seed <= 505")


def success(curves, task, arm, rate, column, at):
    """Return the mean success of five runs at points of a column."""
    runs = curves.query("task == @task and arm == @arm and rate == @rate").groupby("seed")
    return np.mean([np.interp(at, run[column], run["eval_success"]) for _, run in runs], axis=0)


def test_after_as_many_updates(curves):
    for name, *cells in printed("After as many updates as on-policy training"):
        task = KEYS[name]
        end = curves.query("task == @task and arm == 'on_policy' and rate == 1")["step"].max()
        theirs = success(curves, task, "on_policy", 1.0, "step", end)
        ours = [success(curves, task, *arm, "step", end) for arm in (("freshper", 0.5), ("per", 1))]
        assert_printed(cells, ours - theirs)


def test_no_decay_by_the_share_of_the_episodes(curves):
    table = printed("FreshPER minus no decay, by the share of the episodes")
    gains = {0.5: {}, 1.0: {}}
    for name, rate, *cells in table:
        rate = 0.5 if rate == "FreshPER's" else 1.0
        if name in KEYS:
            at = np.linspace(0.1, 1, 10) * curves.query("task == @KEYS[@name]")["episodes"].max()
            ours = success(curves, KEYS[name], "freshper", 0.5, "episodes", at)
            gain = ours - success(curves, KEYS[name], "no_decay", rate, "episodes", at)
            gains[rate][name] = gain
        else:
            left_out = () if name == "nine tasks" else LEFT_OUT
            gain = np.mean([x for task, x in gains[rate].items() if task not in left_out], axis=0)
        assert_printed(cells, gain)


def test_who_leaves_the_plateau(curves):
    runs = curves.query("task == 'nq_search'").groupby(["arm", "rate"])
    for name, of_five, episodes in printed("The plateau of NQ Search"):
        arm, rate = name.split(" @ ")
        times = []
        for _, run in runs.get_group((arm, float(rate))).groupby("seed"):
            at = np.arange(run["episodes"].max() + 1)
            times += [*at[np.interp(at, run["episodes"], run["eval_success"]) >= 0.65][:1]]
        assert np.allclose(np.array(episodes.split(), int), times, atol=1)
        assert of_five == f"{len(times)} of 5"


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


def test_the_tables_are_those_of_the_data(data):
    tables = (FOLDER / "tables.md").read_text()
    for make in (verdicts.claims, verdicts.second_stage, verdicts.drift):
        assert make(data) in tables
    for formulas in (verdicts.MINUS, verdicts.CELL_EFFECTS):
        assert verdicts.compared(data, formulas) in tables
