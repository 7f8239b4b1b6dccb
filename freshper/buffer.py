"""The replay buffer: whole trajectories, drawn by priority, refreshed by age, on the CPU.

Paper: section 3.5 and appendix A.1; Algorithm 1 lines 4 (add), 6 (refresh), 8 (sample).

    leaf_i = p_i^alpha,   p_i = p_i^base * decay(t - t_i),   P(i) = leaf_i / sum_k leaf_k    (eq. per_sampling)

`decay` is any function of age, such as `partial(exponential_decay, tau=500)`; `None` is Standard PER.
That is all in which the two methods differ here. `decay_by="draws"` makes it a function of how often the episode has
been drawn instead, which is FPER (Ma et al. 2022), the neighbour that section 2 names.

Where the paper leaves a choice (and the authors' code takes another road, see the README):
- a new entry gets its own base priority (Algorithm 1 line 4), not the largest one so far;
- age counts optimizer steps; the caller's `step` is the clock;
- eviction is first-in-first-out (Table replay_config), or `lowest_priority` (appendix A.1): the lowest
  leaf, among equals the oldest. Leaves are as of the last refresh, which Algorithm 1 makes every iteration.

The refresh runs on a thread of its own while the on-policy update trains. One lock makes every method
atomic; a refresh of 100,000 entries holds it for about two milliseconds.
"""

import copy
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np

from freshper.episode import Episode, picture_key
from sumtree import SumTree

ARRAYS = ("base_priorities", "steps", "order", "draws")  # what the buffer knows of an entry, by slot


class Replay(NamedTuple):
    """A drawn batch S of Algorithm 1 line 8."""

    episodes: list[Episode]  # [B]
    indices: np.ndarray  # int64 [B]: slots, for update_base_priorities
    probabilities: np.ndarray  # float64 [B]: P(i), eq. per_sampling
    ages: np.ndarray  # int64 [B]: Delta_i = t - t_i


