"""How stale is replayed data, measured: effective sample size, KL divergence and clipping by age.

Paper: section 3.3. Its argument has four steps, and each can be looked at on a real run:

    rho_i = pi_theta(tau_i) / pi_mu(tau_i)         of a trajectory: the product over its action tokens
    ESS / n = 1 / (1 + Var[rho])                   eq. ess_def
    ESS / n <= exp(-KL(pi_theta || pi_mu))         eq. ess_decay: a bound, not an estimate
    KL ~ c Delta, hence exp(-Delta / tau), tau = 1/c    eq. ess_decay_final, eq. age_decay: a heuristic

    python -m freshper.diagnostics out/frozenlake-freshper-42        the table, the fits, diagnostics.png

It reads `replay.csv`, which every run with replay writes: one row a replayed trajectory, from log-probs that the
update computes anyway. `log_ratio` is log rho_i; `ratio`, `ratio_sq`, `kl` (k3 of pi_mu against pi_theta) and
`clipped` are sums over its `tokens` action tokens.

How the estimates are made, since the paper does not say:
- Replay draws by priority, not from pi_mu. Each row is therefore weighted by v_i = 1 / P(i), which gives back the mean
  over the trajectories that were collected (within a bin of age, where P(i) depends on the reward only).
- E[rho] is 1 in expectation, but not in a sample: ESS / n = (sum v rho)^2 / (sum v  sum v rho^2), Kish's form.
- KL(pi_theta || pi_mu) = E_mu[rho log rho] / E_mu[rho] - log E_mu[rho]; KL(pi_mu || pi_theta) = E_mu[-log rho].
- "Per token" treats every action token as a sample of its own, given its context.
With these estimates the bound holds in every sample: it is a theorem about the sample's own distribution. What a run
can show is how loose it is. A sample of n cannot show an ESS / n below 1 / n, nor a KL(pi_theta || pi_mu) above
log n: both saturate.
"""

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

import matplotlib.figure
import numpy as np


class Bin(NamedTuple):
    """Trajectories of similar age. All but `age` and `n` are estimates, see the module's head."""

    age: float  # mean Delta, in the unit of --age_unit
    n: int
    ess: float  # ESS / n of trajectories
    ess_token: float  # ESS / n of tokens
    kl: float  # KL(pi_theta || pi_mu) of trajectories
    kl_reverse: float  # KL(pi_mu || pi_theta) of trajectories
    kl_token: float  # KL(pi_mu || pi_theta) of tokens
    clipped: float  # share of action tokens
    zero_reward: float  # share of the drawn trajectories, not weighted


def read(folder: Path, name: str = "replay.csv") -> dict[str, np.ndarray]:
    """Columns of a run's table, float64 [rows], NaN where empty. Raises FileNotFoundError where there is none: a run
    without replay has no replay.csv."""
    with open(folder / name, newline="") as file:
        names, *rows = csv.reader(file)
    table = np.array([[float(x or "nan") for x in row] for row in rows]).reshape(-1, len(names))
    return dict(zip(names, table.T, strict=True))


def by_age(rows: dict[str, np.ndarray], bins: int = 12) -> list[Bin]:
    """Estimates in `bins` groups of equal size, from young to old."""
    order = np.argsort(rows["age"], kind="stable")
    found = []
    for chosen in np.array_split(order, min(bins, len(order))):
        r = {name: values[chosen] for name, values in rows.items()}
        v = 1.0 / r["probability"]
        v /= v.sum()
        log_rho = r["log_ratio"]
        rho = np.exp(log_rho - log_rho.max())  # the constant cancels below, and nothing overflows
        share = v * rho / (v * rho).sum()
        tokens = (v * r["tokens"]).sum()
        found.append(
            Bin(
                age=float(r["age"].mean()),
                n=len(chosen),
                ess=float((v * rho).sum() ** 2 / (v * rho**2).sum()),
                ess_token=float((v * r["ratio"]).sum() ** 2 / (tokens * (v * r["ratio_sq"]).sum())),
                kl=float((share * log_rho).sum() - log_rho.max() - np.log((v * rho).sum())),
                kl_reverse=float((v * -log_rho).sum()),
                kl_token=float((v * r["kl"]).sum() / tokens),
                clipped=float((v * r["clipped"]).sum() / tokens),
                zero_reward=float((r["reward"] == 0).mean()),
            )
        )
    return found


