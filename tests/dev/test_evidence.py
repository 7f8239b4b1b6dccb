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
from runs import ARMS, FOLDER, NAMES, RATES, RUN

KEYS = {name: task for task, name in NAMES.items()}
*NINE, _ = KEYS  # without SmolLM2
SEVEN = [name for name in NINE if name not in ("NQ Search (stand-in)", "CliffWalking")]
_, *RIVALS = ARMS
STAGE_1 = slice(501, 505)
RNG = np.random.default_rng(0)
ROWS = pandas.read_csv(FOLDER / "runs.csv", index_col=RUN)
CURVES = pandas.read_csv(FOLDER / "runs_curves.csv.gz", index_col=RUN)
AGES = pandas.read_csv(FOLDER / "runs_ages.csv.gz", index_col=RUN).query(
    "effective >= 30 and 500 < seed < 600"
)


def test_holm():
    assert np.allclose(stats.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])  # 1979


def test_verdicts_of_an_effect():
    near = np.array([-0.002, -0.001, 0, 0.001, 0.002])
    effects = stats.contrast([[near, near + 0.1, 200 * near]], [1])
    assert [*stats.judge(effects)] == ["no", "yes", "undecided"]
    assert [*stats.judge_equal(effects)] == ["yes", "no", "undecided"]
    assert [*stats.judge_above(0.05)(effects)] == ["no", "yes", "undecided"]


def test_no_is_significantly_below_the_smallest_effect():
    x = RNG.normal(0, 0.05, 5)
    effect = stats.contrast([[x]], [1])
    for smallest in np.linspace(0, 0.2, 50):
        p = reference.ttest_1samp(x, smallest, alternative="less").pvalue
        assert (stats.judge(effect, smallest) == "no") == (p < 0.025)


def test_the_permutation_test_of_one_stratum_is_scipys():
    x, y = RNG.normal(0.5, 1, 5), RNG.normal(0, 1, 5)
    mean = lambda x, y, axis: (x - y).mean(axis)  # noqa: E731
    exact = reference.permutation_test((x, y), mean, n_resamples=np.inf).pvalue
    assert abs(stats.permutation_p(x, y) - exact) < 0.01


def key(name, formula):
    """Return the key of an arm's runs on a task, of which the rate may be said: "per @ 0.5"."""
    arm, _, rate = formula.partition(" @ ")
    return KEYS[name], arm, float(rate or RATES.get(arm.split()[0], 1))


def finals(name, arm, seeds=STAGE_1):
    return ROWS.loc[key(name, arm)].loc[seeds, "final"]


def curves(name, arm, seeds=STAGE_1):
    return [run for _, run in CURVES.loc[key(name, arm)].loc[seeds].groupby("seed")]


def printed(title):
    """Return the rows of a table of tables.md, without its header."""
    text = (FOLDER / "tables.md").read_text()
    lines = text.partition(f"## {title}\n\n")[2].partition("\n\n")[0].splitlines()
    return [line[1:-1].split("|") for line in lines[2:]]


def assert_printed(cells, expected, atol=5.1e-4):
    """Compare all numbers of cells."""
    numbers = re.findall(r"-?\d+\.\d+", " ".join(cells))
    assert np.allclose(np.array(numbers, float), np.ravel(expected), atol=atol, rtol=0)


def interval(groups, weights=(1, -1)):
    """Return a weighted sum of means and its 95 % interval, by Welch and Satterthwaite, the mean
    over tasks: `groups` has the arms of one task after the other."""
    weights = np.resize(weights, len(groups)) * len(weights) / len(groups)
    parts = (weights * reference.sem(groups, axis=1)) ** 2
    df = parts.sum() ** 2 / (parts**2).sum() * (len(groups[0]) - 1)
    half = reference.t.ppf(0.975, df) * parts.sum() ** 0.5
    return weights @ np.mean(groups, axis=1) + np.array([0, -half, half])


