"""Methods side by side: every arm with every seed through the real train.py, one figure, one table.

    python compare.py --env frozenlake --seeds 11 12 13               on-policy, Standard PER and FreshPER
    python compare.py --exhibit tau --env frozenlake                  a ready-made comparison, see freshper/exhibits.py
    python compare.py --arm "freshper --tau 5" --arm "freshper --tau 500" --out out/mine

Paper: Table main_results, Fig. llm_main, vlm_main, tau_ablation, is_ablation, control; Table config_comparison; and
controls that the paper does not have. Flags that are not ours go to every run (`--preset paper` where there are GPUs).
Runs that are finished are not repeated; those with other flags are refused. The folder gets a folder a run,
`results.csv` (one row a run), `table.md` and `figure.png`.

How to read the table: the mean of the last three held-out evaluations is the honest number, the peak is what the paper
reports. Both are of success, or with `--metric score` of what the paper reports for Sokoban and CliffWalking.
Intervals are for 95 %: of a mean over seeds Student's t, of the difference to the first arm a bootstrap over
seeds (with three seeds both are rough). All arms see the same held-out seeds. A run whose numbers stopped being numbers
counts with 0 (with its lowest score) for the evaluations that it missed; it and runs with over half of the replies
unreadable at the end are counted as diverged.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import matplotlib.axes
import matplotlib.figure
import numpy as np
from scipy import stats
from tqdm import tqdm

from envs import ENVS
from envs.base import EVAL_SEEDS, play_out
from freshper.config import Config, parse_args
from freshper.diagnostics import read
from freshper.earlier_run import check_repeated
from freshper.exhibits import exhibits
from freshper.presets import PRESETS
from freshper.report import baselines

ROOT = Path(__file__).parent
METHOD_COLORS = {"on_policy": "#4285F4", "per": "#FBBC04", "freshper": "#EA4335"}  # the paper's, Fig. llm_main
OTHER_COLORS = ("#34A853", "#FF9800", "#9E9E9E", "#7B1FA2", "#00838F", "#795548", "#F06292", "#1A237E")


def folder_of(out: Path, arm: str, seed: int) -> Path:
    """Where the run of an arm with a seed stands."""
    return out / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', arm).strip('-')}-seed{seed}"


def config_of(folder: Path) -> Config:
    """The settings of a run."""
    return Config(**json.loads((folder / "config.json").read_text()))


def finished(folder: Path) -> bool:
    """Whether a run has all its rows, or has stopped for good (`stopped.txt`)."""
    if (folder / "stopped.txt").exists():
        return True
    if not (folder / "metrics.csv").exists():
        return False
    return len(read(folder, "metrics.csv")["iteration"]) == config_of(folder).iterations


def checked(env: str, arm: str, seed: int, folder: Path, flags: list[str]) -> list[str]:
    """The flags of a run. Ends the program with a sentence where they are no settings; raises ValueError where the
    folder, whose name holds the arm and the seed alone, is of a run with others."""
    method, *arm_flags = arm.split()
    flags = ["--env", env, "--method", method, *flags, *arm_flags, "--seed", str(seed)]
    asked = vars(parse_args(flags))
    if (folder / "config.json").is_file():
        check_repeated(folder, asked)
    return flags


def run(env: str, arm: str, seed: int, folder: Path, flags: list[str]) -> None:
    """One training run in a process of its own, or the rest of one that was interrupted. A run whose numbers stop being
    numbers (exit status 1) leaves its last words in `stopped.txt`. Raises RuntimeError where one fails otherwise."""
    flags = checked(env, arm, seed, folder, flags)
    if finished(folder):
        return
    where = "--resume" if (folder / "config.json").is_file() else "--out"
    command = [sys.executable, "train.py", *flags, where, str(folder.resolve())]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode == 1 and "not finite" in done.stdout:
        (folder / "stopped.txt").write_text(done.stdout)
    elif done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def summary(folder: Path, metric: str = "success") -> dict[str, float]:
    """What a run came to. Evaluations that a stopped run missed count as 0, of another metric than success as its
    lowest (NaN without any)."""
    metrics, config = read(folder, "metrics.csv"), config_of(folder)
    evaluations = metrics[f"eval_{metric}"]
    evaluations = evaluations[~np.isnan(evaluations)]
    due = -(-config.iterations // config.eval_every)
    missed = 0.0 if metric == "success" else min(evaluations, default=np.nan)
    evaluations = np.append(evaluations, np.full(due - len(evaluations), missed))
    invalid = float(metrics["invalid"][-10:].mean()) if len(metrics["invalid"]) else 1.0
    return {
        "last": float(evaluations[-3:].mean()),
        "final": float(evaluations[-1]),
        "peak": float(evaluations.max()),
        "episodes": int(metrics["episodes"].max(initial=0)),
        "updates": int(metrics["step"].max(initial=0)),
        "invalid": invalid,
        "diverged": int((folder / "stopped.txt").exists() or invalid > 0.5),
        "wall_s": float(metrics["wall_s"].max(initial=0)),
    }


def players(config: Config, metric: str) -> dict[str, float]:
    """The random player and, where the task has one, the optimal on the held-out seeds: success as exactly as the task
    knows it, the mean of another metric over a game each."""
    if metric == "success":
        return baselines(config)
    env, rng = config.make_env(), np.random.default_rng(0)
    replies = {"random": lambda: env.random_reply(rng), "optimal": getattr(env, "optimal_reply", None)}
    seeds = range(EVAL_SEEDS, EVAL_SEEDS + config.eval_episodes)
    return {
        name: float(np.mean([play_out(env, seed, reply)[2]["metrics"][metric] for seed in seeds]))
        for name, reply in replies.items()
        if reply
    }


def interval(values: np.ndarray) -> float:
    """Half the width of the 95 % interval of a mean, Student's t; NaN for a single value."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5) if n > 1 else float("nan")


