"""FrozenLake: Gymnasium's dynamics, maps that can be solved, exact baselines, pictures that show the state."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import UNREADABLE
from gymnasium.utils.env_checker import check_env
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envs import ENVS
from envs.base import EVAL_SEEDS, FORMAT_PENALTY
from envs.frozenlake import ACTIONS, random_map


@pytest.mark.parametrize("name", ["frozenlake", "frozenlake_vlm"])
@pytest.mark.parametrize("style", ["full", "terse"])
def test_gymnasium_accepts_it(name, style, monkeypatch):
    env = ENVS[name](style=style)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(env.action_space, "sample", lambda *a, **k: env.random_reply(rng))
    check_env(env, skip_render_check=True)


def play(env, seed, choose):
    observation, info = env.reset(seed=seed)
    total, turns = 0.0, 0
    while True:
        observation, reward, terminated, truncated, info = env.step(choose(env))
        assert env.observation_space.contains(observation)
        total, turns = total + reward, turns + 1
        if terminated or truncated:
            return total, turns, info["success"]


@pytest.mark.parametrize("slippery", [False, True])
def test_exact_baselines_are_what_players_get(slippery):
    """1,000 games of each player against dynamic programming, within 4 standard errors."""
    env, rng = ENVS["frozenlake"](slippery=slippery), np.random.default_rng(0)
    exact = {"random": 0.0, "optimal": 0.0}
    seen = {"random": 0, "optimal": 0}
    n = 1000
    for seed in range(n):
        for player, value in env.baselines(seed).items():
            exact[player] += value / n
        seen["random"] += play(env, seed, lambda e: e.random_reply(rng))[2]
        seen["optimal"] += play(env, seed, lambda e: e.optimal_reply())[2]
    for player in exact:
        p = exact[player]
        assert abs(seen[player] / n - p) <= 4 * np.sqrt(max(0.0, p * (1 - p)) / n) + 1e-12
    assert exact["optimal"] == pytest.approx(0.502 if slippery else 1.0, abs=0.04)
    assert exact["random"] == pytest.approx(0.217, abs=0.02)


def test_maps_are_solvable_reproducible_and_different():
    maps = ["".join(random_map(seed)) for seed in range(300)]
    assert maps == ["".join(random_map(seed)) for seed in range(300)]
    assert len(set(maps)) > 290
    assert all(m.count("S") == m.count("G") == 1 for m in maps)
    holes = np.mean([m.count("H") for m in maps]) / 14
    assert 0.1 < holes < 0.2  # 0.2 of the cells before unsolvable maps are thrown away


@pytest.mark.parametrize("name", ["frozenlake", "sokoban_simple", "nq_search", "gsm8k"])
def test_without_a_seed_an_episode_is_never_a_held_out_one(name, monkeypatch):
    env = ENVS[name]()
    largest = env.reset(seed=EVAL_SEEDS - 1)[0]
    monkeypatch.setattr(env, "_np_random", SimpleNamespace(integers=lambda high: high - 1))
    assert env.reset()[0] == largest


def test_moves_are_gymnasium_s():
    env = ENVS["frozenlake"]()
    env.reset(seed=0)
    twin = ENVS["frozenlake"]()
    twin.reset(seed=0)
    for action in ("Right", "Down", "Left", "Up"):
        _, reward, terminated, _, info = env.step(f"I think <answer> {action} </answer>")
        state, expected, done, _, _ = twin.lake.step(ACTIONS.index(action))
        assert (env.lake.s, reward, terminated, info["valid"]) == (state, expected, done, True)
        if terminated:
            break


@pytest.mark.parametrize("reply", UNREADABLE)
def test_unreadable_replies_cost_a_turn_and_leave_the_state(reply):
    env = ENVS["frozenlake"]()
    before = env.reset(seed=1)[0]
    observation, reward, terminated, truncated, info = env.step(reply)
    assert (reward, terminated, truncated, info["success"], info["valid"]) == (
        -FORMAT_PENALTY,
        False,
        False,
        False,
        False,
    )
    assert observation.text == before.text
    for _ in range(8):
        assert not env.step(reply)[3]
    assert env.step(reply)[3]  # the tenth turn is the last


@settings(max_examples=200, deadline=None)
@given(reply=st.text(max_size=300))
def test_arbitrary_text_never_earns_anything(reply):
    assume(reply.strip() not in ACTIONS)
    env = ENVS["frozenlake"]()
    env.reset(seed=2)
    for text in (reply, f"<answer>{reply}</answer>", reply * 300):
        observation, reward, *_ = env.step(text)
        assert reward <= 0.0
        assert env.observation_space.contains(observation)


def cells(env):
    """What stands where, read off Gymnasium's own map: {(row, col): symbol}."""
    shown = {(r, c): {"H": "O", "G": "G"}.get(env.lake.desc[r, c].decode(), "_") for r in range(4) for c in range(4)}
    player = divmod(int(env.lake.s), 4)
    shown[player] = {"_": "P", "O": "X", "G": "√"}[shown[player]]
    return shown


