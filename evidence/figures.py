"""Draw the figures of README.md and RESULTS.md into docs/.

    python evidence/figures.py

What lies beyond an axis is an arrowhead and a number.
"""

from collections.abc import Callable
from textwrap import fill

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runs import ARMS, CELLS, FOLDER, NAMES, PAIR, TASKS, Data
from stats import SMALLEST_EFFECT, Effect, contrast
from style import COLORS, STYLE, WIDTH
from verdicts import CELL_EFFECTS, NO_DECAY, OTHERS, SHARES, after_updates, decay_pays

RIVALS = ("on_policy", "epochs", "no_decay", "per", "uniform")
# The two factors of the two-by-two, in colours of their own
FACTORS = {"age factor": COLORS["freshper"], "priority": "#7B1FA2"}
COSTS = np.geomspace(0.001, 10.0, 60)  # seconds that an episode costs more
PAYS = {"nq_search": 0.9, "aime": 0.5, "geoqa": 0.5, "cliffwalking": 0.5}  # a success to reach
# Of these KL and ESS by age are drawn, at one learning rate
BY_AGE = {"freshper": "FreshPER", "no_decay": "no decay"}
TAUS = ("1.25", "5", "20", "80", "450", "none")


def curve(axes: Axes, x: np.ndarray, effect: Effect, arm: str, **style: str) -> None:
    """Draw means as a line, and their 95 % intervals as a band."""
    axes.plot(x, effect.estimate, color=COLORS[arm], linewidth=2, **style)
    axes.fill_between(x, effect.low, effect.high, color=COLORS[arm], alpha=0.15, linewidth=0)


def interval(axes: Axes, effect: Effect, y: float, color: str) -> None:
    """Draw an estimate and its 95 % interval as a horizontal line."""
    left, right = axes.get_xlim()
    axes.plot(np.clip([effect.low, effect.high], left, right), [y, y], color=color, linewidth=2)
    axes.plot(effect.estimate, y, "o", color=color, markersize=5)
    if effect.high > right:
        axes.plot(right, y, ">", color=color, clip_on=False)
    if effect.low < left:
        axes.plot(left, y, "<", color=color, clip_on=False)
    if effect.estimate > right:
        axes.text(right, y + 0.2, f"{effect.estimate:.2f} ", size=9, ha="right")


def forest(axes: Axes, effects: dict[str, dict[str, Effect]], colors: dict[str, str]) -> None:
    """Draw effects by name and task, a row per task, beside 0 and what is too small to matter."""
    axes.set_yticks(-np.arange(len(TASKS)), [NAMES[task] for task in TASKS])
    axes.set_ylim(-len(TASKS) + 0.4, 0.7)
    axes.axvline(0.0, color="black", linewidth=1)
    axes.axvspan(-SMALLEST_EFFECT, SMALLEST_EFFECT, color="black", alpha=0.12, linewidth=0)
    shifts = (0.0,) if len(effects) == 1 else (0.17, -0.17)
    for shift, (name, by_task) in zip(shifts, effects.items(), strict=True):
        axes.plot([], [], "o-", color=colors[name], label=ARMS.get(name, name))
        for row, task in enumerate(TASKS):
            interval(axes, by_task[task], shift - row, colors[name])


def rivals(data: Data, figure: Figure) -> None:
    panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for axes, arm in zip(panels, RIVALS, strict=False):
        axes.set(xlim=(-0.12, 0.5), xticks=(0, 0.2, 0.4), title=fill(ARMS[arm], 12))
        axes.tick_params(labelbottom=True)
        by_task = {task: data.effect(f"freshper - {arm}", [task]) for task in TASKS}
        forest(axes, {arm: by_task}, COLORS)
    says = "right of the band:\nFreshPER is better\n\ngrey band: too\nsmall to matter\n\n"
    panels[5].axis("off")
    panels[5].text(0, -4, f"{says}line: 95 % interval,\nfive runs each", va="center", size=9)
    figure.suptitle("held-out success of FreshPER minus that of ...", size=11)


