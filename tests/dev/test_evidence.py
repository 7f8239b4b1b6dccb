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
from runs import ARMS, FOLDER, RATES, TASKS, Data

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


def test_the_tables_are_those_of_the_data(data):
    assert verdicts.claims(data) in (FOLDER / "tables.md").read_text()
