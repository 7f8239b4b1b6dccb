"""Sokoban: moves and solutions against a slow reference, exact baselines against play, pictures that show the state."""

from functools import partial

import numpy as np
import pytest
from conftest import UNREADABLE
from gymnasium.utils.env_checker import check_env
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envs import ENVS
from envs.base import EVAL_SEEDS, FORMAT_PENALTY
from envs.sokoban import ACTIONS, LONGEST, Sokoban, random_room, tile

NAMES = ["sokoban_simple", "sokoban_hard", "sokoban_simple_vlm", "sokoban_hard_vlm"]
SIZES = {"sokoban_simple": (6, 1), "sokoban_hard": (8, 2)}
ROOMS = [
    "____\nO#__\nP_X_\n____",
    "_S___#\n_X____\n______\n_X#_##\n__O___\n_##___",
]  # of seed 7, made once and written down
STEPS = {"Left": (0, -1), "Right": (0, 1), "Up": (-1, 0), "Down": (1, 0)}


def reference_step(rows, action):
    """The rules once more, on rows of symbols: [str] -> [str]."""
    ground = [["." if c in "O√S" else "#" if c == "#" else " " for c in row] for row in rows]
    boxes = {(r, c) for r, row in enumerate(rows) for c, x in enumerate(row) if x in "X√"}
    (r, c) = next((r, c) for r, row in enumerate(rows) for c, x in enumerate(row) if x in "PS")
    dr, dc = STEPS[action]
    target, beyond = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
    blocked = ground[target[0]][target[1]] == "#"
    if target in boxes:
        blocked = ground[beyond[0]][beyond[1]] == "#" or beyond in boxes
        if not blocked:
            boxes = (boxes - {target}) | {beyond}
    player = (r, c) if blocked else target
    shown = []
    for i, row in enumerate(ground):
        line = ""
        for j, g in enumerate(row):
            on = g == "."
            here = "√" if on else "X"
            line += (
                ("S" if on else "P")
                if (i, j) == player
                else here
                if (i, j) in boxes
                else {".": "O", " ": "_"}.get(g, g)
            )
        shown.append(line)
    return shown


def reference_turns(rows, limit):
    """Turns of the shortest solution by searching forwards, or None where there is none within `limit`."""
    seen, frontier = {tuple(rows)}, [rows]
    for turns in range(1, limit + 1):
        following = []
        for state in frontier:
            for action in STEPS:
                after = reference_step(state, action)
                if not any("X" in row for row in after):
                    return turns
                if tuple(after) not in seen:
                    seen.add(tuple(after))
                    following.append(after)
        frontier = following
    return None


def reference_random(rows, turns, known):
    """Probability that random actions solve it within `turns`, by recursion."""
    if not any("X" in row for row in rows):
        return 1.0
    if turns == 0:
        return 0.0
    key = (tuple(rows), turns)
    if key not in known:
        known[key] = sum(reference_random(reference_step(rows, a), turns - 1, known) for a in STEPS) / 4
    return known[key]