class ReplayBuffer:
    """Trajectory-level prioritized replay. Its clock t is the caller's: optimizer steps, or iterations.

    Raises ValueError for capacity < 1, alpha outside [0, 1], an unknown eviction, and base priorities that are not
    finite and positive."""

    def __init__(
        self,
        capacity: int,
        alpha: float,
        decay: Callable[[np.ndarray], np.ndarray] | None,
        eviction: str = "fifo",
        seed: int = 0,
        decay_by: Literal["age", "draws"] = "age",
    ):
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
        if eviction not in ("fifo", "lowest_priority"):
            raise ValueError(f"eviction must be fifo or lowest_priority, got {eviction}")
        self.tree = SumTree(capacity)
        self.capacity, self.alpha, self.decay, self.eviction = capacity, alpha, decay, eviction
        self.decay_by = decay_by
        self.episodes: list[Episode] = []  # by slot; slots 0..len-1 are in use
        self.base_priorities = np.zeros(capacity)
        self.steps = np.zeros(capacity, dtype=np.int64)  # t_i
        self.order = np.zeros(capacity, dtype=np.int64)  # how many episodes had been added before this one
        self.draws = np.zeros(capacity, dtype=np.int64)  # how often it was drawn
        self.added = 0
        self.now = 0  # t of the last refresh or addition
        self.rng = np.random.default_rng(seed)
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="refresh")
        self._images: weakref.WeakValueDictionary[bytes, np.ndarray] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        """N, the number of episodes held."""
        return len(self.episodes)

    def add(self, episodes: list[Episode], base_priorities: np.ndarray, step: int) -> None:
        """Line 4: store episodes collected at t_i = `step`, at age 0, evicting when full.

        The buffer keeps copies of its own: pictures that it already holds are shared.
        """
        base_priorities = np.asarray(base_priorities, dtype=np.float64)
        if len(episodes) > self.capacity or len(episodes) != len(base_priorities):
            raise ValueError(f"{len(episodes)} episodes, {len(base_priorities)} priorities, capacity {self.capacity}")
        self._check(base_priorities)
        with self._lock:
            slots = self._free_slots(len(episodes))
            for slot, episode in zip(slots.tolist(), episodes, strict=True):
                stored = copy.copy(episode)
                stored.images = [self._shared(image) for image in episode.images]
                stored.step = step
                if slot == len(self.episodes):
                    self.episodes.append(stored)
                else:
                    self.episodes[slot] = stored
            self.base_priorities[slots] = base_priorities
            self.steps[slots] = step
            self.draws[slots] = 0
            self.order[slots] = self.added + np.arange(len(slots))
            self.added += len(slots)
            self.now = max(self.now, step)
            self.tree.set(slots, self._leaves(slots))

    def refresh(self, step: int) -> None:
        """Line 6, eq. fresh_priority: p_i <- p_i^base * decay(step - t_i) for all i; rebuilds the tree. O(N)."""
        with self._lock:
            self.now = max(self.now, step)  # a refresh that comes late must not turn the clock back
            self.tree.fill(self._leaves(slice(0, len(self))))

    def refresh_async(self, step: int) -> Future:
        """`refresh` on the buffer's own thread ("async on CPU"). `.result()` waits and passes errors on."""
        return self._thread.submit(self.refresh, step)

    def sample(self, batch_size: int, step: int = 0) -> Replay:
        """Line 8: a stratified draw with P(i) ~ p_i^alpha. Raises ValueError where the buffer is empty. `step` is the
        clock, if it has moved on since the last refresh: the ages returned are as of then."""
        with self._lock:
            indices = self.tree.stratified_sample(batch_size, self.rng)
            probabilities = self.tree[indices] / self.tree.total()
            np.add.at(self.draws, indices, 1)  # counts in P(i) from the next refresh on
            episodes = list(map(self.episodes.__getitem__, indices.tolist()))
            return Replay(episodes, indices, probabilities, max(step, self.now) - self.steps[indices])

    def update_base_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Section 3.5, "Priority Update": for |advantage| or |TD error| priorities, after a training step. Those that
        are what they were leave their leaves as of the last refresh."""
        self._check(priorities)
        with self._lock:
            changed = self.base_priorities[indices] != priorities
            indices = indices[changed]
            self.base_priorities[indices] = np.asarray(priorities)[changed]
            self.tree.set(indices, self._leaves(indices))

    def newest(self, n: int) -> list[Episode]:
        """The last n episodes added, in that order."""
        with self._lock:
            return [self.episodes[i] for i in np.argsort(self.order[: len(self)])[-n:]]

    def ages(self) -> np.ndarray:
        """Delta_i of every entry at the last refresh, in steps of the clock, int64 [N]."""
        with self._lock:
            return self.now - self.steps[: len(self)]

    def state_dict(self) -> dict:
        """Everything that shapes future draws. Arrays are copies, episodes are shared."""
        with self._lock:
            arrays = {name: getattr(self, name)[: len(self)].copy() for name in ARRAYS}
            return arrays | {
                "episodes": list(self.episodes),
                "capacity": self.capacity,
                "leaves": self.tree[np.arange(len(self))],
                "added": self.added,
                "now": self.now,
                "rng": self.rng.bit_generator.state,
            }

    def load_state_dict(self, state: dict) -> None:
        """The inverse of `state_dict`. Raises ValueError where the capacities differ (slots are a ring)."""
        n = len(state["episodes"])
        if state["capacity"] != self.capacity:
            raise ValueError(f"the saved buffer has a capacity of {state['capacity']}, this one {self.capacity}")
        with self._lock:
            self.episodes = list(state["episodes"])
            for episode in self.episodes:
                episode.images = [self._shared(image) for image in episode.images]
            for name in ARRAYS:
                getattr(self, name)[:n] = state[name]
            self.tree.fill(state["leaves"])
            self.added, self.now = state["added"], state["now"]
            self.rng.bit_generator.state = state["rng"]

    def _leaves(self, slots: np.ndarray | slice) -> np.ndarray:
        """p_i^alpha at the time `now`."""
        p = self.base_priorities[slots]
        if self.decay is not None:
            p = p * self.decay(self.draws[slots] if self.decay_by == "draws" else self.now - self.steps[slots])
        # A priority that has decayed below the smallest float must stay drawable while nothing else is
        # left, or a buffer of only stale entries has no mass to sample from.
        # without base priorities (alpha 0) an age limit still is one: 0^0 would be 1
        return np.maximum(np.where(p > 0.0, p**self.alpha, 0.0), np.finfo(np.float64).tiny)

    def _free_slots(self, n: int) -> np.ndarray:
        """n slots to write: the unused ones first, then those to evict."""
        unused = np.arange(len(self), min(len(self) + n, self.capacity))
        n -= len(unused)
        if self.eviction == "fifo":
            return np.concatenate([unused, (self.added + len(unused) + np.arange(n)) % self.capacity])
        if n == 0:
            return unused
        held = self.tree[np.arange(len(self))]
        threshold = np.partition(held, n - 1)[n - 1]  # O(N), where sorting would be O(N log N)
        below, ties = np.flatnonzero(held < threshold), np.flatnonzero(held == threshold)
        n -= len(below)  # at least 1: the threshold itself is always among those to go
        return np.concatenate([unused, below, ties[np.argpartition(self.order[ties], n - 1)[:n]]])

    def _shared(self, image: np.ndarray) -> np.ndarray:
        return self._images.setdefault(picture_key(image), image)

    @staticmethod
    def _check(base_priorities: np.ndarray) -> None:
        low, high = np.min(base_priorities, initial=1.0), np.max(base_priorities, initial=1.0)
        if not (low > 0.0 and high < np.inf):  # NaN fails too
            raise ValueError(f"base priorities must be finite and positive (epsilon > 0?), got {low} to {high}")
