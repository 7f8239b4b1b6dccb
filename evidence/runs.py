"""The runs, their curves and what they drew by age, as arrays.

An arm is a name of ARMS, further flags of train.py, and perhaps `+control`, one of controls.py.
`arm @ 0.25` has this factor on the preset's learning rate, otherwise the one that its tuning found.
An effect is written as it is read: "freshper - on_policy", "freshper - 4 freshper @ 0.125".
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from stats import Effect, contrast

FOLDER = Path(__file__).parent
SEEDS = (501, 502, 503, 504, 505)
NAMES = {
    "frozenlake": "text FrozenLake",
    "nq_search": "NQ Search",
    "frozenlake_vlm": "image FrozenLake",
    "sokoban_simple": "Sokoban Simple",
    "aime": "AIME",
    "gsm8k": "GSM8K",
    "geoqa": "GeoQA",
    "cliffwalking": "CliffWalking",
    "sokoban_hard": "Sokoban Hard",
    "small": "GSM8K, SmolLM2",
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
# The two-by-two. A base priority of |r| + 1e6 is the same for all.
CELLS = {
    "F": "freshper",
    "N": "no_decay @ 0.5",
    "A": "freshper --epsilon 1e6",
    "Z": "per --beta 0 --alpha 0 @ 0.5",
}
SUCCESSES = (0.5, 0.6, 0.65, 0.9)  # of the times to a success
RUN = ["task", "arm", "rate", "seed"]
Row = dict[str, Any]
Key = tuple[str, str, float]  # task, arm, rate


def late_loss(evaluations: np.ndarray) -> float:
    """Return the highest mean of three evaluations in a row less that of the last three."""
    means = np.convolve(evaluations, np.ones(3) / 3, "valid")
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


class Data:
    """The tables of a folder. A run that has not been made raises KeyError."""

    def __init__(self):
        self.curves = self.read("runs_curves.csv.gz")
        self.ages = self.read("runs_ages.csv.gz")
        self.rows: dict[Key, dict[int, Row]] = {}
        for row in pandas.read_csv(FOLDER / "runs.csv").to_dict("records"):
            key = row["task"], row["arm"], row["rate"]
            self.rows.setdefault(key, {})[row["seed"]] = row
            self.derive(row, self.curves[key][row["seed"]])

    def read(self, name: str) -> dict[Key, dict[int, pandas.DataFrame]]:
        """Return the part of each run of a table that has several rows a run."""
        runs: dict = {}
        for (*key, seed), part in pandas.read_csv(FOLDER / name).groupby(RUN):
            runs.setdefault(tuple(key), {})[seed] = part.reset_index(drop=True)
        return runs

    def derive(self, row: Row, curve: pandas.DataFrame) -> None:
        """Add the columns that follow from others."""
        row["late"] = late_loss(np.array(row["evaluations"].split(), float))
        row["normalised"] = (row["final"] - row["random"]) / (row["optimal"] - row["random"])
        row["ess"] = curve["ess"][1:].mean()
        row["s"] = row["cpu_s"] / row["episodes"]
        for success in SUCCESSES:
            row[f"until {success}"] = episodes_until(success, curve)
            row[f"log until {success}"] = np.log(min(row[f"until {success}"], row["episodes"]))
            row[f"reach {success}"] = float(row[f"until {success}"] < np.inf)
        # c of eq. 12, in nats per 1,000 steps; where KL falls with age, no line fits
        row["c"] = 1000.0 / row["reverse_tau"]
        row["r2"] = max(row["reverse_r2"], 0.0) if row["c"] > 0 else 0.0

    def key(self, task: str, arm: str) -> Key:
        """Return the key of an arm, "no_decay" or "no_decay @ 0.5"."""
        name, _, rate = arm.partition(" @ ")
        return task, name, float(rate or RATES.get(name.split()[0], 1.0))

    def values(
        self, task: str, arm: str, column: str = "final", seeds: tuple = SEEDS
    ) -> np.ndarray:
        """Return a column for the runs of an arm, [seeds]."""
        runs = self.rows[self.key(task, arm)]
        return np.array([runs[seed][column] for seed in seeds])

    def terms(self, formula: str) -> list[tuple[float, str]]:
        """Return the weights and arms of an effect."""
        terms = []
        for sign, factor, arm in re.findall(r"([+-] |^)([\d.]+ )?(.+?)(?: (?=[+-] )|$)", formula):
            weight = float(factor or 1)
            terms.append((-weight if sign == "- " else weight, arm))
        return terms

    def effect(
        self, formula: str, tasks: list[str], column: str = "final", seeds: tuple = SEEDS
    ) -> Effect:
        """Return an effect, the mean over tasks."""
        groups = []
        weights = []
        for weight, arm in self.terms(formula):
            for task in tasks:
                groups.append(self.values(task, arm, column, seeds))
                weights.append(weight / len(tasks))
        return contrast(groups, weights)

    def complete(self, formula: str, tasks: list[str], seeds: tuple = SEEDS) -> list[str]:
        """Return the tasks for which all runs of an effect have been made."""
        done = []
        for task in tasks:
            runs = [self.rows.get(self.key(task, arm), {}) for _, arm in self.terms(formula)]
            if all(set(seeds) <= set(made) for made in runs):
                done.append(task)
        return done

    def interpolated(self, task: str, arm: str, column: str, at: np.ndarray) -> np.ndarray:
        """Return the held-out success of the runs of an arm at points of a column, [5, n]."""
        curves = [self.curves[self.key(task, arm)][seed] for seed in SEEDS]
        return np.array([np.interp(at, curve[column], curve["eval_success"]) for curve in curves])
