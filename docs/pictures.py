"""Draw docs/idea.png: the priority of an old success falls below that of a fresh failure.

    python -m docs.pictures

docs/frozenlake.gif shows a held-out lake before and after training, each beside the image that the
policy gets. `git show e3e7852:docs/make_gif.py` drew it.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from evidence.style import COLORS, GREY, STYLE, WIDTH
from freshper.priority import exponential_decay, reward_priority

# Of the tiny presets.
TAU = 20.0
EPSILON = 0.1

success, failure = reward_priority(np.array([1.0, 0.0]), EPSILON)
crossing = TAU * np.log(success / failure)
ages = np.linspace(0.0, 80.0, 200)

plt.rcParams.update(STYLE)
figure, axes = plt.subplots(figsize=(WIDTH, 2.9), layout="constrained")
axes.axhline(success, color=COLORS["no_decay"], ls="--", lw=1.5)
axes.semilogy(ages, success * exponential_decay(ages, TAU), color=COLORS["freshper"], lw=3)
axes.axhline(failure, color=GREY, lw=3)
axes.plot(crossing, failure, "o", color="black", ms=7, zorder=3)

axes.text(80, 1.2 * success, "without decay", color=COLORS["no_decay"], ha="right")
axes.text(17, 0.62, "an old success", color=COLORS["freshper"], weight="bold", size=11)
axes.text(1, 1.2 * failure, "a fresh failure", color=GREY, weight="bold", size=11)
axes.text(crossing + 1.5, 0.125, f"age {crossing:.0f}", weight="bold")
axes.text(crossing + 1.5, 0.012, "now the failure is\ndrawn more often", va="bottom")

axes.set_title(r"$p = (|r| + \epsilon)\;\exp(-\mathrm{age}\,/\,\tau)$", size=14, pad=8)
setting = rf"$\tau$ = {TAU:.0f}, $\epsilon$ = {EPSILON}"
axes.set_xlabel(f"age of the success, optimizer steps ({setting})")
axes.set(ylabel="priority p", xlim=(0, 80), ylim=(0.01, 2.2))
axes.set_yticks([1, 0.1, 0.01], ["1", "0.1", "0.01"])
figure.savefig(Path(__file__).parent / "idea.png")
