"""What a refresh, a draw and an addition cost at the paper's buffer size, beside the alternatives.

Paper: section 3.5, and appendix A.1, which gives 50 to 100 ms for a refresh at N = 100,000.

Median milliseconds over rounds in which the columns take turns, after a warm-up. All hold the same priorities (of
0/1 rewards, aged as if 128 episodes came every three steps). A ratio above 1: ours is slower. What is included:

- refresh. Ours: `ReplayBuffer.refresh`: ages, decay, power, floor, checks, all sums. bare: the arithmetic
  `(base * np.exp(-age / tau)) ** alpha` alone. cpprb: base * exp(-age / tau) in numpy, then `update_priorities` of
  all indexes (power, sum and minimum tree, in C++ and float32). Python: entry by entry into the tree (one round).
- draw, indices. Ours and Python: the tree's stratified draw alone. cpprb: `sample`, which cannot leave out the
  importance weights and a gather of the one int64 an entry that it stores here.
- draw, batch. Episodes with importance weights from all: `ReplayBuffer.sample` (which adds P(i) and ages) and
  `importance_weights`; the peers draw indices as above and look the episodes up in a list.
- add. Ours copies 128 episodes into a full buffer after choosing whom to evict. cpprb: `add` of 128 int64 with
  priorities. Python: sets 128 leaves, stores nothing. The peers only ever evict the oldest, in both rows.

    python benchmarks/replay.py        ten seconds
"""

import math
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from cpprb import PrioritizedReplayBuffer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from freshper.buffer import ReplayBuffer
from freshper.episode import Episode
from freshper.is_weights import importance_weights
from freshper.priority import exponential_decay, reward_priority
from freshper.tiny import keep_freed_memory

BATCH, ROUNDS, ALPHA, BETA, TAU, EPSILON = 128, 200, 0.6, 0.4, 500.0, 0.01
MILLISECONDS = {"refresh": 3.0, "add, fifo": 2.0, "add, lowest_priority": 2.0}  # targets
RATIOS = {("refresh", "bare"): 2.0, ("draw, indices", "cpprb"): 1.0, ("draw, batch", "cpprb"): 1.0}


class PlainTree:
    """The sum tree of textbooks, in plain Python."""

    def __init__(self, capacity):
        self.size = 1 << (capacity - 1).bit_length()
        self.sums = [0.0] * (2 * self.size)

    def set(self, i, value):
        node = self.size + i
        self.sums[node] = value
        while node > 1:
            node //= 2
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]

    def find(self, mass):
        node = 1
        while node < self.size:
            node *= 2
            if mass >= self.sums[node]:
                mass -= self.sums[node]
                node += 1
        return node - self.size

    def stratified_sample(self, n, rng):
        return [self.find((k + u) / n * self.sums[1]) for k, u in enumerate(rng.random(n).tolist())]


