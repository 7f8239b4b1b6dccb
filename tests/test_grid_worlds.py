"""FrozenLake and CliffWalking beside Gymnasium's own, Sokoban beside its rules written once more, and what is shown."""

import re
import sys
from collections import Counter
from functools import cache

import gymnasium
import numpy as np
import pytest

from envs import ENVS
from envs.base import EVAL_SEEDS, WARM_START_SEEDS, play_out
from envs.frozenlake import random_map, solve
from envs.sokoban import random_room

STEPS = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}


def wander(env, seed):
    """Return every observation of an episode of random replies, with its caption."""
    rng, seen = np.random.default_rng(seed), []
    play_out(
        env, seed, lambda: seen.append((env.observe(), env.caption())) or env.random_reply(rng)
    )
    return [*seen, (env.observe(), env.caption())]


FOLDS = {"random": np.mean, "optimal": max}


def value(transitions, start, horizon, fold):
    """Expected sum of rewards by recursion over a table like Gymnasium's; `fold` combines the values of the actions."""

    @cache
    def of(state, left):
        return (
            fold([sum(outcome(left, *o) for o in way) for way in transitions[state].values()])
            if left
            else 0
        )

    def outcome(left, p, after, reward, end):
        return p * (reward + (0 if end else of(after, left - 1)))

    return of(start, horizon)


