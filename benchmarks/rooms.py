"""How many Sokoban rooms a second? Each has a start whose shortest solution is known (envs/sokoban.py).

1,000 rooms of each size on one core, nothing cached, and then the exact baselines of 256 of them. Times are CPU time,
so that a busy machine does not matter.

    python benchmarks/rooms.py        about five seconds
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs.sokoban import Sokoban, random_room

ROOMS, LIMIT = 1000, 10.0  # rooms, and the seconds they may take


def main() -> int:
    slowest = 0.0
    for name, side, boxes in (("simple", 6, 1), ("hard", 8, 2)):
        began = time.process_time()
        for seed in range(ROOMS):
            random_room(seed, side, boxes)
        seconds = time.process_time() - began
        slowest = max(slowest, seconds)
        env, began = Sokoban(side, boxes), time.process_time()
        success = sum(env.baselines(seed)["random"] for seed in range(256)) / 256
        baselines = time.process_time() - began
        print(
            f"{name}: {ROOMS / seconds:.0f} rooms/s, {ROOMS} in {seconds:.1f} s (limit {LIMIT:.0f} s); "
            f"exact baselines of 256 rooms in {baselines:.2f} s: random {success:.4f}"
        )
    return 0 if slowest <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