def two_by_two(data: Data, figure: Figure) -> None:
    """Draw mean success of the four cells, and both factors' effects by task."""
    above, below = figure.subplots(2, 1, height_ratios=(2, 3))
    cells = [[data.values(task, CELLS[cell]).mean() for task in TASKS] for cell in "NFZA"]
    means = np.mean(cells, axis=1).reshape(2, 2)
    spread = np.ptp(means)
    limits = {"vmin": means.min() - spread / 4, "vmax": means.max() + spread}
    above.imshow(means, cmap="Reds", aspect="auto", **limits)
    for (y, x), mean in np.ndenumerate(means):
        label = "\nFreshPER" if (y, x) == (0, 1) else ""
        above.text(x, y, f"{mean:.3f}{label}", size=14, ha="center", va="center")
    above.set_xticks((0, 1), ("no age factor", "age factor exp(-age / tau)"))
    above.set_yticks((0, 1), ("priority |r|", "no priority"))
    above.set_title("success at one learning rate, mean of nine tasks")
    above.tick_params(length=0)
    above.spines[:].set_visible(False)

    below.set(
        xlim=(-0.15, 0.5),
        title="what each factor adds, mean over the other",
        xlabel="success, five runs a cell (grey: too little to matter)",
    )
    effects = {}
    for name in FACTORS:
        effects[name] = {task: data.effect(CELL_EFFECTS[name], [task]) for task in TASKS}
    forest(below, effects, FACTORS)
    below.legend(loc="lower right")


def late(data: Data, figure: Figure) -> None:
    """Draw what decay adds in the course of training, and success after equally many updates."""
    above, below = figure.subplots(2, 1, height_ratios=(2, 3))
    for arm, (no_decay, rate) in zip(("freshper", "no_decay"), NO_DECAY.items(), strict=True):
        effect = Effect(*np.array(decay_pays(data, TASKS, no_decay)).T)
        curve(above, 100 * SHARES, effect, arm, label=rate)
        others = [effect.estimate for effect in decay_pays(data, OTHERS, no_decay)]
        above.plot(100 * SHARES, others, "--", color=COLORS[arm])
    above.plot([], [], "k--", label="without NQ Search, CliffWalking")
    above.axhline(0.0, color="black", linewidth=1)
    above.set(
        ylabel="success",
        ylim=(-0.03, 0.41),
        xlabel="% of the episodes",
        title="FreshPER minus no decay, mean of nine tasks",
    )
    above.legend(loc="upper left", title="learning rate of no decay")

    below.set(
        xlim=(-0.5, 0.3),
        title="success minus on-policy's, at equal updates",
        xlabel="success (grey: too little to matter)",
    )
    forest(below, after_updates(data), COLORS)
    below.set_ylim(-10.4, 0.7)
    below.legend(loc="lower left")


def tau(data: Data, figure: Figure) -> None:
    """Draw success by tau; and KL and ESS by age on text and image FrozenLake."""
    panels = figure.subplots(3, 2)
    for axes, task in zip(panels[0], PAIR, strict=True):
        for rate, style, name in ((0.125, "s--", "a quarter"), (0.5, "o-", "best")):
            arms = {x: f"freshper --tau {x} @ {rate}" for x in TAUS}
            arms |= {"20": f"freshper @ {rate}", "none": f"no_decay @ {rate}"}
            made = [x for x in TAUS if data.complete(arms[x], [task])]
            effects = Effect(*np.array([data.effect(arms[x], [task]) for x in made]).T)
            half = effects.high - effects.estimate
            x = [TAUS.index(x) for x in made]
            color = COLORS["freshper"]
            axes.errorbar(x, effects.estimate, half, fmt=style, color=color, capsize=3, label=name)
        axes.set_xticks(x, made)
        axes.set(title=f"success, {NAMES[task]}", xlabel="tau, steps", ylim=(0.3, 1.03))
    panels[0, 0].legend(loc="lower left", title="learning rate")

    by_age(data, "frozenlake", *panels[1])
    by_age(data, "frozenlake_vlm", *panels[2])


