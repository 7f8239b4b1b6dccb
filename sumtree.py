"""A sum segment tree: draw i with probability proportional to its value, in O(log N).

Paper: section 3.5, "Proportional Sampling". Leaf i holds p_i^alpha (eq. 2), every other node the sum of its two
children, so the root holds the total mass S = sum_k p_k^alpha:

                 [1] 10                 node 1 is the root
               /        \\
          [2] 4          [3] 6          children of node n: 2n and 2n + 1
          /   \\          /   \\
       [4] 1  [5] 3   [6] 0  [7] 6      leaf i is node  size + i   (here size = 4)

To draw, pick a mass in [0, S) and walk down: left if the mass lies below the left child's sum, otherwise subtract that
sum and go right. Mass 3.5 -> node 2 -> node 5 -> leaf 1. All operations work on whole arrays, a level at a time. A node
is recomputed from its children (never `+= change`), so rounding errors do not accumulate.

Exercise: fill the tree with `[1, 3, 0, 6]` and find the masses 0, 0.99, 1, 3.99, 4, 9.99 by hand.
"""

import numpy as np


class SumTree:
    """`capacity` non-negative float64 leaves, all zero at first. Raises ValueError on an index out of
    range, on values that are negative, NaN or infinite, and on a draw if the total is zero or not finite."""

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.depth = (capacity - 1).bit_length()
        self.size = 1 << self.depth  # leaves rounded up to a power of two; the surplus stays zero
        self.nodes = np.zeros(2 * self.size)  # node 0 is unused

    def __getitem__(self, i: int | np.ndarray) -> np.ndarray:
        """Return the value of leaf i, or of an array of leaves."""
        return self.nodes[self._leaf_nodes(i)]

    def total(self) -> float:
        """Return S, the sum over all leaves."""
        return float(self.nodes[1])

    def set(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Write leaves [n] and recompute their paths to the root: O(n log N). Of equal indices the last
        one counts."""
        node = self._leaf_nodes(indices)
        self.nodes[node] = _checked(values)
        for _ in range(self.depth):
            node = node >> 1  # siblings give the same parent twice, which costs less than np.unique
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def fill(self, values: np.ndarray) -> None:
        """Write leaves 0..len-1, zero the rest, and recompute every sum: O(N), a level at a time."""
        values = _checked(values)
        if len(values) > self.capacity:
            raise ValueError(f"{len(values)} values do not fit a capacity of {self.capacity}")
        self.nodes[self.size :] = 0.0
        self.nodes[self.size : self.size + len(values)] = values
        for level in range(self.depth - 1, -1, -1):
            children = self.nodes[2 << level : 4 << level]
            np.add(children[0::2], children[1::2], out=self.nodes[1 << level : 2 << level])

    def find(self, masses: np.ndarray) -> np.ndarray:
        """Return, for each mass in [0, S), the smallest i whose cumulative sum exceeds it. [n] -> int64 [n].

        Never returns a leaf of value zero, whatever the rounding. Raises ValueError if a mass lies
        outside [0, S)."""
        nodes = self.nodes
        total = self.total()
        masses = np.array(masses, dtype=np.float64, ndmin=1)
        inside = masses.min(initial=0.0) >= 0.0 and masses.max(initial=0.0) < total < np.inf
        if not inside:  # NaN is not inside either
            allowed = f"in [0, S), with a finite total S = {total} above 0"
            raise ValueError(f"masses must lie {allowed}, got {masses}")

        node = np.ones(len(masses), dtype=np.int64)  # the root
        for _ in range(self.depth):
            node += node  # to the left child
            left = nodes.take(node)
            go_right = masses >= left
            masses -= left * go_right
            node += go_right

        leaf = node - self.size
        rounded_past_the_end = np.flatnonzero(nodes.take(node) == 0.0)
        for k in rounded_past_the_end:
            before = nodes[self.size : self.size + leaf[k]]
            leaf[k] = np.flatnonzero(before)[-1]
        return leaf

    def stratified_sample(self, batch_size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a leaf from each of B equal segments of S ("stratified sampling", section 3.5).
        Returns int64 [B], in order."""
        total = self.total()
        shares = (
            np.arange(batch_size) + rng.random(batch_size)
        ) / batch_size  # one in each [b, b + 1) / B
        below_total = np.nextafter(total, 0.0)  # rounding may give S itself
        return self.find(np.minimum(shares * total, below_total))

    def _leaf_nodes(self, indices: int | np.ndarray) -> np.ndarray:
        indices = np.asarray(indices)
        inside = indices.min(initial=0) >= 0 and indices.max(initial=0) < self.capacity
        if not inside:
            span = f"{indices.min()} to {indices.max()}"
            raise ValueError(f"index out of range: {span} in a tree of {self.capacity}")
        return self.size + indices


def _checked(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    valid = values.min(initial=0.0) >= 0.0 and values.max(initial=0.0) < np.inf
    if not valid:  # NaN is not valid either
        span = f"{values.min()} to {values.max()}"
        raise ValueError(f"values must be finite and not negative, got {span}")
    return values
