"""Methods side by side: every arm with every seed through the real train.py, one figure, one table.

    python compare.py --env frozenlake --seeds 11 12 13               on-policy, Standard PER and FreshPER
    python compare.py --exhibit tau --env frozenlake                  a ready-made comparison
    python compare.py --arm "freshper --tau 5" --arm "freshper --tau 500" --out out/mine

Paper: Table 1, Fig. 3 to 7, Table 3. Flags that are not compare.py's go to every run. --out gets a folder per run,
results.csv, table.md and figure.png. Finished runs are not repeated, interrupted ones go on.

The table has the mean of the last three held-out evaluations beside the paper's peak, both of success, or with
`--metric score` of what the paper reports for Sokoban and CliffWalking. 95 % intervals: Student's t for means, Welch's
t for the difference to the first arm. Diverged: numbers not finite, or most of the last replies unreadable.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from envs import ENVS
from freshper.config import Config
from freshper.diagnostics import read
from freshper.flags import parse_args
from freshper.presets import CONFIG_A, CONFIG_DEFAULT, PRESETS, defaults
from freshper.report import baselines, plot

PHRASES = {
    "on_policy": "On-policy",
    "per": "Standard PER",
    "freshper": "FreshPER",
    "alpha 0": "uniform",
}
PHRASES |= {"beta 0": "without IS", "beta 0.4": "with IS", "decay none": "without decay"}
A, DEFAULT = (
    " ".join(f"--{name} {value}" for name, value in c.items()) for c in (CONFIG_A, CONFIG_DEFAULT)
)
RUN_FLAGS = {
    "--env",
    "--method",
    "--seed",
    "--out",
    "--resume",
}  # of train.py, set here for every run
METHOD_COLORS = {
    "on_policy": "#4285F4",
    "per": "#FBBC04",
    "freshper": "#EA4335",
}  # the paper's, Fig. 3


def exhibits(preset: str, env: str) -> dict[str, list[str]]:
    """Return ready-made comparisons: name -> arms, each a method and flags of train.py."""
    known = vars(Config(**defaults(preset, env, "freshper")))
    epochs = f"on_policy --ppo_epochs {known['replay_ratio'] + 1}"  # as many updates as with replay
    oldest = (
        2 * known["tau"] / known["alpha"]
    )  # steps: the same mean age drawn, by a limit or by a queue
    limit = f"--decay limit --tau {oldest:.0f}"
    queue = f"--capacity {oldest * known['rollout_batch_size'] / (1 + known['replay_ratio']):.0f}"
    taus = (500, 1000, 1500) if preset == "paper" else (5, 20, 80, 320)
    return {
        # Table 1, Fig. 3, 4 and 6; Fig. 5; Fig. 7; Table 3, and Config A with the clip of Default
        "main": ["on_policy", "per", "freshper"],
        "tau": ["on_policy", *(f"freshper --tau {x}" for x in taus), "freshper --decay none", "freshper --tau auto"],
        "is": ["on_policy", "freshper", "freshper --beta 0.4", "per --beta 0", "per"],
        "config": [f"freshper {A}", f"freshper {DEFAULT}", f"freshper {A} --advantage_clip 20"],
        # not in the paper
        "matched": ["freshper", "per", "per --beta 0", "per --beta 0 --alpha 0", epochs, "on_policy"],
        "decay": ["freshper", "freshper --decay polynomial", f"freshper {limit}", "freshper --decay none"],
        "ratio": ["on_policy", *(f"freshper --replay_ratio {k}" for k in (1, 2, 4, 8))],
        "epsilon": [f"freshper --epsilon {epsilon}" for epsilon in (1e-6, 0.01, 0.1, 1.0)],
        "neighbours": ["freshper", f"per --beta 0 --alpha 0 {queue}", f"freshper --base_priority advantage {limit}",
                       "per --beta 0 --epsilon 1e-6 --alpha 1", "on_policy"],
        "baseline": [f"freshper --baseline {kind}" for kind in ("turn", "batch", "recompute")],
    }  # fmt: skip


def label(arm: str) -> str:
    """Return the name of an arm in figures and tables, such as "Standard PER, without IS, lr 0.001"."""
    method_and_flags = arm.replace(A, "--Config A").replace(DEFAULT, "--Default").split(" --")
    return ", ".join(PHRASES.get(part, part.replace("_", " ")) for part in method_and_flags)


def folder_of(out: Path, arm: str, seed: int) -> Path:
    """Return the folder of the run of an arm with a seed."""
    return out / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', arm).strip('-')}-seed{seed}"


def config_of(folder: Path) -> Config:
    """Read the settings of a run."""
    return Config(**json.loads((folder / "config.json").read_text()))


def checked(env: str, arm: str, seed: int, folder: Path, flags: list[str]) -> list[str]:
    """Return the checked flags of a run. Raises ValueError if one of them is compare.py's to set, or
    if the folder has a run with other settings."""
    method, *own = arm.split()
    for name in RUN_FLAGS & {word.partition("=")[0] for word in flags + own}:
        raise ValueError(f"{name} is in the flags of {arm}, but must be left to compare.py")
    flags = ["--env", env, "--method", method, *flags, *own, "--seed", str(seed)]
    asked = vars(parse_args(flags).config)
    for name, value in vars(config_of(folder)).items() if folder.exists() else ():
        if name not in ("out", "backend") and value != asked[name]:
            raise ValueError(
                f"--{name} is {asked[name]}, but must be {value} as in {folder}, or use another --out"
            )
    return flags


def run(env: str, arm: str, seed: int, folder: Path, flags: list[str], threads: int = 1) -> None:
    """Train one run in a process of its own, or the rest of an interrupted one. Exits with a sentence if it fails."""
    flags, where = checked(env, arm, seed, folder, flags), str(folder.resolve())
    done = read(folder, "metrics.csv")["iteration"][-1] if (folder / "metrics.csv").exists() else 0
    if (folder / "stopped.txt").exists() or (done and done == config_of(folder).iterations):
        return
    command = [
        sys.executable,
        "train.py",
        *(["--resume", where] if folder.exists() else [*flags, "--out", where]),
    ]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
    ended = subprocess.run(
        command, cwd=Path(__file__).parent, env=variables, capture_output=True, text=True
    )
    if ended.returncode == 1 and re.search(
        "^stopped after iteration .*finite", ended.stdout, re.MULTILINE
    ):
        (folder / "stopped.txt").write_text(ended.stdout)
    elif ended.returncode:
        sys.exit(
            f"{' '.join(command)} ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}"
        )


def summary(folder: Path, metric: str = "success") -> dict[str, float]:
    """Return the columns of results.csv, of the evaluations after training began; missed ones count as 0 or lowest."""
    metrics, config = read(folder, "metrics.csv"), config_of(folder)
    values = metrics[f"eval_{metric}"][1:]
    values = values[~np.isnan(values)]
    missed = -(-config.iterations // config.eval_every) - len(values)
    values = np.append(
        values, np.full(missed, 0.0 if metric == "success" else min(values, default=np.nan))
    )
    invalid = np.mean(metrics["invalid"][1:][-10:]) if len(metrics["invalid"]) > 1 else 1.0
    diverged = int((folder / "stopped.txt").exists() or invalid > 0.5)
    ends = {
        "episodes": metrics["episodes"][-1],
        "updates": metrics["step"][-1],
        "wall_s": metrics["wall_s"][-1],
    }
    return {
        "last": values[-3:].mean(),
        "peak": values.max(),
        "invalid": invalid,
        "diverged": diverged,
    } | ends


def welch_interval(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of the difference of means, x - y, by Welch's t: few seeds each, and
    variances that may differ. [..., n], [..., m] -> low and high, [...]."""
    n, m = x.shape[-1], y.shape[-1]
    u = np.maximum(
        x.var(-1, ddof=1) / n, 1e-30
    )  # squared standard errors; not 0 / 0 if all are equal
    v = np.maximum(y.var(-1, ddof=1) / m, 1e-30)
    freedom = (u + v) ** 2 / (u**2 / (n - 1) + v**2 / (m - 1))

    difference = x.mean(-1) - y.mean(-1)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(u + v)
    return difference - half, difference + half


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table, one row per arm, from the summaries of its runs. One seed gets no intervals."""
    first = next(iter(results))
    base = [run["last"] for run in results[first]]
    text = f"| arm | last 3 evaluations, per seed | mean | - {label(first)} | peak | updates | diverged | seconds |\n"
    text += "|---" * 8 + "|\n"
    for arm, runs in results.items():
        last, n, half, difference = [run["last"] for run in runs], len(runs), "", ""
        if n > 1:
            half = f" ± {stats.t.ppf(0.975, n - 1) * stats.sem(last):.3f}"
        if n > 1 and arm != first:
            low, high = welch_interval(np.array(last), np.array(base))
            difference = f"{low:+.3f} to {high:+.3f}"
        mean = {
            name: np.mean([run[name] for run in runs])
            for name in ("last", "peak", "updates", "wall_s")
        }
        text += f"| {label(arm)} | {' '.join(f'{x:.3f}' for x in last)} | {mean['last']:.3f}{half} | {difference} "
        text += f"| {mean['peak']:.3f} | {mean['updates']:.0f} | {sum(run['diverged'] for run in runs)} of {n} "
        text += f"| {mean['wall_s']:.0f} |\n"
    return text


def figure(
    path: Path, runs: dict[str, list[dict]], title: str, known: dict[str, float], metric: str
) -> None:
    """Draw the metric on held-out seeds against episodes: the mean over seeds, and each seed as a thin line."""
    lines, others, column = (
        [],
        (f"C{k}" for k in count(4)),
        f"eval_{metric}",
    )  # matplotlib's, unlike METHOD_COLORS
    for arm, tables in runs.items():
        color, x = (
            METHOD_COLORS.get(arm) or next(others),
            max((table["episodes"] for table in tables), key=len),
        )
        lines += [
            (table, column, {"color": color, "alpha": 0.3, "linewidth": 1}) for table in tables
        ]
        there = [~np.isnan(table[column]) for table in tables]
        seeds = [
            np.interp(x, t["episodes"][k], t[column][k]) for t, k in zip(tables, there, strict=True)
        ]
        style = {"color": color, "linewidth": 2.2, "label": label(arm)}
        lines.append(({"episodes": x, column: np.mean(seeds, axis=0)}, column, style))
    plot(path, title, f"{metric} on held-out seeds", lines, known)


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    parser.add_argument("--env", default="frozenlake", choices=list(ENVS))
    parser.add_argument("--exhibit", default="main", choices=list(exhibits("tiny", "frozenlake")))
    parser.add_argument(
        "--arm", action="append", help="a method and flags of train.py; may be repeated"
    )
    parser.add_argument("--metric", default="success", help="or one of the task's own: score")
    parser.add_argument("--preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, help="default: out/compare-<env>-<exhibit>")
    args, flags = parser.parse_known_args()  # flags that are not ours go to every run
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}, but must be 1 or more")
    arms = args.arm or exhibits(args.preset, args.env)[args.exhibit]
    out = args.out or Path(f"out/compare-{args.env}-{'own' if args.arm else args.exhibit}")
    jobs = {(arm, seed): folder_of(out, arm, seed) for arm, seed in product(arms, args.seeds)}
    flags = ["--preset", args.preset, *flags]
    try:
        for job, folder in jobs.items():  # before hours of runs
            checked(args.env, *job, folder, flags)
    except ValueError as error:
        parser.error(str(error))
    if args.metric not in (metrics := ("success", *ENVS[args.env]().metrics)):
        parser.error(
            f"--metric is {args.metric}, but must be one of {', '.join(metrics)} with --env {args.env}"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {out}, but must be a folder that can be made: {error.strerror}")
    print(f"{len(jobs)} runs, {args.jobs} at a time, written to {out}", flush=True)
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with ThreadPoolExecutor(args.jobs) as pool:
        done = pool.map(lambda job: run(args.env, job[0], job[1], jobs[job], flags), jobs)
        for (arm, seed), folder, _ in zip(jobs, jobs.values(), done, strict=True):
            found = {"arm": arm, "seed": seed} | summary(folder, args.metric)
            results[arm].append(found)
            score = f"{args.metric} {found['last']:.3f} in {found['wall_s']:.0f} s"
            print(f"{label(arm)}, seed {seed}: {score}, {folder}", flush=True)
    with open(out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, found)
        writer.writeheader()
        writer.writerows(sum(results.values(), []))
    (out / "table.md").write_text(text := table(results))
    runs = {arm: [read(jobs[arm, seed], "metrics.csv") for seed in args.seeds] for arm in arms}
    config = config_of(folder)
    title = f"{config.task()}, preset {args.preset}\nseeds {' '.join(map(str, args.seeds))}"
    success = args.metric == "success"
    known = baselines(config.make_env(), config.eval_episodes) if success else {}
    figure(out / "figure.png", runs, title, known, args.metric)
    print(text)


if __name__ == "__main__":
    main()
