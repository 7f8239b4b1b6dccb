"""Draw the figures of README.md and RESULTS.md into docs/.

    python evidence/figures.py

Lines and bands are means and 95 % intervals, uncorrected. What lies beyond an axis is an arrowhead
and a number.
"""

from textwrap import fill

import matplotlib
import numpy as np
from claims import reached
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runs import ARMS, CURVES, FOLDER, NAMES, PAIR, TASKS, at, effect, names, values
from stats import SMALLEST_EFFECT, Effect, contrast
from style import COLORS, STYLE, WIDTH
from verdicts import DIFFERENCES, FACTORS, NO_DECAY, OTHERS, SHARES, Difference, decay_pays, until

# The two factors of the two-by-two, in colours of their own
FACTOR_COLORS = {"age factor": COLORS["freshper"], "priority": "#7B1FA2"}
COSTS = np.geomspace(0.001, 10.0, 60)  # seconds that an episode costs more
TAUS = ("1.25", "5", "20", "80", "450", "none")


def curve(axes: Axes, x: np.ndarray, effect: Effect, arm: str, **style: str) -> None:
    """Draw means as a line, and their intervals as a band."""
    axes.plot(x, effect.estimate, color=COLORS[arm], linewidth=2, **style)
    axes.fill_between(x, effect.low, effect.high, color=COLORS[arm], alpha=0.15, linewidth=0)


def forest(axes: Axes, difference: Difference, color: str, shift: float = 0.0) -> None:
    """Draw a difference, a row per task, beside 0 and what is too small to matter."""
    arms, weights = difference
    right = axes.get_xlim()[1]
    for y, task in zip(shift - np.arange(len(TASKS)), TASKS, strict=True):
        own = effect([task], arms, weights=weights)
        axes.plot([own.low, min(own.high, right)], [y, y], color=color, linewidth=2)
        axes.plot(own.estimate, y, "o", color=color, markersize=5)
        if own.high > right:
            axes.plot(right, y, ">", color=color, clip_on=False)
            axes.text(right, y + 0.2, f"{own.estimate:.2f} ", size=9, ha="right")
    axes.set_yticks(-np.arange(len(TASKS)), [NAMES[task] for task in TASKS])
    axes.axvline(0.0, color="black", linewidth=1)
    axes.axvspan(-SMALLEST_EFFECT, SMALLEST_EFFECT, color="black", alpha=0.1, linewidth=0)


def rivals(figure: Figure) -> None:
    panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for axes, arm in zip(panels, ("on_policy", "epochs", "no_decay", "per", "uniform")):
        axes.set(xlim=(-0.12, 0.5), xticks=(0, 0.2, 0.4), title=fill(ARMS[arm], 12))
        axes.tick_params(labelbottom=True)
        forest(axes, DIFFERENCES[f"FreshPER minus {ARMS[arm]}"], COLORS[arm])
    says = "right of the band:\nFreshPER is better\n\ngrey band: too\nsmall to matter\n\n"
    panels[5].axis("off")
    panels[5].text(
        0, -4, f"{says}line: 95 % interval,\nuncorrected,\nfive runs each", va="center", size=9
    )
    figure.suptitle("held-out success of FreshPER minus that of ...", size=11)


def two_by_two(figure: Figure) -> None:
    axes = figure.subplots()
    axes.set(
        xlim=(-0.15, 0.5),
        ylim=(-len(TASKS) - 0.5, 0.7),
        title="what each factor adds, mean over the other",
        xlabel="success, five runs a cell (grey: too little to matter)",
    )
    for shift, (name, color) in zip((0.17, -0.17), FACTOR_COLORS.items()):
        axes.plot([], [], "o-", color=color, label=name)
        forest(axes, FACTORS[name], color, shift)
    axes.legend(loc="lower right")


