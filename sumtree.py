r"""A sum segment tree: draw i with probability proportional to its value, in O(log N).

Paper: section 3.5, "Proportional Sampling". Leaf i holds p_i^alpha (eq. 2), every other node the
sum of its two children, so the root holds the total mass S = sum_k p_k^alpha:

                 [1] 10                 node 1 is the root
               /        \
          [2] 4          [3] 6          children of node n: 2n and 2n + 1
          /   \          /   \
       [4] 1  [5] 3   [6] 0  [7] 6      leaf i is node  size + i   (here size = 4)

To draw, pick a mass in [0, S) and walk down: left if the mass lies below the left child's sum,
otherwise subtract that sum and go right. Mass 3.5 -> node 2 -> node 5 -> leaf 1. All operations
work on whole arrays, a level at a time. A node is recomputed from its children (never `+= change`),
so rounding errors do not accumulate.

Exercise 1 of docs/exercises.md is about this.
"""

import numpy as np


class SumTree:
    """Hold `capacity` non-negative float64 leaves, all zero at first.

    Raises ValueError on an index out of range, on values that are negative, NaN, infinite or so
    large that their sum could be infinite, and on a draw if the total is zero."""

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.depth = (int(capacity) - 1).bit_length()
        self.size = 2**self.depth  # leaves rounded up to a power of two; the surplus stays zero
        self.nodes = np.zeros(2 * self.size)  # node 0 is unused
        self.leaves = self.nodes[self.size :]  # a view of these nodes, not a copy
        self.end = np.finfo(float).max / self.size  # of values, so that no sum is infinite

    def __getitem__(self, i: int | np.ndarray) -> np.ndarray:
        """Return the value of leaf i, or of an array of leaves."""
        return self.leaves[_in_range(i, self.capacity, "indices")]

    def total(self) -> float:
        """Return S, the sum over all leaves."""
        return self.nodes[1]

    def set(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Write leaves [n] and recompute their paths to the root: O(n log N).

        Of equal indices the last one counts."""
        nodes = self.nodes
        node = self.size + _in_range(indices, self.capacity, "indices")
        nodes[node] = _in_range(values, self.end, "values")
        for _ in range(self.depth):
            # Siblings give the same parent twice, which costs less than np.unique.
            node = node // 2
            left = 2 * node
            nodes[node] = nodes[left] + nodes[left + 1]

    def fill(self, values: np.ndarray) -> None:
        """Write leaves 0..len-1, zero the rest, and recompute every sum: O(N), level by level."""
        values = _in_range(values, self.end, "values")
        if len(values) > self.capacity:
            raise ValueError(f"{len(values)} values do not fit a capacity of {self.capacity}")

        self.leaves[:] = 0.0
        self.leaves[: len(values)] = values
        children = self.leaves
        while len(children) > 1:
            first = len(children) // 2
            parents = self.nodes[first : 2 * first]
            parents[:] = children[::2] + children[1::2]
            children = parents

    def find(self, masses: np.ndarray) -> np.ndarray:
        """Return, for each mass in [0, S), the smallest i whose cumulative sum exceeds it.

        [n] -> int64 [n]. Never returns a leaf of value zero, whatever the rounding. Raises
        ValueError if a mass lies outside [0, S)."""
        masses = _in_range(masses, self.total(), "masses (below the total)")

        node = np.ones_like(masses, int)  # the root
        for _ in range(self.depth):
            node = 2 * node  # the left child
            left = self.nodes.take(node)
            right = self.nodes.take(node + 1)
            # Rounding can lift a mass to the end of the left child, with only zeros to its right.
            go_right = (masses >= left) & (right > 0.0)
            masses = masses - left * go_right
            node = node + go_right
        return node - self.size

    def stratified_sample(self, batch_size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a leaf from each of B equal segments of S ("stratified sampling", section 3.5).

        Returns int64 [B], in order."""
        total = self.total()
        # one share in each [b, b + 1) / B
        shares = (np.arange(batch_size) + rng.random(batch_size)) / batch_size
        below_total = np.nextafter(total, 0.0)  # rounding may give S itself
        return self.find(np.minimum(shares * total, below_total))


def _in_range(values: int | np.ndarray, end: float, name: str) -> np.ndarray:
    """Return the values as an array. Raises ValueError if one is NaN or outside [0, end)."""
    values = np.asarray(values)
    if not 0 <= values.min(initial=0) <= values.max(initial=0) < end:
        raise ValueError(f"{name} must lie in [0, {end}), got {values.min()} to {values.max()}")
    return values if values.size else values.astype(int)  # NumPy reads [] as floats
