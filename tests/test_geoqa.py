"""GeoQA: figures whose answers follow from the drawn coordinates, pictures that show them, data with pictures."""

import io
import json
import math

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import train
from envs import ENVS
from envs.base import EVAL_SEEDS, FORMAT_PENALTY
from envs.geoqa import MAX_SIDE, VALUES, GeoQA, draw, generated_figures
from freshper.config import parse_args
from freshper.tiny import build_policy

RED = (224, 24, 40)


def tagged(text):
    return f"<answer>{text}</answer>"


@pytest.mark.parametrize("style", ["full", "terse"])
def test_gymnasium_accepts_it(style, monkeypatch):
    env, rng = GeoQA(style=style), np.random.default_rng(0)
    monkeypatch.setattr(env.action_space, "sample", lambda *a, **k: env.random_reply(rng))
    check_env(env, skip_render_check=True)


# -- generated figures -----------------------------------------------------------------------------------------


def shoelace(points):
    following = [*points[1:], points[0]]
    return abs(sum(x * v - u * y for (x, y), (u, v) in zip(points, following, strict=True))) / 2


def solve(figure):
    """The answer from the coordinates, by formulas that the generator does not use."""
    if figure.question == "area":
        return shoelace(figure.points)
    if figure.question == "length":
        (x, y), (u, v) = figure.red
        return math.hypot(u - x, v - y)
    k = figure.points.index(figure.red[0])
    a, b = (np.subtract(p, figure.red[0]) for p in (figure.points[k - 1], figure.points[(k + 1) % len(figure.points)]))
    return math.degrees(math.acos(a @ b / math.sqrt((a @ a) * (b @ b))))


def every_figure():
    return [(value, f) for value, kinds in generated_figures().items() for figures in kinds.values() for f in figures]


def test_every_answer_follows_from_the_coordinates():
    figures = every_figure()
    assert len(figures) > 1500
    for value, figure in figures:
        assert solve(figure) == pytest.approx(float(value))
        assert all(0 <= c <= 4 for point in figure.points for c in point)
        assert shoelace(figure.points) > 0 or figure.shape == "circle"
        if figure.shape == "rectangle":
            (a, b), (c, d), (e, f), (g, h) = figure.points
            assert (a, b, c, f) == (g, d, e, h)
        if figure.question == "length" and figure.shape == "circle":  # a radius, or a diameter through the centre
            (x, y), rim = figure.points
            mid = tuple(np.mean(figure.red, 0)) if figure.red[0] != (x, y) else (x, y)
            assert mid == (x, y)
            assert math.dist(mid, rim) == math.dist(mid, figure.red[1])
    assert {f.shape for _, f in figures} == {"triangle", "rectangle", "circle"}


@pytest.mark.parametrize("cell_size", [14, 56])
def test_pictures_show_the_figure(cell_size):
    """Filled where an oracle says inside, white where it says outside, red only along the line or at the corner."""
    rng = np.random.default_rng(0)
    figures = every_figure()
    for k in rng.choice(len(figures), 100 if cell_size == 14 else 20, replace=False):
        figure = figures[k][1]
        image = draw(figure, cell_size).astype(int)
        assert image.shape == (4 * cell_size, 4 * cell_size, 3)
        margin, step = cell_size / 8, (4 * cell_size - cell_size / 4) / 4
        red = (np.abs(image - RED).sum(-1) < 90).nonzero()
        reds = [((x + 0.5 - margin) / step, (y + 0.5 - margin) / step) for y, x in zip(*red, strict=True)]
        if figure.question == "area":
            assert not reds
        elif figure.question == "length":
            (x, y), (u, v) = figure.red
            along = np.array([((p - x) * (u - x) + (q - y) * (v - y)) for p, q in reds]) / solve(figure)
            assert -0.3 < along.min() < 0.3
            assert abs(along.max() - solve(figure)) < 0.3
        else:
            assert reds
            assert max(math.dist(point, figure.red[0]) for point in reds) < 0.75
        for _ in range(150):
            row, col = rng.integers(4 * cell_size, size=2)
            x, y = (col + 0.5 - margin) / step, (row + 0.5 - margin) / step
            inside = depth(figure, x, y)
            on_line = any(not 0.15 < c % 1 < 0.85 for c in (x, y))
            if not on_line and abs(inside) > 0.25 and all(math.dist((x, y), point) > 0.2 for point in reds):
                assert (image[row, col, 2] - image[row, col, 0] > 30) == (inside > 0)


