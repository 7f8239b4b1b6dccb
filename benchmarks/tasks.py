"""Every task at tiny scale: the random policy, held-out success before and after training, the optimum, in one table.

    python benchmarks/tasks.py [--env gsm8k ...] [--seeds 0 1 2]        two to six minutes per run on two cores

Each run goes through the real train.py with the task's tiny preset (`compare.run`), in a new folder. "per seed" is the
mean of the last three held-out evaluations; their mean has its 95 % interval. "reached": what we set out to reach, the
mean in GOALS, with an interval above the random policy, the score in SCORES, in at most 10 minutes (FrozenLake: 5).
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import config_of, folder_of, run, summary
from envs import ENVS
from freshper.diagnostics import read
from freshper.evaluation import baselines

GOALS = {
    "frozenlake": 0.85,
    "frozenlake_vlm": 0.85,
    "sokoban_simple": 0.45,
    "sokoban_hard": 0.15,
    "cliffwalking": 0.8,
}
GOALS |= {"nq_search": 0.6, "gsm8k": 0.8, "aime": 0.9, "geoqa": 0.9}
SCORES = {"cliffwalking": -25.0}


def row(env: str, seeds: list[int], out: Path, jobs: int) -> str:
    """Run the task with each seed and return its line of the table."""
    folders = [folder_of(out / env, "freshper", seed) for seed in seeds]
    flags, threads = ["--preset", "tiny"], 2 if jobs == 1 else 1
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda *job: run(env, "freshper", *job, flags, threads), seeds, folders))
    found, config = [summary(folder) for folder in folders], config_of(folders[0])
    tables = [read(folder, "metrics.csv") for folder in folders]
    known, before = baselines(config.make_env(), config.eval_episodes), np.mean([table["eval_success"][0] for table in tables])
    last, ends = (
        [run["last"] for run in found],
        {name: np.mean([run[name] for run in found]) for name in found[0]},
    )
    score = [
        t["eval_score"][~np.isnan(t["eval_score"])][-3:].mean() for t in tables if "eval_score" in t
    ]
    mean, half = (
        np.mean(last),
        stats.t.ppf(0.975, len(last) - 1) * stats.sem(last) if len(last) > 1 else 0.0,
    )
    reached = (
        mean >= GOALS[env]
        and mean - half > known["random"]
        and np.mean(score or 0) >= SCORES.get(env, -np.inf)
    )
    reached &= ends["wall_s"] <= (300 if "frozenlake" in env else 600)
    cells = [
        config.task(),
        f"{known['random']:.3f}",
        f"{before:.3f}",
        " ".join(f"{x:.3f}" for x in last),
    ]
    cells += [f"{mean:.3f} ± {half:.3f}", f"{known.get('optimal', np.nan):.3f}", f"{GOALS[env]:g}"]
    cells += ["yes" if reached else "no", f"{np.mean(score):.2f}" if score else ""]
    cells += [f"{ends['invalid']:.1%}", f"{ends['episodes']:.0f}", f"{ends['wall_s']:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", choices=list(ENVS), nargs="+", default=list(ENVS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; only one: two threads")
    parser.add_argument("--out", type=Path, default=Path("out/tasks"))
    args = parser.parse_args()
    if args.out.exists():  # an old run must not stand in the table
        parser.error(f"--out is {args.out}, but must be a folder that does not exist yet")
    print(
        "| task | random | before | after, per seed | mean | optimum | goal | reached | score |",
        end="",
    )
    print(" unreadable | episodes | seconds |\n" + "|---" * 12 + "|", flush=True)
    for env in args.env:
        print(row(env, args.seeds, args.out, args.jobs), flush=True)


if __name__ == "__main__":
    main()
