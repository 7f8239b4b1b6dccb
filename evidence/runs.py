"""The runs, their curves and what they drew by age, as arrays.

An arm is a name of ARMS, further flags of train.py, and perhaps `+control`.
`arm @ 0.25` has this factor on the preset's learning rate, otherwise the one that its tuning found.
An effect is written as it is read: "freshper - on_policy", "freshper - 4 freshper @ 0.125".
"""

import re
from pathlib import Path

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
    """The tables of this folder. A run that has not been made raises KeyError."""

    def __init__(self):
        curves = pandas.read_csv(FOLDER / "runs_curves.csv.gz").groupby(RUN)
        self.curves = {run: curve.reset_index(drop=True) for run, curve in curves}
        self.runs = pandas.read_csv(FOLDER / "runs.csv").set_index(RUN)
        self.derive()

        ages = pandas.read_csv(FOLDER / "runs_ages.csv.gz").groupby(RUN[:3])
        # Of arms with several runs: the bins of age of each run
        self.ages: dict[Key, list[pandas.DataFrame]] = {}
        for key, arm in ages:
            if arm["seed"].nunique() > 1:
                self.ages[key] = [run for _, run in arm.groupby("seed")]

    def derive(self) -> None:
        """Add the columns that follow from others."""
        runs = self.runs
        runs["late"] = [late_loss(np.array(row.split(), float)) for row in runs["evaluations"]]
        runs["normalised"] = (runs["final"] - runs["random"]) / (runs["optimal"] - runs["random"])
        runs["s"] = runs["cpu_s"] / runs["episodes"]

        curves = [self.curves[run] for run in runs.index]
        runs["ess"] = [curve["ess"][1:].mean() for curve in curves]
        for success in SUCCESSES:
            until = np.array([episodes_until(success, curve) for curve in curves])
            runs[f"until {success}"] = until
            runs[f"log until {success}"] = np.log(np.minimum(until, runs["episodes"]))
            runs[f"reach {success}"] = np.where(np.isnan(until), np.nan, until < np.inf)

        # c of eq. 12, in nats per 1,000 steps; where KL falls with age, no line fits
        runs["c"] = 1000.0 / runs["reverse_tau"]
        runs["r2"] = runs["reverse_r2"].mask(runs["c"] < 0, 0.0)

    def names(self, task: str, arm: str, seeds: tuple = SEEDS) -> list[tuple]:
        """Return the keys of an arm's runs. The arm is "no_decay" or "no_decay @ 0.5"."""
        name, _, rate = arm.partition(" @ ")
        rate = float(rate or RATES.get(name.split()[0], 1.0))
        return [(task, name, rate, seed) for seed in seeds]

    def values(
        self, task: str, arm: str, column: str = "final", seeds: tuple = SEEDS
    ) -> np.ndarray:
        """Return a column for the runs of an arm, [seeds]."""
        return self.runs.loc[self.names(task, arm, seeds), column].to_numpy()

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
        arms = [arm for _, arm in self.terms(formula)]
        done = []
        for task in tasks:
            runs = sum((self.names(task, arm, seeds) for arm in arms), [])
            if set(runs) <= self.curves.keys():
                done.append(task)
        return done

    def interpolated(self, task: str, arm: str, column: str, at: np.ndarray) -> np.ndarray:
        """Return the held-out success of the runs of an arm at points of a column, [5, n]."""
        curves = [self.curves[run] for run in self.names(task, arm)]
        return np.array([np.interp(at, curve[column], curve["eval_success"]) for curve in curves])
