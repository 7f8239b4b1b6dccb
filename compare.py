"""Methods side by side: every arm with every seed through the real train.py, one figure, one table.

    python compare.py --env frozenlake --seeds 11 12 13               on-policy, Standard PER and FreshPER
    python compare.py --exhibit tau --env frozenlake                  a ready-made comparison
    python compare.py --arm "freshper --tau 5" --arm "freshper --tau 500" --out out/mine

Paper: Table 1, Fig. 3 to 7, Table 3. Flags that are not compare.py's go to every run. --out gets a folder per run,
results.csv, table.md and figure.png. Finished runs are not repeated, interrupted ones go on.

The table's number is the mean of the last three held-out evaluations; the paper reports the peak. Both are of success,
or with `--metric score` of what the paper reports for Sokoban and CliffWalking. Intervals are for 95 %: Student's t for
a mean over seeds, a bootstrap over seeds for the difference to the first arm; from one seed there is none. A run whose
numbers stop being finite counts with 0 (or its lowest score) for the evaluations it missed. It counts as diverged, as
does a run with over half of the replies unreadable at the end.
"""

import argparse
import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
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

NAMES = {"on_policy": "On-policy", "per": "Standard PER", "freshper": "FreshPER"}
PHRASES = {"beta 0": "without IS", "beta 0.4": "with IS", "decay none": "without decay", "alpha 0": "uniform"}
METHOD_COLORS = {"on_policy": "#4285F4", "per": "#FBBC04", "freshper": "#EA4335"}  # the paper's, Fig. 3
OTHER_COLORS = ("#34A853", "#FF9800", "#9E9E9E", "#7B1FA2", "#00838F", "#795548", "#F06292", "#1A237E")
NOT_FINITE = r"^stopped after iteration .*(finite|gradient norm)"  # the sentences of NonFiniteError
MACHINE = ("out", "resume", "save_every", "backend", "engine_memory")  # settings that shape no number of a run


def exhibits(preset: str, env: str) -> dict[str, list[str]]:
    """Return ready-made comparisons: name -> arms, each a method and flags of train.py."""
    known: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)} | defaults(preset, env, "freshper")
    fresh, replayed = known["rollout_batch_size"], known["replay_ratio"] * known["batch_size"]
    epochs = f"on_policy --ppo_epochs {known['replay_ratio'] + 1}"  # as many updates as with replay
    current = f"per --beta 0 --capacity {fresh} --batch_size {fresh} --replay_ratio {replayed // fresh}"
    halves = f"per --beta 0 --alpha 0 --capacity {fresh} --batch_size {fresh // 2} --replay_ratio 4"
    rivals = ["freshper", "per --beta 0", "per", "per --beta 0 --alpha 0", "on_policy", epochs, halves, current]
    settings = (5e-4, 0), (1e-3, 0), (5e-4, 0.15), (1e-3, 0.15), (2e-3, 0.15)
    grid = [f"--lr {lr} --format_penalty {penalty}" for lr, penalty in settings]
    best = zip(rivals, (3, 4, 3, 2, 3, 3, 4, 0), strict=True)  # what `search` found (RESULTS.md)
    large = f"--rollout_batch_size {4 * fresh} --batch_size {4 * known['batch_size']} --iterations 25 --eval_every 5"
    changes = "", "--decay none", "--epsilon 1000", "--replay_advantage recompute", "--advantage_clip 0.2", large
    config_a, default = (f"freshper {_flags(config)}" for config in (CONFIG_A, CONFIG_DEFAULT))
    limit = f"--decay limit --tau {2 * known['tau'] / known['alpha']:.0f}"  # the same mean age drawn
    taus = (500, 1000, 1500) if preset == "paper" else (5, 20, 80, 320)
    return {
        # Table 1, Fig. 3, 4 and 6; Fig. 5; Fig. 7; Table 3, and Config A with the clip of Default
        "main": ["on_policy", "per", "freshper"],
        "tau": ["on_policy", *(f"freshper --tau {x}" for x in taus), "freshper --decay none", "freshper --tau auto"],
        "is": ["on_policy", "freshper", "freshper --beta 0.4", "per --beta 0", "per"],
        "config": [config_a, default, f"{config_a} --advantage_clip {CONFIG_DEFAULT['advantage_clip']:g}"],
        # not in the paper
        "matched": ["freshper", "per", "per --beta 0", "per --beta 0 --alpha 0", epochs, "on_policy"],
        "search": [f"{arm} {setting}" for arm in rivals for setting in grid],
        "showcase": [f"{arm} {grid[k]}" for arm, k in best],
        "factors": [f"freshper {grid[3]} {change}".strip() for change in changes],
        "decay": ["freshper", "freshper --decay polynomial", f"freshper {limit}", "freshper --decay none"],
        "ratio": ["on_policy", *(f"freshper --replay_ratio {k}" for k in (1, 2, 4, 8))],
        "epsilon": [f"freshper --epsilon {epsilon}" for epsilon in (1e-6, 0.01, 0.1, 1.0)],
        "advantage": [f"freshper --replay_advantage {mode}" for mode in ("running", "recompute")],
    }


