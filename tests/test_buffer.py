"""The buffer: what comes out is what went in, with the probability it should have, whatever runs beside it."""

import copy
import threading
from functools import partial

import numpy as np
import pytest
from conftest import make_episode
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from freshper.buffer import ReplayBuffer
from freshper.priority import age_limit, exponential_decay, polynomial_decay

fast_decay = partial(exponential_decay, tau=3.0)


def episodes(n, start=0, **fields):
    rng = np.random.default_rng(start)
    return [make_episode(rng, seed=start + k, **fields) for k in range(n)]


def test_an_episode_comes_back_byte_equal():
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = ReplayBuffer(10, 0.6, fast_decay)
    stored = episodes(4, image=image)
    expected = copy.deepcopy(stored)
    buffer.add(stored, np.ones(4), step=7)
    for drawn in buffer.sample(32).episodes:
        e = expected[drawn.seed]
        for name in ("tokens", "action_mask", "behavior_logprobs", "turn_rewards"):
            a, b = getattr(drawn, name), getattr(e, name)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
        assert drawn.images[0].tobytes() == image.tobytes()
        assert (drawn.reward, drawn.seed, drawn.step) == (e.reward, e.seed, 7)


def test_equal_pictures_are_kept_once():
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = ReplayBuffer(10, 0.6, None)
    for k in range(3):
        buffer.add(episodes(2, start=10 * k, image=image.copy()), np.ones(2), step=k)
    assert len({id(e.images[0]) for e in buffer.episodes}) == 1


@settings(deadline=None)
@given(
    capacity=st.integers(1, 12),
    batches=st.lists(st.integers(1, 12), max_size=8),
    eviction=st.sampled_from(["fifo", "lowest_priority"]),
    seed=st.integers(0, 1000),
)
def test_eviction_keeps_whom_it_should(capacity, batches, eviction, seed):
    """Against a list that is sorted anew every time."""
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer(capacity, 0.6, fast_decay, eviction)
    held, added = [], 0  # (priority as of the last refresh, order, seed)
    for step, n in enumerate(batches):
        n = min(n, capacity)
        base = rng.integers(1, 4, n) / 2.0  # with ties
        new = episodes(n, start=added)
        excess = max(0, len(held) + n - capacity)
        held = sorted(held, key=lambda x: x[1] if eviction == "fifo" else (x[0], x[1]))[excess:]
        held += [[b, added + k, added + k, b, step] for k, b in enumerate(base)]
        buffer.add(new, base, step)
        buffer.refresh(step + 1)
        for entry in held:
            entry[0] = np.round(np.log(entry[3] * np.exp(-(step + 1 - entry[4]) / 3.0)), 9)
        added += n
        assert len(buffer) == len(held)
        assert {e.seed for e in buffer.episodes} == {x[2] for x in held}


def test_a_refresh_gives_the_paper_s_priorities():
    buffer = ReplayBuffer(50, 0.6, partial(exponential_decay, tau=20.0))
    base, steps = np.random.default_rng(0).random(30) + 0.1, np.repeat([0, 10, 25], 10)
    for t in (0, 10, 25):
        buffer.add(episodes(10, start=int(t)), base[steps == t], step=t)
    buffer.refresh(40)
    leaves = [(b * np.exp(-(40 - t) / 20.0)) ** 0.6 for b, t in zip(base, steps, strict=True)]
    replay = buffer.sample(64)
    np.testing.assert_allclose(replay.probabilities, (np.array(leaves) / sum(leaves))[replay.indices], rtol=1e-12)
    np.testing.assert_array_equal(replay.ages, 40 - steps[replay.indices])
    later = buffer.sample(8, step=42)  # two updates after the refresh
    np.testing.assert_array_equal(later.ages, 42 - steps[later.indices])
    assert [e.seed for e in replay.episodes] == [buffer.episodes[i].seed for i in replay.indices]


def test_an_age_limit_holds_where_base_priorities_do_not_count():
    buffer = ReplayBuffer(10, 0.0, partial(age_limit, tau=5.0))
    buffer.add(episodes(4), np.ones(4), step=0)
    buffer.add(episodes(4, start=4), np.ones(4), step=10)
    buffer.refresh(11)
    assert {e.seed for e in buffer.sample(64).episodes} == {4, 5, 6, 7}


