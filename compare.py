"""Methods side by side: every arm with every seed through the real train.py, one figure, one table.

    python compare.py --env frozenlake --seeds 11 12 13         on-policy, Standard PER and FreshPER
    python compare.py --exhibit tau --env frozenlake            a ready-made comparison
    python compare.py --arm "freshper --tau 5" --arm "freshper --tau 500" --out out/mine

Paper: Table 1, Fig. 3 to 7, Table 3. An arm is a method and flags of train.py. Flags that are not
compare.py's go to every run. --out gets a folder per run, results.csv, table.md and figure.png.
Finished runs are not repeated, and interrupted ones go on.

The table has the mean of the last three held-out evaluations beside the paper's peak: of success,
or with `--metric score` of what the paper reports for Sokoban and CliffWalking. 95 % intervals:
Student's t for means, Welch's t for the difference to the first arm. Diverged: numbers not finite,
or most of the last replies unreadable.
"""

import argparse
import csv
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats

from envs import ENVS
from freshper.config import Config
from freshper.diagnostics import read
from freshper.evaluation import Row, baselines
from freshper.flags import parse_args
from freshper.pages import plot
from freshper.presets import CONFIG_A, CONFIG_DEFAULT, PRESETS, defaults

A = " ".join(f"--{name} {value}" for name, value in CONFIG_A.items())
DEFAULT = " ".join(f"--{name} {value}" for name, value in CONFIG_DEFAULT.items())
PHRASES = {
    "on_policy": "On-policy",
    "per": "Standard PER",
    "freshper": "FreshPER",
    "alpha 0": "uniform",
    "beta 0": "without IS",
    "beta 0.4": "with IS",
    "decay none": "without decay",
}
# These flags of train.py are set here for every run.
RUN_FLAGS = ("--env", "--method", "--seed", "--out", "--resume")
# The paper's colors (Fig. 3), and those of RESULTS.md for arms of --exhibit matched.
METHOD_COLORS = {
    "on_policy": "#4285F4",
    "per": "#FBBC04",
    "freshper": "#EA4335",
    "per --beta 0": "#9C6500",
    "per --beta 0 --alpha 0": "#34A853",
    "on_policy --ppo_epochs 3": "#1A3E8C",
}
# The arms of ready-made comparisons. `exhibits` fills in the numbers.
EXHIBITS = {
    # Table 1, Fig. 3, 4 and 6
    "main": ["on_policy", "per", "freshper"],
    # Fig. 5; the fixed values of tau come before its last two arms
    "tau": ["on_policy", "freshper --decay none", "freshper --tau auto"],
    # Fig. 7
    "is": ["on_policy", "freshper", "freshper --beta 0.4", "per --beta 0", "per"],
    # Table 3, and Config A with the clip of Default
    "config": [f"freshper {A}", f"freshper {DEFAULT}", f"freshper {A} --advantage_clip 20"],
    # What follows is not in the paper. `epochs` makes as many updates as replay does.
    "matched": [
        "freshper",
        "per",
        "per --beta 0",
        "per --beta 0 --alpha 0",
        "on_policy --ppo_epochs {epochs}",
        "on_policy",
    ],
    # The limit `oldest`, and the queue of "neighbours", draw episodes of the same mean age.
    "decay": [
        "freshper",
        "freshper --decay polynomial",
        "freshper --decay limit --tau {oldest:.0f}",
        "freshper --decay none",
    ],
    "ratio": [
        "on_policy",
        "freshper --replay_ratio 1",
        "freshper --replay_ratio 2",
        "freshper --replay_ratio 4",
        "freshper --replay_ratio 8",
    ],
    "neighbours": [
        "freshper",
        "per --beta 0 --alpha 0 --capacity {queue:.0f}",
        "freshper --base_priority advantage --decay limit --tau {oldest:.0f}",
        "per --beta 0 --epsilon 1e-6 --alpha 1",
        "on_policy",
    ],
}

