"""When does replay pay? Time to a success rate, if an episode costs more than it does here.

Paper: section 1 ("multi-turn environment interactions ... expensive"), Fig. 2; Arnal et al., arXiv 2604.08706.

    python compare.py --env frozenlake --exhibit matched --seeds 111 112 113 114 115
    python benchmarks/replay_pays.py out/compare-frozenlake-matched

Time of an iteration: the median of its measured phases, plus a cost for each episode, as if the environment were
slower by that much and episodes came one at a time. Success: the mean over seeds of held-out evaluations, interpolated.
Prints a table of minutes and draws them against the cost.
"""

import argparse
import sys
from pathlib import Path

import matplotlib.figure
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import folder_of, label
from freshper.diagnostics import read

ARMS = ("freshper", "on_policy", "on_policy --ppo_epochs 3")
PHASES = ("rollout_s", "logprobs_s", "update_s", "replay_s", "sync_s")


def curve(folder: Path, arm: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Return episodes [n] and mean success [n] at the evaluations of an arm's runs, and median seconds per episode."""
    tables = [read(path, "metrics.csv") for path in sorted(folder.glob(f"{folder_of(Path(), arm, 0).name[:-1]}*"))]
    evaluated = ~np.isnan(tables[0]["eval_success"])
    success = np.mean([table["eval_success"][evaluated] for table in tables], axis=0)
    seconds = np.median(np.concatenate([sum(np.nan_to_num(table[name][1:]) for name in PHASES) for table in tables]))
    return tables[0]["episodes"][evaluated], success, seconds / tables[0]["episodes"][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a comparison")
    parser.add_argument("--success", type=float, default=0.5)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    costs = np.array([0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0])  # seconds per episode
    print(f"minutes to a held-out success of {args.success:g}, by seconds that an episode costs beyond those measured")
    print("| arm | episodes | seconds per episode, measured | " + " | ".join(f"{cost:g} s" for cost in costs) + " |")
    print("|---" * (3 + len(costs)) + "|")
    axes = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained").subplots()
    for arm in ARMS:
        episodes, success, seconds = curve(args.folder, arm)
        reached = np.flatnonzero(success >= args.success)
        if not len(reached):
            print(f"| {label(arm)} | not within {episodes[-1]:.0f} | {seconds:.4f} |" + " |" * len(costs))
            continue
        k = reached[0]
        needed = np.interp(args.success, success[k - 1 : k + 1], episodes[k - 1 : k + 1])
        minutes = needed * (seconds + costs) / 60
        row = " | ".join(f"{x:.2f}" for x in minutes)
        print(f"| {label(arm)} | {needed:.0f} | {seconds:.4f} | {row} |")
        axes.plot(costs, minutes, marker="o", label=label(arm))
    axes.set(yscale="log", xlabel="seconds that an episode costs more", ylabel="minutes")
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_title(f"Time to a held-out success of {args.success:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    if args.figure:
        axes.figure.savefig(args.figure, dpi=100)


if __name__ == "__main__":
    main()
