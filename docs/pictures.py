"""Draw docs/idea.png: the priority of an old success falls below that of a fresh failure.

    python -m docs.pictures

docs/frozenlake.gif shows a held-out lake before and after training, each beside the image that the
policy gets. `git show e3e7852:docs/make_gif.py` drew it.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from freshper.priority import exponential_decay, reward_priority

# Those of FreshPER and "no decay" in evidence/figures.py
SUCCESS = "#EA4335"
FAILURE = "#444444"
WITHOUT = "#9C6500"
# Of the tiny presets.
TAU = 20.0
EPSILON = 0.1

success, failure = reward_priority(np.array([1.0, 0.0]), EPSILON)
crossing = TAU * np.log(success / failure)
ages = np.linspace(0.0, 80.0, 200)

plt.rcParams.update({"font.size": 21, "axes.spines.top": False, "axes.spines.right": False})
figure, axes = plt.subplots(figsize=(12, 6.4), layout="constrained")
axes.axhline(success, color=WITHOUT, ls="--", lw=3)
axes.semilogy(ages, success * exponential_decay(ages, TAU), color=SUCCESS, lw=6)
axes.axhline(failure, color=FAILURE, lw=6)
axes.plot(crossing, failure, "o", color="black", ms=15, zorder=3)

axes.text(80, 1.2 * success, "without decay", color=WITHOUT, ha="right")
axes.text(17, 0.62, "an old success", color=SUCCESS, weight="bold", size=25)
axes.text(1, 1.15 * failure, "a fresh failure", color=FAILURE, weight="bold", size=25)
axes.text(crossing + 1.5, 0.125, f"age {crossing:.0f}", weight="bold")
axes.text(crossing + 1.5, 0.012, "now the failure is\ndrawn more often", va="bottom")

axes.set_title(r"$p = (|r| + \epsilon)\;\exp(-\mathrm{age}\,/\,\tau)$", size=32, pad=18)
setting = rf"$\tau$ = {TAU:.0f}, $\epsilon$ = {EPSILON}"
axes.set_xlabel(f"age of the success, optimizer steps ({setting})")
axes.set(ylabel="priority p", xlim=(0, 80), ylim=(0.01, 2.2))
axes.set_yticks([1, 0.1, 0.01], ["1", "0.1", "0.01"])
figure.savefig(Path(__file__).parent / "idea.png", dpi=100)