def depth(figure, x, y):
    """How far a point lies inside the figure (below 0: outside)."""
    if figure.shape == "circle":
        return math.dist(*figure.points) - math.dist((x, y), figure.points[0])
    sides = list(zip(figure.points, [*figure.points[1:], figure.points[0]], strict=True))
    turns = [((u - p) * (y - q) - (v - q) * (x - p)) / math.dist((p, q), (u, v)) for (p, q), (u, v) in sides]
    return max(min(turns), min(-t for t in turns))


def test_questions_are_reproducible_and_answers_equally_likely():
    env, full = GeoQA(), GeoQA(style="full", cell_size=56)
    counts = dict.fromkeys(VALUES, 0)
    seen = set()
    for seed in range(1000):
        text, images = env.reset(seed=seed)[0]
        figure = env.question.picture
        counts[env.question.gold] += 1
        seen.add(figure)
        assert images[0].shape == (56, 56, 3)
        assert text == figure.question + "?"
        shape, *points = env.caption().split()
        assert shape == figure.shape
        assert [("abcde".index(p[0]), int(p[1]) - 1) for p in points] == list(figure.points)
        if seed < 50:
            other = full.reset(seed=seed)[0]
            assert full.question.picture == figure
            assert other.images[0].shape == (224, 224, 3)
            assert {"length": "long", "angle": "angle", "area": "area"}[figure.question] in other.text
            assert not full.step(tagged("0"))[0].images  # a pretrained model has it in its context
            assert (GeoQA().reset(seed=seed)[0].images[0] == images[0]).all()
    share = 1 / len(VALUES)
    assert all(abs(c / 1000 - share) < 4 * math.sqrt(share * (1 - share) / 1000) for c in counts.values())
    assert len(seen) > 300


# -- the scorer ------------------------------------------------------------------------------------------------

JUDGED = [  # gold, reply, whether it is right
    ("145°", "145", True), ("145°", "145 degrees", True), ("145°", "145^\\circ", True), ("145°", "145.5", True),
    ("145°", "146", False), ("200", "201", False), ("4cm", "4", True), ("4cm", "4.0 cm", True), ("4cm", "5cm", False),
    ("2√3", "2\\sqrt{3}", True), ("2√3", "3.46", True), ("2√3", "3.464 cm", True), ("2√3", "3.5", False),
    ("2√{3}", "2√3cm", True), ("\\sqrt{2}", "1.414", True), ("√2/2", "0.707", True), ("9π", "28.27", True),
    ("9\\pi", "9π", True), ("9π", "9", False), ("3/4", "0.75", True), ("B", "B", True), ("B", "(B)", True),
    ("B", "b.", True), ("B", "A", False), ("B", "A B C D", False), ("B", "2", False), ("B", "AB", False),
    ("40°", "40° or 50°", False), ("40°", "40, 50", False), ("40°", ".", False),
    ("40°", "e", False), ("40°", "20*2", False), ("40°", "4e1", False), ("40°", "nan", False), ("40°", "inf", False), 
    ("40°", "√", False),
    ("40°", "√1600", False),
    ("4", "8/2", False), ("40°", "√" * 30, False), ("40°", "40/0", False), ("2√3", "2√3/0", False),
    ("3", "π", False),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "reply", "right"), JUDGED)
def test_values_letters_and_tolerance(gold, reply, right):
    value = GeoQA.read(reply)
    assert (value is not None and GeoQA.right(value, GeoQA.read(gold))) is right
    assert GeoQA.right(GeoQA.read(gold), GeoQA.read(gold))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60) | st.text("0123456789√π/.,abcABC (){}\\", max_size=20))
def test_arbitrary_replies_never_crash(text):
    env = GeoQA()
    env.reset(seed=3)
    for reply in (text, tagged(text), f"\\boxed{{{text}}}", text * 100):
        observation, reward, *_, info = env.step(reply)
        assert reward in (-FORMAT_PENALTY, 0.0, 1.0)
        assert info["valid"] or reward == -FORMAT_PENALTY
        assert reward <= 0 or env.question.gold in text or "√" in text
        assert env.observation_space.contains(observation)


# -- data ------------------------------------------------------------------------------------------------------


def png(shade, size=(60, 40), mode="RGB"):
    stream = io.BytesIO()
    Image.new(mode, size, (shade,) * 3 if mode == "RGB" else (shade, shade, shade, 0)).save(stream, "PNG")
    return stream.getvalue()


def rows(n=20):
    return [
        {"image": png(k), "problem": f"Find angle {k}?", "solution": f"<answer> {100 + k}° </answer>"} for k in range(n)
    ]


