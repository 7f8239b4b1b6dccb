"""Intervals, corrections and verdicts.

An effect is a weighted sum of the means of independent groups of runs: a mean (Student's t), a
difference (Welch's t), a difference of differences or a mean over tasks (Welch and Satterthwaite).
Runs of equal seed are not paired, because they soon diverge. The 95 % intervals cover 93 to 97 % at
n = 3, 5 and 10, with equal and unequal variances.
"""

from collections import namedtuple

import numpy as np
import pandas
from scipy.stats import t

SMALLEST_EFFECT = 0.03  # of success: what is smaller does not matter


# An estimate, its 95 % interval, its standard error and degrees of freedom: numbers, or arrays of
# many effects. A table of effects has these columns.
Effect = namedtuple("Effect", "estimate low high error df")


def contrast(groups, weights):
    """Return the effect sum_k w_k mean(x_k) of independent groups, [k, ..., n].

    Degrees of freedom: Welch and Satterthwaite's; n - 1 of one group."""
    groups = np.array(groups)
    n = groups.shape[-1]
    # Without the small number, equal values would divide 0 by 0.
    variances = groups.var(-1, ddof=1) / n + 1e-20
    estimate = weights @ groups.mean(-1)
    variance = np.square(weights) @ variances
    df = variance**2 / (np.power(weights, 4) @ variances**2) * (n - 1)
    error = np.sqrt(variance)
    half = t.ppf(0.975, df) * error
    return Effect(estimate, estimate - half, estimate + half, error, df)


def span(effect):
    """Return an estimate with its 95 % interval, if it has one, as text."""
    estimate, low, high = map("{:z.3f}".format, effect[:3])
    return estimate if low == "nan" else f"{estimate} [{low}, {high}]"


def holm(p):
    """Return Holm's corrected p-values of a family, in its order."""
    p = pandas.Series(p).sort_values()
    return (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1).sort_index()


def differ(effects):
    """Return whether effects are not 0: two-sided, with Holm's correction."""
    return holm(2 * t.sf(abs(effects.estimate) / effects.error, effects.df)) < 0.05


def judge(effects, smallest=SMALLEST_EFFECT):
    """Return whether each effect of a family is there, with Holm's correction.

    no: it is significantly below the smallest that matters; of one effect, the whole interval is.
    yes: it is significantly above 0. Else undecided."""
    p = t.cdf((effects.estimate - smallest) / effects.error, effects.df)
    too_small = holm(p) < 0.025
    there = differ(effects) & (effects.estimate > 0)
    return np.select([too_small, there], ["no", "yes"], "undecided")


def judge_equal(effects):
    """Return whether two arms are equal: yes (the interval lies within the smallest effect), no
    (they differ, with Holm's correction) or undecided."""
    within = np.maximum(-effects.low, effects.high) <= SMALLEST_EFFECT
    return np.select([within, differ(effects)], ["yes", "no"], "undecided")


def judge_above(bound):
    """Return a judge of whether each interval, uncorrected, lies above a bound (yes) or below it
    (no)."""
    return lambda effects: np.select(
        [effects.low > bound, effects.high < bound], ["yes", "no"], "undecided"
    )


def permutation_p(x, y, draws=100_000):
    """Return the two-sided p-value of a mean of differences, mean_k (mean(x_k) - mean(y_k)), of
    [..., n] each.

    Under the null hypothesis the runs of x_k and y_k may be exchanged, within each stratum k."""
    n = x.shape[-1]
    signs = np.repeat([1, -1], n)
    both = np.concatenate([x, y], axis=-1).reshape(-1, 1, 2 * n)
    rng = np.random.default_rng(0)
    drawn = rng.permuted(np.tile(both, (draws, 1)), axis=-1) @ signs
    extreme = np.abs(drawn.sum(0)) >= np.abs(np.sum(both @ signs)) - 1e-12
    return (extreme.sum() + 1) / (draws + 1)
