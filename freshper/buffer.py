"""The replay buffer: whole trajectories on the CPU, drawn by priority, refreshed by age.

Paper: section 3.5 and appendix A.1; Algorithm 1 lines 4 (add), 6 (refresh), 8 (sample).

    leaf_i = p_i^alpha,   p_i = p_i^base * decay(t - t_i),   P(i) = leaf_i / sum_k leaf_k    (eq. 2, eq. 14)

`decay` is a function of age in steps, such as `partial(exponential_decay, tau=500)`; `None` makes Standard PER. The
refresh runs on a thread of its own; every other method waits for it. A new entry gets its own base priority, not the
largest so far. Eviction: first-in-first-out (Table 5), or the lowest leaf, the oldest among equals (appendix A.1).
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from freshper.auto_tau import AutoTau
from freshper.episode import AnyImage, Episode, StoredImage, compressed, image_key
from sumtree import SumTree

STATE = ("episodes", "base_priorities", "steps", "order", "added", "now")


class Replay(NamedTuple):
    """A drawn batch S of Algorithm 1 line 8."""

    episodes: list[Episode]  # [B]
    indices: np.ndarray  # int64 [B]: slots, for update_base_priorities
    probabilities: np.ndarray  # float64 [B]: P(i), eq. 2
    ages: np.ndarray  # int64 [B]: Delta_i = t - t_i


class ReplayBuffer:
    """Trajectory-level prioritized replay. Raises ValueError for capacity < 1, alpha outside [0, 1], an unknown
    eviction, base priorities that are not finite and positive, and a draw from an empty buffer."""

    def __init__(
        self,
        capacity: int,
        alpha: float,
        decay: Callable | None,
        eviction: str = "fifo",
        seed: int = 0,
    ):
        if not 0.0 <= alpha <= 1.0 or eviction not in ("fifo", "lowest_priority"):
            raise ValueError(
                f"alpha {alpha} must lie in [0, 1], eviction {eviction} be fifo or lowest_priority"
            )
        self.tree = SumTree(capacity)
        self.capacity, self.alpha, self.decay, self.eviction = capacity, alpha, decay, eviction
        self.episodes: list[Episode] = []  # by slot; slots 0..len-1 are in use
        self.base_priorities = np.zeros(capacity)
        self.steps, self.order = np.zeros(
            (2, capacity), dtype=np.int64
        )  # t_i, number of episodes added before
        self.added = self.now = 0  # episodes so far; t of the last refresh or addition
        self.rng = np.random.default_rng(seed)
        self._images: weakref.WeakValueDictionary[bytes, StoredImage] = (
            weakref.WeakValueDictionary()
        )  # by key
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="refresh")
        self._pending: Future = (
            Future()
        )  # the last asynchronous refresh, for whose end (or error) other methods ask
        self._pending.set_result(None)

    def __len__(self) -> int:
        """Return N, the number of episodes held."""
        return len(self.episodes)

    def add(self, episodes: list[Episode], base_priorities: np.ndarray, step: int) -> None:
        """Store episodes [n] collected at t_i = `step` (line 4), evicting if full. Equal images become one PNG."""
        base_priorities, n = _checked(base_priorities), len(episodes)
        if n > self.capacity or n != len(base_priorities):
            raise ValueError(
                f"{n} episodes, {len(base_priorities)} priorities, capacity {self.capacity}"
            )
        self._pending.result()
        order = self.added + np.arange(n)
        slots = order % self.capacity  # unused ones first, then the oldest
        if self.eviction == "lowest_priority" and len(self) + n > self.capacity:
            held = np.arange(len(self))
            lowest = np.lexsort((self.order[held], self.tree[held]))
            slots = np.append(slots[: self.capacity - len(self)], lowest)[:n]
        for slot, episode in zip(slots.tolist(), episodes, strict=True):
            episode.images = [self._stored(image) for image in episode.images]
            episode.step = step
            self.episodes[slot : slot + 1] = [episode]  # appends at the end
        self.base_priorities[slots], self.steps[slots], self.order[slots] = (
            base_priorities,
            step,
            order,
        )
        self.added, self.now = self.added + n, max(self.now, step)
        self.tree.set(slots, self._leaves(slots))

    def refresh(self, step: int) -> None:
        """Recompute p_i <- p_i^base * decay(step - t_i) for all i (line 6, eq. 14) and rebuild the tree. O(N)."""
        self.now = max(self.now, step)  # never turns the clock back
        self.tree.fill(self._leaves(slice(0, len(self))))

    def refresh_async(self, step: int) -> Future:
        """Start `refresh` on the buffer's own thread ("async on CPU")."""
        self._pending.result()
        self._pending = self._thread.submit(self.refresh, step)
        return self._pending

    def sample(self, batch_size: int, step: int = 0) -> Replay:
        """Draw a stratified batch with P(i) ~ p_i^alpha as of the last refresh (line 8), with ages at t = `step`."""
        self._pending.result()
        indices = self.tree.stratified_sample(batch_size, self.rng)
        probabilities = self.tree[indices] / self.tree.total()
        episodes = [self.episodes[slot] for slot in indices.tolist()]
        return Replay(episodes, indices, probabilities, max(step, self.now) - self.steps[indices])

    def update_base_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set new base priorities [n] (section 3.5, "Priority Update"). Unchanged ones keep their tree values."""
        priorities = _checked(priorities)
        self._pending.result()
        changed = self.base_priorities[indices] != priorities
        self.base_priorities[indices] = priorities
        self.tree.set(indices[changed], self._leaves(indices[changed]))

    def observe_drift(self, replay: Replay, kl: np.ndarray) -> None:
        """Give the KL of each replayed trajectory [B], in nats, to the estimate of `--tau auto`."""
        if isinstance(self.decay, AutoTau):
            self.decay.observe(replay.ages, kl / [len(e.turn_rewards) for e in replay.episodes])

    def ages(self) -> np.ndarray:
        """Return Delta_i of every entry at the last refresh, int64 [N]."""
        self._pending.result()
        return self.now - self.steps[: len(self)]

    def state_dict(self) -> dict:
        """Return everything that shapes future draws; nothing is copied."""
        self._pending.result()
        state = {name: getattr(self, name) for name in STATE}
        state |= {"drift": self.decay.sums if isinstance(self.decay, AutoTau) else None}
        return state | {"nodes": self.tree.nodes, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict) -> None:
        """Restore a state of a buffer of this capacity."""
        for name in STATE:
            setattr(self, name, state[name])
        self._images.update((image_key(x), x) for e in self.episodes for x in e.images)
        self.tree.nodes, self.rng.bit_generator.state = state["nodes"], state["rng"]
        if isinstance(self.decay, AutoTau) and state["drift"] is not None:
            self.decay.sums = state["drift"]

    def _stored(self, image: AnyImage) -> StoredImage:
        """Return the PNG of this image and all that equal it."""
        key = image_key(image)
        return self._images.get(key) or self._images.setdefault(key, compressed(image))

    def _leaves(self, slots: np.ndarray | slice) -> np.ndarray:
        """Return p_i^alpha at the time `now`, float64 [n]. Never 0, so a buffer of only stale entries can be drawn."""
        ages = self.now - self.steps[slots]
        p = self.base_priorities[slots] * (1.0 if self.decay is None else self.decay(ages))
        powers = np.where(
            p > 0.0, p**self.alpha, 0.0
        )  # 0^0 would be 1: --decay limit with --alpha 0
        return np.maximum(powers, np.finfo(np.float64).tiny)


def _checked(base_priorities: np.ndarray) -> np.ndarray:
    base_priorities = np.asarray(base_priorities, dtype=np.float64)
    if not ((base_priorities > 0.0) & (base_priorities < np.inf)).all():
        raise ValueError(
            f"base priorities must be finite and positive (epsilon > 0?), got {base_priorities}"
        )
    return base_priorities
