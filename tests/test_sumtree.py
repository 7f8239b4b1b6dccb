"""The sum tree against brute force: exact integer sums, adversarial magnitudes, exact draw frequencies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from sumtree import SumTree

# integers are summed exactly in float64 in any order, so brute force and tree must agree to the last bit
integers = arrays(np.float64, st.integers(1, 200), elements=st.integers(0, 2**40).map(float))
magnitudes = st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.floats(1e-3, 1e3))


def brute_force_find(values, masses):
    """The smallest i whose cumulative sum exceeds the mass."""
    return np.array([next(i for i, total in enumerate(np.cumsum(values)) if total > mass) for mass in masses])


@given(values=integers, seed=st.integers(0, 2**32 - 1))
def test_find_is_exact_on_integers(values, seed):
    if values.sum() == 0:
        return
    tree = SumTree(len(values) + seed % 5)
    tree.fill(values)
    edges = np.cumsum(values)[:-1]
    rng = np.random.default_rng(seed)
    masses = np.concatenate([[0.0], edges[edges < values.sum()], np.floor(rng.random(20) * values.sum())])
    assert tree.total() == values.sum()
    np.testing.assert_array_equal(tree.find(masses), brute_force_find(values, masses))


@given(values=integers, data=st.data())
def test_set_equals_fill(values, data):
    n = len(values)
    by_set, by_fill = SumTree(n), SumTree(n)
    by_set.fill(np.ones(n))
    indices = np.array(data.draw(st.permutations(range(n))))
    for part in np.array_split(indices, 3):
        by_set.set(part, values[part])
    by_fill.fill(values)
    np.testing.assert_array_equal(by_set.nodes, by_fill.nodes)


def test_set_keeps_the_last_of_equal_indices():
    tree = SumTree(4)
    tree.set(np.array([2, 2, 2]), np.array([5.0, 7.0, 1.0]))
    assert tree[2] == tree.total() == 1.0


def test_fill_zeroes_the_rest():
    tree = SumTree(8)
    tree.fill(np.ones(8))
    tree.fill(np.array([2.0, 3.0]))
    assert tree.total() == 5.0
    np.testing.assert_array_equal(tree[np.arange(8)], [2, 3, 0, 0, 0, 0, 0, 0])


@given(values=arrays(np.float64, st.integers(1, 300), elements=magnitudes), seed=st.integers(0, 2**32 - 1))
def test_zero_leaves_are_never_drawn(values, seed):
    tree = SumTree(len(values))
    tree.fill(values)
    if tree.total() == 0:
        with pytest.raises(ValueError, match="total"):
            tree.stratified_sample(4, np.random.default_rng(seed))
        return
    drawn = tree.stratified_sample(64, np.random.default_rng(seed))
    assert (values[drawn] > 0).all()
    last = np.nextafter(tree.total(), 0.0)  # the mass that rounding pushes furthest
    assert values[tree.find(np.array([0.0, last, last * 0.5]))].min() > 0


@given(values=arrays(np.float64, st.integers(1, 300), elements=magnitudes))
def test_sums_have_float64_accuracy(values):
    import math

    tree = SumTree(len(values))
    tree.fill(values)
    assert tree.total() == pytest.approx(math.fsum(values), rel=1e-14, abs=0.0)


def test_many_small_updates_leave_no_drift():
    rng = np.random.default_rng(0)
    tree, values = SumTree(1000), np.zeros(1000)
    for _ in range(2000):
        indices = rng.integers(0, 1000, 16)
        values[indices] = new = 10.0 ** rng.uniform(-12, 6, 16)
        tree.set(indices, new)
        values[indices] = tree[indices]  # where an index came twice
    fresh = SumTree(1000)
    fresh.fill(values)
    np.testing.assert_array_equal(tree.nodes, fresh.nodes)


def test_stratified_draws_follow_p():
    """Chi-square of 400,000 draws against P(i), and of one stratum against the uniform law inside it."""
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.random(40), [0.0] * 5, rng.random(5) * 20])
    tree = SumTree(64)
    tree.fill(values)
    draws = np.concatenate([tree.stratified_sample(100, rng) for _ in range(4000)])
    seen, p = np.bincount(draws, minlength=len(values)), values / values.sum()
    assert (seen[p == 0] == 0).all()
    assert stats.chisquare(seen[p > 0], 400_000 * p[p > 0]).pvalue > 1e-4


def test_stratification_draws_every_entry_its_whole_share():
    """An entry that holds k whole segments is drawn at least k - 1 times in every batch, not only on average."""
    tree = SumTree(3)
    tree.fill(np.array([2.0, 5.0, 3.0]))
    rng = np.random.default_rng(2)
    for _ in range(200):
        drawn = tree.stratified_sample(10, rng)
        assert np.bincount(drawn, minlength=3).tolist() == [2, 5, 3]
        assert (np.diff(drawn) >= 0).all()


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bad_values_are_refused_and_change_nothing(bad):
    tree = SumTree(4)
    tree.fill(np.arange(4.0))
    before = tree.nodes.copy()
    with pytest.raises(ValueError, match="finite"):
        tree.set(np.array([1, 2]), np.array([1.0, bad]))
    with pytest.raises(ValueError, match="finite"):
        tree.fill(np.array([1.0, bad]))
    np.testing.assert_array_equal(tree.nodes, before)


def test_bad_indices_masses_and_sizes_are_refused():
    tree = SumTree(5)
    for call in (
        lambda: tree.set(np.array([5]), np.array([1.0])),
        lambda: tree[-1],
        lambda: tree.fill(np.ones(6)),
        lambda: tree.stratified_sample(2, np.random.default_rng(0)),
        lambda: SumTree(0),
    ):
        with pytest.raises(ValueError):
            call()
    tree.fill(np.ones(5))
    for mass in (-0.1, 5.0, np.nan):
        with pytest.raises(ValueError, match="masses"):
            tree.find(np.array([mass]))