def by_age(data: Data, task: str, kl_axes: Axes, ess_axes: Axes) -> None:
    """Draw KL and ESS of what is drawn, by its age."""
    for arm, label in BY_AGE.items():
        runs = data.ages[task, arm, 0.5]
        count = min((run["effective"] >= 30).sum() for run in runs)
        columns = ("age", "kl_reverse", "ess", "kl")
        age, reverse, ess, kl = (np.array([run[name][:count] for run in runs]) for name in columns)
        curve(kl_axes, age[0], contrast([reverse.T], [1.0]), arm, label=label)
        curve(ess_axes, age[0], contrast([ess.T], [1.0]), arm)
        curve(ess_axes, age[0], contrast([np.exp(-kl).T], [1.0]), arm, linestyle=":")
    kl_axes.plot([2, 200], [0.02, 2], "k:", label="∝ age (eq. 12)")
    ess_axes.plot([], [], "k:", label="exp(-KL(θ, μ))")
    for axes, name in ((kl_axes, "KL(μ, θ)"), (ess_axes, "ESS / n")):
        axes.set(title=f"{name}, {NAMES[task]}", xlabel="age, steps", xscale="log")
    kl_axes.legend(loc="lower right")
    ess_axes.legend(loc="lower left")
    kl_axes.set(ylabel="nats", yscale="log")
    ess_axes.set_ylim(0, 1.05)


def pays(data: Data, figure: Figure) -> None:
    """Draw the time until a success, relative to FreshPER's, if an episode costs x seconds more."""
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (task, success) in zip(panels.flat, PAYS.items(), strict=True):
        own = np.median(data.values(task, "freshper", "s"))
        for arm in ("epochs", "on_policy"):
            ratio = data.effect(f"{arm} - freshper", [task], f"log until {success}")
            theirs = np.median(data.values(task, arm, "s"))
            of_costs = (theirs + COSTS) / (own + COSTS)
            time = Effect(*(np.exp(number) * of_costs for number in ratio[:3]), ratio.p)
            reached = data.values(task, arm, f"reach {success}").all()
            name = ARMS[arm] if reached else f"{ARMS[arm]}: at least"
            curve(axes, COSTS, time, arm, label=name, linestyle="-" if reached else "--")
        axes.axhline(1.0, color=COLORS["freshper"], linewidth=2, label="FreshPER")
        axes.set(title=f"{NAMES[task]}, to {success:g}", xscale="log", ylim=(0, 3.6))
    panels[0, 0].legend(loc="upper left")
    panels[1, 1].legend(loc="upper left")
    figure.supxlabel("extra seconds per episode", size=10)
    figure.supylabel("time to a success, FreshPER = 1", size=10)


def frozenlake(data: Data, figure: Figure) -> None:
    """Draw success against episodes, from images and from text."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, task in zip(panels, ("frozenlake_vlm", "frozenlake"), strict=True):
        for arm in ("freshper", "uniform", "per", "on_policy"):
            episodes = np.linspace(0, data.values(task, arm, "episodes")[0], 40)
            success = data.interpolated(task, arm, "episodes", episodes)
            curve(axes, episodes, contrast([success.T], [1.0]), arm, label=ARMS[arm])
        random = data.values(task, "freshper", "random")[0]
        axes.axhline(random, color="black", linestyle=":", label="random policy")
        axes.set(title=NAMES[task], xlabel="episodes", ylim=(0, 1))
    panels[0].set_ylabel("held-out success")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, columnspacing=1)


FIGURES: dict[Callable[[Data, Figure], None], float] = {  # and their height in inches
    rivals: 5.4,
    two_by_two: 5.8,
    late: 6.4,
    tau: 7.8,
    pays: 4.8,
    frozenlake: 3.4,
}


def main() -> None:
    data = Data()
    with matplotlib.rc_context(STYLE):
        for draw, height in FIGURES.items():
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            draw(data, figure)
            figure.savefig(FOLDER.parent / f"docs/results_{draw.__name__}.png")


if __name__ == "__main__":
    main()
