"""The replay buffer: whole trajectories on the CPU, drawn by priority, refreshed by age.

Paper: section 3.5 and appendix A.1; Algorithm 1 lines 4 (add), 6 (refresh), 8 (sample).

    leaf_i = p_i^alpha,   p_i = p_i^base * decay(t - t_i),   P(i) = leaf_i / sum_k leaf_k

These are eq. 2 and eq. 14 (freshper/priority.py). `decay` is a function of age in steps, such as
`partial(exponential_decay, tau=500)`; without it (None) nothing ages, as in Standard PER. The
refresh runs on a thread of its own. `add`, `sample`, `ages`, `update_base_priorities` and
`state_dict` wait for its end. A new entry gets its own base priority, not the largest so
far. Eviction is first-in-first-out (Table 5), or takes the lowest leaf, of equal ones the oldest
(appendix A.1).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from freshper.episode import Episode, compressed
from freshper.priority import priorities
from sumtree import SumTree

ARRAYS = ("base_priorities", "collected_at", "arrival")  # of the state
MIN_LEAF = np.finfo(float).tiny


class Replay(NamedTuple):
    """A drawn batch S of Algorithm 1 line 8."""

    episodes: list[Episode]  # [B]
    indices: np.ndarray  # int64 [B]: slots, for update_base_priorities
    probabilities: np.ndarray  # float64 [B]: P(i), eq. 2
    ages: np.ndarray  # int64 [B]: Delta_i = t - t_i


class ReplayBuffer:
    """Trajectory-level prioritized replay.

        buffer = ReplayBuffer(50_000, alpha=0.6, decay=partial(exponential_decay, tau=500.0))
        buffer.add(episodes, reward_priority(returns, epsilon=0.1), step)
        buffer.refresh(step)                    # without it nothing ages
        drawn = buffer.sample(128, step)        # episodes, P(i), ages
        buffer.update_base_priorities(drawn.indices, new_priorities)

    Steps never go back. `add` writes `step` into each episode, and PNGs in place of its images.

    Raises ValueError for capacity < 1, an unknown eviction, base priorities that are not finite and
    positive, and a draw from an empty buffer."""

    def __init__(
        self,
        capacity: int,
        alpha: float,
        decay: Callable[[np.ndarray], np.ndarray] | None,
        eviction: str = "fifo",
        seed: int = 0,
    ):
        if eviction not in ("fifo", "lowest_priority"):
            raise ValueError(f"eviction must be fifo or lowest_priority, got {eviction}")
        self.capacity = capacity
        self.alpha = alpha
        self.decay = decay or np.ones_like
        self.eviction = eviction
        self.rng = np.random.default_rng(seed)

        # Per-slot arrays. Slots 0 to len - 1 are in use.
        self.tree = SumTree(capacity)
        self.episodes: list[Episode] = []
        self.base_priorities = np.zeros(capacity)
        self.collected_at = np.zeros(capacity, int)  # t_i
        self.arrival = np.zeros(capacity, int)  # number of episodes added before

        self.added = 0  # episodes so far
        self.now = 0  # t of the last refresh or addition
        self.thread = ThreadPoolExecutor(1)
        self.lock = threading.Lock()  # one refresh at a time
        # The last asynchronous refresh. Other methods wait for its end, and raise its error.
        self.pending: Future = Future()
        self.pending.set_result(None)

    def __len__(self) -> int:
        """Return N, the number of episodes held."""
        return len(self.episodes)

    def add(self, episodes: list[Episode], base_priorities: np.ndarray, step: int) -> None:
        """Store episodes [n] collected at t_i = `step` (line 4). A full buffer evicts others."""
        n = len(episodes)
        if n > self.capacity or n != len(base_priorities):
            raise ValueError(
                f"{n} episodes, {len(base_priorities)} priorities, capacity {self.capacity}"
            )
        check_priorities(base_priorities)
        self.pending.result()

        arrival = self.added + np.arange(n)
        slots = arrival % self.capacity  # unused ones, then the oldest
        unused = self.capacity - len(self)
        if self.eviction == "lowest_priority" and n > unused:
            slots[unused:] = self._lowest(n - unused)

        for slot, episode in zip(slots, episodes):
            episode.images = [compressed(image) for image in episode.images]
            episode.step = step
            # This replaces the episode in a used slot, and appends to fill the first unused one.
            self.episodes[slot : slot + 1] = [episode]
        self.base_priorities[slots] = base_priorities
        self.collected_at[slots] = step
        self.arrival[slots] = arrival

        self.added += n
        self.now = max(self.now, step)
        self.tree.set(slots, self._leaves(slots))

    def refresh(self, step: int) -> None:
        """Recompute p_i <- p_i^base * decay(step - t_i) for all i and rebuild the tree: O(N).

        This is line 6, and eq. 14."""
        with self.lock:
            self.now = max(self.now, step)  # never turns the clock back
            self.tree.fill(self._leaves(slice(len(self))))

    def refresh_async(self, step: int) -> Future:
        """Start `refresh` on the buffer's own thread ("async on CPU")."""
        self.pending.result()
        self.pending = self.thread.submit(self.refresh, step)
        return self.pending

    def sample(self, batch_size: int, step: int = 0) -> Replay:
        """Draw a stratified batch with P(i) ~ p_i^alpha as of the last refresh (line 8).

        Its ages are those at t = `step`, or at `now` if that is later."""
        self.pending.result()
        indices = self.tree.stratified_sample(batch_size, self.rng)
        episodes = [self.episodes[slot] for slot in indices]
        probabilities = self.tree[indices] / self.tree.total()
        ages = max(step, self.now) - self.collected_at[indices]
        return Replay(episodes, indices, probabilities, ages)

    def update_base_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set new base priorities [n] of slots that were drawn (section 3.5, "Priority Update").

        Unchanged ones keep their tree values."""
        check_priorities(priorities)
        self.pending.result()
        changed = self.base_priorities[indices] != priorities
        indices = indices[changed]
        self.base_priorities[indices] = priorities[changed]
        self.tree.set(indices, self._leaves(indices))

    def ages(self) -> np.ndarray:
        """Return Delta_i of every entry at t = `now`, int64 [N]."""
        self.pending.result()
        return self.now - self.collected_at[: len(self)]

    def state_dict(self) -> dict:
        """Return everything that shapes future draws; nothing is copied."""
        self.pending.result()
        state = {name: torch.from_numpy(getattr(self, name)) for name in ARRAYS}
        return state | {
            "episodes": self.episodes,
            "added": self.added,
            "now": self.now,
            "nodes": torch.from_numpy(self.tree.nodes),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore the state of a buffer of the same capacity into a new one."""
        for name in ARRAYS:
            getattr(self, name)[:] = state[name].numpy()
        self.episodes = state["episodes"]
        self.added = int(state["added"])
        self.now = int(state["now"])
        self.tree.nodes[:] = state["nodes"].numpy()
        self.rng.bit_generator.state = state["rng"]

    def _leaves(self, slots: np.ndarray | slice) -> np.ndarray:
        """Return p_i^alpha at the time `now`, float64 [n] (eq. 2 and 14).

        Never 0, so a buffer of only stale entries can be drawn."""
        ages = self.now - self.collected_at[slots]
        p = priorities(self.base_priorities[slots], ages, self.decay)
        # A decay can reach 0 (--decay limit, or by underflow beyond age 745 tau). With --alpha 0
        # the leaf would then be 0^0 = 1.
        return np.where(p > 0.0, p**self.alpha, MIN_LEAF)

    def _lowest(self, n: int) -> np.ndarray:
        """Return the n slots of the lowest leaves, of equal ones the oldest."""
        held = slice(len(self))
        order = np.lexsort((self.arrival[held], self.tree.leaves[held]))  # by leaf, then by age
        return np.sort(order[:n])


def check_priorities(base_priorities: np.ndarray) -> None:
    """Raise ValueError if a base priority is not finite and positive."""
    if not all(0.0 < p < np.inf for p in base_priorities):
        raise ValueError(f"base priorities must be finite and positive, got {base_priorities}")
