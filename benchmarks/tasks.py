"""Every task at tiny scale: the random policy, held-out success before and after training, the optimum, in one table.

    python benchmarks/tasks.py [--env gsm8k ...] [--seed 0]        three to nine minutes per task on one core

Each task runs through the real train.py with its tiny preset (`compare.run`), after its warm start if the model is not
built yet. "after" is the mean of the last three held-out evaluations. Questions are generated here.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import config_of, folder_of, run, summary
from envs import ENVS
from freshper.diagnostics import read
from freshper.report import baselines


def row(env: str, seed: int, out: Path) -> str:
    """Run one task, if it has not been run, and return its line of the table."""
    folder = folder_of(out / env, "freshper", seed)
    run(env, "freshper", seed, folder, ["--preset", "tiny"])
    metrics, found, config = read(folder, "metrics.csv"), summary(folder), config_of(folder)
    known = baselines(config)
    rewards = metrics["eval_reward"][~np.isnan(metrics["eval_reward"])]
    success = [known["random"], metrics["eval_success"][0], found["last"], found["peak"], known.get("optimal", np.nan)]
    cells = [f"{x:.3f}" for x in success] + [
        f"{rewards[0]:.2f} to {rewards[-3:].mean():.2f}",
        f"{found['invalid']:.1%}",
    ]
    return f"| {config.task()} | " + " | ".join([*cells, f"{found['episodes']:.0f}", f"{found['wall_s']:.0f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=list(ENVS), nargs="+", default=list(ENVS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/tasks"))
    args = parser.parse_args()
    print("| task | random | before | after | best | optimum | return | unreadable | episodes | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for env in args.env:
        print(row(env, args.seed, args.out), flush=True)


if __name__ == "__main__":
    main()
