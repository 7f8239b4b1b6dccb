"""Collect the curves of TRL's runs (docs/your_trainer.md), and draw them.

python examples/trl_plot.py     out/trl/ARM-SEED -> evidence/trl.csv, docs/trl.png
"""

import json
from pathlib import Path

import pandas as pd

rows = []
for file in sorted(Path("out/trl").glob("*/trainer_state.json")):
    for k, row in enumerate(json.loads(file.read_text())["log_history"][:-1]):
        rows.append((*file.parent.name.split("-"), 320 * (k + 1), row["reward"]))
runs = pd.DataFrame(rows, columns=["arm", "seed", "replies", "reward"])
runs.to_csv("evidence/trl.csv", index=False)

curves = runs.groupby(["replies", "arm"]).reward.agg(["mean", "std"]).unstack()
shown = curves["mean"][["on_policy", "epochs", "epochs_slow", "replay"]]
axes = shown.plot(yerr=curves["std"], capsize=3, ylabel="reward of fresh replies")
axes.axhline(0.25, linestyle=":")  # random moves
axes.figure.savefig("docs/trl.png")
