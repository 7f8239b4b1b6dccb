"""What a refresh, a draw and an addition cost at the paper's buffer size, beside the alternatives.

Paper: section 3.5, and appendix A.1, which gives 50 to 100 ms for a refresh at N = 100,000.

Median milliseconds over rounds in which the columns take turns, after a warm-up. All hold the same
priorities (of 0/1 rewards, aged as if 128 episodes came every three steps). A ratio above 1: ours
is slower. What is included:

- refresh. Ours: `ReplayBuffer.refresh`: ages, decay, power, floor, checks, all sums. bare: the
  arithmetic `(base * np.exp(-age / tau)) ** alpha` alone. cpprb: base * exp(-age / tau) in numpy,
  then `update_priorities` of all indexes (power, sum and minimum tree, in C++ and float32). Python:
  entry by entry into the tree (one round).
- draw, indices. Ours and Python: the tree's stratified draw alone. cpprb: `sample`, which cannot
  leave out the importance weights and a gather of the one int64 an entry that it stores here.
- draw, batch. Episodes with importance weights from all: `ReplayBuffer.sample` (which adds P(i) and
  ages) and `importance_weights`. The peers draw indices as above and look the episodes up in a
  list.
- add. Ours stores 128 episodes in a full buffer after choosing which to evict. cpprb: `add` of
  128 int64 with priorities. Python: sets 128 leaves, stores nothing. The peers only ever evict the
  oldest, in both rows.

    python benchmarks/replay.py        ten seconds
"""

import math
import time
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
ALPHA = 0.6
BETA = 0.4
TAU = 500.0
EPSILON = 0.01
ROWS = ("refresh", "draw, indices", "draw, batch", "add, fifo", "add, lowest_priority")
# Targets: milliseconds of ours, and its ratio to a column.
MILLISECONDS = {"refresh": 3.0, "add, fifo": 2.0, "add, lowest_priority": 2.0}
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
        offsets = rng.random(n).tolist()
        return [self.find((k + offset) / n * self.sums[1]) for k, offset in enumerate(offsets)]


def milliseconds(calls):
    """Return the median time of each call. They take turns, so that noise meets all alike. A tenth
    more rounds warm up. What takes more than 100 ms runs once."""
    times = {name: [] for name in calls}
    for _ in range(ROUNDS + ROUNDS // 10):
        for name, call in calls.items():
            if times[name] and times[name][-1] > 100:
                continue
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))

    return {name: float(np.median(times[name][-ROUNDS:])) for name in calls}


def full_buffer(base, steps, eviction):
    """Return our buffer, full of one episode and refreshed at the last step."""
    buffer = ReplayBuffer(len(base), ALPHA, partial(exponential_decay, tau=TAU), eviction)
    zeros = np.zeros(8, np.float32)
    episode = Episode(zeros.astype(np.int32), np.ones(8, bool), zeros, 1.0, zeros[:1])

    for start in range(0, len(base), BATCH):
        priorities = base[start : start + BATCH]
        buffer.add([episode] * len(priorities), priorities, int(steps[start]))
    buffer.refresh(buffer.now)
    return buffer


def our_calls(base, steps):
    """Return the call of each row for our buffer."""
    fifo = full_buffer(base, steps, "fifo")
    lowest = full_buffer(base, steps, "lowest_priority")
    new = fifo.episodes[:BATCH]

    def draw_batch():
        importance_weights(fifo.sample(BATCH).probabilities, BETA)

    return {
        "refresh": partial(fifo.refresh, fifo.now),
        "draw, indices": partial(fifo.tree.stratified_sample, BATCH, fifo.rng),
        "draw, batch": draw_batch,
        "add, fifo": partial(fifo.add, new, base[:BATCH], fifo.now),
        "add, lowest_priority": partial(lowest.add, new, base[:BATCH], fifo.now),
    }