def test_the_rates_are_the_best_of_the_tuning():
    tuning = ROWS.query("seed in [401, 402] and task in ['frozenlake', 'nq_search']")
    scaled = tuning.eval("(final - random) / (1 - random)").groupby(["arm", "rate"])
    means = scaled.mean().unstack()
    arms = [*ARMS, CELLS[1]]
    assert [*means.idxmax(1)[arms]] == [RATES.get(arm.split()[0], 1) for arm in arms]
    (_, *rates), *rows = verdicts.tuning()
    for arm, *cells in rows:
        assert np.allclose(np.float64(cells), means.loc[arm, rates], 0, 5.1e-4, True)


MINUS = np.column_stack([np.ones(5), -np.eye(5)])
CELLS = ["no_decay @ 0.5", "freshper --epsilon 1e6", "per --beta 0 --alpha 0 @ 0.5"]
F, N, A, Z = np.eye(4)
WEIGHTS = {  # of the arms' means in the columns of a table, FreshPER's first
    # the last: uniform up to an age minus on-policy
    "Differences of arms": (RIVALS, [*MINUS, MINUS[4] - MINUS[2]]),
    "The two-by-two": (
        CELLS,
        [(F - N + A - Z) / 2, (F - A + N - Z) / 2, F - N - A + Z, F - N, A - Z, F - A, N - Z],
    ),
}


@pytest.mark.parametrize("title", WEIGHTS)
def test_a_table_of_effects(title):
    others, weights = WEIGHTS[title]
    *table, (_, *medians), mean, normalised, without, _ = printed(title)
    groups, scaled = {}, {}
    for name, *cells in table:
        groups[name] = np.array([finals(name, arm) for arm in ("freshper", *others)])
        low, high = ROWS.loc[KEYS[name], ["random", "optimal"]].mean()
        scaled[name] = (groups[name] - low) / (high - low)
        assert_printed(cells, [interval(groups[name], w) for w in weights])
    means = np.mean([*groups.values()], axis=2) @ np.transpose(weights)
    assert_printed(medians, np.median(means, 0))

    seven = [groups[name] for name in SEVEN]
    rows = (mean, groups.values()), (normalised, scaled.values()), (without, seven)
    for (_, *cells), some in rows:
        assert_printed(cells, [interval(np.concatenate([*some]), w) for w in weights])


def test_the_second_stage():
    for name, formula, *cells, _ in printed("The second stage"):
        four = ["text FrozenLake", "image FrozenLake", "Sokoban Simple", "AIME (stand-in)"]
        tasks = four if name == "mean of four" else [name]
        arms = formula.split(" - ")
        expected = []
        for stage in (STAGE_1, slice(506, 510), slice(501, 510)):
            groups = [finals(task, arm, stage) for task in tasks for arm in arms]
            expected.append(interval(groups))
        assert_printed(cells, expected)


def test_no_decay_by_the_share_of_the_episodes():
    for name, rate, *cells in printed("FreshPER minus `no decay`, by the share of the episodes"):
        groups = []
        for task in NINE if name == "nine tasks" else SEVEN:
            for arm in ("freshper", "no_decay" if rate == "doubled" else "no_decay @ 0.5"):
                runs = [run.set_index("episodes")["eval_success"] for run in curves(task, arm)]
                shares = np.linspace(0.1, 1, 10) * max(runs[0].index)
                groups.append([np.interp(shares, run.index, run) for run in runs])
        assert_printed(cells, [interval(share) for share in np.transpose(groups, (2, 0, 1))])


def first(run, level):
    """Return the logarithm of the episodes at which a curve first has a success, or of all."""
    for (x, y), (later, higher) in pairwise(run[["episodes", "eval_success"]].to_numpy()):
        if higher >= level:
            return np.log(x + (later - x) * (level - y) / (higher - y))
    return np.log(later)