@pytest.mark.parametrize("slippery", [False, True])
def test_frozenlake_is_gymnasium_s_on_our_maps(slippery):
    """Every state and reward of random episodes, slips included."""
    for seed in range(40):
        env, rng, desc = (
            ENVS["frozenlake"](slippery=slippery),
            np.random.default_rng(seed),
            random_map(seed),
        )
        twin = gymnasium.make("FrozenLake-v1", desc=desc, is_slippery=slippery).unwrapped
        twin.reset(seed=seed)
        env.reset(seed=seed)
        over = False
        while not over:
            k = int(rng.integers(4))
            observation, reward, terminated, truncated, info = env.step(
                f"so <answer> {list(STEPS)[k]} </answer>"
            )
            state, expected, done, _, _ = twin.step(k)
            shown = list("".join(desc).replace("S", "_").replace("F", "_").replace("H", "O"))
            under = shown[state]
            shown[state] = {"_": "P", "O": "X", "G": "√"}[under]
            grid, beside = observation.text.split("\n ")
            assert grid.replace("\n", "") == "".join(shown)
            at = {
                divmod(k, 4): x
                for k, x in enumerate("".join(desc).translate(str.maketrans("SFH", "__O")))
            }
            around = [(state // 4 + dr, state % 4 + dc) for dr, dc in STEPS.values()]
            assert beside.split() == [at.get(cell, "#") for cell in around]
            assert (reward, terminated, info["success"]) == (expected, done, under == "G")
            over = terminated or truncated


def test_frozenlake_maps_and_exact_bounds():
    """Means over maps: 0.502 at best on slippery ice and 1 elsewhere, 0.217 at random; each by another recursion."""
    maps = ["".join(random_map(seed)) for seed in range(600)]
    assert len(set(maps)) > 580
    assert all(m.count("S") == m.count("G") == 1 for m in maps)
    assert (
        0.1 < np.mean([m.count("H") for m in maps]) / 14 < 0.2
    )  # 0.2 before unsolvable maps are dropped
    for slippery, best in ((False, 1.0), (True, 0.502)):
        env = ENVS["frozenlake"](slippery=slippery)
        known = [env.baselines(seed) for seed in range(300)]
        assert np.mean([k["optimal"] for k in known]) == pytest.approx(best, abs=0.035)
        assert np.mean([k["random"] for k in known]) == pytest.approx(0.217, abs=0.02)
        for seed in range(8):
            env.reset(seed=seed)
            exact = {name: value(env.lake.P, env.lake.s, 10, fold) for name, fold in FOLDS.items()}
            assert known[seed] == pytest.approx(exact)


@pytest.mark.parametrize("name", ["frozenlake", "sokoban_simple", "sokoban_hard"])
def test_held_out_maps_and_rooms_are_never_seen_in_training_or_warm_start(name):
    """None shares holes and goal, or walls and targets, with a held-out one; training has at least 10,000 of them."""
    env, grounds = ENVS[name](), {}
    movers = {"P": "_"} if name == "frozenlake" else {"P": "_", "X": "_", "S": "O"}
    for first in (0, EVAL_SEEDS, WARM_START_SEEDS):
        shown = (env.reset(seed=first + k)[0].text.split("\n ")[0] for k in range(1000))
        grounds[first] = {text.translate(str.maketrans(movers)) for text in shown}
    seen, held_out = grounds[0] | grounds[WARM_START_SEEDS], grounds[EVAL_SEEDS]
    assert (len(seen & held_out), len(held_out) > 300) == (0, True)
    sampled = range(25_000) if name == "sokoban_simple" else range(12_000)
    size = SIZES.get(name)
    assert (
        len({random_room(k, *size, 5)[:3] if size else "".join(random_map(k)) for k in sampled})
        >= 10_000
    )


def test_cliffwalking_is_gymnasium_s():
    """A long random walk beside the original."""
    twin, rng = gymnasium.make("CliffWalking-v1").unwrapped, np.random.default_rng(0)
    env = ENVS["cliffwalking"](max_turns=3000)
    twin.reset(seed=0)
    env.reset(seed=0)
    assert env.caption() == "Up a3 Right X Down a4 Left a4"  # the neighbours
    rewards, terminated = [], False
    while not terminated and env.turn < 3000:
        k = int(rng.integers(4))
        way = ("Up", "Right", "Down", "Left")[k]
        observation, reward, terminated, _, info = env.step(f"so <answer> {way} </answer>")
        state, expected, done, _, _ = twin.step(k)
        row, col = divmod(int(state), 12)
        rewards.append(expected)
        assert (reward, terminated) == (expected, done)
        around = ((row - 1, col), (row, col + 1), (row + 1, col), (row, col - 1))
        marks = [
            "CG"[c == 11] if r == 3 and 0 < c < 12 else "_" if 0 <= r < 4 and 0 <= c < 12 else "#"
            for r, c in around
        ]
        assert observation.text == f" {'abcdefghijkl'[col]}{row + 1} {' '.join(marks)}"
        env.style = "full"
        assert f"You: row {row + 1}, column {col + 1}." in env.observe().text
        env.style = "terse"
        assert info == {
            "success": (row, col) == (3, 11),
            "valid": True,
            "metrics": {"score": sum(rewards)},
        }
    assert rewards.count(-100) > 5


def test_where_episodes_of_cliffwalking_start():
    """Held-out ones at the start; training along the shortest way, if asked for; the warm start at every free cell."""
    env = ENVS["cliffwalking"](along_the_way=True)
    way = ["a4", *(f"{column}3" for column in "abcdefghijkl")]
    for first, cells in ((0, way), (EVAL_SEEDS, way[:1]), (WARM_START_SEEDS, None)):
        found = {env.reset(seed=first + k)[0].text.split()[0] for k in range(500)}
        assert found == set(
            cells or [f"{column}{row}" for column in "abcdefghijkl" for row in (1, 2, 3)] + ["a4"]
        )
    assert ENVS["cliffwalking"]().reset(seed=0)[0].text == " a4 _ C # #"


def test_cliffwalking_s_exact_bounds():
    """By another recursion; and the optimal policy earns the best of them, in as many turns."""
    sys.setrecursionlimit(5000)
    env = ENVS["cliffwalking"](max_turns=200)
    env.reset(seed=0)
    best, random = solve(env.cliff.P, 200)[:, 36]
    found = {"random": random.mean(), "optimal": best.max()}
    assert found == pytest.approx(
        {name: value(env.cliff.P, 36, 200, fold) for name, fold in FOLDS.items()}
    )
    assert play_out(env, 0, env.optimal_reply)[0] == best.max() == -13
    assert round(random.mean()) == -2079  # as the module says


SIZES = {"sokoban_simple": (6, 1), "sokoban_hard": (8, 2)}
ROOMS = {  # of seed 7, made once and written down
    "sokoban_simple": "____\nO#__\nP_X_\n____",
    "sokoban_hard": "#_____\n__#X_P\n#__O__\n_#_X__\n##_O#_\n_____#",
}


def reference_step(rows, action):
    """The rules once more, on rows of symbols: (str, ...) -> (str, ...)."""
    cells = {(r, c): x for r, row in enumerate(rows) for c, x in enumerate(row)}
    boxes = {cell for cell, x in cells.items() if x in "X√"}
    r, c = next(cell for cell, x in cells.items() if x in "PS")
    dr, dc = STEPS[action]
    ahead, beyond = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
    if cells[ahead] == "#" or (ahead in boxes and (cells[beyond] == "#" or beyond in boxes)):
        return rows
    boxes = boxes - {ahead} | {beyond} if ahead in boxes else boxes

    def shown(cell):
        ground = {"O": "O", "√": "O", "S": "O", "#": "#"}.get(cells[cell], "_")
        if cell == ahead:
            return {"O": "S", "_": "P"}[ground]
        return {"O": "√", "_": "X"}[ground] if cell in boxes else ground

    return tuple("".join(shown((i, j)) for j in range(len(row))) for i, row in enumerate(rows))


def solved(rows):
    return not any("X" in row for row in rows)


class Moves(dict):
    """The table of a room in Gymnasium's form, filled by `reference_step` as it is read."""

    def __missing__(self, rows):
        after = [reference_step(rows, action) for action in STEPS]
        self[rows] = {
            k: [(1.0, state, float(solved(state)), solved(state))] for k, state in enumerate(after)
        }
        return self[rows]


@pytest.mark.parametrize("name", list(SIZES))
def test_sokoban_follows_the_rules(name):
    """Random episodes; state and text as the reference sees them, rewards counted from its symbols."""
    env, rng, seen = ENVS[name](max_turns=60, style="full"), np.random.default_rng(0), Counter()
    for seed in range(60):
        env.reset(seed=seed)
        rows, score, over = tuple(env.grid()), 0.0, False
        while not over:
            action = list(STEPS)[rng.integers(4)]
            after = reference_step(rows, action)
            (text, _), reward, terminated, truncated, info = env.step(
                f"so <answer> {action} </answer>"
            )
            shown = text.replace(" ", "").split("State:\n")[1].split("\n")[: env.side]
            assert tuple(env.grid()) == after == tuple(shown)
            before, now = ("".join(r).count("√") for r in (rows, after))
            assert reward == pytest.approx(-0.1 + now - before + 10 * solved(after))
            score += reward
            assert info["metrics"]["score"] == pytest.approx(score)
            assert (info["success"], terminated, info["valid"]) == (
                solved(after),
                solved(after),
                True,
            )
            seen.update(on=now > before, off=now < before, blocked=rows == after)
            rows, over = after, terminated or truncated
    assert min(seen["on"], seen["blocked"]) > 3
    assert seen["off"] > 0 or name == "sokoban_simple"  # one box in place is the end of the episode


@pytest.mark.parametrize(("name", "n"), [("sokoban_simple", 100), ("sokoban_hard", 6)])
def test_sokoban_s_rooms_need_the_turns_they_were_made_for(name, n):
    """By another search. Walls around, no box on a target, and the optimal policy solves it in as many turns."""
    assert ENVS[name]().reset(seed=7)[0].text == ROOMS[name]
    (side, boxes), lengths, moves = SIZES[name], [], Moves()
    for seed in range(EVAL_SEEDS, EVAL_SEEDS + n):
        env = ENVS[name]()
        env.reset(seed=seed)
        rows, text = tuple(env.grid()), "".join(tuple(env.grid()))
        assert [len(text), text.count("√"), text.count("X")] == [side**2, 0, boxes]
        assert [text.count("O") + text.count("S"), text.count("P") + text.count("S")] == [boxes, 1]
        assert set(rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)) == {"#"}
        lengths.append(next(turns for turns in range(1, 11) if value(moves, rows, turns, max)))
        assert lengths[-1] == env.shortest
        assert env.baselines(seed)["optimal"] == 1
        total, turns, _ = play_out(env, seed, env.optimal_reply)
        assert (turns, total) == (lengths[-1], pytest.approx(10 + boxes - lengths[-1] / 10))
    assert set(lengths) <= set(range(boxes, 11))
    assert name == "sokoban_hard" or set(lengths) == set(range(1, 11))


def cells_in(caption):
    """What a caption says of each cell: {mark: {(row, column)}}."""
    named = re.findall(r"(\S)((?: [a-l]\d)+)", caption)
    return {
        mark: {(int(cell[1]) - 1, ord(cell[0]) - ord("a")) for cell in cells.split()}
        for mark, cells in named
    }


@pytest.mark.parametrize("name", ["frozenlake", *SIZES])
def test_captions_name_the_cells(name):
    lake = {"P": "P", "X": "X", "√": "√", "G": "G√", "O": "OX"}
    marks = lake if name == "frozenlake" else {"P": "PS", "X": "X√", "O": "O√S", "#": "#"}
    env = ENVS[name]()
    for seed in range(30):
        for observation, caption in wander(env, seed):
            shown = {
                (r, c): x
                for r, row in enumerate(observation.text.split("\n ")[0].split("\n"))
                for c, x in enumerate(row)
            }
            expected = {
                mark: {cell for cell, x in shown.items() if x in symbols}
                for mark, symbols in marks.items()
            }
            assert cells_in(caption) == {mark: cells for mark, cells in expected.items() if cells}


@pytest.mark.parametrize(("style", "size"), [("terse", 14), ("full", 56)])
def test_images_show_the_state(style, size):
    """Red only in the player's cell, green on the goal, dark blue in holes, grey beyond the edge, else plain ice."""
    for seed in range(20):
        env, text = ENVS["frozenlake_vlm"](style=style), ENVS["frozenlake"]()
        for (observation, caption), (twin, same) in zip(
            wander(env, seed), wander(text, seed), strict=True
        ):
            assert (
                style == "full" or observation.text == ""
            )  # the image alone says where things are
            grid, beside = twin.text.split("\n ")
            assert caption == f"{same} {beside}"
            image, rows = (
                observation.images[0].astype(int),
                grid.split("\n") + [beside.replace(" ", "")],
            )
            rows = rows if style == "terse" else rows[:4]
            assert image.shape == (len(rows) * size, 4 * size, 3)
            for at, symbol in enumerate("".join(rows)):
                row, col = divmod(at, 4)
                cell = image[size * row : size * (row + 1), size * col : size * (col + 1)]
                cell = cell[2 * size // 7 : -1, 2 * size // 7 : -1].reshape(-1, 3)
                r, g, b = cell.T
                red, green, dark = (
                    (r > 150) & (g < 100),
                    (g > 130) & (r < 60),
                    (b > 60) & (r < 60) & (g < 80),
                )
                assert (red.mean() > 0.1) == (symbol in "PX√")
                assert symbol == "√" or (green.mean() > 0.1) == (
                    symbol == "G"
                )  # the player hides the flag
                assert (dark.mean() > 0.2) == (symbol in "OX")
                assert (np.ptp(cell, axis=1).max() < 5) == (symbol == "#")
                assert symbol != "_" or np.ptp(cell, axis=0).max() < 90
