"""Measure how stale replayed trajectories are, by age.

Paper: section 3.3; a real run shows its argument step by step.

    rho_i = pi_theta(e_i) / pi_mu(e_i)               eq. 4: the product over its action tokens
    ESS / n = 1 / (1 + Var[rho])                     eq. 5
    ESS / n <= exp(-KL(pi_theta || pi_mu))           eq. 11: a bound, not an estimate
    KL ~ c Delta, so exp(-Delta / tau), tau = 1/c    eq. 12 and 13: a heuristic

The input is replay.csv, one row per replayed trajectory: `log_ratio` is log rho_i; `ratio`,
`ratio_sq`, `kl` (k3 of pi_mu against pi_theta) and `clipped` are sums over its `tokens` action
tokens. How to estimate is ours:
- Replay draws by priority, not from pi_mu: each row has the weight v_i = 1 / P(i).
- E[rho] is 1 in expectation but not in a sample: ESS / n = (sum v rho)^2 / (sum v sum v rho^2),
  Kish's form.
- KL(pi_theta || pi_mu) = E_mu[rho log rho] / E_mu[rho] - log E_mu[rho], so eq. 11 holds in every
  sample (Jensen). Its reverse, KL(pi_mu || pi_theta) = -E_mu[log rho], has no ratio as a factor.
  So it is less noisy, and c is the slope of its line. The two agree to second order.
- If priorities decay, few trajectories of the oldest bin count, those with the largest weights, and
  the bin lies far from all others. So the line is fitted without it.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pandas

COLUMNS = "age probability log_ratio ratio ratio_sq tokens".split()  # of replay.csv, read below


def estimate(rows: pandas.DataFrame) -> dict[str, float]:
    """Estimate staleness from rows of replay.csv.

    Returns the mean `age` in steps, ESS / n of trajectories (`ess`) and tokens (`ess_token`),
    KL(pi_theta || pi_mu) (`kl`) and its reverse (`kl_reverse`) in nats."""
    # E_mu. Replay draws by priority, so each row has the weight v_i = 1 / P(i).
    mean = partial(np.average, weights=1.0 / rows["probability"])

    # The largest log ratio becomes 0, so nothing overflows. A constant factor of rho cancels below.
    log_rho = rows["log_ratio"] - rows["log_ratio"].max()
    rho = np.exp(log_rho)
    mean_rho = mean(rho)
    ess = mean_rho**2 / mean(rho**2)
    kl = mean(rho * log_rho) / mean_rho - np.log(mean_rho)

    ratio = mean(rows["ratio"])
    return {
        "age": mean(rows["age"]),
        "ess": ess,
        "ess_token": ratio**2 / (mean(rows["tokens"]) * mean(rows["ratio_sq"])),
        "kl": kl,
        "kl_reverse": -mean(rows["log_ratio"]),
    }


def by_age(rows: pandas.DataFrame, bins: int = 12) -> pandas.DataFrame:
    """Apply `estimate` to groups of equal size, from young to old. Returns a row of its values per
    group."""
    order = np.argsort(rows["age"], kind="stable")
    groups = np.array_split(order, min(bins, len(order)))
    return pandas.DataFrame([estimate(rows.iloc[group]) for group in groups])


def drift_rate(ages: np.ndarray, values: np.ndarray) -> tuple[float, float, float]:
    """Fit values [bins] = offset + ages [bins] / tau by least squares (eq. 12).

    Give it the bins of `by_age` without the oldest. Returns tau = 1 / c in optimizer steps, the
    offset, and R², or NaN if there is only one age, or no drift."""
    if len(ages) == 0 or np.ptp(ages) == 0 or np.ptp(values) == 0:
        return np.nan, np.nan, np.nan
    rate, offset = np.polyfit(ages, values, 1)
    correlation = np.corrcoef(ages, values)[0, 1]
    return 1 / rate, offset, correlation**2


def plot(folder: Path, estimates: pandas.DataFrame) -> None:
    """Write diagnostics.png to the folder of a run, from the values of `by_age`."""
    from matplotlib.figure import Figure

    age = estimates["age"]
    kl = estimates["kl"]
    kl_reverse = estimates["kl_reverse"]
    steps, offset, r2 = drift_rate(age[:-1], kl_reverse[:-1])
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)

    left.set(title="How much replayed episodes are worth", ylabel="ESS / n", ylim=(0, 1.05))
    left.plot(age, estimates["ess_token"], "s-", label="of tokens")
    left.plot(age, estimates["ess"], "o-", label="of trajectories")
    left.plot(age, np.exp(-kl), "k--", label=r"its bound, $\exp(-KL)$ (eq. 11)")

    right.set(title="How far the policy has moved", ylabel="KL of a trajectory, nats")
    right.plot(age, kl, "s-", label=r"$KL(\pi_\theta\|\pi_\mu)$, of eq. 11")
    right.plot(age, kl_reverse, "o-", label=r"$KL(\pi_\mu\|\pi_\theta)$")
    line = f"""its line: one nat in 1/c = {steps:.0f} steps (R² {r2:.2f}). By eq. 12
and 13 tau would be 1/c. This run uses the value of --tau."""
    if steps > 0:
        right.plot(age, offset + age / steps, "k--", label=line)

    for axes in (left, right):
        axes.set_xlabel("age of the episodes, optimizer steps")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    figure.savefig(folder / "diagnostics.png")