def cpprb_calls(base, age, leaves):
    """Return the call of each row for cpprb, which stores the number of a slot as an episode."""
    slots = np.arange(len(base))
    fields = {"slot": {"dtype": np.int64}}
    buffer = PrioritizedReplayBuffer(len(base), fields, alpha=ALPHA, eps=0.0)
    buffer.add(slot=slots, priorities=base)
    draw = partial(buffer.sample, BATCH, beta=BETA)
    add = partial(buffer.add, slot=slots[:BATCH], priorities=base[:BATCH])
    episodes = slots.tolist()

    def refresh():
        buffer.update_priorities(slots, base * np.exp(-age / TAU))

    def draw_batch():
        return [episodes[k] for k in draw()["indexes"].tolist()]

    # Its priorities are ours: at beta = 1 a weight is min p / p_i.
    refresh()
    drawn = buffer.sample(BATCH, beta=1.0)
    assert np.allclose(drawn["weights"], leaves.min() / leaves[drawn["indexes"]], rtol=1e-3)
    return dict(zip(ROWS, (refresh, draw, draw_batch, add, add), strict=True))


def plain_calls(base, age, leaves):
    """Return the call of each row for the tree in plain Python."""
    n = len(base)
    tree = PlainTree(n)
    entries = list(zip(range(n), base.tolist(), age.tolist(), strict=True))
    draw = partial(tree.stratified_sample, BATCH, np.random.default_rng(0))

    def refresh(count=n):
        for k, priority, delta in entries[:count]:
            tree.set(k, (priority * math.exp(-delta / TAU)) ** ALPHA)

    def draw_batch():
        indices = draw()
        drawn = np.array([tree.sums[tree.size + k] for k in indices])
        importance_weights(drawn / tree.sums[1], BETA)
        return [entries[k] for k in indices]

    refresh()
    assert np.allclose(leaves, tree.sums[tree.size : tree.size + n])
    add = partial(refresh, BATCH)
    return dict(zip(ROWS, (refresh, draw, draw_batch, add, add), strict=True))


def measure(n):
    """Return the table for N = n: row -> column -> milliseconds."""
    base = reward_priority(np.random.default_rng(0).random(n) < 0.3, EPSILON)
    steps = np.arange(n) // BATCH * 3
    age = steps[-1] - steps

    def bare():
        return (base * np.exp(-age / TAU)) ** ALPHA

    columns = {
        "ours": our_calls(base, steps),
        "bare": {"refresh": bare},
        "cpprb": cpprb_calls(base, age, bare()),
        "Python": plain_calls(base, age, bare()),
    }
    table = {}
    for row in ROWS:
        calls = {name: column[row] for name, column in columns.items() if row in column}
        table[row] = milliseconds(calls)
    return table


def show(n, table):
    """Print the table and a verdict on each target."""
    columns = list(table["refresh"])
    names = "".join(f"{name:>8}" for name in columns)
    print(f"N = {n:<8,} of {BATCH:<8}{names}     ours / bare, cpprb, Python")
    for row in ROWS:
        times = np.array([table[row].get(column, np.nan) for column in columns])
        cells = "".join(f"{value:8.3f}" for value in times)
        cells += "".join(f"{value:9.3g}" for value in times[0] / times[1:])
        print(f"{row:25}{cells.replace('nan', '  -')}")
    print()

    for row, limit in MILLISECONDS.items():
        value = table[row]["ours"]
        common.print_verdict(value <= limit, f"{n:7,}  {row}: {value:.2f} <= {limit:g} ms")
    for (row, column), limit in RATIOS.items():
        value = table[row]["ours"] / table[row][column]
        text = f"{n:7,}  {row}: {value:.2f} <= {limit:g} x {column}"
        common.print_verdict(value <= limit, text)
    print()


if __name__ == "__main__":
    # train.py keeps freed memory, too.
    keep_freed_memory()
    for size in (50_000, 100_000):
        show(size, measure(size))