def late(figure: Figure) -> None:
    """Draw what decay adds in the course of training."""
    axes = figure.subplots()
    for arm, (no_decay, rate) in zip(("freshper", "no_decay"), NO_DECAY.items(), strict=True):
        nine = Effect(*np.array(decay_pays(TASKS, no_decay)).T)
        curve(axes, 100 * SHARES, nine, arm, label=rate)
        seven = [effect.estimate for effect in decay_pays(OTHERS, no_decay)]
        axes.plot(100 * SHARES, seven, "--", color=COLORS[arm])
    axes.plot([], [], "k--", label="without NQ Search (stand-in), CliffWalking")
    axes.axhline(0.0, color="black", linewidth=1)
    axes.set(
        ylabel="success",
        ylim=(-0.03, 0.41),
        xlabel="% of the episodes",
        title='FreshPER minus "no decay", mean of nine tasks',
    )
    axes.legend(loc="upper left", title='learning rate of "no decay"')


def tau(figure: Figure) -> None:
    """Draw success by tau, of the taus that were tried."""
    for axes, task in zip(figure.subplots(1, 2, sharey=True), PAIR, strict=True):
        for rate, style, name in ((0.125, "s--", "a quarter"), (0.5, "o-", "best")):
            arms = {x: f"freshper --tau {x} @ {rate}" for x in TAUS}
            arms |= {"20": f"freshper @ {rate}", "none": f"no_decay @ {rate}"}
            made = [x for x in TAUS if names(task, arms[x])[0] in CURVES]
            effects = Effect(*np.array([effect([task], arms[x]) for x in made]).T)
            half = effects.high - effects.estimate
            x = [TAUS.index(x) for x in made]
            color = COLORS["freshper"]
            axes.errorbar(x, effects.estimate, half, fmt=style, color=color, capsize=3, label=name)
        axes.set_xticks(range(len(TAUS)), TAUS)
        axes.set(title=NAMES[task], xlabel="tau, steps", ylim=(0.3, 1.03))
    axes.legend(loc="lower left", title="learning rate")
    figure.supylabel("held-out success", size=10)


def pays(figure: Figure) -> None:
    """Draw the time until a success, relative to FreshPER's, if an episode costs x seconds more."""
    shown = [(task, 0.5) for task in reached(0.5)] + [("nq_search", 0.9)]
    panels = figure.subplots(4, 2, sharex=True, sharey=True).ravel()
    for axes, (task, success) in zip(panels, shown, strict=True):
        for arm in ("epochs", "on_policy"):
            all_reach = np.isfinite(values(task, arm, f"until {success}")).all()
            style = "-" if all_reach else "--"
            curve(axes, COSTS, until(success, task, arm, COSTS), arm, linestyle=style)
        axes.axhline(1.0, color=COLORS["freshper"], linewidth=2)
        axes.set(title=f"{NAMES[task]}\nto {success:g}", xscale="log", ylim=(0, 5))
    for arm in ("freshper", "epochs", "on_policy"):
        panels[0].plot([], [], color=COLORS[arm], label=ARMS[arm])
    panels[0].plot([], [], "k--", label="at least")
    figure.legend(loc="outside upper center", ncols=4, columnspacing=1)
    figure.supxlabel("extra seconds per episode", size=10)
    figure.supylabel("time to a success, FreshPER = 1", size=10)


def frozenlake(figure: Figure) -> None:
    """Draw success against episodes, from images and from text."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, task in zip(panels, ("frozenlake_vlm", "frozenlake"), strict=True):
        for arm in ("freshper", "uniform", "per", "epochs", "on_policy"):
            episodes = np.linspace(0, values(task, arm, "episodes")[0], 40)
            success = at(task, arm, "episodes", episodes)
            curve(axes, episodes, contrast([success.T], [1.0]), arm, label=ARMS[arm])
        random = values(task, "freshper", "random")[0]
        axes.axhline(random, color="black", linestyle=":", label="random policy")
        axes.set(title=NAMES[task], xlabel="episodes", ylim=(0, 1))
    panels[0].set_ylabel("held-out success")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, columnspacing=1)


FIGURES = {rivals: 5.4, two_by_two: 3.8, late: 3.4, tau: 3.2, pays: 7.6, frozenlake: 3.4}  # inches


def main() -> None:
    with matplotlib.rc_context(STYLE):
        for draw, height in FIGURES.items():
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            draw(figure)
            figure.savefig(FOLDER.parent / f"docs/results_{draw.__name__}.png")


if __name__ == "__main__":
    main()