@pytest.mark.parametrize("form", ["struct", "bytes", "path"])
def test_pictures_from_a_file(form, tmp_path):
    """As `datasets` writes them to parquet, as plain bytes, and as files beside a jsonl."""
    table = rows()
    if form == "struct":
        table = [row | {"image": {"bytes": row["image"], "path": None}} for row in table]
    if form == "path":
        for k, row in enumerate(table):
            (tmp_path / f"{k}.png").write_bytes(row["image"])
            row["image"] = f"{k}.png"
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in table))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "train.parquet")
    env = GeoQA(style="full", data=str(tmp_path))
    seen = {}
    for seed in (*range(18), *range(EVAL_SEEDS, EVAL_SEEDS + 2)):
        observation, _ = env.reset(seed=seed)
        assert env.observation_space.contains(observation)
        k = int(env.question.text.split()[2][:-1])
        assert observation.images[0].shape == (40, 60, 3)
        assert (observation.images[0] == k).all()
        assert env.step(tagged(f"{100 + k} degrees"))[1] == 1.0
        seen[k] = seed
    assert len(seen) == 20


SOLUTIONS = {
    "145°": 145, "\\boxed{145}": 145, "<answer> \\boxed{145^\\circ} </answer>": 145, "A sum, hence \\boxed{145}.": 145,
    "(B)": "b", "<think>1 + 2</think> <answer>3</answer>": 3, "2\\sqrt{3}": pytest.approx(12**0.5),
}  # fmt: skip


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_solutions_are_read_as_replies_are(solution):
    env = GeoQA(style="full")
    env.reset(seed=0)
    env.question = GeoQA.from_row(rows(1)[0] | {"solution": solution})
    assert GeoQA.read(env.question.gold) == SOLUTIONS[solution]
    assert env.step(env.optimal_reply())[1] == 1.0


def test_large_and_transparent_pictures(tmp_path):
    table = [rows(1)[0] | {"image": image, "problem": f"p{k}"} for k, image in enumerate(
        (png(0, (3000, 1000)), png(0, mode="RGBA"), png(7))
    )]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "d.parquet")
    env = GeoQA(data=str(tmp_path / "d.parquet"))
    shown = {}
    for seed in (0, 1, EVAL_SEEDS):
        observation = env.reset(seed=seed)[0]
        assert env.observation_space.contains(observation)
        shown[observation.text] = observation.images[0]
    assert shown["p0"].shape[:2] in ((299, MAX_SIDE), (298, MAX_SIDE))
    assert (shown["p1"] == 255).all()


def test_train_learns_from_pictures_of_any_size(tmp_path):
    """The real train.py, with pictures of several sizes in a batch."""
    table = [row | {"image": png(k, (30 + 20 * k, 60))} for k, row in enumerate(rows(6))]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "d.parquet")
    build_policy(GeoQA()).save(str(tmp_path / "model"))
    flags = ["--iterations", "2", "--rollout_batch_size", "4", "--batch_size", "4", "--eval_episodes", "4"]
    flags += ["--data", str(tmp_path / "d.parquet"), "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    assert train.main(["--env", "geoqa", *flags, "--format_penalty", "0.15"]) == 0
    assert (tmp_path / "run" / "episodes.html").read_text().count("data:image/png") == 4 * 3


BAD = {
    "no picture": ({"image": b"hello"}, "row 3: the field image is no picture that can be read"),
    "half a picture": ({"image": png(0)[:60]}, "row 3: the field image is no picture that can be read"),
    "no answer": ({"solution": "<answer></answer>"}, "row 3: the field solution must hold one answer"),
    "two answers": ({"solution": "<answer>1</answer><answer>2</answer>"}, "row 3: the field solution must hold one"),
    "an essay": ({"solution": "because " * 20}, "row 3: the field solution must hold one answer"),
    "no problem": ({"problem": ""}, "row 3: the field problem is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_end_train_with_one_sentence(name, tmp_path, monkeypatch, capsys):
    change, sentence = BAD[name]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows(2), rows(1)[0] | change]), path)
    monkeypatch.chdir(tmp_path)
    assert train.main(["--env", "geoqa", "--data", str(path)]) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_picture_file_is_named(tmp_path):
    path = tmp_path / "d.jsonl"
    table = [{"image": "gone.png", "problem": f"p{k}", "solution": "1"} for k in range(2)]
    path.write_text("\n".join(json.dumps(row) for row in table))
    with pytest.raises(ValueError, match=r"row [12]: the field image names a file that cannot be read.*gone\.png"):
        GeoQA(data=str(path))


def test_presets_hold_the_paper_s_values():
    """Tables env_details and training_config."""
    config = parse_args(["--preset", "paper", "--env", "geoqa"])
    assert (config.model, config.max_tokens, config.iterations) == ("Qwen/Qwen2.5-VL-3B-Instruct", 4096, 100)
    assert (config.micro_batch_size, config.tau, config.advantage_clip, config.kl_reward_coef) == (1, 500.0, 20.0, 0.1)
    assert ENVS["geoqa"].max_turns == 3