def difference(values: np.ndarray, others: np.ndarray, draws: int = 10_000) -> tuple[float, float]:
    """95 % interval of mean(values) - mean(others): percentiles over bootstrap samples of either."""
    rng = np.random.default_rng(0)
    means = [rng.choice(x, (draws, len(x))).mean(1) for x in (values, others)]
    low, high = np.percentile(means[0] - means[1], [2.5, 97.5])
    return float(low), float(high)


def table(results: list[dict], arms: list[str]) -> Iterator[str]:
    """Markdown, one row an arm."""
    yield f"| arm | last 3 evaluations, per seed | mean ± 95 % | - {arms[0]} | peak | updates | diverged | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    first = np.array([r["last"] for r in results if r["arm"] == arms[0]])
    for arm in arms:
        rows = [r for r in results if r["arm"] == arm]
        last = np.array([r["last"] for r in rows])
        mean = {name: np.mean([r[name] for r in rows]) for name in ("peak", "updates", "wall_s")}
        each = " ".join(f"{x:.3f}" for x in last)
        low, high = difference(last, first)
        yield (
            f"| {arm} | {each} | {last.mean():.3f} ± {interval(last):.3f} "
            f"| {'' if arm == arms[0] else f'{low:+.3f} to {high:+.3f}'} | {mean['peak']:.3f} | {mean['updates']:.0f} "
            f"| {sum(r['diverged'] for r in rows)} of {len(rows)} | {mean['wall_s']:.0f} |"
        )


def colors(arms: Iterable[str]) -> dict[str, str]:
    """A method with its preset's settings has the paper's color in every figure; other arms take theirs in turn."""
    others = cycle(OTHER_COLORS)
    return {arm: METHOD_COLORS.get(arm) or next(others) for arm in arms}


