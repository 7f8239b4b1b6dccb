r"""When does replay pay? Time to a held-out success, if an episode costs more than it does here.

Paper: section 1 and Fig. 2 (multi-turn episodes are expensive); beside Arnal et al., arXiv
2604.08706.

    python compare.py --env frozenlake --seeds 111 112 113 114 115 --out out/pays --arm freshper \
        --arm "on_policy --ppo_epochs 3" --arm "on_policy --iterations 500"
    python benchmarks/replay_pays.py out/pays

A run needs E episodes until it has the success (interpolated between evaluations), and s seconds
for each: the median over iterations, all phases together. If the environment takes c seconds more
for an episode, the run takes E (s + c). So between two arms the ratio of the times goes from
E2 s2 / (E1 s1) at c = 0 to E2 / E1. If 1 lies between, their lines cross. E2 / E1 is of geometric
means over seeds. Intervals: 95 %, Welch's t on log E, for E alone.
"""

import csv
from pathlib import Path

import common
import matplotlib.figure
import numpy as np

from compare import folder_of, label, welch_interval
from freshper.diagnostics import read

PHASES = ("rollout_s", "logprobs_s", "update_s", "replay_s", "sync_s")
COSTS = np.array([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])  # seconds


def episodes_until(success: float, metrics: dict[str, np.ndarray]) -> float:
    """Return how many episodes a run needs until an evaluation has this success, or NaN."""
    evaluated = ~np.isnan(metrics["eval_success"])
    episodes = metrics["episodes"][evaluated]
    successes = metrics["eval_success"][evaluated]
    if not (successes >= success).any():
        return np.nan

    first = int(np.argmax(successes >= success))
    if first == 0:
        return 0.0
    around = slice(first - 1, first + 1)
    return float(np.interp(success, successes[around], episodes[around]))


def seconds_per_episode(metrics: dict[str, np.ndarray]) -> float:
    """Return the median of what an episode costs in a run, training included."""
    seconds = sum(np.nan_to_num(metrics[name][1:]) for name in PHASES)
    return float(np.median(seconds / np.diff(metrics["episodes"])))


def ratio(e1: np.ndarray, e2: np.ndarray) -> np.ndarray:
    """Return how many times as many episodes e2, [seeds], are as e1, in geometric means, and the
    95 % interval: [3]."""
    x = np.log(e2)
    y = np.log(e1)
    return np.exp([x.mean() - y.mean(), *welch_interval(x, y)])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("folder", type=Path, help="of a comparison that is complete")
    parser.add_argument("--success", type=float, default=0.6)
    args = parser.parse_args()

    arms: dict[str, list] = {}
    for row in csv.DictReader((args.folder / "results.csv").open()):
        folder = folder_of(args.folder, row["arm"], int(row["seed"]))
        arms.setdefault(row["arm"], []).append(read(folder, "metrics.csv"))

    goal = f"{args.success:g}"
    print(f"| arm | episodes until {goal}, per seed | mean | seconds per episode |", end="")
    print(" time, free episodes | time, expensive episodes |\n" + "|---" * 6 + "|")
    axes = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained").subplots()
    first = None
    for arm, tables in arms.items():
        e = np.array([episodes_until(args.success, table) for table in tables])
        s = np.median([seconds_per_episode(table) for table in tables])
        first = first or (e, s)
        times = ratio(first[0], e)

        form = "{:.2f} ({:.2f} to {:.2f})"
        free = form.format(*times * s / first[1])
        expensive = form.format(*times)
        seeds = " ".join(f"{count:.0f}" for count in e)
        cells = (label(arm), seeds, f"{e.mean():.0f}", f"{s:.4f}", free, expensive)
        print(f"| {' | '.join(cells)} |")

        minutes = (s + COSTS) / 60
        (line,) = axes.plot(COSTS, e.mean() * minutes, marker="o", label=label(arm))
        area = {"color": line.get_color(), "alpha": 0.2}
        axes.fill_between(COSTS, e.min() * minutes, e.max() * minutes, **area)

    axes.set(xlim=(0, 1), yscale="log", ylabel="minutes")
    axes.set_xlabel("c: seconds that the environment takes more per episode")
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_title(f"Time until a held-out success of {goal} (mean, and range over seeds)")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(args.folder / "replay_pays.png", dpi=100)


if __name__ == "__main__":
    main()
