"""The figures of the results, from the data of the campaign.

docs/results.py draws them. A method has one colour everywhere: the paper's three have those of its
Fig. 3. At half the width of a page the letters are as large as the text.
"""

from collections.abc import Sequence
from textwrap import fill

import claims
import numpy as np
from claims import ARMS, FACTOR_REFERENCES, NAMES, Data, arm_words
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp
from stats import SMALLEST_EFFECT, Effect, bootstrap, contrast, difference, interquartile_mean
from waves import PAIR, SMALL_ARMS, TASKS, oracle_arm

from compare import METHOD_COLORS

STYLE = {
    "font.size": 10,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.dpi": 140,
}
WIDTH = 5.0  # inches
COLORS = METHOD_COLORS | {
    "epochs": METHOD_COLORS["on_policy --ppo_epochs 3"],
    "uniform": METHOD_COLORS["per --beta 0 --alpha 0"],
    "no_decay": METHOD_COLORS["per --beta 0"],
}
OTHER = "#777777"  # what is no arm of the main table
# FreshPER at the top
FOREST = tuple(reversed(ARMS))
COSTS = np.geomspace(0.001, 10.0, 60)  # seconds that an episode costs more
NO_DECAY_AT = 5  # where the arm without decay stands on the axis of log4(tau / 5)


def new_figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """Put the legend of some axes below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def interval(axes: Axes, effect: Effect, y: float, color: str, marker: str = "o") -> None:
    """Draw an estimate and its interval as a horizontal line. What lies beyond the limits of the
    axis becomes an arrowhead there, and the estimate a number."""
    low, high = axes.get_xlim()
    style = {"color": color, "markersize": 5}
    size = {"markersize": 10, "markeredgewidth": 2.5} if marker == "|" else {}
    axes.plot([effect.low, effect.high], [y, y], color=color, linewidth=2)
    if effect.low < low:
        axes.plot(low, y, "<", clip_on=False, zorder=5, **style)
    if effect.high > high:
        axes.plot(high, y, ">", clip_on=False, zorder=5, **style)

    if low <= effect.estimate <= high:
        axes.plot(effect.estimate, y, marker, **(style | size))
        return
    edge, side = (low, "left") if effect.estimate < low else (high, "right")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.text(edge, y, f"  {effect.estimate:.2f}  ", size=8, ha=side, va="center", bbox=box)


def differ(axes: Axes) -> None:
    """Draw the effect 0, and the range of effects that do not matter."""
    axes.axvline(0.0, color="black", linewidth=1)
    axes.axvspan(-SMALLEST_EFFECT, SMALLEST_EFFECT, color="black", alpha=0.08)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows 0, -1, -2, ... of a figure of intervals."""
    axes.set_yticks(-np.arange(len(names)), names)
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.grid(False, axis="y")


# -- 3. who wins?


def interquartile(data: Data, arm: str) -> Effect:
    """Return the interquartile mean over the nine tasks, and its interval."""
    return Effect(*bootstrap(interquartile_mean, [data.all_normalized(arm)]), np.nan)


