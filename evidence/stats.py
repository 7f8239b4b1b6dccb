"""Intervals, corrections and verdicts.

An effect is a weighted sum of the means of independent groups of runs: a mean (Student's t), a
difference (Welch's t), a difference of differences or a mean over tasks (Welch and Satterthwaite).
Runs of equal seed are not paired, because they soon diverge. The 95 % intervals cover 93 to 97 % at
n = 3, 5 and 10, with equal and unequal variances.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

SMALLEST_EFFECT = 0.03  # of success: what is smaller does not matter
Groups = Sequence[np.ndarray]


class Effect(NamedTuple):
    """An estimate, its 95 % interval, the two-sided p-value of the effect 0, degrees of freedom."""

    estimate: float
    low: float
    high: float
    p: float
    df: float = np.nan


def contrast(groups: Groups, weights: Sequence[float]) -> Effect:
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


def holm(p: Sequence[float]) -> np.ndarray:
    """Return Holm's corrected p-values of a family, [n], in its order."""
    p = np.asarray(p, float)
    order = np.argsort(p)
    steps = p[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(steps).clip(max=1.0)
    return corrected


def p_at_least(effect: Effect, smallest: float) -> float:
    """Return the one-sided p-value of "the effect is `smallest` or more"."""
    error = (effect.high - effect.estimate) / stats.t.ppf(0.975, effect.df)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(stats.t.cdf((effect.estimate - smallest) / error, effect.df))


def judge(effects: Sequence[Effect], smallest: float = SMALLEST_EFFECT) -> list[str]:
    """Return whether each effect of a family is there, with Holm's correction.

    no: it is significantly below the smallest that matters; of one effect, the whole interval is.
    yes: it is significantly above 0. Else undecided."""
    p_0 = holm([effect.p for effect in effects])
    p_smallest = holm([p_at_least(effect, smallest) for effect in effects])
    answers = []
    for effect, above_0, at_least in zip(effects, p_0, p_smallest, strict=True):
        there = effect.estimate > 0 and above_0 < 0.05
        answers.append("no" if at_least < 0.025 else "yes" if there else "undecided")
    return answers


def judge_equal(effects: Sequence[Effect]) -> list[str]:
    """Return whether two arms are equal: yes (the interval lies within the smallest effect), no
    (they differ, with Holm's correction) or undecided."""
    answers = []
    corrected = holm([effect.p for effect in effects])
    for effect, p in zip(effects, corrected, strict=True):
        within = max(-effect.low, effect.high) <= SMALLEST_EFFECT
        answers.append("yes" if within else "no" if p < 0.05 else "undecided")
    return answers


def above(bound: float) -> Callable[[Sequence[Effect]], list[str]]:
    """Return a judge of whether each interval, uncorrected, lies above a bound (yes) or below it
    (no)."""

    def judge_above(effects: Sequence[Effect]) -> list[str]:
        answers = []
        for effect in effects:
            there, not_there = effect.low > bound, effect.high < bound
            answers.append("yes" if there else "no" if not_there else "undecided")
        return answers

    return judge_above


def permutation_p(x: Groups, y: Groups, draws: int = 100_000) -> float:
    """Return the two-sided p-value of a mean of differences, mean_k (mean(x_k) - mean(y_k)).

    Under the null hypothesis the runs of x_k and y_k may be exchanged, within each stratum k."""
    rng = np.random.default_rng(0)
    observed = 0.0
    drawn = np.zeros(draws)
    for one, other in zip(x, y, strict=True):
        both = np.concatenate([one, other])
        observed += one.mean() - other.mean()
        mixed = rng.permuted(np.tile(both, (draws, 1)), axis=1)
        drawn += mixed[:, : len(one)].mean(1) - mixed[:, len(one) :].mean(1)
    extreme = np.abs(drawn) >= abs(observed) - 1e-12
    return float((extreme.sum() + 1) / (draws + 1))