def curves(axes: matplotlib.axes.Axes, x_name: str, metric: str, runs: dict[str, list[dict[str, np.ndarray]]]) -> None:
    """On held-out seeds: the mean over seeds with its 95 % band, and each seed as a thin line."""
    for arm, color in colors(runs).items():
        evaluated = [(m, ~np.isnan(m[f"eval_{metric}"])) for m in runs[arm]]
        lines = [(m[x_name][done], m[f"eval_{metric}"][done]) for m, done in evaluated if done.any()]
        if not lines:
            continue  # stopped before the first evaluation; the table counts it
        for line in lines:
            axes.plot(*line, color=color, alpha=0.25, linewidth=1)
        x = np.linspace(min(x[0] for x, _ in lines), max(x[-1] for x, _ in lines), 60)
        y = np.array([np.interp(x, *line) for line in lines])
        axes.plot(x, y.mean(0), color=color, linewidth=2.2, label=arm)
        if len(lines) > 1:
            half = np.array([interval(column) for column in y.T])
            axes.fill_between(x, y.mean(0) - half, y.mean(0) + half, color=color, alpha=0.12, linewidth=0)


def figure(
    path: Path, runs: dict[str, list[dict[str, np.ndarray]]], title: str, known: dict[str, float], metric: str
) -> None:
    """The metric against episodes and against seconds, with the random and the optimal player."""
    page = matplotlib.figure.Figure(figsize=(12, 4.2 + 0.2 * len(runs)), layout="constrained")
    for axes, (x_name, label) in zip(
        page.subplots(1, 2), (("episodes", "episodes"), ("wall_s", "seconds")), strict=True
    ):
        curves(axes, x_name, metric, runs)
        for name, style in (("optimal", "--"), ("random", ":")):
            if name in known:
                axes.axhline(known[name], color="black", linestyle=style, linewidth=1)
                where = {"fontsize": 8, "transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
                axes.text(0.99, known[name], f"{name} player: {known[name]:.3f}", **where)
        axes.set(xlabel=label, ylabel=f"{metric} on held-out seeds")
        if metric == "success":
            axes.set_ylim(0, 1.06)
    # below the axes: the names of arms are long
    page.legend(*page.axes[0].get_legend_handles_labels(), fontsize="small", loc="outside lower center")
    page.suptitle(title)
    page.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="frozenlake")
    parser.add_argument("--exhibit", default="main", choices=list(exhibits("tiny", "frozenlake")))
    parser.add_argument("--arm", action="append", help="a method and flags of train.py; may be repeated")
    parser.add_argument("--metric", default="success", help="or one of the task's own: score")
    parser.add_argument("--preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--out", type=Path, help="default: out/compare-<env>-<exhibit>")
    args, flags = parser.parse_known_args()  # flags that are not ours go to every run
    arms = args.arm or exhibits(args.preset, args.env)[args.exhibit]
    out = args.out or Path(f"out/compare-{args.env}-{'own' if args.arm else args.exhibit}")
    jobs = [(arm, seed) for seed in args.seeds for arm in arms]
    flags = ["--preset", args.preset, *flags]
    try:  # before hours of runs
        for arm, seed in jobs:
            checked(args.env, arm, seed, folder_of(out, arm, seed), flags)
    except ValueError as error:
        parser.error(str(error))
    known = ("success", *ENVS[args.env]().metrics)
    if args.metric not in known:
        parser.error(f"--metric is {args.metric}, but must be one of {', '.join(known)} with --env {args.env}")
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run, args.env, a, s, folder_of(out, a, s), flags) for a, s in jobs]
        for future in tqdm(futures, unit="run"):
            future.result()

    results = [{"arm": a, "seed": s, **summary(folder_of(out, a, s), args.metric)} for a, s in jobs]
    with open(out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, results[0])
        writer.writeheader()
        writer.writerows(results)
    config = config_of(folder_of(out, *jobs[0]))
    runs = {arm: [read(folder_of(out, arm, seed), "metrics.csv") for seed in args.seeds] for arm in arms}
    title = f"{config.task()}, preset {config.preset}, {len(args.seeds)} seeds"
    figure(out / "figure.png", runs, title, players(config, args.metric), args.metric)
    text = "\n".join(table(results, arms)) + "\n"
    (out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
