"""Episodes, and the batches and micro-batches that they become."""

import numpy as np
import pytest
from conftest import make_episode
from hypothesis import given
from hypothesis import strategies as st

from freshper.episode import PADDING, collate, group_by_length


def test_a_batch_is_its_episodes_padded_and_a_micro_batch_some_of_its_rows():
    rng = np.random.default_rng(0)
    episodes = [make_episode(rng, turns=1 + k, seed=k) for k in range(4)]
    batch = collate(episodes)
    part = batch.rows([2, 0])
    for rows, of in ((batch, episodes), (part, [episodes[2], episodes[0]])):
        assert rows.tokens.shape[1] == max(rows.lengths)
        for row, e in enumerate(of):
            n = len(e.tokens)
            ends = np.flatnonzero(e.action_mask & ~np.append(e.action_mask[1:], False))
            rewards = np.zeros(n)
            rewards[ends] = e.turn_rewards
            assert (rows.seeds[row], rows.lengths[row]) == (e.seed, n)
            expected = vars(e) | {"rewards": rewards}
            for name in ("tokens", "action_mask", "behavior_logprobs", "rewards"):
                padded = getattr(rows, name)[row].numpy()
                np.testing.assert_array_equal(padded[:n], expected[name].astype(padded.dtype))
                assert not padded[n:].any()


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.integers(1, 40))
def test_rows_stand_once_in_groups_of_little_padding(lengths, most):
    groups = group_by_length(lengths, most)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        grouped = [lengths[row] for row in group]
        assert grouped == sorted(grouped)
        assert len(grouped) <= most
        assert sum(grouped) > (1 - PADDING) * max(grouped) * len(grouped)
    # Equal lengths fill every group but one.
    assert [len(group) for group in group_by_length([7] * 10, 4)] == [2, 4, 4]


def test_an_episode_with_too_few_rewards_is_refused():
    episode = make_episode(np.random.default_rng(0), seed=7)
    episode.turn_rewards = episode.turn_rewards[:-1]
    with pytest.raises(ValueError, match="episode of seed 7"):
        collate([episode])
