"""What a refresh, a draw and an addition cost at the paper's buffer size, beside the alternatives.

    python benchmarks/replay.py        ten seconds

Paper: section 3.5, and appendix A.1, which gives 50 to 100 ms for a refresh at N = 100,000.

Median milliseconds over rounds in which the columns take turns, after a warm-up. All hold the same
priorities (of 0/1 rewards, aged as if 128 episodes came every three steps). A ratio above 1: ours
is slower.

- refresh. Ours: ages, decay, power, floor, checks, all sums. bare: only the arithmetic
  `(base * np.exp(-age / tau)) ** alpha`. cpprb: `update_priorities` of all (power, sum and minimum
  tree, in C++ and float32).
- draw: 128 episodes with importance weights. cpprb's episodes lie in a list.
- add: 128 episodes into a full buffer. cpprb stores a number for each and evicts the oldest only.
"""

import time
from collections.abc import Callable
from functools import partial

import common
import numpy as np
from cpprb import PrioritizedReplayBuffer

from freshper.buffer import ReplayBuffer
from freshper.episode import Episode
from freshper.is_weights import importance_weights
from freshper.priority import exponential_decay, reward_priority
from freshper.tiny import keep_freed_memory

BATCH = 128
ROUNDS = 200
WARM_UP = 20  # rounds
ALPHA = 0.6
BETA = 0.4
TAU = 500.0
# Targets: the ratio of ours to cpprb's. A draw is a third of a millisecond of an iteration of more
# than a second, so NumPy may take twice the time of C++ there.
TARGETS = {"refresh": 1.0, "draw": 2.0}


def milliseconds(calls: dict[str, Callable]) -> dict[str, float]:
    """Return the median time of each call. They take turns, so that noise meets all alike."""
    times: dict[str, list] = {name: [] for name in calls}
    for _ in range(WARM_UP + ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: float(np.median(values[WARM_UP:])) for name, values in times.items()}


def full_buffer(base: np.ndarray, steps: np.ndarray, eviction: str) -> ReplayBuffer:
    """Return our buffer, full of one episode and refreshed at the last step."""
    buffer = ReplayBuffer(len(base), ALPHA, partial(exponential_decay, tau=TAU), eviction)
    zeros = np.zeros(8, np.float32)
    episode = Episode(zeros.astype(np.int32), np.ones(8, bool), zeros, 1.0, zeros[:1])
    for start in range(0, len(base), BATCH):
        priorities = base[start : start + BATCH]
        buffer.add([episode] * len(priorities), priorities, int(steps[start]))
    buffer.refresh(buffer.now)
    return buffer


def measure(n: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each row and column at N = n."""
    base = reward_priority(np.random.default_rng(0).random(n) < 0.3, epsilon=0.01)
    steps = np.arange(n) // BATCH * 3
    age = steps[-1] - steps
    fifo = full_buffer(base, steps, "fifo")
    lowest = full_buffer(base, steps, "lowest_priority")
    new = [fifo.episodes[:BATCH], base[:BATCH], fifo.now]

    slots = np.arange(n)
    episodes = slots.tolist()
    peer = PrioritizedReplayBuffer(n, {"slot": {"dtype": np.int64}}, alpha=ALPHA, eps=0.0)
    peer.add(slot=slots, priorities=base)

    def bare() -> np.ndarray:
        return (base * np.exp(-age / TAU)) ** ALPHA

    def refresh_peer() -> None:
        peer.update_priorities(slots, base * np.exp(-age / TAU))

    def draw() -> None:
        importance_weights(fifo.sample(BATCH).probabilities, BETA)

    def draw_from_peer() -> None:
        drawn = peer.sample(BATCH, beta=BETA)
        [episodes[k] for k in drawn["indexes"].tolist()]

    # Its priorities are ours: at beta = 1 a weight is min p / p_i.
    refresh_peer()
    drawn = peer.sample(BATCH, beta=1.0)
    leaves = bare()
    assert np.allclose(drawn["weights"], leaves.min() / leaves[drawn["indexes"]], rtol=1e-3)

    add_to_peer = partial(peer.add, slot=slots[:BATCH], priorities=base[:BATCH])
    refresh = partial(fifo.refresh, fifo.now)
    rows = {
        "refresh": {"ours": refresh, "bare": bare, "cpprb": refresh_peer},
        "draw": {"ours": draw, "cpprb": draw_from_peer},
        "add, fifo": {"ours": partial(fifo.add, *new), "cpprb": add_to_peer},
        "add, lowest_priority": {"ours": partial(lowest.add, *new), "cpprb": add_to_peer},
    }
    return {row: milliseconds(calls) for row, calls in rows.items()}


def main() -> None:
    keep_freed_memory()  # as train.py does
    for n in (50_000, 100_000):
        print(f"N = {n:,}, {BATCH} of them; milliseconds")
        table = measure(n)
        for row, times in table.items():
            cells = [f"{name} {time:.3f}" for name, time in times.items()]
            print(f"{row:22}{', '.join(cells)}")
        for row, limit in TARGETS.items():
            ratio = table[row]["ours"] / table[row]["cpprb"]
            common.print_verdict(ratio <= limit, f"{row}: {ratio:.2f} <= {limit:g} x cpprb")


if __name__ == "__main__":
    main()
