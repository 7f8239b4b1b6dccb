"""Methods side by side: every arm with every seed through the real train.py, one figure, one table.

    python compare.py --env frozenlake --seeds 11 12 13         on-policy, Standard PER and FreshPER
    python compare.py --exhibit tau --env frozenlake            a ready-made comparison
    python compare.py --arm "freshper --tau 5" --arm "freshper --tau 500" --out out/mine

Paper: Table 1, Fig. 3 to 7, Table 3. An arm is a method and flags of train.py. Flags that are not
compare.py's go to every run. --out gets a folder and a log per run, results.csv, table.md and
figure.png. Finished runs are not repeated, and interrupted ones go on. A line a minute says where
the runs are.

The table has the mean of the last three held-out evaluations beside the paper's peak: of success,
or with `--metric score` of what the paper reports for Sokoban and CliffWalking. 95 % intervals:
Student's t for means, Welch's t for the difference to the first arm. Diverged: numbers that are not
finite ended the run.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in the imports leaves no traceback

import argparse
import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import warnings
from itertools import count, product
from pathlib import Path

import numpy as np
from scipy import stats

from envs import ENVS
from freshper.backends import make_env
from freshper.config import CONFIG_A, CONFIG_DEFAULT, Config
from freshper.diagnostics import Table, read
from freshper.errors import Ending, protect_output
from freshper.flags import parse_args
from freshper.report import Row, baselines, plot, task

A = " ".join(f"--{name} {value}" for name, value in CONFIG_A.items())
DEFAULT = " ".join(f"--{name} {value}" for name, value in CONFIG_DEFAULT.items())
NO_TAU = ("freshper --decay none", "per", "on_policy")
EXHIBITS = {
    # Table 1, Fig. 3, 4 and 6
    "main": ["on_policy", "per", "freshper"],
    # Fig. 5: with the steps of a tiny model, and with those of the paper
    "tau": [*(f"freshper --tau {tau}" for tau in (5, 20, 80, 320)), *NO_TAU],
    "tau_paper": [*(f"freshper --tau {tau}" for tau in (500, 1000, 1500)), *NO_TAU],
    # Fig. 7
    "is": ["on_policy", "freshper", "freshper --beta 0.4", "per --beta 0", "per"],
    # Table 3, and Config A with the clip of Default
    "config": [f"freshper {A}", f"freshper {DEFAULT}", f"freshper {A} --advantage_clip 20"],
}
# As in the figures of RESULTS.md
COLORS = {"on_policy": "#4285F4", "per": "#FBBC04", "freshper": "#EA4335"}
NOT_FINITE = 3  # the exit status of a run that met such numbers

Results = dict[str, list[Row]]  # the rows of results.csv, by arm
Runs = dict[Path, subprocess.Popen]  # those under way, by their folders


def folder_of(out: Path, arm: str, seed: int) -> Path:
    """Return the folder of the run of an arm with a seed."""
    name = re.sub(r"[^A-Za-z0-9_.+]+", "-", arm)
    return out / f"{name}-seed{seed}"


# -- runs


def flags_of(args: argparse.Namespace, arm: str, seed: int) -> list[str]:
    """Return the checked flags of a run, or those that resume it, [] if it has ended. Raises
    ValueError if its folder has a run with other settings."""
    method, *of_arm = arm.split()
    flags = [*args.flags, *of_arm, f"--env={args.env}", f"--method={method}", f"--seed={seed}"]
    config = parse_args(flags)
    folder = folder_of(args.out, arm, seed)
    if not folder.exists():
        return [*flags, f"--out={folder}"]

    before, _, done = read_run(folder)
    if dataclasses.replace(before, out="") != config:
        raise ValueError(f"{folder} is a run with other settings, use another --out")
    return [f"--resume={folder}"] if done < config.iterations else []


def read_run(folder: Path) -> tuple[Config, Table, int]:
    """Return settings, metrics and completed iterations of a run. Raises ValueError if they are
    damaged, or those of something else."""
    try:
        config = Config(**json.loads((folder / "config.json").read_text()))
        metrics = {"iteration": np.zeros(1)}
        if (folder / "metrics.csv").exists():
            metrics = read(folder, "metrics.csv")
            iterations = metrics["iteration"]
            due = iterations % config.eval_every == 0
            whole = [metrics["step"], metrics["wall_s"], metrics["eval_success"][due]]
            in_order = np.array_equal(iterations, np.arange(len(iterations)))
            if not (in_order and due.any() and np.isfinite(np.concatenate(whole)).all()):
                raise ValueError("metrics.csv lacks rows or numbers")
        return config, metrics, int(metrics["iteration"][-1])
    # A folder of something else may hold anything.
    except Exception as error:
        raise ValueError(f"{folder} is no run of this version, remove it: {error}") from error


def start(folder: Path, flags: list[str]) -> subprocess.Popen:
    """Start a run in a process of its own with one thread."""
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("train.py")), *flags],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            # Ctrl-C reaches this process alone, which ends each run once, so that it saves.
            start_new_session=True,
        )


def drop_ended(runs: Runs) -> None:
    """Drop the runs that have ended. Numbers that are not finite end a run, but not the comparison.
    Raises ChildProcessError if one has failed in another way."""
    for folder, process in [*runs.items()]:
        status = process.poll()
        if status in (0, NOT_FINITE):
            del runs[folder]
        elif status is not None:
            raise ChildProcessError(f"a run ended with status {status}: see {folder}.log")


def progress(runs: Runs) -> str:
    """Return a line on the runs under way: the iteration of each."""
    parts = []
    for folder in runs:
        if (folder / "config.json").exists():
            config, _, done = read_run(folder)
            parts.append(f"{folder.name} {done} of {config.iterations}")
    return f"iterations: {', '.join(parts)}"


def run_all(flags: dict[Path, list[str]], jobs: int) -> None:
    """Train all runs that have flags, by their folders, so many jobs at a time."""
    waiting = [folder for folder in flags if flags[folder]]
    runs: Runs = {}
    seconds = count(1)
    try:
        while waiting or runs:
            while waiting and len(runs) < jobs:
                folder = waiting.pop(0)
                runs[folder] = start(folder, flags[folder])
            time.sleep(1)
            drop_ended(runs)
            if next(seconds) % 60 == 0:
                print(progress(runs), flush=True)
    finally:
        # After an error or a signal, those under way save and end.
        for process in runs.values():
            process.terminate()
        for process in runs.values():
            process.wait()


# -- statistics


def curve(folder: Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return collected episodes and value of each evaluation of a run, the first one before
    training. Those that a stopped run has missed count as 0, or as its lowest value below."""
    config, metrics, _ = read_run(folder)
    iterations = np.append(np.arange(0, config.iterations, config.eval_every), config.iterations)
    values = metrics[f"eval_{metric}"]
    values = values[~np.isnan(values)]
    missed = len(iterations) - len(values)
    values = np.pad(values, (0, missed), constant_values=min([0.0, *values[1:]]))
    return iterations * config.rollout_batch_size, values


