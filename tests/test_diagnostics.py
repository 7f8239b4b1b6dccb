"""ESS and KL by age, against closed forms, the law of section 3.3, and SciPy."""

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from freshper.diagnostics import by_age, drift_rate, estimate


def rows_of(log_ratio, probability=1.0, age=0.0):
    """Rows of replay.csv, of trajectories with one action token."""
    ratio = np.exp(log_ratio)
    columns = {
        "age": age,
        "probability": probability,
        "log_ratio": log_ratio,
        "ratio": ratio,
        "ratio_sq": ratio**2,
        "tokens": 1.0,
    }
    return pandas.DataFrame(columns)


@given(n=st.integers(2, 8), seed=st.integers(0, 1000))
def test_the_derivation_of_section_3_3(n, seed):
    """Eq. 8 to 11 for any two distributions over a few trajectories, each side as it is defined.

    If each is drawn once, with a probability proportional to 1 / q, the estimates are exact."""
    p, q = np.random.default_rng(seed).dirichlet(np.full(n, 0.5), 2) * 0.99 + 0.01 / n
    rho = p / q
    kl = (p * np.log(rho)).sum()
    variance = (q * rho**2).sum() - (q * rho).sum() ** 2
    assert (q * rho).sum() == pytest.approx(1)  # eq. 8
    assert variance == pytest.approx((q * (rho - 1) ** 2).sum(), abs=1e-12)  # eq. 9
    assert variance >= np.expm1(kl) - 1e-9  # eq. 10
    ess = 1 / (1 + variance)
    assert ess <= np.exp(-kl) * (1 + 1e-9)  # eq. 11

    estimates = estimate(rows_of(np.log(rho), probability=1 / q))
    assert estimates["ess"] == pytest.approx(ess)
    assert estimates["ess_token"] == pytest.approx(ess)  # one token per trajectory
    assert estimates["kl"] == pytest.approx(kl, abs=1e-9)
    assert estimates["kl_reverse"] == pytest.approx((q * np.log(q / p)).sum(), abs=1e-9)


@settings(deadline=None)
@given(log_ratio=st.lists(st.floats(-30, 30), min_size=1, max_size=40), seed=st.integers(0, 1000))
def test_the_bound_holds_in_every_sample_and_no_ratio_overflows(log_ratio, seed):
    probability = np.random.default_rng(seed).uniform(0.1, 1.0, len(log_ratio))
    rows = rows_of(log_ratio, probability)
    plain = estimate(rows)
    v = 1 / probability / (1 / probability).sum()
    assert v.min() - 1e-12 <= plain["ess"] <= np.exp(-plain["kl"]) * (1 + 1e-9)  # eq. 11

    rows["log_ratio"] = rows["log_ratio"] + 1000.0  # a common factor cancels
    shifted = estimate(rows)
    assert shifted["ess"] == pytest.approx(plain["ess"], abs=1e-9)
    assert shifted["kl"] == pytest.approx(plain["kl"], abs=1e-9)


def test_a_mean_age_is_that_of_a_uniform_draw():
    """By hand: trajectories drawn with p = 1/2 and 1/4 count 2 and 4 times."""
    rows = rows_of([0.0, 0.0], probability=np.array([0.5, 0.25]), age=np.array([1.0, 4.0]))
    assert estimate(rows)["age"] == pytest.approx((2 * 1 + 4 * 4) / 6)


@pytest.mark.parametrize("seed", range(5))
def test_the_drift_rate_does_not_depend_on_which_ages_are_drawn(seed):
    """log rho is normal with KL = age / 100, so both KLs are. Uniform and FreshPER's draws must
    agree, although the second ones are mostly young: within a bin, too, age decides who is drawn.
    """
    rng = np.random.default_rng(seed)
    buffer = np.repeat(np.arange(0.0, 1080.0, 3.0), 32)
    for leaves in (np.ones(len(buffer)), np.exp(-0.6 * buffer / 20)):
        probability = leaves / leaves.sum()
        drawn = rng.choice(len(buffer), 23_040, p=probability)
        ages = buffer[drawn]
        log_ratio = rng.normal(-ages / 100, np.sqrt(2 * ages / 100))
        bins = by_age(rows_of(log_ratio, probability[drawn], ages))
        tau, offset, r2 = drift_rate(bins["age"][:-1], bins["kl_reverse"][:-1])
        assert tau == pytest.approx(100, rel=0.08)
        assert offset == pytest.approx(0, abs=0.03)
        assert r2 > 0.97


def test_bins_are_by_age_and_the_drift_rate_is_a_least_squares_line():
    age_of_bin = np.array([5.0, 10.0, 20.0])
    ages = np.repeat(age_of_bin, 30)
    log_ratio = 0.01 * ages * np.tile([1.0, -1.0], 45)
    order = np.random.default_rng(0).permutation(90)
    bins = by_age(rows_of(log_ratio[order], age=ages[order]), bins=3)
    rho = np.exp([0.01 * age_of_bin, -0.01 * age_of_bin])
    np.testing.assert_array_equal(bins["age"], age_of_bin)
    np.testing.assert_allclose(bins["ess"], rho.sum(0) ** 2 / (2 * (rho**2).sum(0)))

    x, y = np.random.default_rng(1).normal(size=(2, 9))
    line = stats.linregress(x, y)
    assert drift_rate(x, y) == pytest.approx((1 / line.slope, line.intercept, line.rvalue**2))
    assert np.isnan(drift_rate(np.ones(3), y[:3])).all()
