"""Draw the figures of README.md and RESULTS.md into docs/.

    python evidence/figures.py

Lines and bands are means and 95 % intervals, uncorrected. What lies beyond an axis is an arrowhead
and a number.
"""

from textwrap import fill

import matplotlib
import numpy as np
from claims import reached
from matplotlib.figure import Figure
from runs import ARMS, CURVES, FOLDER, NAMES, PAIR, RATES, SEEDS, TASKS, effect, values
from stats import SMALLEST_EFFECT, contrast
from style import COLORS, STYLE, WIDTH
from verdicts import FACTORS, LEFT_OUT, NO_DECAY, OTHERS, decay_pays, until

COSTS = np.geomspace(0.001, 10.0, 60)  # seconds that an episode costs more
ARMS_BY_TAU = {
    "1.25": "freshper --tau 1.25",
    "5": "freshper --tau 5",
    "20": "freshper",
    "80": "freshper --tau 80",
    "450": "freshper --tau 450",
    "none": "no_decay",
}


def curve(axes, x, effects, arm, **style):
    """Draw means as a line, and their intervals as a band."""
    means, low, high = effects[:3]
    axes.plot(x, means, color=COLORS[arm], linewidth=2, **style)
    axes.fill_between(x, low, high, color=COLORS[arm], alpha=0.15, linewidth=0)


def forest(axes, formula, color, shift=0):
    """Draw an effect, a row per task, beside 0 and what is too small to matter."""
    right = axes.get_xlim()[1]
    rows = -np.arange(len(TASKS))
    for y, task in zip(rows + shift, TASKS):
        mean, low, high, *_ = effect([task], formula)
        axes.plot([low, min(high, right)], [y, y], color=color, linewidth=2)
        axes.plot(mean, y, "o", color=color, markersize=5)
        if high > right:
            axes.plot(right, y, ">", color=color, clip_on=False)
            axes.text(right, y + 0.2, f"{mean:.2f} ", size=9, ha="right")
    axes.set_yticks(rows, [NAMES[task] for task in TASKS])
    axes.axvline(0, color="black", linewidth=1)
    axes.axvspan(-SMALLEST_EFFECT, SMALLEST_EFFECT, color="black", alpha=0.1, linewidth=0)


def rivals(figure):
    panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for axes, arm in zip(panels, ("on_policy", "epochs", "no_decay", "per", "uniform")):
        axes.set(xlim=(-0.12, 0.5), xticks=(0, 0.2, 0.4), title=fill(ARMS[arm], 12))
        axes.tick_params(labelbottom=True)
        forest(axes, f"freshper - {arm}", COLORS[arm])
    panels[5].axis("off")
    says = """right of the band:
FreshPER is better

grey band: too
small to matter

line: 95 % interval,
uncorrected,
five runs each"""
    panels[5].text(0, -4, says, va="center", size=9)
    figure.suptitle("held-out success of FreshPER minus that of ...", size=11)


def two_by_two(figure):
    axes = figure.subplots()
    axes.set(
        xlim=(-0.15, 0.5),
        ylim=(-len(TASKS) - 0.5, 0.7),
        title="what each factor adds, mean over the other",
        xlabel="success, five runs a cell (grey: too little to matter)",
    )
    age = (0.17, "age factor", COLORS["freshper"])
    for shift, name, color in (age, (-0.17, "priority", "#7B1FA2")):
        axes.plot([], [], "o-", color=color, label=name)
        forest(axes, FACTORS[name], color, shift)
    axes.legend(loc="lower right")