def test_new_entries_gain_on_old_ones_only_by_age():
    """Line 6 matters for entries frozen earlier: P(i) within one refresh law is constant, across additions not."""
    buffer = ReplayBuffer(10, 1.0, partial(exponential_decay, tau=10.0))
    buffer.add(episodes(1), np.ones(1), step=0)
    buffer.add(episodes(1, start=1), np.ones(1), step=10)
    stale = buffer.tree[0] / buffer.tree.total()
    buffer.refresh(10)
    assert stale == pytest.approx(0.5)
    assert buffer.tree[0] / buffer.tree.total() == pytest.approx(np.exp(-1) / (1 + np.exp(-1)))
    before = buffer.tree[np.arange(2)] / buffer.tree.total()
    buffer.refresh(60)
    np.testing.assert_allclose(buffer.tree[np.arange(2)] / buffer.tree.total(), before, rtol=1e-12)


def test_draws_follow_the_refreshed_priorities():
    buffer = ReplayBuffer(40, 0.6, partial(polynomial_decay, tau=5.0, power=1.0), seed=3)
    for t in range(4):
        buffer.add(episodes(10, start=10 * t), np.linspace(0.2, 2.0, 10), step=3 * t)
    buffer.refresh(15)
    p = buffer.tree[np.arange(40)] / buffer.tree.total()
    seen = np.bincount(np.concatenate([buffer.sample(50).indices for _ in range(3000)]), minlength=40)
    assert stats.chisquare(seen, p * seen.sum()).pvalue > 1e-4


def test_standard_per_forgets_nothing():
    buffer = ReplayBuffer(10, 0.6, None)
    buffer.add(episodes(3), np.array([1.0, 2.0, 3.0]), step=0)
    before = buffer.tree[np.arange(3)]
    buffer.refresh(10**6)
    np.testing.assert_array_equal(buffer.tree[np.arange(3)], before)


def test_a_buffer_of_only_stale_entries_can_still_be_drawn_from():
    buffer = ReplayBuffer(10, 0.6, fast_decay)
    buffer.add(episodes(3), np.ones(3), step=0)
    buffer.refresh(10**6)
    assert len(buffer.sample(8).episodes) == 8


def test_decay_by_draws():
    """FPER: the priority of an episode falls with every time it was drawn, whatever its age; a new one starts anew."""
    buffer = ReplayBuffer(4, 0.5, partial(exponential_decay, tau=3.0), seed=0, decay_by="draws")
    buffer.add(episodes(4), np.array([1.0, 2.0, 3.0, 4.0]), step=0)
    drawn = np.zeros(4)
    for step in (10, 20, 1000):
        np.add.at(drawn, buffer.sample(6).indices, 1)
        buffer.refresh(step)
        expected = np.sqrt(np.array([1, 2, 3, 4]) * np.exp(-drawn / 3))
        np.testing.assert_allclose(buffer.tree[np.arange(4)], expected)
    other = ReplayBuffer(4, 0.5, partial(exponential_decay, tau=3.0), seed=9, decay_by="draws")
    other.load_state_dict(buffer.state_dict())
    other.refresh(2000)
    np.testing.assert_allclose(other.tree[np.arange(4)], expected)
    buffer.add(episodes(1, start=4), np.ones(1), step=2000)  # into the slot of the first
    np.testing.assert_allclose(buffer.tree[np.arange(4)], [1, *expected[1:]])


def test_base_priorities_can_be_updated():
    """Section 3.5: advantage and TD-error priorities are recomputed after a training step."""
    buffer = ReplayBuffer(10, 0.5, partial(exponential_decay, tau=4.0))
    buffer.add(episodes(4), np.ones(4), step=0)
    buffer.refresh(4)
    buffer.update_base_priorities(np.array([1, 3]), np.array([9.0, 4.0]))
    np.testing.assert_allclose(buffer.tree[np.arange(4)], np.sqrt(np.array([1, 9, 1, 4]) * np.exp(-1)))


