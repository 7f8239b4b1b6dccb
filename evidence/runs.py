"""The runs and their curves.

An arm is a name of ARMS, further flags of train.py, and perhaps `+control`.
"arm @ 0.25" has this factor on the preset's learning rate, otherwise the one that its tuning found.
An effect is a formula: a difference is written as it is read, "freshper - on_policy @ 0.5". Other
weights of the arms' means stand behind them: "freshper - per (1, -2)".
A run that has not been made raises KeyError.
"""

from pathlib import Path

import numpy as np
import pandas
from stats import contrast

FOLDER = Path(__file__).parent
SEEDS = range(501, 506)
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
    "small": "SmolLM2",
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
SHARES = [f"{tenth}0%" for tenth in range(1, 11)]  # of the episodes
LEVELS = (0.5, 0.6, 0.65, 0.9)  # of success


def measures(curve):
    """Return what follows from the held-out evaluations of a run. Between two of them success lies
    on a line."""
    episodes, success, updates = curve[["episodes", "eval_success", "step"]].to_numpy().T
    all_episodes = episodes[-1]
    # Three evaluations in a row, rounded as in runs.csv
    means = np.convolve(success.round(3), np.ones(3) / 3, "valid")
    row = {
        "late": means.max() - means[-1],
        "curve": np.trapezoid(success, episodes) / all_episodes,
        "ess": curve["ess"].mean(),
        "after 360 updates": np.interp(360, updates, success),  # as many as on-policy training's
    }
    shares = np.linspace(0.1, 1, 10) * all_episodes
    row |= zip(SHARES, np.interp(shares, episodes, success))
    for level in LEVELS:
        # A run that begins with this success has no such columns.
        if success[0] < level:
            k = np.argmax(success >= level)  # 0: it is never reached
            between = slice(k - 1, k + 1)
            until = np.interp(level, success[between], episodes[between]) if k else all_episodes
            row |= {f"reach {level}": float(k > 0), f"log until {level}": np.log(until)}
    return row


CURVES = pandas.read_csv(FOLDER / "runs_curves.csv.gz", index_col=RUN)
RUNS = pandas.read_csv(FOLDER / "runs.csv", index_col=RUN)
RUNS = RUNS.join(pandas.DataFrame([measures(CURVES.loc[run]) for run in RUNS.index], RUNS.index))
# c of eq. 12 is in nats per 1,000 steps. Where KL falls with age, no line fits.
RUNS = RUNS.eval("""
normalised = (final - random) / (optimal - random)
s = cpu_s / episodes
c = 1000 / reverse_tau
r2 = reverse_r2 * (reverse_tau > 0)
""")


def values(tasks, arm, column="final", seeds=SEEDS):
    """Return a column for the runs of an arm, [tasks, seeds]. The arm is "no_decay" or
    "no_decay @ 0.5"."""
    name, _, rate = arm.partition(" @ ")
    rate = float(rate or RATES.get(name.split()[0], 1))
    return np.array([RUNS.loc[(task, name, rate)].loc[[*seeds], column] for task in tasks])


def terms(formula):
    """Return the arms of a formula, and the weights of their means."""
    arms, _, weights = formula.strip(")").partition(" (")
    arms = arms.split(" - ")
    return arms, np.array((weights or "1, -1").split(", "), float)[: len(arms)]


def effect(tasks, formula, column="final", seeds=SEEDS):
    """Return the effect of a formula, the mean over tasks."""
    arms, weights = terms(formula)
    groups = [values(tasks, arm, column, seeds) for arm in arms]
    return contrast(np.concatenate(groups), np.repeat(weights, len(tasks)) / len(tasks))