def summary(folder: Path, metric: str) -> Row:
    """Return the columns of results.csv, of the evaluations after training began."""
    config, metrics, done = read_run(folder)
    _, (_, *values) = curve(folder, metric)
    return {
        "last": np.mean(values[-3:]),
        "peak": max(values),
        # All runs have ended.
        "diverged": int(done < config.iterations),
        "updates": metrics["step"][-1],
        "wall_s": metrics["wall_s"][-1],
    }


def welch_interval(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of the difference of means, x - y, by Welch's t: few seeds each, and
    variances that may differ. [..., n], [..., m] -> low and high, [...]."""
    # SciPy warns if the seeds of an arm are all equal, but its interval is right then, too
    with warnings.catch_warnings(action="ignore"):
        return stats.ttest_ind(x, y, axis=-1, equal_var=False).confidence_interval()


# -- what is written


def column(runs: list[Row], name: str) -> np.ndarray:
    """Return a number of each run, [runs]."""
    return np.array([run[name] for run in runs])


def table(results: Results) -> str:
    """Return a Markdown table, one row per arm, from the summaries of its runs. One seed gets no
    intervals."""
    first, *_ = results
    text = "| arm | last 3 evaluations, per seed | mean "
    text += f"| - {first} | peak | updates | diverged | seconds |\n"
    text += "|---" * 8 + "|\n"
    for arm, runs in results.items():
        last = column(runs, "last")
        n = len(runs)
        half, difference = "", ""
        if n > 1:
            half = f" ± {stats.t.ppf(0.975, n - 1) * stats.sem(last):.3f}"
        if n > 1 and arm != first:
            low, high = welch_interval(last, column(results[first], "last"))
            difference = f"{low:+.3f} to {high:+.3f}"
        cells = [
            arm,
            " ".join(f"{value:.3f}" for value in last),
            f"{last.mean():.3f}{half}",
            difference,
            f"{column(runs, 'peak').mean():.3f}",
            f"{column(runs, 'updates').mean():.0f}",
            f"{column(runs, 'diverged').sum()} of {n}",
            f"{column(runs, 'wall_s').mean():.0f}",
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text


def figure(args: argparse.Namespace, results: Results) -> None:
    """Draw the metric on held-out seeds against episodes in figure.png: the mean over seeds, each
    seed as a thin line, and the success of the random and the optimal policy."""
    lines = []
    for number, (arm, runs) in enumerate(results.items()):
        color = COLORS.get(arm, f"C{number}")
        curves = [curve(folder_of(args.out, arm, run["seed"]), args.metric) for run in runs]
        for episodes, values in curves:
            lines.append((episodes, values, {"color": color, "alpha": 0.3, "linewidth": 1}))
        mean = np.mean([values for _, values in curves], axis=0)
        style = {"color": color, "linewidth": 2.2, "label": arm}
        lines.append((episodes, mean, style))

    config, *_ = read_run(folder_of(args.out, arm, args.seeds[0]))
    levels = {}
    if args.metric == "success":
        levels = baselines(make_env(config), config.eval_episodes)
    title = f"{task(config)}, preset {config.preset}\nseeds {' '.join(map(str, args.seeds))}"
    plot(args.out / "figure.png", title, f"{args.metric} on held-out seeds", lines, levels)


def write_results(args: argparse.Namespace, results: Results) -> None:
    """Write results.csv, table.md and figure.png, and print the table."""
    rows = sum(results.values(), [])
    with open(args.out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    text = table(results)
    (args.out / "table.md").write_text(text)
    print(text)
    figure(args, results)


# -- the command line


def parse() -> argparse.Namespace:
    """Return the arguments; `flags` are those of all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--env", default="frozenlake", choices=ENVS)
    arms = parser.add_mutually_exclusive_group()
    arms.add_argument("--exhibit", default="main", choices=EXHIBITS)
    arms.add_argument("--arm", action="append", help="a method and flags; may be repeated")
    parser.add_argument("--metric", default="success", help="or one of the task's own: score")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, help="default: out/compare-<env>-<exhibit>")
    args, flags = parser.parse_known_args()
    if [] in vars(args).values():  # so argparse reads `--jobs=--`
        parser.error("-- is no value of a flag")
    args.flags = flags
    metrics = ("success", *ENVS[args.env]().metrics)
    if args.metric not in metrics:
        parser.error(f"--metric must be one of {', '.join(metrics)} with --env {args.env}")
    args.out = args.out or Path(f"out/compare-{args.env}-{'own' if args.arm else args.exhibit}")
    return args


def main() -> int:
    """Return the exit status, one of those of `Ending`."""
    args = parse()
    with Ending() as ending:
        ending.program = "compare.py"
        arms = args.arm or EXHIBITS[args.exhibit]
        runs = list(product(arms, args.seeds))
        # Wrong ones are noticed before hours of runs.
        flags = {folder_of(args.out, *run): flags_of(args, *run) for run in runs}
        args.out.mkdir(parents=True, exist_ok=True)
        print(f"{len(runs)} runs, {args.jobs} at a time, written to {args.out}")
        print("If interrupted, the same command goes on.", flush=True)
        run_all(flags, args.jobs)

        results: Results = {arm: [] for arm in arms}
        for arm, seed in runs:
            row = summary(folder_of(args.out, arm, seed), args.metric)
            results[arm].append({"arm": arm, "seed": seed, **row})
        write_results(args, results)
    return ending.status


if __name__ == "__main__":
    protect_output()
    sys.exit(main())
