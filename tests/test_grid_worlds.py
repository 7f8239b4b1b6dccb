"""FrozenLake and CliffWalking beside Gymnasium's own, Sokoban beside its rules written once more,
and the texts, images and captions of all three."""

from functools import cache

import gymnasium
import numpy as np
import pytest

from envs import ENVS
from envs.base import EVAL_SEEDS, WARM_START_SEEDS, play_out
from envs.frozenlake import action_values, random_map

STEPS = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
SIZES = {"sokoban_simple": (6, 1), "sokoban_hard": (8, 2)}


def wander(env, seed):
    """Return every observation of an episode of random replies, with its caption."""
    rng = np.random.default_rng(seed)
    seen = []

    def reply():
        seen.append((env.observe(), env.caption()))
        return env.random_reply(rng)

    play_out(env, seed, reply)
    return [*seen, (env.observe(), env.caption())]


def value(transitions, start, horizon):
    """Return the largest expected sum of rewards by recursion over a table like Gymnasium's."""

    @cache
    def state_value(state, left):
        if left == 0:
            return 0
        return max(action_value(outcomes, left) for outcomes in transitions[state].values())

    def action_value(outcomes, left):
        total = 0
        for p, after, reward, end in outcomes:
            total += p * (reward if end else reward + state_value(after, left - 1))
        return total

    return state_value(start, horizon)


