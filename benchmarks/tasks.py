"""Every task at tiny scale: the random player, the model before and after training, the optimum, in one table.

    python benchmarks/tasks.py [--env gsm8k ...] [--seed 0]        three to nine minutes a task on one core

Each task runs through the real train.py with its own preset (`compare.run`), after its warm start where there is none
yet ("warm", in seconds; FrozenLake's comes with the repository). "before" is the warm-started model on 256 held-out
games; "after" the mean of the last three held-out evaluations; "best" the highest. Questions without
--data are generated here, not those of the datasets.
"""

import argparse
import contextlib
import io
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import config_of, finished, folder_of, run
from envs import ENVS
from freshper.diagnostics import read
from freshper.report import baselines
from freshper.tiny import describe, tiny_model
from freshper.trainer import keep_freed_memory


def row(env: str, seed: int, out: Path) -> str:
    """One line of the table, in Markdown."""
    folder, start = folder_of(out / env, "freshper", seed), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        model = tiny_model(env)
        warm = time.monotonic() - start
        before = describe(model, env, episodes=256)["success"]
    if not finished(folder):
        run(env, "freshper", seed, folder, [])
    metrics = read(folder, "metrics.csv")
    config = config_of(folder)
    success = metrics["eval_success"][~np.isnan(metrics["eval_success"])]
    reward = metrics["eval_reward"][~np.isnan(metrics["eval_reward"])]
    players = baselines(config)
    optimal = f"{players['optimal']:.3f}" if "optimal" in players else ""
    cells = [f"{players['random']:.3f}", f"{before:.3f}", f"{success[-3:].mean():.3f}", f"{success.max():.3f}", optimal]
    cells += [f"{reward[0]:.2f} to {reward[-3:].mean():.2f}", f"{metrics['invalid'][-10:].mean():.1%}"]
    cells += [f"{metrics['episodes'][-1]:.0f}", f"{warm:.0f}", f"{metrics['wall_s'][-1]:.0f}"]
    return f"| {config.task()} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=list(ENVS), nargs="+", default=list(ENVS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/tasks"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| task | random | before | after | best | optimum | return | unreadable | episodes | warm | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for env in args.env:
        (args.out / env).mkdir(parents=True, exist_ok=True)
        print(row(env, args.seed, args.out), flush=True)


if __name__ == "__main__":
    main()
