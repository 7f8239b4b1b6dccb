"""Methods side by side: every method with every seed through the real train.py, one figure, one table.

    python compare.py --env frozenlake --seeds 0 1 2            on-policy, Standard PER and FreshPER
    python compare.py --env frozenlake --arm "freshper --tau 5" --arm "freshper --tau 500" --seeds 0 1 2

Paper: Table main_results, Fig. llm_main and vlm_main. Runs that are finished already are not repeated. In the
folder (--out) it leaves one folder a run, `results.csv` (one row a run), `table.md` and `figure.png`.

The table gives the mean of the last three held-out evaluations, which is the honest number, beside the peak,
which the paper reports; +- is the standard deviation over seeds. All methods see the same held-out seeds.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.figure
import numpy as np
from tqdm import tqdm

from freshper.config import Config
from freshper.report import baselines

ROOT = Path(__file__).parent
COLORS = ("#4285F4", "#FBBC04", "#EA4335", "#34A853", "#FF9800", "#9E9E9E", "#7B1FA2", "#00838F")  # the paper's first


def folder_of(out: Path, arm: str, seed: int) -> Path:
    return out / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', arm).strip('-')}-seed{seed}"


def finished(folder: Path) -> bool:
    """Whether metrics.csv has a row for every iteration."""
    if not (folder / "metrics.csv").is_file():
        return False
    return len(read(folder)["iteration"]) == json.loads((folder / "config.json").read_text())["iterations"]


def run(env: str, arm: str, seed: int, folder: Path, flags: list[str]) -> None:
    """One training run in a process of its own, or the rest of one that was stopped. Raises RuntimeError with its
    last words where it fails."""
    if finished(folder):
        return
    method, *arm_flags = arm.split()
    command = [sys.executable, "train.py", "--env", env, "--method", method, *arm_flags, *flags]
    resumed = (folder / "config.json").is_file()
    command += ["--seed", str(seed), "--resume" if resumed else "--out", str(folder.resolve())]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def read(folder: Path) -> dict[str, np.ndarray]:
    """Columns of a run's metrics.csv as float arrays, NaN where empty."""
    with open(folder / "metrics.csv", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        names = reader.fieldnames
    return {name: np.array([float(r[name] or "nan") for r in rows]) for name in names}


def summary(metrics: dict[str, np.ndarray]) -> dict[str, float]:
    evaluations = metrics["eval_success"][~np.isnan(metrics["eval_success"])]
    return {
        "last": float(evaluations[-3:].mean()),
        "final": float(evaluations[-1]),
        "peak": float(evaluations.max()),
        "episodes": int(metrics["episodes"][-1]),
        "updates": int(metrics["step"][-1]),
        "invalid": float(metrics["invalid"][-10:].mean()),
        "wall_s": float(metrics["wall_s"][-1]),
    }


def table(results: list[dict], arms: list[str]) -> Iterator[str]:
    """Markdown, one row an arm."""
    yield "| arm | seeds | last 3 evaluations, per seed | mean ± sd | peak | updates | unreadable | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for arm in arms:
        rows = [r for r in results if r["arm"] == arm]
        last = np.array([r["last"] for r in rows])
        mean = {name: np.mean([r[name] for r in rows]) for name in ("peak", "updates", "invalid", "wall_s")}
        each = " ".join(f"{x:.3f}" for x in last)
        yield (
            f"| {arm} | {len(rows)} | {each} | {last.mean():.3f} ± {last.std(ddof=1):.3f} "
            f"| {mean['peak']:.3f} | {mean['updates']:.0f} | {mean['invalid']:.1%} | {mean['wall_s']:.0f} |"
        )


def figure(out: Path, arms: list[str], seeds: list[int], title: str, baselines: dict[str, float]) -> None:
    """Held-out success against episodes: mean over seeds, each seed as a thin line, exact baselines."""
    page = matplotlib.figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = page.subplots()
    for arm, color in zip(arms, COLORS, strict=False):
        curves = []
        for seed in seeds:
            m = read(folder_of(out, arm, seed))
            done = ~np.isnan(m["eval_success"])
            axes.plot(m["episodes"][done], m["eval_success"][done], color=color, alpha=0.25, linewidth=1)
            curves.append((m["episodes"][done], m["eval_success"][done]))
        x = np.unique(np.concatenate([episodes for episodes, _ in curves]))
        mean = np.mean([np.interp(x, *curve) for curve in curves], axis=0)
        axes.plot(x, mean, color=color, linewidth=2.2, label=arm)
    for name, style in (("optimal", "--"), ("random", ":")):
        if name in baselines:
            axes.axhline(baselines[name], color="black", linestyle=style, linewidth=1)
            label = f"{name} player: {baselines[name]:.3f}, exact"
            axes.text(0.01, baselines[name] + 0.01, label, fontsize=8, transform=axes.get_yaxis_transform())
    axes.set(xlabel="episodes", ylabel="success on held-out seeds", title=title, ylim=(0, 1.06))
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0.0, 0.93))
    page.savefig(out / "figure.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="frozenlake")
    parser.add_argument("--arm", action="append", help="a method and flags of train.py; may be repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--out", type=Path, help="default: out/compare-<env>")
    args, flags = parser.parse_known_args()  # flags that are not ours go to every run
    arms = args.arm or ["on_policy", "per", "freshper"]
    out = args.out or Path(f"out/compare-{args.env}")
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(arm, seed) for seed in args.seeds for arm in arms]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run, args.env, a, s, folder_of(out, a, s), flags) for a, s in jobs]
        for future in tqdm(futures, unit="run"):
            future.result()

    results = [{"arm": a, "seed": s, **summary(read(folder_of(out, a, s)))} for a, s in jobs]
    with open(out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, results[0])
        writer.writeheader()
        writer.writerows(results)
    config = Config(**json.loads((folder_of(out, *jobs[0]) / "config.json").read_text()))
    title = f"{config.task()}, preset {config.preset}, {len(args.seeds)} seeds"
    figure(out, arms, args.seeds, title, baselines(config))
    text = "\n".join(table(results, arms)) + "\n"
    (out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
