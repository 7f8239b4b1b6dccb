"""ESS and KL by age, against closed forms, a loop, and the law of section 3.3."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper.diagnostics import by_age, fit, fits, main, plot, read


def rows_of(log_ratio, probability=None, age=None, tokens=None):
    n = len(log_ratio)
    log_ratio = np.asarray(log_ratio, dtype=float)
    tokens = np.full(n, 1.0) if tokens is None else tokens
    return {
        "age": np.zeros(n) if age is None else np.asarray(age, dtype=float),
        "probability": np.full(n, 1 / n) if probability is None else np.asarray(probability),
        "reward": np.arange(n) % 2.0,
        "tokens": tokens,
        "log_ratio": log_ratio,
        "ratio": np.exp(log_ratio),
        "ratio_sq": np.exp(2 * log_ratio),
        "kl": np.exp(log_ratio) - log_ratio - 1,
        "clipped": np.zeros(n),
    }


def test_gaussian_closed_forms():
    """mu = N(0, 1), theta = N(d, 1): log rho = d x - d^2 / 2, KL = d^2 / 2 both ways, ESS / n = exp(-d^2)."""
    d = 0.5
    x = np.random.default_rng(0).normal(size=400_000)
    (found,) = by_age(rows_of(d * x - d**2 / 2), bins=1)
    assert found.ess == pytest.approx(np.exp(-(d**2)), rel=0.02)
    assert found.kl == pytest.approx(d**2 / 2, rel=0.02)
    assert found.kl_reverse == pytest.approx(d**2 / 2, rel=0.02)
    assert found.ess_token == pytest.approx(found.ess)  # one token a trajectory


def test_weights_undo_the_priorities():
    """Drawn four times as often where x > 0: the estimates are those of the collected trajectories all the same."""
    rng, d = np.random.default_rng(1), 0.5
    x = rng.normal(size=400_000)
    priority = np.where(x > 0, 4.0, 1.0)
    drawn = rng.choice(len(x), size=400_000, p=priority / priority.sum())
    rows = rows_of(d * x[drawn] - d**2 / 2, probability=priority[drawn] / priority.sum())
    (found,) = by_age(rows, bins=1)
    assert found.kl == pytest.approx(d**2 / 2, rel=0.03)
    assert found.ess == pytest.approx(np.exp(-(d**2)), rel=0.03)
    (biased,) = by_age(rows | {"probability": np.full(len(x), 1.0)}, bins=1)
    assert abs(biased.kl_reverse - d**2 / 2) > 0.1


@given(
    p=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8),
    q=st.lists(st.floats(0.01, 1.0), min_size=8, max_size=8),
)
def test_the_derivation_of_section_3_3(p, q):
    """Prop. var_chi2 and eq. rho_mean_one to eq. ess_decay, for any two distributions over a few trajectories, each
    side from its own definition. Where each is drawn once, with a probability of the order of 1 / q, by_age agrees."""
    p, q = np.array(p) / np.sum(p), np.array(q[: len(p)]) / np.sum(q[: len(p)])
    rho = p / q
    variance = (q * rho**2).sum() - (q * rho).sum() ** 2
    renyi = [np.log((q * rho**order).sum()) / (order - 1) for order in (1 + 1e-6, 1.5, 2.0, 3.0)]
    kl = (p * np.log(p / q)).sum()
    assert (q * rho).sum() == pytest.approx(1)
    assert variance == pytest.approx((q * (rho - 1) ** 2).sum(), abs=1e-12)  # eq. var_equals_chi2
    assert variance == pytest.approx(np.expm1(renyi[2]), abs=1e-12)  # eq. var_chain
    assert renyi[0] == pytest.approx(kl, abs=1e-4)
    assert (np.diff(renyi) >= -1e-5).all()
    assert 1 / (1 + variance) <= np.exp(-kl) * (1 + 1e-9)  # eq. ess_decay
    (found,) = by_age(rows_of(np.log(rho), probability=1 / q), bins=1)
    assert found.ess == pytest.approx(1 / (1 + variance))
    assert found.kl == pytest.approx(kl, abs=1e-9)
    assert found.kl_reverse == pytest.approx((q * np.log(q / p)).sum(), abs=1e-9)


@settings(deadline=None)
@given(
    log_ratio=st.lists(st.floats(-30, 30), min_size=1, max_size=40),
    seed=st.integers(0, 1000),
)
def test_the_bound_of_the_paper(log_ratio, seed):
    """1 / n <= ESS / n <= exp(-KL(theta || mu)) (eq. ess_decay), and KL >= 0: Renyi's order, for any ratios."""
    probability = np.random.default_rng(seed).uniform(0.1, 1.0, len(log_ratio))
    (found,) = by_age(rows_of(log_ratio, probability), bins=1)
    v = 1 / probability / (1 / probability).sum()
    assert v.min() - 1e-12 <= found.ess <= np.exp(-found.kl) * (1 + 1e-9)
    assert found.kl >= -1e-9


def test_a_ratio_of_any_size_is_no_overflow():
    """A factor common to all ratios changes neither ESS nor KL(theta || mu): both are of the weights' distribution."""
    rows = rows_of([0.0, 0.5, 2.0])
    (plain,) = by_age(rows, bins=1)
    (found,) = by_age(rows | {"log_ratio": rows["log_ratio"] + 1000.0}, bins=1)
    assert (found.ess, found.kl) == pytest.approx((plain.ess, plain.kl))


def test_bins_are_by_age_and_fits_find_a_line():
    ages = np.repeat([5.0, 10.0, 20.0], 30)
    shuffled = np.random.default_rng(0).permutation(90)
    sign = np.tile([1.0, -1.0], 45)
    rows = rows_of((0.01 * ages * sign)[shuffled], age=ages[shuffled])
    found = by_age(rows, bins=3)
    assert [b.age for b in found] == [5.0, 10.0, 20.0]
    assert [b.n for b in found] == [30, 30, 30]
    for b in found:
        rho = np.exp([0.01 * b.age, -0.01 * b.age])
        assert b.ess == pytest.approx(rho.sum() ** 2 / (2 * (rho**2).sum()))
    line = fit(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 9.0]))
    assert line == pytest.approx((2.0, 1.0, 1.0))
    assert all(np.isfinite(f).all() for f in fits(found).values())


def test_the_command_line(tmp_path, capsys, monkeypatch):
    rows = rows_of(np.random.default_rng(0).normal(0, 0.1, 60), age=np.repeat(np.arange(6), 10))
    text = ",".join(rows) + "\n" + "\n".join(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))
    (tmp_path / "replay.csv").write_text(text + "\n")
    assert {name: values.tolist() for name, values in read(tmp_path).items()} == {
        name: values.tolist() for name, values in rows.items()
    }
    monkeypatch.setattr("sys.argv", ["diagnostics", str(tmp_path), "--bins", "3"])
    main()
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 + 5
    assert (tmp_path / "diagnostics.png").read_bytes().startswith(b"\x89PNG")
    still = "0,0.1,1,4,0,4,4,0,0\n1,0.1,1,4,0,4,4,0,0\n"  # a policy that does not move
    (tmp_path / "replay.csv").write_text(",".join(rows) + "\n" + still)
    main()
    assert "KL(theta||mu) of trajectories: 0.000 + age / inf" in capsys.readouterr().out
    (tmp_path / "replay.csv").write_text(",".join(rows) + "\n")
    assert plot(tmp_path) == []
    monkeypatch.setattr("sys.argv", ["diagnostics", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "holds no replay.csv" in capsys.readouterr().err