Results = dict[str, list[Row]]  # the rows of results.csv, by arm


def exhibits(preset: str, env: str, flags: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the arms of all ready-made comparisons by name, with the numbers of a preset, or of
    the flags of all runs."""
    config = parse_args([f"--preset={preset}", f"--env={env}", *flags]).config
    of_preset = Config(**defaults(preset, env, "freshper"))
    epochs = config.updates_per_iteration
    tau = of_preset.tau if config.tau == "auto" else config.tau
    oldest = 2 * float(tau) / (config.alpha or of_preset.alpha)  # steps
    queue = oldest * config.rollout_batch_size / epochs  # episodes

    arms = {}
    for name, forms in EXHIBITS.items():
        arms[name] = [form.format(epochs=epochs, oldest=oldest, queue=queue) for form in forms]
    taus = (500, 1000, 1500) if preset == "paper" else (5, 20, 80, 320)
    arms["tau"][1:1] = [f"freshper --tau {tau}" for tau in taus]
    return arms


def label(arm: str) -> str:
    """Return the name of an arm in figures and tables, such as "Standard PER, without IS"."""
    parts = arm.replace(A, "--Config A").replace(DEFAULT, "--Default").split(" --")
    return ", ".join(PHRASES.get(part, part.replace("_", " ")) for part in parts)


def folder_of(out: Path, arm: str, seed: int) -> Path:
    """Return the folder of the run of an arm with a seed."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", arm).strip("-")
    return out / f"{name}-seed{seed}"


def config_of(folder: Path) -> Config:
    """Read the settings of a run."""
    return Config(**json.loads((folder / "config.json").read_text()))


# -- runs


def checked(env: str, arm: str, seed: int, folder: Path, flags: list[str]) -> list[str]:
    """Return the checked flags of a run. Raises ValueError if one of them is compare.py's to set,
    or if the folder has a run with other settings."""
    method, *arm_flags = arm.split() or [arm]
    for word in flags + arm_flags:
        name = word.partition("=")[0]
        if name in RUN_FLAGS:
            raise ValueError(f"{name} is in the flags of {arm}, but must be left to compare.py")

    flags = [f"--env={env}", f"--method={method}", *flags, *arm_flags, f"--seed={seed}"]
    check_folder(folder, parse_args(flags).config)
    return flags


def check_folder(folder: Path, config: Config) -> None:
    """Raise ValueError if a folder has a run with other settings."""
    if not folder.exists():
        return
    try:
        before = vars(config_of(folder))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} is no run of this version, remove it: {error}") from error
    for name, value in before.items():
        now = getattr(config, name)
        if name not in ("out", "backend") and value != now:
            allowed = f"{value} as in {folder}, or use another --out"
            raise ValueError(f"--{name} is {now}, but must be {allowed}")


def finished(folder: Path) -> bool:
    """Return whether a run has made its last iteration, or met numbers that are not finite."""
    if (folder / "stopped.txt").exists():
        return True
    if not (folder / "metrics.csv").exists():
        return False
    done = read(folder, "metrics.csv")["iteration"][-1]
    return bool(done == config_of(folder).iterations)


def run(env: str, arm: str, seed: int, folder: Path, flags: list[str], threads: int = 1) -> None:
    """Train one run in a process of its own, or the rest of an interrupted one.

    Numbers that are not finite end a run, but not the comparison: stopped.txt says so. Exits with a
    sentence if a run fails in another way."""
    flags = checked(env, arm, seed, folder, flags)
    if finished(folder):
        return

    path = folder.resolve()
    flags = [f"--resume={path}"] if folder.exists() else [*flags, f"--out={path}"]
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *flags]

    process = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )

    # A defect ends in a traceback, whatever its message says. Without metrics.csv there is nothing
    # to summarize.
    known = process.returncode == 1 and "Traceback" not in process.stderr
    evaluated = (folder / "metrics.csv").exists()
    if known and evaluated and re.search("(?m)^stopped after .*finite", process.stdout):
        (folder / "stopped.txt").write_text(process.stdout)
    elif process.returncode:
        output = (process.stdout + process.stderr)[-2000:]
        sys.exit(f"{' '.join(command)} ended with {process.returncode}: {output}")


