"""The estimate of tau: right where the drift is known, within its bounds elsewhere, and in a run."""

import csv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import train
from freshper.auto_tau import AutoTau
from freshper.config import parse_args
from freshper.diagnostics import read
from freshper.priority import exponential_decay


@given(st.floats(5.0, 400.0), st.floats(0.1, 1.0), st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_a_steady_drift_gives_alpha_over_twice_its_rate(wanted, alpha, ages):
    tau, c = AutoTau(alpha, 20), alpha / (2 * wanted)  # between the bounds or beyond either
    for age in ages:
        batch = np.array([age, 2 * age, 3])
        tau.observe(batch, c * batch)
    assert tau.tau == pytest.approx(np.clip(wanted, 20, 100))


def test_probabilities_decay_as_the_effective_sample_size_does():
    """Trajectory ratios that are log-normal, with a KL of c Delta: the law behind the estimate, by Monte Carlo."""
    rng, c, alpha = np.random.default_rng(0), 0.02, 0.6
    tau = AutoTau(alpha, 10)
    ages = np.arange(1, 41)
    tau.observe(ages, c * ages)
    for age in (5, 15, 30):
        variance = 2 * c * age
        rho = np.exp(rng.normal(-variance / 2, variance**0.5, 1_000_000))  # mean 1, KL(mu || theta) = variance / 2
        assert -np.log(rho).mean() == pytest.approx(c * age, abs=0.01)
        ess = rho.mean() ** 2 / (rho**2).mean()
        assert tau(np.array([age]))[0] ** alpha == pytest.approx(ess, rel=0.05)


def test_what_is_old_is_forgotten():
    tau = AutoTau(0.6, 10)
    for rate in (0.02, 0.008):
        for _ in range(300):
            tau.observe(np.array([10.0]), np.array([10 * rate]))
        assert tau.tau == pytest.approx(0.3 / rate, rel=1e-3)


def test_bounds():
    tau = AutoTau(0.6, 3)
    assert tau.tau == 15.0  # nothing known
    tau.observe(np.array([5.0, 9.0]), np.zeros(2))
    assert tau.tau == 15.0  # no drift
    tau.observe(np.array([1.0]), np.array([1e9]))
    assert tau.tau == 3.0
    np.testing.assert_array_equal(tau(np.array([0, 3])), exponential_decay(np.array([0, 3]), 3.0))


@pytest.mark.parametrize(
    ("flags", "iteration"), [("", 3), ("--replay_ratio 4 --ppo_epochs 2", 6), ("--age_unit iteration", 1)]
)
def test_the_bounds_are_one_and_five_iterations(flags, iteration):
    tau = parse_args(["--tau", "auto", "--preset", "tiny", *flags.split()]).decay_function()
    assert (tau.shortest, tau.longest) == (iteration, 5 * iteration)


def test_tau_auto_in_a_run(tmp_path, monkeypatch):
    """The real train.py: metrics.csv holds the estimate that replay.csv's ages and KL give, the KL shared among a
    trajectory's turns."""
    observe, per_turn = AutoTau.observe, []
    monkeypatch.setattr(AutoTau, "observe", lambda tau, ages, kl: (per_turn.append(kl), observe(tau, ages, kl)))
    out = tmp_path / "run"
    small = "--iterations 4 --rollout_batch_size 8 --batch_size 8 --eval_episodes 4 --save_every 2".split()
    small += ["--lr", "0.0003", "--warmup_steps", "0"]  # a drift that keeps the estimate between its bounds
    assert train.main(["--env", "frozenlake", "--tau", "auto", *small, "--out", str(out)]) == 0
    with open(out / "metrics.csv", newline="") as file:
        found = [float(row["tau"]) for row in csv.DictReader(file)]
    rows, expected = read(out), AutoTau(0.6, 3)
    for iteration in range(4):
        taus = []
        for ages, kl in zip(
            *(np.split(rows[n][rows["iteration"] == iteration], 2) for n in ("age", "kl")), strict=True
        ):
            shared = per_turn.pop(0)
            turns = np.round(kl[kl > 1e-4] / shared[kl > 1e-4])
            assert set(turns) <= set(range(1, 11))
            np.testing.assert_allclose(turns * shared[kl > 1e-4], kl[kl > 1e-4], rtol=0.01)
            observe(expected, ages, shared)
            taus.append(expected.tau)
        assert found[iteration] == pytest.approx(np.mean(taus), rel=1e-3)
    assert len(set(found)) == 4
    assert 3 < min(found) < 14  # the estimate, not its bounds


def test_both_ways_to_write_the_flag():
    assert parse_args(["--tau", "auto"]).decay == parse_args(["--tau=auto"]).decay == "auto"
