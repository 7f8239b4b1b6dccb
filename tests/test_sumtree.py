"""The sum tree against cumulative sums: on integers, at adversarial magnitudes, in its draws."""

import math

import numpy as np
import pytest

from sumtree import SumTree


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 512, 513, 1000, 5000])
def test_find_is_exact_on_integers(capacity):
    """Integers are summed exactly in float64 in any order, so the sums agree to the last bit."""
    rng = np.random.default_rng(capacity)
    values = rng.integers(1, 2**40, capacity) * (rng.random(capacity) < 0.7).astype(float)
    values[rng.integers(capacity)] = 5.0  # not all zero
    tree, sums = SumTree(capacity), np.cumsum(values)
    tree.fill(values)
    assert tree.total() == sums[-1]

    edges = np.concatenate([[0.0], sums, sums - 1])  # the first and the last mass of every leaf
    edges = edges[(edges >= 0) & (edges < sums[-1])]
    masses = np.append(edges, np.floor(rng.random(1000) * sums[-1]))
    np.testing.assert_array_equal(tree.find(masses), np.searchsorted(sums, masses, "right"))


def test_writes_of_all_kinds_leave_the_values_and_no_drift():
    """`set` with equal indices (the last counts) and `fill` against an array, over 12 decades."""
    rng = np.random.default_rng(0)
    tree = SumTree(1000)
    values = np.zeros(1000)
    for k in range(2000):
        new = 10.0 ** rng.uniform(-6, 6, 16)
        if k % 300 == 299:
            values = np.append(new, np.zeros(984))  # `fill` zeroes the rest
            tree.fill(new)
        else:
            indices = rng.integers(0, 1000, 16)
            tree.set(indices, new)
            for i, value in zip(indices, new, strict=True):
                values[i] = value

    np.testing.assert_array_equal(tree[np.arange(1000)], values)
    fresh = SumTree(1000)
    fresh.fill(values)
    np.testing.assert_array_equal(tree.nodes, fresh.nodes)  # after 2,000 updates
    assert tree.total() == pytest.approx(math.fsum(values), rel=1e-14)


def test_zero_leaves_are_never_drawn_whatever_the_magnitudes():
    rng = np.random.default_rng(0)
    for size in (5, 700, 4096):
        for powers in ((-300, 290), (-8, 8)):
            values = 10.0 ** rng.uniform(*powers, size) * (rng.random(size) < 0.5)
            values[0] = 1.0
            tree = SumTree(size)
            tree.fill(values)
            assert (values[tree.stratified_sample(5000, rng)] > 0).all()

    # On leaf 2 the mass is rounded up to its end.
    tree = SumTree(2048)
    ulp = np.spacing(1.5)
    tree.set(np.array([0, 2, 4]), np.array([1.5 * ulp, 1.5, 1.0]))
    assert tree.find(np.array([np.nextafter(1.5 * ulp + 1.5, 0.0)])) == 2


def test_stratification_draws_every_entry_its_whole_share():
    """Whole segments in every batch; the last, a quarter leaf 2 and the rest leaf 3, uniformly."""
    rng = np.random.default_rng(2)
    tree = SumTree(4)
    tree.fill(np.array([2.0, 5.0, 2.25, 0.75]))
    batches = [tree.stratified_sample(10, rng) for _ in range(4000)]
    counts = np.array([np.bincount(batch, minlength=4) for batch in batches])
    assert (counts[:, :2] == [2, 5]).all()
    assert set(map(tuple, counts[:, 2:])) == {(2, 1), (3, 0)}
    assert counts[:, 2].mean() == pytest.approx(2.25, abs=0.03)


def test_segments_are_drawn_independently():
    rng = np.random.default_rng(0)
    tree = SumTree(1000)
    tree.fill(np.ones(1000))
    pairs = np.array([tree.stratified_sample(2, rng) for _ in range(2000)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.1


def test_bad_input_is_refused_and_changes_nothing():
    tree = SumTree(5)
    with pytest.raises(ValueError, match="total"):
        tree.stratified_sample(2, np.random.default_rng(0))
    tree.fill(np.ones(5))
    bad = [
        (SumTree, 0),
        (tree.set, [5], [1.0]),
        (tree.__getitem__, -1),
        (tree.fill, np.ones(6)),
        (tree.find, [5.0]),
    ]
    # The sum of two values of 1e308 would be infinite.
    for value in (-1.0, np.nan, np.inf, 1e308):
        bad.append((tree.set, np.array([1, 2]), [3.0, value]))
        bad.append((tree.fill, [3.0, value]))
        bad.append((tree.find, [value]))
    for call, *values in bad:
        with pytest.raises(ValueError):
            call(*values)
    tree.set([], [])
    assert len(tree[[]]) == 0
    np.testing.assert_array_equal(tree[np.arange(5)], 1.0)
    assert tree.total() == 5.0