def test_episodes_and_time_until_a_success():
    ratios = []
    for name, *cells in printed("Episodes and time until a success"):
        name, level = name.rsplit(", ", 1)
        if name == "median":
            assert_printed(cells, np.median(ratios, axis=0)[:, 0])
            ratios = []
            continue

        logs, seconds = [], []
        for arm in (*RIVALS, "freshper"):
            logs.append([first(run, float(level)) for run in curves(name, arm)])
            rows = ROWS.loc[key(name, arm)].loc[STAGE_1]
            seconds.append(np.median(rows["cpu_s"] / rows["episodes"]))
        expected = [np.exp(interval([log, logs[-1]])) for log in logs[:-1]]
        expected.append(expected[-1] * seconds[-2] / seconds[-1])
        assert_printed(cells, expected)
        ratios.append(expected)


OF_SMOLLM2 = (
    "freshper - on_policy @ 0.5;freshper - epochs @ 1;freshper - per @ 0.5;freshper - uniform @ 0.5"
)
RATIOS = (
    "on_policy @ 0.5 - freshper;epochs @ 1 - freshper;per @ 0.5 - freshper;uniform @ 0.5 - freshper"
)
# What is compared, and the measure of a run (evaluations are equally far apart)
CLAIMS = {
    "i": (OF_SMOLLM2, lambda run: run["eval_success"].rolling(2).mean().mean()),
    "i, 0.5": (RATIOS, lambda run: first(run, 0.5)),
    "i, final": (OF_SMOLLM2, None),
    "a, updates": (
        "text FrozenLake freshper +constant - on_policy +constant",
        lambda run: np.interp(360, run["step"], run["eval_success"]),
    ),
}
OTHERS = (  # of final success
    "3; 3, Sokoban; 5; 5, long; 5, Sokoban; 6; 9, rates; 13; 14; 15; 16; 17; 18; 19, gain; 20; "
    "20, tenth; 22; a, rate; c; c, none; d; e; f; g; tau"
)


@pytest.mark.parametrize("number", [*CLAIMS, *OTHERS.split("; ")])
def test_the_effects_of_a_claim(number):
    (effects,) = [row[-1] for row in printed("Claims and questions") if row[0] == number]
    names = re.sub("[^;]*SmolLM2 |: [^;]*", "", effects)
    compared, measure = CLAIMS.get(number, (names, None))
    assert names == compared
    seeds = slice(601, 605) if number[0] == "i" else STAGE_1
    for effect in effects.split("; "):
        name, cell = effect.split(": ")
        task = max(filter(name.startswith, KEYS), key=len)
        keys = [(task, arm) for arm in name.removeprefix(task + " ").split(" - ")]
        groups = [
            [*map(measure, curves(*key, seeds))] if measure else finals(*key, seeds) for key in keys
        ]
        expected = interval(groups)
        assert_printed([cell], np.exp(expected) if number == "i, 0.5" else expected)


def slope(x, y, weights):
    (variance, covariance), _ = np.cov(x, y, aweights=weights)
    return covariance / variance


def test_drift_by_age():
    for name, arm, _, *cells in printed("Drift by age"):
        readings = []
        for _, run in AGES.loc[key(name, arm)].groupby("seed"):
            age, kl, drawn = run[["age", "kl_reverse", "trajectories"]].to_numpy().T
            root = drawn**0.5
            (c,), *_ = np.linalg.lstsq(np.outer(age * root, 1), kl * root)
            mean = age @ drawn / drawn.sum()
            steps = (1 / slope(age, kl, drawn), 1 / c, mean / np.interp(mean, age, kl))
            logs = np.log([age[kl > 0], kl[kl > 0]])
            readings.append([*steps, age[0] / kl[0], slope(*logs, drawn[kl > 0])])
        intervals = [interval([reading], [1]) for reading in np.transpose(readings)]
        assert_printed(cells, [(mean, high - mean) for mean, _, high in intervals], atol=5.1e-3)


def test_the_files_are_those_of_the_data():
    assert verdicts.tables() == (FOLDER / "tables.md").read_text()
    assert verdicts.arms() == (FOLDER / "arms.csv").read_text()
