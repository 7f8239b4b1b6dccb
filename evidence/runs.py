"""The runs and their curves, as arrays.

An arm is a name of ARMS, further flags of train.py, and perhaps `+control`.
"arm @ 0.25" has this factor on the preset's learning rate, otherwise the one that its tuning found.
A difference of two arms is written as it is read: "freshper - on_policy @ 0.5".
A run that has not been made raises KeyError.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
from stats import Effect, contrast

FOLDER = Path(__file__).parent
SEEDS = (501, 502, 503, 504, 505)
# Questions of the stand-ins are generated. Held-out seeds of CliffWalking are the one task that
# training visits.
NAMES = {
    "frozenlake": "text FrozenLake",
    "nq_search": "NQ Search (stand-in)",
    "frozenlake_vlm": "image FrozenLake",
    "sokoban_simple": "Sokoban Simple",
    "aime": "AIME (stand-in)",
    "gsm8k": "GSM8K (stand-in)",
    "geoqa": "GeoQA (stand-in)",
    "cliffwalking": "CliffWalking",
    "sokoban_hard": "Sokoban Hard",
    "small": "GSM8K (stand-in), SmolLM2",
}
TASKS = list(NAMES)[:-1]
# The paper's Table 1. GSM8K and CliffWalking are its controls.
MAIN = [task for task in TASKS if task not in ("gsm8k", "cliffwalking")]
PAIR = ["frozenlake", "nq_search"]
ARMS = {
    "freshper": "FreshPER",
    "per": "Standard PER",
    "no_decay": "no decay",
    "uniform": "uniform up to an age",
    "epochs": "as many updates",
    "on_policy": "on-policy",
}
# Factors on the preset's learning rate that the tuning found, where it is not 1
RATES = {"freshper": 0.5, "epochs": 0.25}
RUN = ["task", "arm", "rate", "seed"]


def late_loss(evaluations: str) -> float:
    """Return the highest mean of three evaluations in a row less that of the last three."""
    means = np.convolve(np.array(evaluations.split(), float), np.ones(3) / 3, "valid")
    return means.max() - means[-1]


def episodes_until(success: float, curve: pandas.DataFrame) -> float:
    """Return the episodes until an evaluation has this success: NaN if the first one has it,
    infinity if none has."""
    has_it = curve["eval_success"] >= success
    if not has_it.any():
        return np.inf
    last = int(has_it.argmax())
    around = slice(last - 1, last + 1)
    if last == 0:
        return np.nan
    return float(np.interp(success, curve["eval_success"][around], curve["episodes"][around]))


def curve_mean(curve: pandas.DataFrame) -> float:
    """Return the mean over the curve: the area under held-out success, with straight lines between
    evaluations, from the one before training to the last, divided by its length."""
    episodes = curve["episodes"].to_numpy()
    return np.trapezoid(curve["eval_success"], episodes) / episodes[-1]


def with_derived(runs: pandas.DataFrame) -> pandas.DataFrame:
    """Return the runs with the columns that follow from others."""
    runs["late"] = runs["evaluations"].map(late_loss)
    runs["normalised"] = (runs["final"] - runs["random"]) / (runs["optimal"] - runs["random"])
    runs["s"] = runs["cpu_s"] / runs["episodes"]

    curves = [CURVES[run] for run in runs.index]
    runs["curve"] = [curve_mean(curve) for curve in curves]
    runs["ess"] = [curve["ess"][1:].mean() for curve in curves]
    for success in (0.5, 0.6, 0.65, 0.9):
        until = np.array([episodes_until(success, curve) for curve in curves])
        runs[f"until {success}"] = until
        runs[f"log until {success}"] = np.log(np.minimum(until, runs["episodes"]))
        runs[f"reach {success}"] = np.where(np.isnan(until), np.nan, until < np.inf)

    # c of eq. 12, in nats per 1,000 steps; where KL falls with age, no line fits
    runs["c"] = 1000.0 / runs["reverse_tau"]
    runs["r2"] = runs["reverse_r2"].mask(runs["c"] < 0, 0.0)
    return runs


CURVES = {
    run: curve.reset_index(drop=True)
    for run, curve in pandas.read_csv(FOLDER / "runs_curves.csv.gz").groupby(RUN)
}
RUNS = with_derived(pandas.read_csv(FOLDER / "runs.csv").set_index(RUN))


def names(task: str, arm: str, seeds: Sequence[int] = SEEDS) -> list[tuple]:
    """Return the keys of an arm's runs. The arm is "no_decay" or "no_decay @ 0.5"."""
    name, _, rate = arm.partition(" @ ")
    rate = float(rate or RATES.get(name.split()[0], 1.0))
    return [(task, name, rate, seed) for seed in seeds]


def values(task: str, arm: str, column: str = "final", seeds: Sequence[int] = SEEDS) -> np.ndarray:
    """Return a column for the runs of an arm, [seeds]."""
    return RUNS.loc[names(task, arm, seeds), column].to_numpy()


def at(task: str, arm: str, column: str, points: np.ndarray) -> np.ndarray:
    """Return the held-out success of the runs of an arm at points of a column, [5, n]."""
    curves = [CURVES[run] for run in names(task, arm)]
    return np.array([np.interp(points, curve[column], curve["eval_success"]) for curve in curves])


def effect(
    tasks: Sequence[str],
    arms: str | Sequence[str],
    column: str = "final",
    weights: Sequence[float] = (1, -1),
    seeds: Sequence[int] = SEEDS,
) -> Effect:
    """Return a weighted sum of the means of arms, the mean over tasks."""
    arms = arms.split(" - ") if isinstance(arms, str) else arms
    groups = [values(task, arm, column, seeds) for arm in arms for task in tasks]
    return contrast(groups, np.repeat(weights[: len(arms)], len(tasks)) / len(tasks))