class Fit(NamedTuple):
    """y = rate * age + offset by least squares, and the share of the variance it explains."""

    rate: float
    offset: float
    r2: float

    @property
    def steps(self) -> float:
        """1 / rate in the unit of age, tau of eq. age_decay; infinite where nothing drifts."""
        return 1.0 / self.rate if self.rate else float("inf")


def fit(ages: np.ndarray, values: np.ndarray) -> Fit:
    """Least squares over bins. [bins], [bins]; at least two different ages, else a fit of nothing (NaN)."""
    if len(set(ages.tolist())) < 2:
        return Fit(float("nan"), float("nan"), float("nan"))
    rate, offset = np.polyfit(ages, values, 1)
    residual, total = values - rate * ages - offset, values - values.mean()
    return Fit(float(rate), float(offset), float(1 - (residual**2).sum() / max((total**2).sum(), 1e-300)))


def fits(bins: list[Bin]) -> dict[str, Fit]:
    """Drift rates: of KL, and of -ln(ESS / n), for trajectories and tokens; tau = 1/c is 1 / rate."""
    ages = np.array([b.age for b in bins])
    return {
        "KL(theta||mu) of trajectories": fit(ages, np.array([b.kl for b in bins])),
        "KL(mu||theta) of trajectories": fit(ages, np.array([b.kl_reverse for b in bins])),
        "-ln(ESS/n) of trajectories": fit(ages, -np.log([b.ess for b in bins])),
        "KL(mu||theta) of tokens": fit(ages, np.array([b.kl_token for b in bins])),
        "-ln(ESS/n) of tokens": fit(ages, -np.log([b.ess_token for b in bins])),
    }


def plot(folder: Path, bins: int = 12) -> list[Bin]:
    """Write diagnostics.png beside replay.csv; returns the bins. Writes nothing where nothing was replayed."""
    rows = read(folder)
    if not len(rows["age"]):
        return []
    found = by_age(rows, bins)
    column = {name: np.array([getattr(b, name) for b in found]) for name in Bin._fields}
    age = column["age"]
    figure = matplotlib.figure.Figure(figsize=(10, 7), layout="constrained")
    (ess, kl), (clip, drawn) = figure.subplots(2, 2)
    ess.semilogy(age, column["ess"], "o-", label="trajectories")
    ess.semilogy(age, np.exp(-column["kl"]), "k--", label="exp(-KL(theta||mu)), eq. ess_decay")
    ess.semilogy(age, column["ess_token"], "s-", label="tokens")
    ess.set(title="ESS / n", xlabel="age")
    kl.plot(age, column["kl"], "o-", label="KL(theta||mu)")
    kl.plot(age, column["kl_reverse"], "s-", label="KL(mu||theta)")
    line = fit(age, column["kl"])
    kl.plot(age, line.rate * age + line.offset, "k--", label=f"1/rate {line.steps:.0f} steps, R² {line.r2:.2f}")
    kl.set(title="KL divergence of trajectories, nats", xlabel="age")
    clip.plot(age, column["clipped"], "o-", label="clipped action tokens")
    clip.plot(age, column["zero_reward"], "s-", label="trajectories of zero reward")
    clip.set(title="shares of what was replayed", xlabel="age", ylim=(-0.02, 1.02))
    drawn.hist(rows["age"], bins=40)
    drawn.set(title="ages that were drawn", xlabel="age")
    for axes in (ess, kl, clip):
        axes.legend(fontsize="small")
    figure.savefig(folder / "diagnostics.png", dpi=120)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="ESS, KL and clipping of replayed trajectories by age.")
    parser.add_argument("folder", type=Path, help="of a run with replay: out/<env>-<method>-<seed>")
    parser.add_argument("--bins", type=int, default=12)
    args = parser.parse_args()
    if not (args.folder / "replay.csv").is_file():
        parser.error(f"{args.folder} holds no replay.csv; name the folder of a run with replay")
    found = plot(args.folder, args.bins)
    print("   age     n  ESS/n exp(-KL) | per token: ESS/n      KL | clipped  zero reward")
    for b in found:
        trajectory = f"{b.age:6.1f} {b.n:5d}  {b.ess:5.3f}    {np.exp(-b.kl):5.3f}"
        print(f"{trajectory} | {b.ess_token:16.3f} {b.kl_token:7.4f} | {b.clipped:7.3f} {b.zero_reward:12.3f}")
    for name, line in fits(found).items():
        print(f"{name}: {line.offset:.3f} + age / {line.steps:.0f}, R² {line.r2:.2f}")


if __name__ == "__main__":
    main()