def run_all(args: argparse.Namespace, arms: list[str], flags: list[str]) -> Results:
    """Train all runs, --jobs at a time. Returns a row of results.csv per run, by arm."""

    def train(job: tuple[str, int]) -> Row:
        arm, seed = job
        folder = folder_of(args.out, arm, seed)
        run(args.env, arm, seed, folder, flags)

        row = {"arm": arm, "seed": seed, **summary(folder, args.metric)}
        score = f"{args.metric} {row['last']:.3f} in {row['wall_s']:.0f} s"
        stopped = folder / "stopped.txt"
        where = stopped if stopped.exists() else folder
        print(f"{label(arm)}, seed {seed}: {score}, {where}", flush=True)
        return row

    jobs = dict.fromkeys(product(arms, args.seeds))
    print(f"{len(jobs)} runs, {args.jobs} at a time, written to {args.out}", flush=True)
    results: Results = {arm: [] for arm in arms}
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(train, jobs):
            results[row["arm"]].append(row)
    return results


# -- statistics


def value_of_missed(metric: str, values: np.ndarray) -> float:
    """Return what an evaluation counts as that a stopped run has missed: a success of 0, or the
    lowest value of another metric."""
    return 0.0 if metric == "success" else min(values, default=np.nan)


def summary(folder: Path, metric: str = "success") -> Row:
    """Return the columns of results.csv, of the evaluations after training began."""
    metrics = read(folder, "metrics.csv")
    config = config_of(folder)
    values = metrics[f"eval_{metric}"][1:]
    values = values[~np.isnan(values)]

    missed = math.ceil(config.iterations / config.eval_every) - len(values)
    values = np.append(values, [value_of_missed(metric, values)] * missed)

    recent = metrics["invalid"][1:][-10:]
    invalid = np.mean(recent) if len(recent) else 1.0
    stopped = (folder / "stopped.txt").exists()
    return {
        "last": values[-3:].mean(),
        "peak": values.max(),
        "invalid": invalid,
        "diverged": int(stopped or invalid > 0.5),
        "episodes": metrics["episodes"][-1],
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
    """Return a column of results.csv for the runs of an arm, [n]."""
    return np.array([run[name] for run in runs])


def table(results: Results) -> str:
    """Return a Markdown table, one row per arm, from the summaries of its runs. One seed gets no
    intervals."""
    first, *_ = results
    text = "| arm | last 3 evaluations, per seed | mean "
    text += f"| - {label(first)} | peak | updates | diverged | seconds |\n"
    text += "|---" * 8 + "|\n"

    for arm, runs in results.items():
        n = len(runs)
        last = column(runs, "last")
        half = ""
        difference = ""
        if n > 1:
            half = f" ± {stats.t.ppf(0.975, n - 1) * stats.sem(last):.3f}"
            if arm != first:
                low, high = welch_interval(last, column(results[first], "last"))
                difference = f"{low:+.3f} to {high:+.3f}"

        seeds = " ".join(f"{value:.3f}" for value in last)
        text += f"| {label(arm)} | {seeds} "
        text += f"| {last.mean():.3f}{half} | {difference} "
        text += f"| {column(runs, 'peak').mean():.3f} "
        text += f"| {column(runs, 'updates').mean():.0f} "
        text += f"| {column(runs, 'diverged').sum()} of {n} "
        text += f"| {column(runs, 'wall_s').mean():.0f} |\n"
    return text


def figure(out: Path, results: Results, metric: str, title: str, levels: Row) -> None:
    """Draw the metric on held-out seeds against episodes in figure.png: the mean over seeds, each
    seed as a thin line, and the baselines as horizontal ones."""
    lines = []
    for number, (arm, runs) in enumerate(results.items(), 4):
        # C4, C5, ... are matplotlib's, unlike METHOD_COLORS
        color = METHOD_COLORS.get(arm, f"C{number}")
        tables = [read(folder_of(out, arm, run["seed"]), "metrics.csv") for run in runs]
        longest = max((table["episodes"] for table in tables), key=len)

        curves = []
        for table in tables:
            episodes = table["episodes"]
            values = table[f"eval_{metric}"]
            lines.append((episodes, values, {"color": color, "alpha": 0.3, "linewidth": 1}))
            measured = ~np.isnan(values)
            values = values[measured]
            after = value_of_missed(metric, values[1:])
            curves.append(np.interp(longest, episodes[measured], values, right=after))

        style = {"color": color, "linewidth": 2.2, "label": label(arm)}
        lines.append((longest, np.mean(curves, axis=0), style))
    plot(out / "figure.png", title, f"{metric} on held-out seeds", lines, levels)


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

    config = config_of(folder_of(args.out, rows[0]["arm"], rows[0]["seed"]))
    seeds = " ".join(map(str, dict.fromkeys(args.seeds)))
    word = "seeds" if " " in seeds else "seed"
    title = f"{config.task()}, preset {args.preset}\n{word} {seeds}"
    levels = {}
    if args.metric == "success":
        levels = baselines(config.make_env(), config.eval_episodes)
    figure(args.out, results, args.metric, title, levels)


# -- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--env", default="frozenlake", choices=ENVS)
    parser.add_argument("--exhibit", choices=EXHIBITS, help="default: main")
    parser.add_argument("--arm", action="append", help="a method and flags; may be repeated")
    parser.add_argument("--metric", default="success", help="or one of the task's own: score")
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, help="default: out/compare-<env>-<exhibit>")
    return parser


