"""Intervals, corrections and verdicts of the campaign. docs/plan.md says which claim has which.

An effect is a weighted sum of the means of independent groups of runs: a mean (Student's t), a
difference (Welch's t), a difference of differences (Welch and Satterthwaite). Runs that are paired
are given as one group, that of their differences. The 95 % intervals cover 93 to 97 % at n = 3, 5
and 10, with equal and unequal variances (tests/dev/test_campaign.py). The lowest, 93 %, is that of
3 runs beside 10 with a third of their spread. So no other form is needed.

Several comparisons of one table: Holm's correction of their p-values. Several tasks: the
interquartile mean of normalised success, with a bootstrap that draws the seeds within each task
(Agarwal et al., arXiv 2108.13264). Their form covers 87, 90 and 93 % at n = 3, 5 and 10, nine
tasks. Widened as `bootstrap` says it covers 93 to 97 %, of one arm and of a difference, with equal
and unequal variances, and with those of our arms (98 % of some differences at n = 3).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

SMALLEST_EFFECT = 0.03  # of success: what is smaller does not matter


class Effect(NamedTuple):
    """An estimate, its 95 % interval, the two-sided p-value of the effect 0, degrees of freedom."""

    estimate: float
    low: float
    high: float
    p: float
    df: float = np.nan


def contrast(groups: Sequence[np.ndarray], weights: Sequence[float]) -> Effect:
    """Return the effect sum_k w_k mean(x_k) of independent groups, [..., n_k] each.

    Degrees of freedom: Welch and Satterthwaite's; n - 1 of one group. Equal values have an interval
    of no width."""
    estimate: Any = 0.0
    variance: Any = 0.0
    spread: Any = 0.0  # the sum that Satterthwaite divides by
    for x, weight in zip(groups, weights, strict=True):
        n = x.shape[-1]
        part = weight**2 * x.var(-1, ddof=1) / n
        estimate = estimate + weight * x.mean(-1)
        variance = variance + part
        spread = spread + part**2 / (n - 1)

    with np.errstate(divide="ignore", invalid="ignore"):
        df = np.where(variance > 0, variance**2 / spread, 1.0)
        t = np.where(estimate == 0, 0.0, estimate / np.sqrt(variance))
    half = stats.t.ppf(0.975, df) * np.sqrt(variance)
    p = 2 * stats.t.sf(np.abs(t), df)
    return Effect(estimate, estimate - half, estimate + half, p, df)


def difference(x: np.ndarray, y: np.ndarray) -> Effect:
    """Return x - y of independent groups, [..., n] and [..., m]."""
    return contrast([x, y], [1.0, -1.0])


def holm(p: Sequence[float]) -> np.ndarray:
    """Return Holm's corrected p-values of a family, [n], in its order."""
    p = np.asarray(p, float)
    order = np.argsort(p)
    steps = p[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(steps).clip(max=1.0)
    return corrected


def p_at_least(effect: Effect, smallest: float = SMALLEST_EFFECT) -> float:
    """Return the one-sided p-value of "the effect is `smallest` or more"."""
    error = (effect.high - effect.estimate) / stats.t.ppf(0.975, effect.df)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(stats.t.cdf((effect.estimate - smallest) / error, effect.df))


def verdict(effect: Effect, corrected_p: float, corrected_p_at_least: float) -> str:
    """Return whether the effect is there: yes, no or undecided.

    no: it is smaller than the smallest effect that matters; of one comparison, the whole interval
    is. yes: it is above 0. Both with the p-values of the family's correction."""
    if corrected_p_at_least < 0.025:
        return "no"
    if effect.estimate > 0 and corrected_p < 0.05:
        return "yes"
    return "undecided"


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half of all values, [..., tasks, seeds] -> [...]."""
    flat = values.reshape(*values.shape[:-2], -1)
    return stats.trim_mean(flat, 0.25, axis=-1)


def degrees_of_freedom(values: np.ndarray) -> float:
    """Return Welch and Satterthwaite's degrees of freedom of an interquartile mean, of values
    [tasks, seeds].

    The outer quarters count as the quartiles, so a task beyond them has no variance."""
    quartiles = np.quantile(values, (0.25, 0.75))
    variances = values.clip(*quartiles).var(-1, ddof=1)
    if not variances.any():
        return values.shape[-1] - 1
    return (values.shape[-1] - 1) * variances.sum() ** 2 / (variances**2).sum()


def bootstrap(
    statistic: Callable[..., np.ndarray],
    groups: Sequence[np.ndarray],
    draws: int = 10_000,
) -> tuple[float, float, float]:
    """Return statistic(*groups) and its 95 % percentile interval.

    The groups are [tasks, seeds] each. A draw takes as many seeds of each task, with replacement,
    for each group on its own. The interval would be too narrow for two reasons, so the deviations
    from the mean of a task are widened by two factors. The variance of n draws from n seeds is too
    small by (n - 1) / n. And the spread is only an estimate, so Student's t takes the place
    of the normal distribution."""
    rng = np.random.default_rng(0)
    drawn = []
    for group in groups:
        tasks, seeds = group.shape
        mean = group.mean(-1, keepdims=True)
        factor = np.sqrt(seeds / (seeds - 1))
        factor *= stats.t.ppf(0.975, degrees_of_freedom(group)) / stats.norm.ppf(0.975)
        widened = mean + factor * (group - mean)
        chosen = rng.integers(seeds, size=(draws, tasks, seeds))
        drawn.append(np.take_along_axis(widened[None], chosen, axis=-1))
    low, high = np.quantile(statistic(*drawn), (0.025, 0.975))
    return float(statistic(*groups)), float(low), float(high)
