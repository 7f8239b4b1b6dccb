"""Every task at tiny scale: the random policy, held-out success before and after training, the
optimum, in one table.

    python benchmarks/tasks.py [--env gsm8k ...] [--seeds 0 1 2]

A run takes one to ten minutes on two cores. Each goes through the real train.py with the task's
tiny preset (`compare.run`), in a new folder. "per seed" is the mean of the last three held-out
evaluations; their mean has its 95 % interval. "reached": what we set out to reach, the mean in
GOALS, with an interval above the random policy, the score in SCORES, in at most 10 minutes
(FrozenLake: 5).
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import numpy as np
from scipy import stats

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
    "nq_search": 0.6,
    "gsm8k": 0.8,
    "aime": 0.9,
    "geoqa": 0.9,
}
SCORES = {"cliffwalking": -25.0}
COLUMNS = (
    "task",
    "random",
    "before",
    "after, per seed",
    "mean",
    "optimum",
    "goal",
    "reached",
    "score",
    "unreadable",
    "episodes",
    "seconds",
)


def half_interval(values: list[float]) -> float:
    """Return half the 95 % interval of a mean, infinite of a single value."""
    if len(values) == 1:
        return np.inf
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def last_score(metrics: dict[str, np.ndarray]) -> float:
    """Return the mean score of the last three evaluations, NaN if the task has none."""
    scores = metrics.get("eval_score", np.array([np.nan]))
    return scores[~np.isnan(scores)][-3:].mean() if np.isfinite(scores).any() else np.nan


def row(env: str, seeds: list[int], out: Path, jobs: int) -> str:
    """Run the task with each seed and return its line of the table."""
    folders = [folder_of(out / env, "freshper", seed) for seed in seeds]
    threads = 2 if jobs == 1 else 1

    def train(seed: int, folder: Path) -> None:
        run(env, "freshper", seed, folder, ["--preset", "tiny"], threads)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train, seeds, folders))

    config = config_of(folders[0])
    bounds = baselines(config.make_env(), config.eval_episodes)
    tables = [read(folder, "metrics.csv") for folder in folders]
    summaries = [summary(folder) for folder in folders]
    means = {}
    for name in summaries[0]:
        means[name] = np.mean([values[name] for values in summaries])
    last = [values["last"] for values in summaries]
    before = np.mean([table["eval_success"][0] for table in tables])
    score = np.mean([last_score(table) for table in tables])
    half = half_interval(last)

    reached = (
        means["last"] >= GOALS[env]
        and means["last"] - half > bounds["random"]
        and (env not in SCORES or score >= SCORES[env])
        and means["wall_s"] <= (300 if "frozenlake" in env else 600)
    )
    cells = [
        config.task(),
        f"{bounds['random']:.3f}",
        f"{before:.3f}",
        " ".join(f"{success:.3f}" for success in last),
        f"{means['last']:.3f} ± {half:.3f}",
        f"{bounds.get('optimal', np.nan):.3f}",
        f"{GOALS[env]:g}",
        "yes" if reached else "no",
        "" if np.isnan(score) else f"{score:.2f}",
        f"{means['invalid']:.1%}",
        f"{means['episodes']:.0f}",
        f"{means['wall_s']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--env", choices=list(ENVS), nargs="+", default=list(ENVS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; only one: two threads")
    parser.add_argument("--out", type=Path, default=Path("out/tasks"))
    args = parser.parse_args()
    # An old run must not stand in the table.
    if args.out.exists():
        parser.error(f"--out is {args.out}, but must be a folder that does not exist yet")

    print(f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for env in args.env:
        print(row(env, args.seeds, args.out, args.jobs), flush=True)


if __name__ == "__main__":
    main()