def check(args: argparse.Namespace, arms: list[str], flags: list[str]) -> None:
    """Check all arguments before hours of runs, and make --out. Raises ValueError."""
    if args.jobs < 1:
        raise ValueError(f"--jobs is {args.jobs}, but must be 1 or more")
    for word in flags[1:]:  # after --preset, which has a default
        name = word.partition("=")[0]
        if name.startswith("--") and all(name in re.split("[ =]", arm) for arm in arms):
            raise ValueError(f"{word} has no effect, because every arm sets {name}")
    arm_of: dict[Path, str] = {}
    for arm, seed in product(arms, args.seeds):
        folder = folder_of(args.out, arm, seed)
        checked(args.env, arm, seed, folder, flags)
        other = arm_of.setdefault(folder, arm)
        if other != arm:
            raise ValueError(f"--arm is {arm}, but must not have the folder of {other}, {folder}")

    metrics = ("success", *ENVS[args.env]().metrics)
    if args.metric not in metrics:
        allowed = f"one of {', '.join(metrics)} with --env {args.env}"
        raise ValueError(f"--metric is {args.metric}, but must be {allowed}")

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"a folder that can be made: {error.strerror}"
        raise ValueError(f"--out is {args.out}, but must be {allowed}") from error


def main() -> None:
    parser = make_parser()
    args, flags = parser.parse_known_args()
    flags = [f"--preset={args.preset}", *flags]
    if args.arm and args.exhibit:
        parser.error(f"--exhibit is {args.exhibit}, but has no effect with --arm")
    name = "own" if args.arm else args.exhibit or "main"
    arms = args.arm or exhibits(args.preset, args.env, flags)[name]
    args.out = args.out or Path(f"out/compare-{args.env}-{name}")

    try:
        check(args, arms, flags)
    except ValueError as error:
        parser.error(str(error))

    try:
        results = run_all(args, arms, flags)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
    write_results(args, results)


if __name__ == "__main__":
    main()