def test_base_priorities_that_did_not_change_leave_their_leaves_alone():
    """Bit for bit, also where the decay has moved on since the last refresh (draws)."""
    for decay_by in ("age", "draws"):
        buffer = ReplayBuffer(8, 0.6, fast_decay, decay_by=decay_by)
        buffer.add(episodes(6), np.arange(1.0, 7.0), step=0)
        buffer.refresh(3)
        before = buffer.tree.nodes.copy()
        indices = buffer.sample(16).indices  # more than there are: some twice
        buffer.update_base_priorities(indices, buffer.base_priorities[indices])
        np.testing.assert_array_equal(buffer.tree.nodes, before)
        buffer.update_base_priorities(np.array([2]), np.array([30.0]))
        assert buffer.tree[2] > before[buffer.tree.size + 2]


def test_state_dict_continues_the_same_draws():
    one, two = (ReplayBuffer(8, 0.6, fast_decay, seed=s) for s in (1, 2))
    for t in range(5):
        one.add(episodes(3, start=3 * t), np.random.default_rng(t).random(3) + 0.1, step=t)
    one.refresh(6)
    one.sample(5)
    two.load_state_dict(one.state_dict())
    for t in range(7, 12):
        a, b = one.sample(6), two.sample(6)
        np.testing.assert_array_equal(a.indices, b.indices)
        assert [e.seed for e in a.episodes] == [e.seed for e in b.episodes]
        for buffer in (one, two):
            buffer.add(episodes(2, start=100 + t), np.ones(2), step=t)
            buffer.refresh(t + 1)
    with pytest.raises(ValueError, match="capacity"):
        ReplayBuffer(9, 0.6, fast_decay).load_state_dict(one.state_dict())


def test_refresh_beside_adding_and_sampling():
    """Stress: no NaN, no stale length, no evicted episode, every drawn entry one that was held."""
    buffer = ReplayBuffer(256, 0.6, fast_decay, "lowest_priority")
    buffer.add(episodes(64), np.ones(64), step=0)
    stop, errors = threading.Event(), []

    def sample():
        while not stop.is_set():
            replay = buffer.sample(16)
            if not (np.isfinite(replay.probabilities).all() and (replay.probabilities > 0).all()):
                errors.append("probability")
            if not ((replay.ages >= 0).all() and all(len(e.tokens) == len(e.action_mask) for e in replay.episodes)):
                errors.append("entry")
            # an episode carries the step it was added with: what was drawn must be what the arrays describe
            if any(e.step != e.info["step"] for e in replay.episodes):
                errors.append("slot")

    for e in buffer.episodes:
        e.info["step"] = 0
    threads = [threading.Thread(target=sample) for _ in range(3)]
    for thread in threads:
        thread.start()
    futures = []
    for step in range(1, 400):
        new = episodes(16, start=step)
        for e in new:
            e.info["step"] = step
        buffer.add(new, np.random.default_rng(step).random(16) + 0.01, step)
        futures.append(buffer.refresh_async(step))
    for future in futures:
        future.result(timeout=60)
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert len(buffer) == 256
    buffer.refresh(400)
    assert buffer.tree.total() == pytest.approx(buffer.tree[np.arange(256)].sum())


def test_an_error_in_the_refresh_reaches_the_caller():
    def broken(age):
        raise RuntimeError("decay failed")

    buffer = ReplayBuffer(4, 0.6, fast_decay)
    buffer.add(episodes(1), np.ones(1), step=0)
    buffer.decay = broken
    with pytest.raises(RuntimeError, match="decay failed"):
        buffer.refresh_async(3).result()


def test_bad_arguments_are_refused():
    for arguments in ((0, 0.6, None), (10, -0.1, None), (10, 1.1, None), (10, 0.6, None, "random")):
        with pytest.raises(ValueError):
            ReplayBuffer(*arguments)
    buffer = ReplayBuffer(4, 0.6, None)
    with pytest.raises(ValueError, match="total"):
        buffer.sample(1)
    for n, base in ((5, np.ones(5)), (2, np.ones(3)), (1, np.zeros(1)), (1, np.array([np.nan])), (1, np.array([-1.0]))):
        with pytest.raises(ValueError):
            buffer.add(episodes(n), base, step=0)
    assert len(buffer) == 0
