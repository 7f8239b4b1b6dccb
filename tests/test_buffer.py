"""The buffer returns what was added, with the probability of eq. 2 and 14, beside a refresh."""

import pickle
import threading
from functools import partial

import numpy as np
import pytest
from conftest import make_episode
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import ENVS
from freshper.buffer import ReplayBuffer
from freshper.priority import age_limit, exponential_decay

fast_decay = partial(exponential_decay, tau=3.0)


def episodes(n, start=0, **fields):
    rng = np.random.default_rng(start)
    return [make_episode(rng, seed=start + k, **fields) for k in range(n)]


def leaves(buffer):
    return buffer.tree[np.arange(len(buffer))]


def test_an_episode_comes_back_and_its_images_are_pngs():
    image = ENVS["frozenlake_vlm"](style="full").reset(seed=0)[0].images[0]
    images = image, image.reshape(112, 448, 3)
    stored = [episodes(1, start=k, images=[i])[0] for k, i in enumerate(images)]
    buffer = ReplayBuffer(10, 0.6, fast_decay)
    buffer.add(stored, np.ones(2), step=7)
    for drawn in buffer.sample(32).episodes:
        assert drawn is stored[drawn.seed]
        assert drawn.step == 7
        np.testing.assert_array_equal(drawn.images[0], images[drawn.seed])
        assert len(pickle.dumps(drawn.images)) < image.nbytes / 20


@pytest.mark.parametrize("eviction", ["fifo", "lowest_priority"])
@pytest.mark.parametrize("tau", [3.0, np.inf])
@settings(deadline=None, max_examples=20)
@given(st.integers(1, 12), st.lists(st.integers(1, 12), max_size=8), st.integers(0, 1000))
def test_priorities_ages_and_eviction(eviction, tau, capacity, batches, seed):
    """Against a list that is sorted anew every time; of equal priorities the oldest goes first."""
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer(capacity, 0.6, partial(exponential_decay, tau=tau), eviction)
    held = []  # [log priority as of the last refresh, order of arrival, base priority, step]
    added = 0
    for step, n in enumerate(batches):
        n = min(n, capacity)
        base = rng.integers(1, 4, n) / 2.0  # with ties
        excess = max(0, len(held) + n - capacity)
        if eviction == "fifo":
            held.sort(key=lambda entry: entry[1])
        else:
            held.sort()
        held = held[excess:]
        held += [[0.0, added + k, b, step] for k, b in enumerate(base)]
        buffer.add(episodes(n, start=added), base, step)
        buffer.refresh_async(step + 1)
        added += n

        for entry in held:
            entry[0] = np.round(np.log(entry[2]) - (step + 1 - entry[3]) / tau, 9)
        leaf_of = {order: np.exp(0.6 * log_p) for log_p, order, *_ in held}  # eq. 2 and 14
        expected = [leaf_of[e.seed] for e in buffer.episodes]
        assert len(buffer) == len(held)
        # `ages` waits for the refresh.
        np.testing.assert_array_equal(buffer.ages(), [step + 1 - e.step for e in buffer.episodes])
        np.testing.assert_allclose(leaves(buffer), expected, rtol=1e-7)

    if held:
        now = len(batches) + 3  # updates after the refresh
        replay = buffer.sample(16, now)
        p = [leaf_of[e.seed] / sum(leaf_of.values()) for e in replay.episodes]
        assert replay.ages.tolist() == [now - e.step for e in replay.episodes]
        np.testing.assert_allclose(replay.probabilities, p, rtol=1e-7)


def test_standard_per_forgets_nothing_and_stale_entries_can_still_be_drawn():
    limit = partial(age_limit, tau=5.0)
    cases = (None, 0.6, [1.0, 2**0.6]), (fast_decay, 0.6, [0.0, 0.0]), (limit, 0.0, [0.0, 0.0])
    for decay, alpha, expected in cases:
        buffer = ReplayBuffer(10, alpha, decay)
        buffer.add(episodes(2), np.array([1.0, 2.0]), step=0)
        buffer.refresh(10**6)
        np.testing.assert_allclose(leaves(buffer), expected, atol=1e-300)
        assert len(buffer.sample(8).episodes) == 8


def test_base_priorities_can_be_updated():
    """Section 3.5, "Priority Update". Unchanged ones keep their leaves to the last bit."""
    buffer = ReplayBuffer(10, 0.5, partial(exponential_decay, tau=4.0))
    buffer.add(episodes(4), np.ones(4), step=0)
    buffer.refresh(4)
    buffer.refresh(3)  # the clock is never turned back
    buffer.update_base_priorities(np.array([1, 3, 3]), np.array([9.0, 4.0, 4.0]))
    np.testing.assert_allclose(leaves(buffer), np.sqrt(np.array([1, 9, 1, 4]) * np.exp(-1)))

    buffer.add(episodes(1), np.ones(1), step=8)  # the clock moves on, the other leaves do not
    assert leaves(buffer)[-1] == 1.0  # its own priority, not the largest so far
    before = leaves(buffer)
    indices = buffer.sample(16).indices  # more than there are: some twice
    buffer.update_base_priorities(indices, buffer.base_priorities[indices])
    np.testing.assert_array_equal(leaves(buffer), before)


@pytest.mark.parametrize(
    "use",
    [
        lambda b: b.add(episodes(1, start=9), np.ones(1), step=5),
        lambda b: b.update_base_priorities(np.array([0]), np.array([2.0])),
        lambda b: b.sample(2),
        lambda b: b.ages(),
        lambda b: b.state_dict(),
        lambda b: b.refresh(6),
        lambda b: b.refresh_async(6),
    ],
)
def test_everything_waits_for_a_pending_refresh_and_passes_its_error_on(use):
    """So a pending refresh never undoes a later one."""
    buffer = ReplayBuffer(8, 0.6, None)
    buffer.add(episodes(3), np.ones(3), step=0)
    started, released = threading.Event(), threading.Event()

    def slow_decay(age):
        started.set()
        return released.wait(10) and fast_decay(age)

    buffer.decay = slow_decay
    refresh = buffer.refresh_async(4)
    assert started.wait(10)
    buffer.decay = fast_decay
    user = threading.Thread(target=use, args=(buffer,))
    user.start()
    user.join(0.05)
    assert user.is_alive()
    assert not refresh.done()
    released.set()
    user.join(10)
    assert not user.is_alive()
    buffer.ages()  # the refresh that refresh_async started has ended too

    buffer.decay = lambda age: 1 / 0
    assert isinstance(buffer.refresh_async(9).exception(10), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        use(buffer)


def test_bad_arguments_are_refused():
    for arguments in ((0, 0.6, None), (9, 0.6, None, "random")):
        with pytest.raises(ValueError):
            ReplayBuffer(*arguments)
    buffer = ReplayBuffer(4, 0.6, None)
    with pytest.raises(ValueError, match="total"):
        buffer.sample(1)
    buffer.add(episodes(2), np.ones(2), step=0)
    for n, priorities in ((2, 1), (5, 5)):
        with pytest.raises(ValueError, match=f"{n} episodes, {priorities} priorities, capacity 4"):
            buffer.add(episodes(n), np.ones(priorities), step=0)
    for bad in (0.0, np.nan, -1.0, np.inf):
        with pytest.raises(ValueError, match="finite and positive"):
            buffer.add(episodes(1), np.array([bad]), step=0)
        with pytest.raises(ValueError, match="finite and positive"):
            buffer.update_base_priorities([0], [bad])
    np.testing.assert_array_equal(buffer.base_priorities, [1, 1, 0, 0])
