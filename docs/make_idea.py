"""Draw docs/idea.png, the idea in one picture: the priority of an old success falls below that of a
fresh failure.

    python -m docs.make_idea

The numbers are those of the tiny preset and of freshper/priority.py.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from freshper.presets import TINY_MODEL
from freshper.priority import exponential_decay, reward_priority

# Colors that people who are color-blind can tell apart (Okabe and Ito).
SUCCESS = "#0072b2"
FAILURE = "#d55e00"
PER = "#9C6500"  # FreshPER without decay, as in the figures of the results
OLDEST = 80


def main() -> None:
    """Draw the figure and save it."""
    parser = argparse.ArgumentParser(description="Draw the idea of FreshPER.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "idea.png")
    out = parser.parse_args().out
    tau = TINY_MODEL["tau"]
    success, failure = reward_priority(np.array([1.0, 0.0]), TINY_MODEL["epsilon"])
    crossing = tau * np.log(success / failure)
    ages = np.linspace(0.0, OLDEST, 200)

    plt.rcParams.update({"font.size": 21, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(12, 6.4), layout="constrained")
    axes.axhline(success, color=PER, ls="--", lw=3)
    axes.semilogy(ages, success * exponential_decay(ages, tau), color=SUCCESS, lw=6)
    axes.axhline(failure, color=FAILURE, lw=6)
    axes.vlines(crossing, 0.01, failure, color="black", ls=":", lw=2)
    axes.plot(crossing, failure, "o", color="black", ms=15, zorder=3)

    axes.text(OLDEST, 1.2 * success, "without decay", color=PER, ha="right")
    axes.text(17, 0.62, "an old success", color=SUCCESS, weight="bold", size=25)
    axes.text(1, 1.15 * failure, "a fresh failure", color=FAILURE, weight="bold", size=25)
    axes.text(crossing + 1.5, 0.125, f"age {crossing:.0f}", weight="bold")
    axes.text(crossing + 1.5, 0.012, "now the failure is\ndrawn more often", va="bottom")

    axes.set_title(r"$p = (|r| + \epsilon)\;\exp(-\mathrm{age}\,/\,\tau)$", size=32, pad=18)
    setting = rf"$\tau$ = {tau:.0f}, $\epsilon$ = {TINY_MODEL['epsilon']:g}"
    axes.set_xlabel(f"age of the success, optimizer steps ({setting})")
    axes.set_ylabel("priority p")
    axes.set(xlim=(0, OLDEST), ylim=(0.01, 2.2))
    axes.set_yticks([1, 0.1, 0.01], ["1", "0.1", "0.01"])
    figure.savefig(out, dpi=100)
    print(f"{out}: the priorities cross at age {crossing:.1f}")


if __name__ == "__main__":
    main()
