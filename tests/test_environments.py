"""Every environment of `ENVS` keeps the same promises. Replies are read as a fair reader would."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs import ENVS
from envs.base import Observation, outside_think, parse_action
from envs.check import check_environment

CASES = {**ENVS, "frozenlake, slippery": partial(ENVS["frozenlake"], slippery=True)}
every_environment = pytest.mark.parametrize("name", list(CASES))
ACTIONS = ("Left", "Down", "Right", "Up")


READABLE = """\
<answer>Right</answer>
<answer>right</answer>
<Answer> RIGHT </Answer>
<ANSWER>⏎\tRight⏎</answer>
The hole is Down, so I go Right: <answer> Right </answer>. Then Up!
1 < 2 <b><answer>Right</answer></b>
<THINK>Left? <answer>Left</answer> no.</Think>⏎<answer>Right</answer>
<think>What is <think> for?</think><answer>Right</answer>
Left? <answer>Left</answer></think><answer>Right</answer>
<answer>Right</answer><think>Or Left?</think>
<reasoning>Left? <answer>Left</answer></reasoning><answer>Right</answer>
Left? <answer>Left</answer></Thinking ><answer>Right</answer>
<cotton><answer>Right</answer>
<answer>**Right**</answer>
<answer>"right".</answer>"""
NO_ACTION = """\
I go Right.
<search>Right</search>
<answer>Right
</answer>Right<answer>
<answer> </answer>
<answer>not Right</answer>
<answer>Right or Left</answer>
<answer>Rights</answer>
<answer>Ri ght</answer>
<anſwer>Right</anſwer>
<answer>Right</answer><answer>Left</answer>
<answer><answer>Right</answer></answer>
\x00\ud800
<think><think><answer>Right</answer>
<think><answer>Right</answer></think>
<answer>Right</answer></think>
<think>a</think><think>b</think><answer>Right</answer>
< answer>Right</ answer>"""


def test_a_reply_holds_one_action_or_none():
    for replies, action in ((READABLE, 2), (NO_ACTION, None)):
        for reply in replies.split("\n"):
            assert parse_action(reply.replace("⏎", "\n"), ACTIONS) == action, reply
    assert parse_action("<answer>left!</answer>", ("Left", "Left!")) == 1


# Replies under a chat template that opens the thought in the assistant's header. The rollout puts
# the opening in front of the reply.
THOUGHTS = """\
<think>⏎A hole.⏎</think>⏎⏎Right|⏎⏎Right
<think>A hole.</think>Right|Right
<think><think>⏎Twice.</think> Right| Right
<THINK>a</Think>Right|Right
A hole.⏎</think>⏎⏎Right|⏎⏎Right
</think>Right|Right
<think>⏎</think>⏎⏎|⏎⏎
<think>⏎Is it <answer>Left</answer>…|
<think>|
<think>a</think>b</think>Right|
a</think>b</think>Right|
a</think>b<think>c</think>Right|
a</think>b<think>Right|
Right|Right
""" + "\n".join(
    f"<{name}>a <answer>Left</answer>|\n<{name}>a</{name}>Right|Right"
    for name in "thinking my_thoughts Reasoning analysis scratchpad cot reflection".split()
)


def test_what_follows_the_thought_is_read_and_nothing_of_an_open_one():
    for line in THOUGHTS.split("\n"):
        reply, read_part = line.replace("⏎", "\n").split("|")
        assert outside_think(reply) == read_part, line


HOSTILE = r"""<answer> </answer> <think> </think> <search> </search> <information> </information>
<answer <ANSWER> </ <|im_end|> <|image_pad|> Up Left 7 042 nan 1e999 - 6*7 \boxed{ } $ , . é 漢字 𝟟
٣ 🙂 %s""".split()
HOSTILE += ["\x00", "\n", " ", "\u202e", "\ud800", "a" * 300]
# What a turn costs besides, by the paper's appendix D and the authors' code.
TURN_REWARD = {"sokoban_simple": -0.1, "sokoban_hard": -0.1, "cliffwalking": -1.0}
UNREADABLE = ["", "<answer></answer>", "x" * 100_000]


@every_environment
def test_gymnasium_accepts_it(name):
    check_env(CASES[name](style="full"), skip_render_check=True)
    if name not in ENVS:
        return
    env = gymnasium.make(f"freshper/{name}-v0")
    assert type(env.unwrapped) is ENVS[name]
    assert isinstance(env.action_space.sample(), str)  # before any episode
    images = env.reset(seed=0)[0].images
    assert bool(images) == (name in ("frozenlake_vlm", "geoqa"))


@every_environment
def test_it_keeps_what_is_asked_of_one_s_own(name):
    """A seed reproduces its episode, among others. Seeds differ, except those of CliffWalking."""
    env = CASES[name]()
    check_environment(env)
    assert len({repr(env.reset(seed=seed)[0]) for seed in range(10)}) > (name != "cliffwalking")
    assert env.caption()


def test_the_random_policy_has_its_own_stream(monkeypatch):
    """Or its first draw is the draw that began the room."""
    env, drawn = ENVS["sokoban_simple"](), []
    monkeypatch.setattr(env, "random_reply", lambda rng: drawn.append(rng.random()) or "")
    env.policy_levels(7)
    assert drawn[0] != np.random.default_rng(7).random()


@every_environment
def test_arbitrary_replies_never_raise_and_unreadable_ones_cost_turn_and_penalty_alone(name):
    env = CASES[name](format_penalty=0.5, max_turns=3)
    rng = np.random.default_rng(0)
    replies = UNREADABLE.copy()
    for _ in range(300):
        pieces = rng.choice(len(HOSTILE), rng.integers(0, 6))
        replies.append("".join(HOSTILE[k] for k in pieces))

    unreadable = 0
    turn_reward = TURN_REWARD.get(name, 0.0)
    before, _ = env.reset(seed=1)
    for k, reply in enumerate(replies):
        observation, reward, terminated, truncated, info = env.step(reply)
        assert isinstance(observation, Observation) and np.isfinite(reward)
        assert set(info["metrics"]) == set(env.metrics)
        if not info["valid"]:
            unreadable += 1
            assert reward == pytest.approx(turn_reward - 0.5)
            assert not (terminated or info["success"])
            assert repr(observation) == repr(before)
        if k == 2 and "score" in env.metrics:  # the paper's number, without our penalty
            assert info["metrics"]["score"] == pytest.approx(3 * turn_reward)

        before = observation
        if terminated or truncated:
            before, _ = env.reset(seed=k)
    assert unreadable > 100


@every_environment
def test_the_optimal_policy_succeeds_and_the_random_one_seldom(name):
    env = CASES[name]()
    levels = [env.policy_levels(seed) for seed in range(40)]
    random, optimal = np.mean([list(success.values()) for success in levels], axis=0)
    assert optimal == 1.0 or (name == "frozenlake, slippery" and optimal > 0.4)
    assert optimal - random > 0.2