def shown(env):
    return ["".join(env.symbol((row, col)) for col in range(env.side)) for row in range(env.side)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("style", ["full", "terse"])
def test_gymnasium_accepts_it(name, style, monkeypatch):
    env = ENVS[name](style=style)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(env.action_space, "sample", lambda *a, **k: env.random_reply(rng))
    check_env(env, skip_render_check=True)


@pytest.mark.parametrize("name", list(SIZES))
def test_moves_and_rewards_are_those_of_the_reference(name):
    """Random games; the state as the reference sees it, and the rewards counted from its symbols."""
    env, rng = ENVS[name](max_turns=60), np.random.default_rng(0)
    pushed_on = pushed_off = blocked = 0
    for seed in range(60):
        env.reset(seed=seed)
        rows, score = shown(env), 0.0
        while True:
            action = ACTIONS[rng.integers(4)]
            after = reference_step(rows, action)
            _, reward, terminated, truncated, info = env.step(f"I think <answer> {action} </answer>")
            assert shown(env) == after
            in_place = ["".join(r).count("√") for r in (rows, after)]
            solved = not any("X" in row for row in after)
            assert reward == pytest.approx(-0.1 + in_place[1] - in_place[0] + 10 * solved)
            score += reward
            assert info["metrics"]["score"] == pytest.approx(score)
            assert (info["success"], terminated, info["valid"]) == (solved, solved, True)
            pushed_on += in_place[1] > in_place[0]
            pushed_off += in_place[1] < in_place[0]
            blocked += rows == after
            rows = after
            if terminated or truncated:
                break
    assert pushed_on > 5
    assert blocked > 5
    assert pushed_off > 0 or name == "sokoban_simple"  # one box in place is the end of the game


@pytest.mark.parametrize(("name", "n"), [("sokoban_simple", 150), ("sokoban_hard", 80)])
def test_rooms_are_as_the_module_says(name, n):
    """Every room: its shortest solution, found by another search, is the number of turns it was made for."""
    side, boxes = SIZES[name]
    rooms, lengths = set(), []
    for seed in range(EVAL_SEEDS, EVAL_SEEDS + n):
        env = ENVS[name]()
        env.reset(seed=seed)
        rows = shown(env)
        text = "\n".join(rows)
        assert "√" not in text
        assert text.count("X") == text.count("O") + text.count("S") == boxes
        assert text.count("P") + text.count("S") == 1
        border = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
        assert set(border) == {"#"}
        assert len(rows) == len(rows[0]) == side
        lengths.append(reference_turns(rows, LONGEST))
        assert lengths[-1] == env.room.shortest
        rooms.add(text)
    assert len(rooms) > 0.95 * n
    assert set(lengths) <= set(range(boxes, LONGEST + 1))
    assert name == "sokoban_hard" or set(lengths) == set(range(1, LONGEST + 1))


def test_rooms_are_reproducible():
    """Also on other machines."""
    for side, boxes in SIZES.values():
        made = [random_room(seed, side, boxes) for seed in range(20)]
        random_room.cache_clear()
        for before, room in zip(made, [random_room(seed, side, boxes) for seed in range(20)], strict=True):
            assert (before.floor == room.floor).all()
            assert before[1:] == room[1:]
    assert [ENVS[name]().reset(seed=7)[0].text for name in SIZES] == ROOMS


@pytest.mark.parametrize(("name", "n"), [("sokoban_simple", 40), ("sokoban_hard", 2)])
def test_random_baseline_is_the_recursion(name, n):
    env = ENVS[name](max_turns=10 if name == "sokoban_simple" else 6)
    for seed in range(n):
        exact = env.baselines(seed)
        assert exact["random"] == pytest.approx(reference_random(shown(env), env.max_turns, {}), abs=1e-12)
        assert exact["optimal"] == (env.room.shortest <= env.max_turns)


def play(env, seed, choose):
    env.reset(seed=seed)
    while True:
        observation, _, terminated, truncated, info = env.step(choose(env))
        assert env.observation_space.contains(observation)
        if terminated or truncated:
            return info["success"], env.turn, info["metrics"]["score"]


@pytest.mark.parametrize(("name", "n"), [("sokoban_simple", 800), ("sokoban_hard", 150)])
def test_baselines_are_what_players_get(name, n):
    """The optimal player solves every room in its number of turns, the random one as often as expected."""
    env, rng = ENVS[name](), np.random.default_rng(0)
    exact = won = 0.0
    for seed in range(n):
        exact += env.baselines(seed)["random"]
        won += play(env, seed, lambda e: e.random_reply(rng))[0]
        if seed % 10 == 0:
            success, turns, score = play(env, seed, lambda e: e.optimal_reply())
            assert (success, turns) == (True, env.room.shortest)
            assert score == pytest.approx(10 + env.n_boxes - turns / 10)
    p = exact / n
    assert 0.01 < p < 0.5
    assert abs(won / n - p) <= 4 * np.sqrt(p * (1 - p) / n)


def test_an_optimal_player_without_hope_still_answers():
    env = ENVS["sokoban_simple"](max_turns=1)
    env.reset(seed=next(seed for seed in range(99) if random_room(seed, 6, 1).shortest > 3))
    assert env.optimal_reply() in [f"<answer>{action}</answer>" for action in ACTIONS]


@pytest.mark.parametrize("reply", UNREADABLE)
def test_unreadable_replies_cost_a_turn_and_leave_the_state(reply):
    env = ENVS["sokoban_simple"]()
    before = env.reset(seed=1)[0]
    observation, reward, terminated, truncated, info = env.step(reply)
    assert (reward, terminated, truncated) == (pytest.approx(-0.1 - FORMAT_PENALTY), False, False)
    assert info == {"success": False, "valid": False, "metrics": {"score": pytest.approx(-0.1)}}
    assert observation.text == before.text
    for _ in range(8):
        assert not env.step(reply)[3]
    _, _, _, truncated, info = env.step(reply)  # the tenth turn is the last
    assert truncated
    assert info["metrics"]["score"] == pytest.approx(-1.0)  # the paper's lower bound


@settings(max_examples=100, deadline=None)
@given(reply=st.text(max_size=300))
def test_arbitrary_text_never_earns_anything(reply):
    assume(reply.strip() not in ACTIONS)
    env = ENVS["sokoban_hard_vlm"]()
    env.reset(seed=2)
    for text in (reply, f"<answer>{reply}</answer>", reply * 300):
        observation, reward, *_ = env.step(text)
        assert reward < 0.0
        assert env.observation_space.contains(observation)


def wander(env, seed):
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    over = False
    while True:
        yield observation
        if over:
            return
        observation, _, terminated, truncated, _ = env.step(env.random_reply(rng))
        over = terminated or truncated


@pytest.mark.parametrize("name", list(SIZES))
def test_text_is_the_room(name):
    for seed in range(15):
        env = ENVS[name](style="full")
        for observation in wander(env, seed):
            rows = observation.text.split("State:\n")[-1].split("\n")[: env.side]
            assert rows == [" ".join(row) for row in shown(env)]
        env = ENVS[name](style="terse")
        for observation in wander(env, seed):
            assert observation.text.split("\n") == [row[1:-1] for row in shown(env)[1:-1]]


@pytest.mark.parametrize("name", NAMES)
def test_captions_name_the_cells(name):
    for seed in range(15):
        env = ENVS[name]()
        for observation in wander(env, seed):
            assert observation.text == "" or not env.image  # nothing but the picture says where things are
            named, mark = {"P": set(), "X": set(), "O": set(), "#": set()}, ""
            for word in env.caption().split(" "):
                if word in named:
                    mark = word
                else:
                    named[mark].add((int(word[1:]), "abcdef".index(word[0]) + 1))
            inner = [(r, c) for r in range(1, env.side - 1) for c in range(1, env.side - 1)]
            stands = {"P": "PS", "X": "X√", "O": "O√S", "#": "#"}
            assert named == {m: {cell for cell in inner if env.symbol(cell) in stands[m]} for m in named}


@pytest.mark.parametrize("size", [14, 20, 56])
def test_pictures_show_the_state(size):
    """Every cell is the tile of its symbol, and no two symbols or places have the same tile."""
    for make in (partial(Sokoban, 6, 1), partial(Sokoban, 8, 2)):
        env = make(image=True, cell_size=size)
        for seed in range(4):
            for observation in wander(env, seed):
                picture = observation.images[0]
                assert picture.shape == (env.side * size, env.side * size, 3)
                for row, symbols in enumerate(shown(env)):
                    for col, symbol in enumerate(symbols):
                        cell = picture[row * size : (row + 1) * size, col * size : (col + 1) * size]
                        assert (cell == tile(symbol, row, col, env.side, size)).all()
    tiles = {tile(symbol, row, col, 8, size).tobytes() for symbol in "#_O√XPS" for row in range(8) for col in range(8)}
    assert len(tiles) == 7 * 64


def test_tiles_have_the_colours_of_the_legend():
    """Blue is the player, brown a box, green one in place, red a target, and nothing else."""

    def share(symbol, condition):
        r, g, b = tile(symbol, 2, 3, 6, 14)[3:, 3:].reshape(-1, 3).astype(int).T
        return condition(r, g, b).mean()

    colours = {
        "PS": lambda r, g, b: (b > 160) & (r < 120),
        "X": lambda r, g, b: (r > 150) & (g > 90) & (g < 160) & (b < 90),
        "√": lambda r, g, b: (g > 130) & (r < 90),
        "OS": lambda r, g, b: (r > 200) & (g < 90) & (b < 110),
        "#": lambda r, g, b: (abs(r - g) < 25) & (r < 160),
    }
    for mine, condition in colours.items():
        for symbol in "#_O√XPS":
            assert (share(symbol, condition) > 0.05) == (symbol in mine), (mine, symbol)


def test_full_prompts_say_what_a_pretrained_model_needs():
    env = ENVS["sokoban_simple"](style="full")
    first = env.reset(seed=0)[0].text
    assert all(w in first for w in ("Left", "Down", "Right", "Up", "<answer>", "# wall", "actions left: 10", "6 x 6"))
    later = env.step("nonsense")[0].text
    assert "Reward: -0.25" in later
    assert "actions left: 9" in later
    assert "crates" in ENVS["sokoban_hard_vlm"](style="full").reset(seed=0)[0].text


def test_sizes_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="side must be 6, 7 or 8 and boxes 1 or 2, got 5 and 1"):
        Sokoban(side=5)