def milliseconds(rounds, **calls):
    """Median time of each call; they take turns, so that noise meets all alike. A tenth more rounds to warm up."""
    times = {name: [] for name in calls}
    for _ in range(rounds + rounds // 10):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: float(np.median(t[-rounds:])) for name, t in times.items()}


def measure(n):
    """The table for N = n: row -> column -> milliseconds."""
    base = reward_priority(np.random.default_rng(0).random(n) < 0.3, EPSILON)
    steps = np.arange(n) // BATCH * 3
    age, now = steps[-1] - steps, int(steps[-1])
    episode = Episode(
        np.zeros(8, np.int32),
        np.ones(8, bool),
        np.zeros(8, np.float32),
        1.0,
        np.ones(1, np.float32),
    )
    new = [episode] * BATCH
    fifo, lowest = (
        ReplayBuffer(n, ALPHA, partial(exponential_decay, tau=TAU), e)
        for e in ("fifo", "lowest_priority")
    )
    for buffer in (fifo, lowest):
        for k in range(0, n, BATCH):
            buffer.add(new[: n - k], base[k : k + BATCH], int(steps[k]))
        buffer.refresh(now)
    cpprb, slots = (
        PrioritizedReplayBuffer(n, {"slot": {"dtype": np.int64}}, alpha=ALPHA, eps=0.0),
        np.arange(n),
    )
    cpprb.add(slot=slots, priorities=base)
    plain, held = PlainTree(n), list(fifo.episodes)
    entries = list(zip(range(n), base.tolist(), age.tolist(), strict=True))

    def plain_set(count):
        for i, p, delta in entries[:count]:
            plain.set(i, (p * math.exp(-delta / TAU)) ** ALPHA)

    def plain_batch():
        indices = plain_draw()
        p = np.array([plain.sums[plain.size + i] for i in indices]) / plain.sums[1]
        return [held[i] for i in indices], importance_weights(p, n, BETA)

    ours_draw, plain_draw = (
        partial(tree.stratified_sample, BATCH, fifo.rng) for tree in (fifo.tree, plain)
    )
    cpprb_draw, plain_add = partial(cpprb.sample, BATCH, beta=BETA), partial(plain_set, BATCH)
    cpprb_add = partial(cpprb.add, slot=slots[:BATCH], priorities=base[:BATCH])
    table = {}
    table["refresh"] = milliseconds(1, Python=partial(plain_set, n)) | milliseconds(
        ROUNDS // 4,
        ours=partial(fifo.refresh, now),
        bare=lambda: (base * np.exp(-age / TAU)) ** ALPHA,
        cpprb=lambda: cpprb.update_priorities(slots, base * np.exp(-age / TAU)),
    )
    leaves, drawn = (
        fifo.tree[slots],
        cpprb.sample(BATCH, beta=1.0),
    )  # where beta = 1 a weight is min p / p_i
    assert np.allclose(leaves, plain.sums[plain.size : plain.size + n])
    assert np.allclose(drawn["weights"], leaves.min() / leaves[drawn["indexes"]], rtol=1e-3)
    table["draw, indices"] = milliseconds(
        ROUNDS, ours=ours_draw, cpprb=cpprb_draw, Python=plain_draw
    )
    table["draw, batch"] = milliseconds(
        ROUNDS,
        ours=lambda: importance_weights(fifo.sample(BATCH).probabilities, n, BETA),
        cpprb=lambda: [held[i] for i in cpprb_draw()["indexes"].tolist()],
        Python=plain_batch,
    )
    for buffer in (fifo, lowest):
        ours_add = partial(buffer.add, new, base[:BATCH], now)
        table[f"add, {buffer.eviction}"] = milliseconds(
            ROUNDS, ours=ours_add, cpprb=cpprb_add, Python=plain_add
        )
    return table


def show(n, table):
    """Print the table and return one verdict a target."""
    print(
        f"N = {n:<8,} of {BATCH:<8}     ours    bare   cpprb  Python     ours / bare, cpprb, Python"
    )
    for name, times in table.items():
        ours, *others = (
            times.get(column, math.nan) for column in ("ours", "bare", "cpprb", "Python")
        )
        cells = "".join(f"{t:8.3f}" for t in (ours, *others)) + "".join(
            f"{ours / t:9.3g}" for t in others
        )
        print(f"{name:25}{cells.replace('nan', '  -')}")
    print()
    checks = [(name, table[name]["ours"], "ms", limit) for name, limit in MILLISECONDS.items()]
    checks += [
        (row, table[row]["ours"] / table[row][to], f"x {to}", limit)
        for (row, to), limit in RATIOS.items()
    ]
    for name, value, unit, limit in checks:
        yield f"{'met   ' if value <= limit else 'MISSED'}  {n:7,}  {name}: {value:.2f} <= {limit:g} {unit}"


if __name__ == "__main__":
    keep_freed_memory()  # as train.py does
    print(
        "\n".join([verdict for size in (50_000, 100_000) for verdict in show(size, measure(size))])
    )
