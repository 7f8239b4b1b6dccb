"""A sum segment tree: draw i with probability proportional to its value, in O(log N).

Paper: section 3.5, "Proportional Sampling". Leaf i holds p_i^alpha (eq. 2), every other node the sum of its two
children, so the root holds the total mass S = sum_k p_k^alpha:

                 [1] 10                 node 1 is the root
               /        \\
          [2] 4          [3] 6          children of node n: 2n and 2n + 1
          /   \\          /   \\
       [4] 1  [5] 3   [6] 0  [7] 6      leaf i is node  size + i   (here size = 4)

To draw, pick a mass in [0, S) and walk down: left if the mass lies below the left child's sum, otherwise subtract that
sum and go right. Mass 3.5 -> node 2 -> node 5 -> leaf 1.

All operations work on whole arrays, one numpy call per level; the top nine levels of a walk are one step, by the
cumulative sums of the 512 nodes below them. A parent is always recomputed from its children (never `+= change`), so
rounding errors do not accumulate.

Exercise: fill the tree with `[1, 3, 0, 6]` and find the masses 0, 0.99, 1, 3.99, 4, 9.99 by hand.
"""

import numpy as np


class SumTree:
    """`capacity` non-negative float64 leaves, all zero at first. Raises ValueError on an index out of range, on values
    that are negative, NaN or infinite, and on a draw if the total is zero or not finite."""

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.depth = (capacity - 1).bit_length()
        self.size = 1 << self.depth  # leaves rounded up to a power of two; the surplus stays zero
        self.nodes = np.zeros(2 * self.size)  # node 0 is unused

    def __getitem__(self, i: int | np.ndarray) -> np.ndarray:
        """Return the value of leaf i, or of an array of leaves."""
        return self.nodes[self.size + self._checked_indices(i)]

    def total(self) -> float:
        """Return S, the sum over all leaves."""
        return float(self.nodes[1])

    def set(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Write leaves [n] and recompute their paths to the root: O(n log N). Of equal indices the last one counts."""
        node = self.size + self._checked_indices(indices)
        self.nodes[node] = self._checked_values(values)
        node = np.atleast_1d(node)
        for _ in range(self.depth):
            node = node >> 1  # siblings give the same parent twice, which costs less than np.unique
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def fill(self, values: np.ndarray) -> None:
        """Write leaves 0..len-1, zero the rest, and recompute every sum: O(N), a level at a time."""
        values = self._checked_values(values)
        if len(values) > self.capacity:
            raise ValueError(f"{len(values)} values do not fit a capacity of {self.capacity}")
        leaves = self.nodes[self.size :]
        leaves[: len(values)] = values
        leaves[len(values) :] = 0.0
        for level in range(self.depth - 1, -1, -1):
            children = self.nodes[2 << level : 4 << level]
            np.add(children[0::2], children[1::2], out=self.nodes[1 << level : 2 << level])

    def find(self, masses: np.ndarray) -> np.ndarray:
        """Return, for each mass in [0, S), the smallest i whose cumulative sum exceeds it. [n] -> int64 [n]. Never a
        leaf of value zero, whatever the rounding. Raises ValueError if a mass lies outside [0, S)."""
        total = self._sampling_total()
        masses = np.array(masses, dtype=np.float64, ndmin=1)
        if not (masses.min(initial=0.0) >= 0.0 and masses.max(initial=0.0) < total):  # NaN fails too
            raise ValueError(f"masses must lie in [0, {total}), got {masses.min()} to {masses.max()}")
        return self._descend(masses)

    def stratified_sample(self, batch_size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw one leaf from each of B equal segments of the mass S ("stratified sampling", section 3.5). Returns
        int64 [B], in the order of the segments; in each the mass is uniform."""
        total = self._sampling_total()
        masses = np.arange(batch_size) + rng.random(batch_size)  # [B], one in each [b, b + 1)
        masses /= batch_size  # before multiplying: (b + u) * S overflows if S is near the largest float
        masses *= total
        return self._descend(masses)

    def _sampling_total(self) -> float:
        total = self.total()
        if not 0.0 < total < np.inf:
            raise ValueError(f"cannot sample: the total of the tree is {total}, not a positive finite number")
        return total

    def _descend(self, masses: np.ndarray) -> np.ndarray:
        nodes = self.nodes
        top = min(self.depth, 9)  # the top levels at once: cumulative sums over the 512 nodes of level 9
        bounds = np.zeros((1 << top) + 1)
        nodes[1 << top : 2 << top].cumsum(out=bounds[1:])
        masses = np.minimum(masses, np.nextafter(bounds[-1], 0.0))  # the root may round differently
        node = bounds.searchsorted(masses, "right") - 1
        masses -= bounds[node]
        node += 1 << top
        for _ in range(self.depth - top):
            node += node  # to the left child
            left = nodes.take(node)
            go_right = masses >= left
            masses -= left * go_right
            node += go_right
        leaf = node - self.size
        # Rounding can push a mass past the end of its subtree, onto a zero leaf. It belongs to the last leaf before it
        # that is not zero.
        for k in np.flatnonzero(nodes.take(node) == 0.0):
            leaf[k] = np.flatnonzero(nodes[self.size : self.size + leaf[k]])[-1]
        return leaf

    def _checked_indices(self, indices: int | np.ndarray) -> np.ndarray:
        indices = np.asarray(indices)
        if indices.size and not (indices.min() >= 0 and indices.max() < self.capacity):
            raise ValueError(f"index out of range: {indices.min()} to {indices.max()} in a tree of {self.capacity}")
        return indices

    @staticmethod
    def _checked_values(values: np.ndarray) -> np.ndarray:
        values = np.asarray(values, dtype=np.float64)
        if values.size and not (values.min() >= 0.0 and values.max() < np.inf):  # NaN fails too
            raise ValueError(f"values must be finite and not negative, got {values.min()} to {values.max()}")
        return values
