"""envs/check.py says in one sentence what is wrong with an environment of one's own."""

import re

import numpy as np
import pytest

from envs.base import Observation, TextEnv, UserError, parse_action
from envs.check import check_environment
from freshper.tiny import build_policy


class Guess(TextEnv):
    """A number from 1 to 8, in two tries. Its actions are of one character."""

    max_turns = 2
    actions = tuple("12345678")

    def start(self, seed):
        self.number = str(self.np_random.integers(1, 9))

    def step(self, reply):
        action = parse_action(reply, self.actions)
        success = action is not None and self.actions[action] == self.number
        return self.end_turn(float(success), success, success, action is not None)

    def observe(self):
        return Observation("number?")


def unseeded(_):
    return Observation(str(np.random.default_rng().random()))


def returns(reward=0.0, ended=True, valid=True):
    """Return a method `step` of one result."""
    info = {"success": False, "valid": valid}
    return lambda env, _: (env.observe(), reward, ended, False, info)


def raises_for_the_unreadable(env, reply):
    int(parse_action(reply, env.actions))
    return Guess.step(env, reply)


BROKEN = [
    ({"actions": ()}, "actions is empty"),
    ({"metrics": ("turns",)}, "metrics has the name 'turns'"),
    ({"metrics": ("style",)}, "metrics has the name 'style'"),
    ({"observe": lambda _: Observation("", (np.zeros((9, 9, 3)),))}, "observe() is Observation("),
    ({"observe": unseeded}, "reset(seed=0) began two different episodes"),
    ({"step": returns(float("nan"))}, "step() gave rewards with the sum nan"),
    ({"step": returns(ended=False)}, "step() did not end the episode in its max_turns"),
    (
        {"step": returns(valid=False)},
        "step() could not read '<answer>7</answer>', which random_reply() returned",
    ),
    (
        {"optimal_reply": lambda _: "7"},
        "step() could not read '7', which optimal_reply() returned",
    ),
]


@pytest.mark.parametrize("change, sentence", BROKEN)
def test_what_is_wrong_with_an_environment_is_one_sentence(change, sentence):
    with pytest.raises(UserError, match=re.escape(f"Own.{sentence}")):
        check_environment(type("Own", (Guess,), change)())


def test_an_error_of_an_environment_keeps_its_type_and_traceback():
    own = type("Own", (Guess,), {"step": raises_for_the_unreadable})
    with pytest.raises(TypeError, match="int"):
        check_environment(own())


def test_actions_of_one_character_can_be_sampled():
    policy = build_policy(Guess())
    ids = policy.tokenizer.convert_tokens_to_ids(list(Guess.actions))
    assert not set(ids) & set(policy.suppressed_ids)
