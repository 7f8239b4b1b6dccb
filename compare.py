"""Methods side by side: every arm with every seed through the real train.py, one figure, one table.

    python compare.py --env frozenlake --seeds 11 12 13         on-policy, Standard PER and FreshPER
    python compare.py --exhibit tau --env frozenlake            a ready-made comparison
    python compare.py --arm "freshper --tau 5" --arm "freshper --tau 500" --out out/mine

Paper: Table 1, Fig. 3 to 7, Table 3. An arm is a method and flags of train.py. Flags that are not
compare.py's go to every run. --out gets a folder and a log per run, results.csv, table.md and
figure.png. Finished runs are not repeated, and interrupted ones go on. A line a minute says where
the runs are.

The table has the mean of the last three held-out evaluations beside the peak, which the paper
reports: of success, or with `--metric score` of what the paper reports for Sokoban and
CliffWalking. 95 % intervals: Student's t for means, Welch's t for the difference to the first arm.
Diverged: numbers that are not finite ended the run.
"""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import time
import warnings
from itertools import count
from pathlib import Path

import numpy as np
import pandas
from scipy import stats

from envs import ENVS
from envs.base import UserError
from freshper.backends import make_env
from freshper.checkpoint import find_saved
from freshper.config import TABLES, Config
from freshper.errors import Ending, protect_output
from freshper.flags import make_parser, parse_args
from freshper.report import drawing, policy_levels, task
from freshper.run import Row, may_fail, write

EXHIBITS = TABLES["exhibit"]  # names, and their arms
# As in the figures of RESULTS.md
COLORS = {"on_policy": "#4285F4", "per": "#FBBC04", "freshper": "#EA4335"}
NOT_FINITE = 3  # the exit status of a run that met such numbers


# -- runs


@dataclasses.dataclass(eq=False)
class Run:
    """An arm with a seed."""

    arm: str
    folder: Path
    flags: list[str]  # of train.py
    config: Config  # which follows from them

    def __str__(self) -> str:
        return f"{self.folder.name} {self.done()} of {self.config.iterations}"

    def done(self) -> int:
        """Return the completed iterations."""
        path = self.folder / "metrics.csv"
        # The header and the evaluation before training are two lines more.
        return path.read_bytes().count(b"\n") - 2 if path.exists() else 0

    def start(self) -> subprocess.Popen:
        """Start or resume the run in a process of its own with one thread."""
        flags = [*self.flags, f"--out={self.folder}"]
        if self.folder.exists():
            flags = [f"--resume={self.folder}"]
        with open(f"{self.folder}.log", "a") as log:
            return subprocess.Popen(
                [sys.executable, Path(__file__).with_name("train.py"), *flags],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                # Ctrl-C reaches this process alone, which ends each run once, so that it saves.
                start_new_session=True,
            )


def plan(args: argparse.Namespace, arm: str, seed: int) -> Run:
    """Return a checked run. Raises UserError if its folder has one with other settings, or if the
    flags set what the comparison sets."""
    method, *of_arm = arm.split() or [""]
    flags = [*args.flags, *of_arm]
    given = vars(make_parser().parse_args(flags))
    for name in given.keys() & {"env", "method", "seed", "out", "resume"}:
        raise UserError(f"--{name} is {given[name]}, but the comparison sets it")

    flags += [f"--env={args.env}", f"--method={method}", f"--seed={seed}"]
    name = re.sub(r"[^A-Za-z0-9_.+]+", "-", arm)
    run = Run(arm, args.out / f"{name}-seed{seed}", flags, parse_args(flags))

    if run.folder.exists():
        before = parse_args([f"--resume={run.folder}"])
        if dataclasses.replace(before, out="", resume="") != run.config:
            raise UserError(f"{run.folder} is a run with other settings, use another --out")
    return run


def train_all(runs: list[Run], jobs: int, ending: Ending) -> None:
    """Train the runs that are not finished, so many jobs at a time. Numbers that are not finite end
    a run, but not the comparison. Raises UserError if one fails in another way."""
    waiting = [run for run in runs if run.done() != run.config.iterations]
    processes: dict[Run, subprocess.Popen] = {}  # of those under way
    seconds = count(1)
    try:
        while waiting or processes:
            while waiting and len(processes) < jobs:
                run = waiting.pop(0)
                processes[run] = run.start()

            time.sleep(1)
            for run, process in [*processes.items()]:
                status = process.poll()
                if status in (0, NOT_FINITE):
                    del processes[run]
                elif status is not None:
                    raise UserError(f"a run ended with status {status}: see {run.folder}.log")

            if ending.must_stop():
                raise KeyboardInterrupt

            if processes and next(seconds) % 60 == 0:
                print(f"iterations: {', '.join(map(str, processes))}", flush=True)
    finally:
        ending.training = False
        # After an error or a signal, those under way save and end.
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()


# -- statistics