@pytest.mark.parametrize("slippery", [False, True])
def test_frozenlake_is_gymnasium_s_on_our_maps(slippery):
    """Every state and reward of random episodes, slips included."""
    rng = np.random.default_rng(0)
    env = ENVS["frozenlake"](slippery=slippery)
    for seed in range(20):
        env.reset(seed=seed)
        desc = random_map(seed)
        twin = gymnasium.make("FrozenLake-v1", desc=desc, is_slippery=slippery).unwrapped
        twin.reset(seed=seed)
        twin.np_random = np.random.default_rng((seed, 2))
        symbols = "".join(desc.flat).translate(str.maketrans("SFH", "__O"))

        over = False
        while not over:
            k = int(rng.integers(4))
            observation, *results, truncated, info = env.step(f"<answer>{list(STEPS)[k]}</answer>")
            state, *expected, _, _ = twin.step(k)
            assert results == expected
            assert info["success"] == (symbols[state] == "G")

            grid, beside = observation.text.split("\n ")
            player = {"_": "P", "O": "X", "G": "√"}[symbols[state]]
            assert grid.replace("\n", "") == symbols[:state] + player + symbols[state + 1 :]
            cells = {divmod(n, 4): symbol for n, symbol in enumerate(symbols)}
            around = [(state // 4 + dr, state % 4 + dc) for dr, dc in STEPS.values()]
            assert beside.split() == [cells.get(cell, "#") for cell in around]
            over = results[1] or truncated


@pytest.mark.parametrize(("slippery", "best"), [(False, 1.0), (True, 0.49)])
def test_frozenlake_s_best_success(slippery, best):
    """The mean over held-out maps. Each is also computed by another recursion."""
    env = ENVS["frozenlake"](slippery=slippery)
    bounds = []
    for k in range(256):
        env.reset(seed=EVAL_SEEDS + k)
        bounds.append(action_values(env.lake.P, 10)[env.lake.s].max())
        assert k > 8 or bounds[k] == pytest.approx(value(env.lake.P, env.lake.s, 10))
    assert np.mean(bounds) == pytest.approx(best, abs=0.005)


@pytest.mark.parametrize("name", ["frozenlake", "sokoban_simple", "sokoban_hard"])
def test_held_out_maps_and_rooms_are_never_seen_in_training_or_warm_start(name):
    """No map shares holes and goal, no room walls and targets, with a held-out one.

    Training has at least 10,000 of them: if n draws have c repetitions, some n² / 2c.
    """
    env, n, grounds = ENVS[name](), 1000, []
    movers = {"P": "_"} if name == "frozenlake" else {"P": "_", "X": "_", "S": "O"}
    for first in (EVAL_SEEDS, WARM_START_SEEDS, 0):
        texts = [env.reset(seed=first + k)[0].text.split("\n ")[0] for k in range(n)]
        grounds.append({text.translate(str.maketrans(movers)) for text in texts})
    held_out, *seen = grounds
    assert not held_out & set.union(*seen)
    assert len(held_out) > 300
    assert 10_000 * (n - len({*texts})) < n**2 / 2


def test_cliffwalking_is_gymnasium_s():
    """A long random walk beside the original."""
    twin, rng = gymnasium.make("CliffWalking-v1").unwrapped, np.random.default_rng(0)
    env = ENVS["cliffwalking"](max_turns=3000)
    twin.reset(seed=0)
    env.reset(seed=0)
    assert env.caption() == "Up a3 Right X Down a4 Left a4"  # the neighbours
    cells = cells_of([*["_" * 12] * 3, "_CCCCCCCCCCG"])

    rewards, terminated = [], False
    while not terminated and env.turn < 3000:
        k = int(rng.integers(4))
        reply = f"<answer>{('Up', 'Right', 'Down', 'Left')[k]}</answer>"
        observation, reward, terminated, _, info = env.step(reply)
        state, *expected, _, _ = twin.step(k)
        assert [reward, terminated] == expected
        rewards.append(reward)

        row, col = divmod(int(state), 12)
        around = ((row - 1, col), (row, col + 1), (row + 1, col), (row, col - 1))
        marks = " ".join(cells.get(cell, "#") for cell in around)
        assert observation.text == f" {'abcdefghijkl'[col]}{row + 1} {marks}"
        assert info["success"] == ((row, col) == (3, 11))
        assert info["metrics"]["score"] == sum(rewards)
    assert rewards.count(-100) > 5


def test_where_episodes_of_cliffwalking_start():
    """Held-out ones start at the task's own start, training ones along the shortest way if the flag
    says so, and those of the warm start in every free cell."""
    env = ENVS["cliffwalking"](along_the_way=True)
    way = {"a4", *(f"{column}3" for column in "abcdefghijkl")}
    free = {"a4", *(f"{column}{row}" for column in "abcdefghijkl" for row in (1, 2, 3))}
    for first, cells in ((0, way), (EVAL_SEEDS, {"a4"}), (WARM_START_SEEDS, free)):
        assert {env.reset(seed=first + k)[0].text.split()[0] for k in range(500)} == cells
    assert ENVS["cliffwalking"]().reset(seed=0)[0].text == " a4 _ C # #"


def test_the_best_score_of_cliffwalking():
    env = ENVS["cliffwalking"]()
    assert play_out(env, 0, env.optimal_reply)[0] == value(env.cliff.P, 36, 50) == -13


def cells_of(rows):
    """Return {(row, column): symbol} of rows of symbols."""
    return {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}


def rows_of(env):
    """Return the grid of a Sokoban as rows of symbols, (str, ...)."""
    return tuple("".join(row) for row in env.grid())


def reference_step(rows, action):
    """Follow the rules once more, on rows of symbols: (str, ...) -> (str, ...)."""
    cells = cells_of(rows)
    boxes = {cell for cell, x in cells.items() if x in "X√"}
    r, c = next(cell for cell, x in cells.items() if x in "PS")
    dr, dc = STEPS[action]
    ahead, beyond = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
    if cells[ahead] == "#" or (ahead in boxes and (cells[beyond] == "#" or beyond in boxes)):
        return rows
    if ahead in boxes:
        boxes = boxes - {ahead} | {beyond}

    def shown(cell):
        ground = {"O": "O", "√": "O", "S": "O", "#": "#"}.get(cells[cell], "_")
        if cell == ahead:
            return {"O": "S", "_": "P"}[ground]
        return {"O": "√", "_": "X"}[ground] if cell in boxes else ground

    text, side = "".join(map(shown, cells)), len(rows)
    return tuple(text[k : k + side] for k in range(0, side**2, side))


def solved(rows):
    return not any("X" in row for row in rows)


class Moves(dict):
    """The table of a room in Gymnasium's form, filled by `reference_step` as it is read."""

    def __missing__(self, rows):
        self[rows] = {}
        for action in STEPS:
            after = reference_step(rows, action)
            self[rows][action] = [(1.0, after, float(solved(after)), solved(after))]
        return self[rows]


@pytest.mark.parametrize("name", list(SIZES))
def test_sokoban_follows_the_rules(name):
    """State and text of random episodes follow the reference, and rewards count its symbols."""
    env, rng = ENVS[name](max_turns=60, style="full"), np.random.default_rng(0)
    changes = set()
    for seed in range(60):
        env.reset(seed=seed)
        rows, score, over = rows_of(env), 0.0, False
        while not over:
            action = list(STEPS)[rng.integers(4)]
            after = reference_step(rows, action)
            reply = f"so <answer> {action} </answer>"
            (text, _), reward, terminated, truncated, info = env.step(reply)
            shown = text.replace(" ", "").split("State:\n")[1].split("\n")[: env.side]
            assert rows_of(env) == after == tuple(shown)
            assert info["success"] == terminated == solved(after)

            put = "".join(after).count("√") - "".join(rows).count("√")
            assert reward == pytest.approx(-0.1 + put + 10 * solved(after))
            score += reward
            assert info["metrics"]["score"] == pytest.approx(score)
            changes.add(put)
            rows, over = after, terminated or truncated

    # With one box, a box in place is the end of the episode.
    assert changes == ({0, 1} if name == "sokoban_simple" else {0, 1, -1})


@pytest.mark.parametrize(("name", "n"), [("sokoban_simple", 100), ("sokoban_hard", 6)])
def test_sokoban_s_rooms_need_the_turns_they_were_made_for(name, n):
    """By another search. Walls are around and no box is on a target. The optimal policy solves the
    room in as many turns."""
    side, boxes = SIZES[name]
    env, lengths, moves = ENVS[name](), [], Moves()
    for seed in range(EVAL_SEEDS, EVAL_SEEDS + n):
        env.reset(seed=seed)
        rows = rows_of(env)
        text = "".join(rows)
        assert [len(text), text.count("√"), text.count("X")] == [side**2, 0, boxes]
        assert [text.count("O") + text.count("S"), text.count("P") + text.count("S")] == [boxes, 1]
        assert set(rows[0] + rows[-1] + text[::side] + text[side - 1 :: side]) == {"#"}

        length = next(turns for turns in range(1, 11) if value(moves, rows, turns))
        total, _ = play_out(env, seed, env.optimal_reply)
        assert (env.turn, total) == (length, pytest.approx(10 + boxes - length / 10))
        lengths.append(length)

    assert set(lengths) <= set(range(boxes, 11))
    assert name == "sokoban_hard" or set(lengths) == set(range(1, 11))


@pytest.mark.parametrize("name", ["frozenlake", *SIZES])
def test_captions_name_the_cells(name):
    lake = {"P": "P", "X": "X", "√": "√", "G": "G√", "O": "OX"}
    marks = lake if name == "frozenlake" else {"P": "PS", "X": "X√", "O": "O√S", "#": "#"}
    env = ENVS[name]()
    for seed in range(15):
        for observation, caption in wander(env, seed):
            shown = cells_of(observation.text.split("\n ")[0].split("\n"))
            words = []
            for mark, symbols in marks.items():
                cells = [cell for cell, symbol in shown.items() if symbol in symbols]
                words += [mark] * bool(cells) + [f"{'abcdef'[c]}{r + 1}" for r, c in cells]
            assert caption == " ".join(words)


@pytest.mark.parametrize(("style", "size"), [("terse", 14), ("full", 56)])
def test_images_show_the_state(style, size):
    """Right of its ruler and below, a cell looks as its symbol, and no two symbols look alike."""
    env, text_env = ENVS["frozenlake_vlm"](style=style), ENVS["frozenlake"]()
    looks = {}
    for seed in range(20):
        shown = zip(wander(env, seed), wander(text_env, seed), strict=True)
        for (observation, caption), (text_observation, text_caption) in shown:
            grid, beside = text_observation.text.split("\n ")
            assert caption == f"{text_caption} {beside}"
            rows = grid.split("\n")
            if style == "terse":
                assert observation.text == ""  # the image alone says where things are
                rows.append(beside.replace(" ", ""))

            image = observation.images[0]
            assert image.shape == (len(rows) * size, 4 * size, 3)
            for (row, col), symbol in cells_of(rows).items():
                cell = image[size * row : size * (row + 1), size * col : size * (col + 1)]
                looks.setdefault(symbol, set()).add(cell[size // 7 :, size // 7 :].tobytes())
    assert looks.keys() == set("PX√_OG" + "#" * (style == "terse"))
    assert len(set.union(*looks.values())) == sum(map(len, looks.values())) == len(looks)

    # Whoever changes an image changes no later one.
    before = image.copy()
    image[:] = 0
    np.testing.assert_array_equal(env.observe().images[0], before)