def _flags(settings: dict[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in settings.items())


def label(arm: str) -> str:
    """Return the name of an arm in figures and tables, such as "Standard PER, without IS, lr 0.001"."""
    for name, config in (("A", CONFIG_A), ("Default", CONFIG_DEFAULT)):
        arm = arm.replace(_flags(config), f"--config {name}")
    method, *flags = arm.split()
    given = [f"{name[2:]} {value}" for name, value in pairwise(flags) if name.startswith("--")]
    return ", ".join([NAMES.get(method, method), *(PHRASES.get(flag, flag.replace("_", " ")) for flag in given)])


def folder_of(out: Path, arm: str, seed: int) -> Path:
    """Return the folder of the run of an arm with a seed."""
    return out / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', arm).strip('-')}-seed{seed}"


def config_of(folder: Path) -> Config:
    """Read the settings of a run."""
    return Config(**json.loads((folder / "config.json").read_text()))


def checked(env: str, arm: str, seed: int, folder: Path, flags: list[str]) -> list[str]:
    """Return the flags of a run. Wrong ones end the program with a sentence. Raises ValueError if the folder has a run
    with other settings: its name holds arm and seed alone."""
    method, *own = arm.split()
    flags = ["--env", env, "--method", method, *flags, *own, "--seed", str(seed)]
    asked, path = parse_args(flags), folder / "config.json"
    for name, value in (json.loads(path.read_text()) if path.is_file() else {}).items():
        if name not in MACHINE and value != (given := getattr(asked, name, None)):
            raise ValueError(f"--{name} is {given}, but must be {value} as in {folder}, or use another --out")
    return flags


def run(env: str, arm: str, seed: int, folder: Path, flags: list[str]) -> None:
    """Train one run in a process of its own, or the rest of an interrupted one. Exits with a sentence if it fails."""
    flags = checked(env, arm, seed, folder, flags)
    resumed, where = (folder / "config.json").is_file(), str(folder.resolve())
    rows = read(folder, "metrics.csv")["iteration"] if (folder / "metrics.csv").exists() else [0]
    if (folder / "stopped.txt").exists() or (resumed and rows[-1] == config_of(folder).iterations):
        return
    command = [sys.executable, "train.py", *(["--resume", where] if resumed else [*flags, "--out", where])]
    root, variables = Path(__file__).parent, os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)
    if done.returncode == 1 and re.search(NOT_FINITE, done.stdout, re.MULTILINE):
        (folder / "stopped.txt").write_text(done.stdout)
    elif done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def summary(folder: Path, metric: str = "success") -> dict[str, float]:
    """Return the results of a run, over its evaluations after training began: the columns of results.csv."""
    metrics, config = read(folder, "metrics.csv"), config_of(folder)
    values = metrics[f"eval_{metric}"][1:]
    values = values[~np.isnan(values)]
    missed = -(-config.iterations // config.eval_every) - len(values)
    values = np.append(values, np.full(missed, 0.0 if metric == "success" else min(values, default=np.nan)))
    invalid = np.mean(metrics["invalid"][1:][-10:]) if len(metrics["invalid"]) > 1 else 1.0
    found = {"last": values[-3:].mean(), "final": values[-1], "peak": values.max()}
    found |= {"episodes": metrics["episodes"][-1], "updates": metrics["step"][-1], "invalid": invalid}
    diverged = int((folder / "stopped.txt").exists() or invalid > 0.5)
    return found | {"diverged": diverged, "wall_s": metrics["wall_s"][-1]}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table, one row per arm, from the summaries of its runs."""
    (first, *_), last = results, {arm: np.array([run["last"] for run in runs]) for arm, runs in results.items()}
    lines = [f"| arm | last 3 evaluations, per seed | mean | - {label(first)} | peak | updates | diverged | seconds |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for arm, runs in results.items():
        half = difference = ""
        if len(runs) > 1:
            half = f" ± {stats.t.ppf(0.975, len(runs) - 1) * stats.sem(last[arm]):.3f}"
        if len(runs) > 1 and arm != first:
            found = stats.bootstrap((last[arm], last[first]), _difference, method="percentile", rng=0)
            difference = f"{found.confidence_interval.low:+.3f} to {found.confidence_interval.high:+.3f}"
        seeds, diverged = " ".join(f"{x:.3f}" for x in last[arm]), sum(run["diverged"] for run in runs)
        peak, updates, seconds = (np.mean([run[name] for run in runs]) for name in ("peak", "updates", "wall_s"))
        lines.append(
            f"| {label(arm)} | {seeds} | {last[arm].mean():.3f}{half} | {difference} | {peak:.3f} | {updates:.0f} "
            f"| {diverged} of {len(runs)} | {seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _difference(values: np.ndarray, others: np.ndarray, axis: int) -> np.ndarray:
    return values.mean(axis) - others.mean(axis)


def figure(path: Path, runs: dict[str, list[dict]], title: str, known: dict[str, float], metric: str) -> None:
    """Draw the metric on held-out seeds against episodes: the mean over seeds, and each seed as a thin line."""
    lines, others, column = [], cycle(OTHER_COLORS), f"eval_{metric}"
    for arm, tables in runs.items():
        color, x = METHOD_COLORS.get(arm) or next(others), max((table["episodes"] for table in tables), key=len)
        lines += [(table, column, {"color": color, "alpha": 0.3, "linewidth": 1}) for table in tables]
        there = [~np.isnan(table[column]) for table in tables]
        seeds = [np.interp(x, t["episodes"][k], t[column][k]) for t, k in zip(tables, there, strict=True)]
        style = {"color": color, "linewidth": 2.2, "label": label(arm)}
        lines.append(({"episodes": x, column: np.mean(seeds, axis=0)}, column, style))
    plot(path, title, f"{metric} on held-out seeds", lines, known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="frozenlake", choices=list(ENVS))
    parser.add_argument("--exhibit", default="main", choices=list(exhibits("tiny", "frozenlake")))
    parser.add_argument("--arm", action="append", help="a method and flags of train.py; may be repeated")
    parser.add_argument("--metric", default="success", help="or one of the task's own: score")
    parser.add_argument("--preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, help="default: out/compare-<env>-<exhibit>")
    args, flags = parser.parse_known_args()  # flags that are not ours go to every run
    arms = args.arm or exhibits(args.preset, args.env)[args.exhibit]
    out = args.out or Path(f"out/compare-{args.env}-{'own' if args.arm else args.exhibit}")
    jobs = {(arm, seed): folder_of(out, arm, seed) for seed in args.seeds for arm in arms}
    known = ("success", *ENVS[args.env]().metrics)
    if args.metric not in known:
        parser.error(f"--metric is {args.metric}, but must be one of {', '.join(known)} with --env {args.env}")
    flags = ["--preset", args.preset, *flags]
    try:
        for job, folder in jobs.items():  # before hours of runs
            checked(args.env, *job, folder, flags)
    except ValueError as error:
        parser.error(str(error))
    out.mkdir(parents=True, exist_ok=True)
    print(f"{len(jobs)} runs, {args.jobs} at a time, written to {out}", flush=True)
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with ThreadPoolExecutor(args.jobs) as pool:
        done = pool.map(lambda job: run(args.env, job[0], job[1], jobs[job], flags), jobs)
        for (arm, seed), _ in zip(jobs, done, strict=True):
            found = summary(jobs[arm, seed], args.metric)
            results[arm].append({"arm": arm, "seed": seed} | found)
            text = f"{label(arm)}, seed {seed}: {args.metric} {found['last']:.3f} in {found['wall_s']:.0f} s"
            print(f"{text}, {jobs[arm, seed]}", flush=True)

    with open(out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, results[arms[0]][0])
        writer.writeheader()
        writer.writerows(row for rows in results.values() for row in rows)
    config = config_of(jobs[arms[0], args.seeds[0]])
    runs = {arm: [read(jobs[arm, seed], "metrics.csv") for seed in args.seeds] for arm in arms}
    title = f"{config.task()}, preset {config.preset}, seeds {' '.join(map(str, args.seeds))}"
    figure(out / "figure.png", runs, title, baselines(config) if args.metric == "success" else {}, args.metric)
    (out / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
