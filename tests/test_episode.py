"""Micro-batches: little padding whatever the lengths are, and every row once."""

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import freshper.episode
from envs import ENVS
from freshper.episode import PADDING, alike
from freshper.presets import defaults
from freshper.rollout import RandomEngine, rollout


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.integers(1, 40))
def test_rows_stand_once_in_groups_of_little_padding(lengths, most):
    groups = alike(lengths, most)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[row] for row in group]
        assert own == sorted(own)
        assert len(own) <= most
        assert sum(own) > (1 - PADDING) * max(own) * len(own)
    assert lengths[groups[-1][-1]] == max(lengths)


def test_equal_lengths_fill_every_micro_batch():
    assert [len(group) for group in alike([7] * 10, 4)] == [2, 4, 4]


def test_real_games_are_ragged(text_policy):
    """64 games of FrozenLake: all in one batch they are over a third padding."""
    limits = (defaults("tiny", "frozenlake", "freshper")[name] for name in ("max_tokens", "max_new_tokens"))
    players = [ENVS["frozenlake"]() for _ in range(64)]
    games = rollout(RandomEngine(text_policy, players, 0), text_policy, players, list(range(64)), *limits)
    lengths = [len(game.tokens) for game in games]
    assert 1 - np.mean(lengths) / max(lengths) > 0.33
    groups = alike(lengths, 16)
    padded = sum(len(group) * max(lengths[row] for row in group) for group in groups)
    assert 1 - sum(lengths) / padded < PADDING
    assert len(groups) < 10


def test_the_example_of_the_docstring():
    tried = doctest.testmod(freshper.episode)
    assert tried.attempted == 1
    assert not tried.failed