def late(figure):
    """Draw what decay adds in the course of training."""
    axes = figure.subplots()
    shares = range(10, 101, 10)
    for arm, (no_decay, rate) in zip(("freshper", "no_decay"), NO_DECAY.items()):
        curve(axes, shares, np.transpose(decay_pays(TASKS, no_decay)), arm, label=rate)
        seven = np.transpose(decay_pays(OTHERS, no_decay))[0]
        axes.plot(shares, seven, "--", color=COLORS[arm])
    axes.plot([], [], "k--", label=LEFT_OUT)
    axes.axhline(0, color="black", linewidth=1)
    axes.set(
        ylabel="success",
        ylim=(-0.03, 0.41),
        xlabel="% of the episodes",
        title='FreshPER minus "no decay", mean of nine tasks',
    )
    axes.legend(loc="upper left", title='learning rate of "no decay"')


def tau(figure):
    """Draw success by tau, of the taus that were tried."""
    arms = list(ARMS_BY_TAU.values())
    quarter = ("a quarter", 0.125, [1, 2, 3, 5], "s--")
    for axes, task in zip(figure.subplots(1, 2, sharey=True), PAIR):
        for name, rate, made, style in (quarter, ("best", 0.5, range(6), "o-")):
            effects = [effect([task], f"{arms[k]} @ {rate}") for k in made]
            means, _, high, *_ = np.transpose(effects)
            color = COLORS["freshper"]
            axes.errorbar(made, means, high - means, fmt=style, color=color, capsize=3, label=name)
        axes.set_xticks(range(6), ARMS_BY_TAU)
        axes.set(title=NAMES[task], xlabel="tau, steps", ylim=(0.3, 1.03))
    axes.legend(loc="lower left", title="learning rate")
    figure.supylabel("held-out success", size=10)


def pays(figure):
    """Draw the time until a success, relative to FreshPER's, if an episode costs x seconds more."""
    shown = [(task, 0.5) for task in reached(0.5)] + [("nq_search", 0.9)]
    panels = figure.subplots(4, 2, sharex=True, sharey=True).ravel()
    for axes, (task, success) in zip(panels, shown):
        for arm in ("epochs", "on_policy"):
            style = "-" if values([task], arm, f"reach {success}").all() else "--"
            curve(axes, COSTS, until(success, task, arm, COSTS), arm, linestyle=style)
        axes.axhline(1, color=COLORS["freshper"], linewidth=2)
        axes.set(title=f"{NAMES[task]}\nto {success:g}", xscale="log", ylim=(0, 8))
    for arm in ("freshper", "epochs", "on_policy"):
        panels[0].plot([], [], color=COLORS[arm], label=ARMS[arm])
    panels[0].plot([], [], "k--", label="at least")
    figure.legend(loc="outside upper center", ncols=4, columnspacing=1)
    figure.supxlabel("extra seconds per episode", size=10)
    figure.supylabel("time to a success, FreshPER = 1", size=10)


def frozenlake(figure):
    """Draw success against episodes, from images and from text."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, task in zip(panels, ("frozenlake_vlm", "frozenlake")):
        for arm in ("freshper", "uniform", "per", "epochs", "on_policy"):
            runs = CURVES.loc[task, arm, RATES.get(arm, 1)]
            episodes = runs.loc[501, "episodes"]  # of evaluations, as in all five runs
            x = np.linspace(0, max(episodes), 40)
            success = [np.interp(x, episodes, runs.loc[seed, "eval_success"]) for seed in SEEDS]
            curve(axes, x, contrast([np.transpose(success)], [1]), arm, label=ARMS[arm])
        random = values([task], "freshper", "random")[0, 0]
        axes.axhline(random, color="black", linestyle=":", label="random policy")
        axes.set(title=NAMES[task], xlabel="episodes", ylim=(0, 1))
    panels[0].set_ylabel("held-out success")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, columnspacing=1)


HEIGHTS = {rivals: 5.4, two_by_two: 3.8, late: 3.4, tau: 3.2, pays: 7.6, frozenlake: 3.4}  # inches

if __name__ == "__main__":
    matplotlib.rcParams.update(STYLE)
    for draw, height in HEIGHTS.items():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(FOLDER.parent / f"docs/results_{draw.__name__}.png")