def main(data: Data) -> Figure:
    """Final success of six arms on nine tasks: the seeds, their mean, the interval of the mean, and
    the random policy."""
    figure = new_figure(7.6)
    grid = figure.add_gridspec(4, 3)
    for number, task in enumerate(TASKS):
        axes = figure.add_subplot(grid[number // 3, number % 3])
        axes.set(title=NAMES[task], xlim=(-0.07, 1.07), xticks=(0.0, 0.5, 1.0))
        for row, arm in enumerate(FOREST):
            values = data.values(task, arm)
            axes.plot(values, np.full(5, -row - 0.28), ".", color=COLORS[arm], markersize=6)
            interval(axes, contrast([values], [1.0]), -row + 0.14, COLORS[arm], "|")
        level = data.values(task, FOREST[0], "random")[0]
        axes.axvline(level, color="black", linestyle=":", linewidth=1, zorder=0)
        name_rows(axes, [ARMS[arm] for arm in FOREST] if number % 3 == 0 else [""] * len(FOREST))

    axes = figure.add_subplot(grid[3, :])
    axes.set(title="interquartile mean, normalised", xlim=(-0.03, 1.03))
    for row, arm in enumerate(FOREST):
        interval(axes, interquartile(data, arm), -row, COLORS[arm], "D")
    name_rows(axes, [ARMS[arm] for arm in FOREST])
    figure.supxlabel("held-out success (below: normalised) of the final policy", fontsize=10)
    return figure


# -- curves


def run_curves(data: Data, task: str, arm: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x [40], and the success of each run of an arm there, [5, 40]. A run keeps its last
    value.

    `cpu_s`: the CPU seconds of a run, spread evenly over its episodes."""
    curves = []
    for run in data.runs(task, arm):
        curve = data.curve(run)
        share = curve["episodes"] / curve["episodes"][-1]
        curve["cpu_s"] = float(data.row(run)["cpu_s"]) * share
        curves.append(curve)

    end = max(curve[column][-1] for curve in curves)
    x = np.linspace(0.0, end, 40)
    return x, np.array([np.interp(x, curve[column], curve["eval_success"]) for curve in curves])


def curves(
    axes: Axes, data: Data, task: str, arms: Sequence[str], column: str, band: bool = False
) -> None:
    """Draw the mean curve of each arm and, as a band, its 95 % interval (Student's t)."""
    for arm in arms:
        x, values = run_curves(data, task, arm, column)
        axes.plot(x, values.mean(0), color=COLORS[arm], label=ARMS[arm], linewidth=2)
        if band:
            low, high = ttest_1samp(values, 0.0).confidence_interval()
            axes.fill_between(x, low, high, color=COLORS[arm], alpha=0.15, linewidth=0)
    axes.set(title=NAMES[task], ylim=(0, 1.02))


def updates(data: Data) -> Figure:
    """Success against updates, and against CPU seconds."""
    figure = new_figure(5.2)
    panels = figure.subplots(2, 3, sharey=True)
    for column, row in zip(("step", "cpu_s"), panels, strict=True):
        for axes, task in zip(row, (*PAIR, "cliffwalking"), strict=True):
            curves(axes, data, task, FOREST, column)
        row[1].set_xlabel({"step": "updates", "cpu_s": "CPU seconds"}[column])
        row[0].set_ylabel("success")
    legend(figure, panels[0][0])
    return figure


def frozenlake(data: Data) -> Figure:
    """Success against episodes, from images and from text: the paper's methods, and uniform
    replay, which comes closest to FreshPER."""
    arms = ("freshper", "uniform", "per", "on_policy")
    return learning(data, ("frozenlake_vlm", "frozenlake"), arms)


def small(data: Data) -> Figure:
    """Success of SmolLM2 against episodes."""
    return learning(data, ("small",), SMALL_ARMS)


def learning(data: Data, tasks: Sequence[str], arms: Sequence[str]) -> Figure:
    figure = new_figure(3.4)
    panels = np.atleast_1d(figure.subplots(1, len(tasks), sharey=True))
    for axes, task in zip(panels, tasks, strict=True):
        curves(axes, data, task, arms, "episodes", band=True)
        for policy, style in (("random", ":"), ("optimal", "--")):
            level = data.values(task, arms[0], policy)[0]
            axes.axhline(level, color="black", linestyle=style, label=f"{policy} policy")
        axes.set_xlabel("episodes")
    panels[0].set_ylabel("held-out success")
    legend(figure, panels[0])
    return figure


# -- 5. is it freshness?


def freshness(data: Data) -> Figure:
    """Differences of FreshPER to what replays as much and knows less of freshness."""
    figure = new_figure(5.6)
    axes = figure.subplots()
    axes.set_xlim(-0.13, 0.6)
    differ(axes)
    for row, task in enumerate(TASKS):
        for place, arm in enumerate(("no_decay", "per", "uniform")):
            effect = data.effect(task, "freshper", arm)
            interval(axes, effect, 0.3 - 0.2 * place - row, COLORS[arm])
            if row == 0:
                axes.plot([], [], "o-", color=COLORS[arm], label=ARMS[arm])
        if task in PAIR:
            effect = data.effect(task, "freshper", "freshper +shuffled")
            interval(axes, effect, -0.3 - row, OTHER, "s")
    axes.plot([], [], "s-", color=OTHER, label="shuffled ages")
    name_rows(axes, [NAMES[task] for task in TASKS])
    axes.set_xlabel("success of FreshPER minus that of")
    legend(figure, axes, columns=2)
    return figure


# -- 6. what sets tau?


def tau(data: Data) -> Figure:
    """Success against tau, a curve per drift. Vertical lines: 1/c, measured at tau 20."""
    figure = new_figure(5.0)
    panels = figure.subplots(1, 2, sharey=True)
    rate = data.rate("freshper")
    arms = ("freshper --tau 5", "freshper", "freshper --tau 80", "no_decay")
    # label, factor, how the inside of a mark looks, line, shift to the side
    shown = (
        ("best learning rate", rate, "full", "-", -0.08),
        ("a quarter of it", rate / 4, "none", "--", 0.08),
    )
    for axes, task in zip(panels, PAIR, strict=True):
        measured = []
        for label, factor, inside, line, aside in shown:
            effects = [contrast([data.values(task, arm, rate=factor)], [1.0]) for arm in arms]
            means = [effect.estimate for effect in effects]
            half = [effect.high - effect.estimate for effect in effects]
            places = np.array([0, 1, 2, NO_DECAY_AT]) + aside
            style = {"capsize": 3, "fillstyle": inside}
            ours, theirs = COLORS["freshper"], COLORS["no_decay"]
            form = f"o{line}"
            axes.errorbar(places[:3], means[:3], half[:3], fmt=form, color=ours, **style)
            axes.errorbar(places[3:], means[3:], half[3:], fmt="o", color=theirs, **style)
            axes.plot([], [], form, color=ours, fillstyle=inside, label=f"FreshPER, {label}")

            # If KL does not grow with age there is none.
            c = claims.drift_rates(data, task, "freshper", factor).mean() / 1000.0
            measured.append(f"{1 / c:.0f}" if c > 0 else "none")
            place = np.log(1 / c / 5) / np.log(4) if c > 0 else np.inf
            if place < NO_DECAY_AT - 0.5:
                axes.axvline(place, color=ours, linestyle=":", alpha=1.0 if line == "-" else 0.5)

        others = ("freshper --tau auto", oracle_arm(task), "freshper +shuffled")
        for place, arm in enumerate(others, start=NO_DECAY_AT + 1):
            effect = contrast([data.values(task, arm)], [1.0])
            half_width = effect.high - effect.estimate
            axes.errorbar(place, effect.estimate, half_width, fmt="s", capsize=3, color=OTHER)
        ticks = [0, 1, 2, *range(NO_DECAY_AT, NO_DECAY_AT + 4)]
        axes.set_xticks(ticks, ["5", "20", "80", "none", "auto", "oracle", "shuffled"], rotation=60)
        title = f"{NAMES[task]}\n1/c: {measured[0]} and {measured[1]} steps"
        axes.set(title=title, xlabel="tau, steps")
    panels[0].set_ylabel("held-out success")
    panels[0].plot([], [], "o", color=COLORS["no_decay"], label=ARMS["no_decay"])
    panels[0].plot([], [], "s", color=OTHER, label="other arms, best rate")
    panels[0].plot([], [], ":", color=COLORS["freshper"], label="1/c at tau 20 (pale: a quarter)")
    legend(figure, panels[0], columns=1)
    return figure


def drift(data: Data) -> Figure:
    """How well age predicts drift: the stored episodes of the runs with the oracle, and measures of
    each run."""
    figure = new_figure(6.6)
    grid = figure.add_gridspec(2, 2, height_ratios=[2.6, 4.0])
    for column, task in enumerate(PAIR):
        axes = figure.add_subplot(grid[0, column])
        runs = data.runs(task, oracle_arm(task))
        entries = [entry for run in runs for entry in data.entries[run]]
        ages, drifts = np.array([[e["age"], e["drift"]] for e in entries], float).T
        axes.plot(ages, drifts, ".", color=OTHER, markersize=2, alpha=0.5)
        axes.set(title=NAMES[task], xlabel="age, steps", yscale="symlog", ylim=(0, None))
        axes.set_ylabel("drift, nats" if column == 0 else "")

    axes = figure.add_subplot(grid[1, :])
    for row, task in enumerate(TASKS):
        r2 = claims.drift_fit(data, task, "freshper")
        axes.plot(r2, np.full(5, 0.2 - row), "o", color=COLORS["freshper"], alpha=0.6)
        if task in PAIR:
            of_entries = data.values(task, oracle_arm(task), "age_r2")
            ranks = data.values(task, oracle_arm(task), "age_rank")
            axes.plot(of_entries, np.full(5, -row), "s", color=OTHER, alpha=0.6)
            axes.plot(ranks, np.full(5, -0.2 - row), "^", color=OTHER, alpha=0.6)
    axes.plot([], [], "o", color=COLORS["freshper"], label="R², means of 11 ages")
    axes.plot([], [], "s", color=OTHER, label="R², each episode")
    axes.plot([], [], "^", color=OTHER, label="rank correlation, each episode")
    name_rows(axes, [NAMES[task] for task in TASKS])
    axes.set_xlabel("age as a prediction of drift, a mark per run")
    legend(figure, axes, columns=1)
    return figure


# -- 7. which settings matter?


def changed(arm: str, other: str) -> str:
    """Return what an arm changes of another one, such as "constant rate (both beta 0.4)". The
    method is named unless it is FreshPER."""
    words = arm_words(arm)
    shared = arm_words(other)
    text = ", ".join(word for word in words if word not in shared)
    method = ARMS[arm.split()[0]]
    if method != ARMS["freshper"]:
        text = f"{method}: {text}"
    return f"{text} (both {', '.join(shared)})" if shared else text


def factors(data: Data) -> Figure:
    """One-factor intervals on text FrozenLake."""
    figure = new_figure(7.0)
    axes = figure.subplots()
    axes.set_xlim(-0.25, 0.15)
    differ(axes)
    for row, (arm, other) in enumerate(FACTOR_REFERENCES.items()):
        effect = data.effect("frozenlake", arm, other)
        interval(axes, effect, -row, COLORS[arm.split()[0]])
    for arm in ("freshper", "per", "on_policy"):
        axes.plot([], [], "o-", color=COLORS[arm], label=ARMS[arm])
    pairs = FACTOR_REFERENCES.items()
    name_rows(axes, [fill(changed(arm, other), 27) for arm, other in pairs])
    axes.set_xticks([-0.2, -0.1, 0.0, 0.1])
    axes.set_xlabel("success: changed minus unchanged")
    legend(figure, axes)
    return figure


# -- 8. where replay does not pay


def pays(data: Data) -> Figure:
    """Time until a success, relative to FreshPER's, against the cost of an episode."""
    figure = new_figure(6.0)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    first = panels[0, 0]
    for arm in ("epochs", "on_policy"):
        first.plot([], [], color=COLORS[arm], label=ARMS[arm])
    for axes, task in zip(panels.flat, ("nq_search", "aime", "geoqa", "cliffwalking"), strict=True):
        ours, _ = claims.episodes_needed(data, task, "freshper")
        ours_s = claims.seconds_per_episode(data, task, "freshper")
        for arm in ("epochs", "on_policy"):
            needed, all_have_it = claims.episodes_needed(data, task, arm)
            line = "-" if all_have_it else "--"
            ratio = difference(np.log(needed), np.log(ours))
            of_costs = (claims.seconds_per_episode(data, task, arm) + COSTS) / (ours_s + COSTS)
            style = {"color": COLORS[arm]}
            axes.plot(COSTS, np.exp(ratio.estimate) * of_costs, line, **style)
            # The interval of a ratio that is "at least" something is no bound.
            if all_have_it:
                low, high = np.exp(ratio.low) * of_costs, np.exp(ratio.high) * of_costs
                axes.fill_between(COSTS, low, high, alpha=0.2, **style)
        axes.axhline(1.0, color=COLORS["freshper"], linewidth=2, label="FreshPER")
        axes.set(title=NAMES[task], xscale="log")
    first.plot([], [], "--", color="black", label=claims.AT_LEAST)
    for axes in panels[1]:
        axes.set_xlabel("x, seconds per episode")
    figure.supylabel(f"time to success {claims.SUCCESS:g}, FreshPER = 1", fontsize=10)
    legend(figure, first)
    return figure


FIGURES = {
    "main": main,
    "updates": updates,
    "freshness": freshness,
    "tau": tau,
    "drift": drift,
    "factors": factors,
    "pays": pays,
    "small": small,
    "frozenlake": frozenlake,
}
