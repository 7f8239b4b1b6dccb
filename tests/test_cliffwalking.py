"""CliffWalking: Gymnasium's dynamics and rewards, exact baselines, and what the observations say."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envs import ENVS
from envs.base import FORMAT_PENALTY
from envs.cliffwalking import ACTIONS, START, tables
from freshper.presets import PRESETS

make = ENVS["cliffwalking"]


@pytest.mark.parametrize("style", ["full", "terse"])
def test_gymnasium_accepts_it(style, monkeypatch):
    env = make(style=style)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(env.action_space, "sample", lambda *a, **k: env.random_reply(rng))
    check_env(env, skip_render_check=True)


def say(action):
    return f"so <answer> {action} </answer>"


def test_moves_and_rewards_are_gymnasium_s():
    """A random game beside the original, by action names and the grid's own geometry."""
    twin, rng = gymnasium.make("CliffWalking-v1").unwrapped, np.random.default_rng(0)
    env, falls = make(max_turns=2000), 0
    env.reset(seed=0)
    twin.reset(seed=0)
    row, col, score = 3, 0, 0.0
    steps = {"Up": (-1, 0), "Right": (0, 1), "Down": (1, 0), "Left": (0, -1)}
    for _ in range(2000):
        action = list(steps)[rng.integers(4)]
        observation, reward, terminated, _, info = env.step(say(action))
        state, expected, done, _, _ = twin.step(ACTIONS.index(action))
        row = min(max(row + steps[action][0], 0), 3)
        col = min(max(col + steps[action][1], 0), 11)
        if row == 3 and 0 < col < 11:
            row, col, falls = 3, 0, falls + 1
            assert reward == -100
        score += reward
        assert (env.world.s, reward, terminated) == (state, expected, done)
        assert divmod(int(state), 12) == (row, col)
        assert observation.text == f" {'abcdefghijkl'[col]}{row + 1}"
        assert info == {"success": (row, col) == (3, 11), "valid": True, "metrics": {"score": score}}
        if terminated:
            break
    assert falls > 5


def test_the_shortest_way_scores_minus_13():
    for choose in (lambda env, way: way.pop(0), lambda env, way: env.optimal_reply()):
        env = make()
        env.reset(seed=5)
        way = [say(a) for a in ["Up"] + ["Right"] * 11 + ["Down"]]
        for turn in range(1, 14):
            _, _, terminated, truncated, info = env.step(choose(env, way))
            assert terminated == (turn == 13)
            assert not truncated
        assert info == {"success": True, "valid": True, "metrics": {"score": -13.0}}


def test_every_seed_is_the_same_task():
    env = make()
    assert len({env.reset(seed=seed)[0].text for seed in range(20)}) == 1
    assert env.baselines(1) == env.baselines(10**9 + 3)


def transition_matrix():
    """Of the random player, from the geometry alone: [48, 48], the goal absorbing; falls [48]."""
    matrix, falls = np.zeros((48, 48)), np.zeros(48)
    for s in range(47):
        for down, right in ((-1, 0), (0, 1), (1, 0), (0, -1)):
            r, c = min(max(s // 12 + down, 0), 3), min(max(s % 12 + right, 0), 11)
            cliff = r == 3 and 0 < c < 11
            matrix[s, 36 if cliff else 12 * r + c] += 0.25
            falls[s] += 0.25 * cliff
    matrix[47, 47] = 1.0
    return matrix, falls


@pytest.mark.parametrize("turns", [5, 50, 200])
def test_exact_baselines_are_powers_of_the_transition_matrix(turns):
    matrix, falls = transition_matrix()
    at, score = np.eye(48)[36], 0.0
    for _ in range(turns):
        score -= at[:47].sum() + 99 * at @ falls
        at = at @ matrix
    exact = make(max_turns=turns).baselines(0)
    assert exact == {"random": pytest.approx(at[47], abs=1e-12), "optimal": float(turns >= 13)}
    assert tables(turns)[1][-1, START] == pytest.approx(score)
    assert turns != 200 or (round(at[47], 3), round(score)) == (0.023, -2079)  # as the module's head says


def test_the_random_player_is_what_the_table_says():
    env, rng, n, won, score = make(max_turns=200), np.random.default_rng(0), 300, 0, 0.0
    for seed in range(n):
        env.reset(seed=seed)
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(env.random_reply(rng))
            over = terminated or truncated
        won, score = won + info["success"], score + info["metrics"]["score"] / n
    p = env.baselines(0)["random"]
    assert abs(won / n - p) <= 4 * np.sqrt(p * (1 - p) / n)
    assert score == pytest.approx(-2079, abs=4 * 650 / np.sqrt(n))  # a game's standard deviation is about 600


REPLIES = [
    "", " ", "Right", "<answer>", "<answer>Right", "Right</answer>", "<answer></answer>", "<answer>right</answer>",
    "<answer>Right</answer><answer>Right</answer>", "<answer><answer>Right</answer></answer>",
    "<answer>Right Left</answer>", "<answer>1</answer>", "\x00\ud800", "<search>Up</search>", "x" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("reply", REPLIES)
def test_unreadable_replies_cost_a_turn_and_leave_the_state(reply):
    env = make(max_turns=2)
    before = env.reset(seed=1)[0]
    observation, reward, terminated, truncated, info = env.step(reply)
    assert (reward, terminated, truncated) == (-1 - FORMAT_PENALTY, False, False)
    assert info == {"success": False, "valid": False, "metrics": {"score": -1.0}}
    assert observation == before
    assert env.step(reply)[3]


@settings(max_examples=100, deadline=None)
@given(reply=st.text(max_size=300))
def test_arbitrary_text_never_earns_anything(reply):
    assume(reply.strip() not in ACTIONS)
    env = make()
    env.reset(seed=2)
    for text in (reply, f"<answer>{reply}</answer>", reply * 300):
        observation, reward, *_ = env.step(text)
        assert reward < 0.0
        assert env.observation_space.contains(observation)


def test_captions_name_the_neighbours():
    env = make()
    env.reset(seed=0)
    assert env.caption() == "Up a3 Right X Down a4 Left a4"
    env.step(say("Up"))
    assert env.caption() == "Up a2 Right b3 Down a4 Left a3"
    for _ in range(11):
        env.step(say("Right"))
    assert env.caption() == "Up l2 Right l3 Down l4 Left k3"


def test_full_prompts_say_what_a_pretrained_model_needs():
    env = make(style="full", max_turns=200)
    first = env.reset(seed=0)[0].text
    assert all(w in first for w in (*ACTIONS, "<answer>", "P C C C C C C C C C C G", "200 actions", "row 4, column 1"))
    later = env.step(say("Up"))[0].text
    assert later == "Reward: -1. Turn 2, actions left: 199. You: row 3, column 1."
    assert PRESETS["paper"]["cliffwalking"]["max_turns"] == 200
