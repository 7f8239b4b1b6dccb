"""Numbers of the pages recomputed from runs.csv by other code; statistics against SciPy and closed
forms."""

import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats as reference

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))

import stats
import verdicts
from runs import ARMS, FOLDER, NAMES, RATES, TASKS, Data

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


def test_groups_of_equal_spread_add_their_degrees_of_freedom():
    x = RNG.normal(size=5)
    effect = stats.contrast([x, x + 1, x + 2, x + 3], [1.0, -1.0, -1.0, 1.0])
    assert np.isclose(effect.df, 16) and np.isclose(effect.estimate, 0.0)
    half = reference.t.ppf(0.975, 16) * np.sqrt(4 * x.var(ddof=1) / 5)
    assert np.isclose(effect.high, half)


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


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_all_readings_of_a_line_through_the_origin_are_1_over_c(power):
    age = np.arange(1.0, 200.0)
    ages = pandas.DataFrame({"age": age, "kl_reverse": (age / 80) ** power})
    ages["effective"] = ages["trajectories"] = 100
    *readings, slope = verdicts.readings(ages)
    assert np.isclose(slope, power)
    assert np.allclose(readings, 80) == (power == 1.0)


def test_the_rates_are_the_best_of_the_tuning(rows):
    tuning = rows.query("seed in [401, 402] and task in ['frozenlake', 'nq_search']")
    success = (tuning["final"] - tuning["random"]) / (1 - tuning["random"])
    means = success.groupby([tuning["arm"], tuning["rate"]]).mean()
    assert dict(means.groupby("arm").idxmax()) == {arm: (arm, RATES.get(arm, 1.0)) for arm in ARMS}


def test_effects_of_the_pages(data, rows):
    gains = []
    for task in TASKS:
        ours, theirs = finals(rows, task, "freshper", 0.5), finals(rows, task, "on_policy", 1.0)
        interval = reference.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
        effect = data.effect("freshper - on_policy", [task])
        assert np.allclose([effect.low, effect.high], interval)
        gains.append(ours.mean() - theirs.mean())
    assert np.isclose(data.effect("freshper - on_policy", TASKS).estimate, np.mean(gains))
    assert f"{np.median(gains):.3f}" in (FOLDER / "tables.md").read_text()


def test_the_two_by_two_of_a_task(data, rows):
    arms = "freshper", "no_decay", "freshper --epsilon 1e6", "per --beta 0 --alpha 0"
    cells = np.array([finals(rows, "aime", arm, 0.5) for arm in arms])
    effect = data.effect(verdicts.CELL_EFFECTS["age factor"], ["aime"])
    assert np.isclose(effect.estimate, [0.5, -0.5, 0.5, -0.5] @ cells.mean(1))
    error = np.sqrt(cells.var(1, ddof=1).sum() / 20)
    assert np.isclose((effect.high - effect.low) / 2, error * reference.t.ppf(0.975, effect.df))


def printed(title):
    """Return the rows of a table of tables.md, without its header."""
    text = (FOLDER / "tables.md").read_text()
    lines = text.partition(f"## {title}\n\n")[2].partition("\n\n")[0].splitlines()
    return [line[1:-1].split("|") for line in lines[2:]]


def assert_printed(cells, expected):
    assert np.allclose([float(cell.split()[0]) for cell in cells], expected, atol=6e-4)


def test_the_two_by_two_of_all_tasks(rows):
    for name, *cells in printed("The two-by-two")[:9]:
        arms = "freshper", "no_decay", "freshper --epsilon 1e6", "per --beta 0 --alpha 0"
        f, n, a, z = (finals(rows, KEYS[name], arm, 0.5).mean() for arm in arms)
        effects = [(f - n + a - z) / 2, (f - a + n - z) / 2, f - n - a + z, f - n, a - z, f - a]
        assert_printed(cells, [*effects, n - z])


def test_the_second_stage(rows):
    for name, formula, *cells, _ in printed("The second stage"):
        rival = formula.removeprefix("freshper - ").removesuffix(" @ 0.5")
        rate = 1.0 if rival in ("on_policy", "uniform") else 0.5
        of_task = rows[rows["task"] == KEYS[name]].set_index(["arm", "rate", "seed"])["final"]
        ours, theirs = of_task["freshper", 0.5], of_task[rival, rate]
        stages = range(501, 506), range(506, 511), range(501, 511)
        assert_printed(cells, [ours[seeds].mean() - theirs[seeds].mean() for seeds in stages])


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
            left_out = () if name == "nine tasks" else ("NQ Search", "CliffWalking")
            gain = np.mean([x for task, x in gains[rate].items() if task not in left_out], axis=0)
        assert_printed(cells, gain)


def test_who_leaves_the_plateau(curves):
    runs = curves.query("task == 'nq_search'").groupby(["arm", "rate", "seed"])["eval_success"]
    left = (runs.max() >= 0.65).groupby(["arm", "rate"]).sum()
    for name, of_five, _ in printed("The plateau of NQ Search"):
        arm, rate = name.split(" @ ")
        assert of_five == f"{left[arm, float(rate)]} of 5"


def test_drift_by_age():
    ages = pandas.read_csv(FOLDER / "runs_ages.csv.gz").query("effective >= 30")
    for name, arm, _, _, origin, _, youngest, _ in printed("Drift by age"):
        arm, rate = arm.split(" @ ")
        own = ages[ages["task"].eq(KEYS[name]) & ages["arm"].eq(arm) & ages["rate"].eq(float(rate))]
        readings = []
        for _, run in own.groupby("seed"):
            age, kl, root = run["age"].array, run["kl_reverse"].array, run["trajectories"] ** 0.5
            (c,), *_ = np.linalg.lstsq(np.outer(age * root, 1), kl * root)
            readings.append((1 / c, age[0] / kl[0]))
        assert_printed([origin, youngest], np.mean(readings, axis=0))


def test_the_tables_are_those_of_the_data(data):
    assert verdicts.claims(data) in (FOLDER / "tables.md").read_text()
