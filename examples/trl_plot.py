"""Collect the curves of TRL's runs, out/trl/ARM-SEED/trainer_state.json, and draw them.

python examples/trl_plot.py     writes evidence/trl.csv and docs/trl.png (docs/your_trainer.md)
"""

import json
from pathlib import Path

import pandas as pd

REPLIES = 320  # between two rows of a log
rows = []
for file in sorted(Path("out/trl").glob("*/trainer_state.json")):
    for k, row in enumerate(json.loads(file.read_text())["log_history"][:-1]):
        rows.append((*file.parent.name.split("-"), REPLIES * (k + 1), row["reward"]))
runs = pd.DataFrame(rows, columns=["arm", "seed", "replies", "reward"])
runs.to_csv("evidence/trl.csv", index=False)

curves = runs.groupby(["replies", "arm"]).reward.agg(["mean", "std"]).unstack()
axes = curves["mean"].plot(yerr=curves["std"], capsize=3, ylabel="reward of fresh replies")
axes.axhline(0.25, color="grey", linestyle=":")  # random moves
axes.figure.savefig("docs/trl.png")