def wander(env, seed):
    """Every state of a random game."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    over = False
    while True:
        yield observation, cells(env)
        if over:
            return
        observation, _, terminated, truncated, _ = env.step(env.random_reply(rng))
        over = terminated or truncated


@pytest.mark.parametrize(("style", "separator"), [("full", " "), ("terse", "")])
def test_text_is_the_grid(style, separator):
    for seed in range(40):
        for observation, shown in wander(ENVS["frozenlake"](style=style), seed):
            rows = observation.text.split("State:\n")[-1].split("\n")[:4]
            assert rows == [separator.join(shown[r, c] for c in range(4)) for r in range(4)]


def test_captions_name_the_cells():
    for seed in range(40):
        env = ENVS["frozenlake_vlm"]()
        for observation, shown in wander(env, seed):
            assert observation.text == ""  # nothing but the picture says where things are
            words = env.caption().split(" ")
            named = {(int(w[1]) - 1, "abcd".index(w[0])) for w in words if w[0] in "abcd"}
            assert named == {cell for cell, symbol in shown.items() if symbol != "_"}
            player = next(cell for cell, symbol in shown.items() if symbol in "PX√")
            assert words[:2] == [shown[player], f"{'abcd'[player[1]]}{player[0] + 1}"]
            assert words[2] == "G"
            assert words[4:5] in ([], ["O"])


def test_pictures_show_the_state():
    """Red only where the player is, green only on the goal, dark blue only in holes, plain ice elsewhere."""
    for seed in range(30):
        for observation, shown in wander(ENVS["frozenlake_vlm"](), seed):
            image = observation.images[0].astype(int)
            assert image.shape == (56, 56, 3)
            for (row, col), symbol in shown.items():
                cell = image[14 * row + 4 : 14 * row + 13, 14 * col + 4 : 14 * col + 13].reshape(-1, 3)
                red = ((cell[:, 0] > 150) & (cell[:, 1] < 100)).sum() > 8
                green = ((cell[:, 1] > 130) & (cell[:, 0] < 60)).sum() > 8
                dark = ((cell[:, 2] > 60) & (cell[:, 0] < 60) & (cell[:, 1] < 80)).sum() > 20
                assert red == (symbol in "PX√")
                assert symbol == "√" or green == (symbol == "G")  # the player stands before the flag
                assert dark == (symbol in "OX")
                assert symbol != "_" or np.ptp(cell, axis=0).max() < 60


def test_full_prompts_say_what_a_pretrained_model_needs():
    env = ENVS["frozenlake"](style="full", slippery=True)
    first = env.reset(seed=0)[0].text
    assert all(word in first for word in ("slippery", "Left", "Down", "Right", "Up", "<answer>", "actions left: 10"))
    later = env.step("nonsense")[0].text
    assert "Reward: -0.15" in later
    assert "actions left: 9" in later
    assert "slippery" not in ENVS["frozenlake"](style="full").reset(seed=0)[0].text