def summary(run: Run, metric: str) -> Row:
    """Return a run's row of results.csv, of the evaluations after training began, and its curve:
    collected `episodes` and `values` of all that were due, the first one before training.

    Evaluations that a stopped run has missed count as 0, or as its lowest value below. Raises
    UserError if metrics.csv is damaged."""
    config = run.config
    due = np.arange(0, config.iterations, config.eval_every)
    due = np.append(due, config.iterations)

    try:
        metrics = pandas.read_csv(run.folder / "metrics.csv", dtype=float)
        values = metrics[f"eval_{metric}"].to_numpy()
        values = values[due[due < len(metrics)]]
        updates, wall_s = metrics[["step", "wall_s"]].iloc[-1]
        if not np.isfinite([*values, updates, wall_s]).all():
            raise ValueError("it lacks numbers")
    # A damaged file may hold anything.
    except Exception as error:
        raise UserError(f"{run.folder} has a damaged metrics.csv, remove it: {error}") from error

    missed = len(due) - len(values)
    values = np.pad(values, (0, missed), constant_values=min([0.0, *values[1:]]))
    return {
        "arm": run.arm,
        "seed": config.seed,
        "last": values[1:][-3:].mean(),
        "peak": values[1:].max(),
        # All runs have ended. The first row is the evaluation before training.
        "diverged": int(len(metrics) <= config.iterations),
        "updates": updates,
        "wall_s": wall_s,
        "episodes": due * config.rollout_batch_size,
        "values": values,
    }


def welch_interval(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of the difference of means, x - y, by Welch's t: few seeds each, and
    variances that may differ. [..., n], [..., m] -> low and high, [...]."""
    # SciPy warns if the seeds of an arm are all equal, but its interval is right then, too
    with warnings.catch_warnings(action="ignore"):
        return stats.ttest_ind(x, y, axis=-1, equal_var=False).confidence_interval()


# -- what is written


def table(results: pandas.DataFrame, evaluations: int) -> str:
    """Return a Markdown table, one row per arm, from the summaries of its runs. One seed gets no
    intervals."""
    first = results["arm"][0]
    of_first = results["last"][results["arm"] == first]
    text = f"| arm | evaluations, the last {min(evaluations, 3)}, per seed | mean "
    text += f"| - {first} | peak | updates | diverged | seconds |\n"
    text += "|---" * 8 + "|\n"

    for arm, runs in results.groupby("arm", sort=False):
        last = runs["last"]
        means = runs.mean(numeric_only=True)
        n = len(runs)

        half, difference = "", ""
        if n > 1:
            half = f" ± {stats.t.ppf(0.975, n - 1) * last.sem():.3f}"
        if n > 1 and arm != first:
            low, high = welch_interval(last, of_first)
            difference = f"{means['last'] - of_first.mean():+.3f} [{low:+.3f}, {high:+.3f}]"

        cells = [
            arm,
            " ".join(f"{value:.3f}" for value in last),
            f"{means['last']:.3f}{half}",
            difference,
            f"{means['peak']:.3f}",
            f"{means['updates']:.0f}",
            f"{runs['diverged'].sum()} of {n}",
            f"{means['wall_s']:.0f}",
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text


def figure(args: argparse.Namespace, config: Config, results: pandas.DataFrame) -> None:
    """Draw the metric on held-out seeds against episodes in figure.png: the mean over seeds, each
    seed as a thin line, and the success of the random and the optimal policy."""
    levels = {}
    if args.metric == "success":
        levels = policy_levels(make_env(config), config.eval_episodes)

    title = f"{task(config)}, preset {config.preset}\nseeds {' '.join(map(str, args.seeds))}"
    path = args.out / "figure.png"

    with drawing(path, title, f"{args.metric} on held-out seeds", levels) as axes:
        for number, (arm, runs) in enumerate(results.groupby("arm", sort=False)):
            color = COLORS.get(arm, f"C{number}")
            for episodes, values in zip(runs["episodes"], runs["values"]):
                axes.plot(episodes, values, color=color, alpha=0.3, linewidth=1)
            mean = np.mean([*runs["values"]], axis=0)
            axes.plot(episodes, mean, color=color, linewidth=2.2, label=arm)


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
    parser.add_argument(
        "--out", type=os.path.expanduser, help="default: out/compare-<env>-<exhibit>"
    )

    args, flags = parser.parse_known_args()
    args.flags = flags
    metrics = ("success", *ENVS[args.env].metrics)
    if args.metric not in metrics:
        allowed = f"{', '.join(metrics)} with --env {args.env}"
        parser.error(f"--metric is {args.metric}, but must be one of {allowed}")
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}, but must be above 0")

    name = "own" if args.arm else args.exhibit
    args.out = Path(args.out or f"out/compare-{args.env}-{name}")
    return args


def main() -> int:
    """Return the exit status, one of those of `Ending`."""
    args = parse()
    with Ending() as ending:
        ending.program = "compare.py"
        arms = args.arm or EXHIBITS[args.exhibit]

        # Wrong ones are noticed before hours of runs.
        runs = [plan(args, arm, seed) for arm in arms for seed in args.seeds]
        if len({run.folder for run in runs}) < len(runs):
            raise UserError("--seeds or --arm names a run twice")

        with may_fail(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
        print(
            f"{len(runs)} runs in {args.out}; if interrupted, the same command goes on", flush=True
        )
        ending.training = True
        train_all(runs, args.jobs, ending)

        saved = [find_saved(str(run.folder)) for run in runs]
        if len({one.made_with["data_sha256"] for one in saved if one}) > 1:
            raise UserError(f"{args.out} has runs with different rows of --data")

        results = pandas.DataFrame([summary(run, args.metric) for run in runs])
        rows = results.drop(columns=["episodes", "values"])
        write(args.out / "results.csv", rows.to_csv(index=False))
        text = table(results, len(results["values"][0]) - 1)
        write(args.out / "table.md", text)
        print(text)
        figure(args, runs[0].config, results)
    return ending.status


if __name__ == "__main__":
    protect_output()
    sys.exit(main())
