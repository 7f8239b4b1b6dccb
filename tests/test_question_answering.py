"""GSM8K, AIME and GeoQA: attempts, generated problems that an oracle solves and that no two splits share, data."""

import io
import math
import re
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from conftest import write_rows
from PIL import Image

from envs.aime import AIME
from envs.base import EVAL_SEEDS, WARM_START_SEEDS
from envs.geoqa import MAX_SIDE, RED, GeoQA, area
from envs.gsm8k import GSM8K
from envs.question_answering import RIGHT, WRONG

TASKS = pytest.mark.parametrize("task", [GSM8K, AIME, GeoQA])
FIRST_SEEDS = {"train": 0, "held_out": EVAL_SEEDS, "warm_start": WARM_START_SEEDS}


@TASKS
@pytest.mark.parametrize("style", ["full", "terse"])
@pytest.mark.parametrize("right_at", [1, 2, 3, None])
def test_three_attempts_and_reward_whenever_it_is_right(task, style, right_at):
    env = task(style=style)
    env.reset(seed=5)
    for turn in range(1, (right_at or 3) + 1):
        right = turn == right_at
        observation, *results, info = env.step(
            env.optimal_reply() if right else "<answer>99</answer>"
        )
        assert results == [float(right), right, turn == 3]
        assert info == {
            "success": right,
            "valid": True,
            "metrics": {"first_success": float(right and turn == 1)},
        }
        assert ("Wrong" in observation.text) != right
        assert (style == "full" and turn < 3 and not right) == (
            f"attempts left: {3 - turn}" in observation.text
        )


def solve_gsm8k(text, _):
    """The answer from the text alone, and its numbers with what is done with them, in no order. (Terse: the first
    number apart.)"""
    signed = [
        -int(n) if verb == "loses" else int(n)
        for verb, n in re.findall(r"(has|gets|loses) (\d+)", text)
    ]
    first = 0 if " does " in text else 1
    return sum(signed), (*signed[:first], *sorted(signed[first:]))


def solve_aime(text, _):
    task, numbers = re.fullmatch(r"Find (.*?)((?: \d+)+)\.", text).groups()
    numbers = sorted(map(int, numbers.split()))
    if divisor := re.match(r"how many multiples of (\d) there are among", task):
        return len([n for n in numbers if n in range(0, 17, int(divisor[1]))]), tuple(numbers)
    if task == "the smallest of":
        return numbers[0], tuple(numbers)
    assert task == "the greatest common divisor of"
    return max(d for d in range(1, 17) if all(n in range(0, 17, d) for n in numbers)), tuple(
        numbers
    )


def solve_geoqa(text, env):
    """The answer from the corners in the caption and the red points, by formulas that the generator does not use."""
    names = env.caption().split()[1:]
    corners, red = (
        [complex("abcde".index(name[0]), int(name[1]) - 1) for name in names],
        env.question.image.red,
    )
    ends = [corners.index(complex(*point)) for point in red]
    if text == "area?":  # of a fan of triangles
        value = (
            abs(
                sum(((b - corners[0]).conjugate() * (c - b)).imag for b, c in pairwise(corners[1:]))
            )
            / 2
        )
    elif text == "length?":
        value = abs(corners[ends[0]] - corners[ends[1]])
        assert abs(ends[0] - ends[1]) in (1, len(corners) - 1)
    else:
        k = ends[0]
        turn = (corners[k - 1] - corners[k]) / (corners[(k + 1) % len(corners)] - corners[k])
        value = abs(math.degrees(math.atan2(turn.imag, turn.real)))
    return round(value, 9), tuple(sorted(names))


SOLVE = {GSM8K: solve_gsm8k, AIME: solve_aime, GeoQA: solve_geoqa}


@pytest.mark.parametrize(
    ("task", "style"), [(GSM8K, "full"), (GSM8K, "terse"), (AIME, "terse"), (GeoQA, "terse")]
)
def test_held_out_problems_are_never_seen_in_training(task, style):
    """Every problem there is, in words: its answer is that of an oracle, training has at least 10,000 different ones
    (full prompts of GSM8K: 390 in all), and the splits share neither texts nor numbers. Questions are from the split of
    their seed."""
    env, again, rng = task(style=style), task(style=style), np.random.default_rng(0)
    keys, texts = {split: set() for split in FIRST_SEEDS}, {split: set() for split in FIRST_SEEDS}
    for (split, gold), kinds in task.generated(style).items():
        for content in chain(*kinds.values()) if gold in env.generated_answers else ():
            env.question = env.question_of(content, gold, rng)
            answer, key = SOLVE[task](env.question.text, env)
            assert answer == float(gold)
            words = env.question.text if task is not GeoQA else repr((key, env.question.image.red))
            texts[split].add(re.sub("Ann|Ben|Mia|Tom|deer|fish|sheep|squid", "", words))
            keys[split].add(key)
    for split, first in FIRST_SEEDS.items():
        for seed in range(first, first + 100):
            text = env.reset(seed=seed)[0].text
            assert SOLVE[task](text, env)[1] in (keys[split] or keys["held_out"])
            assert again.reset(seed=seed)[0].text == text
    if style == "full":
        assert (
            sum(map(len, texts.values())) == 20 * 21 - 30
        )  # two different numbers, but not 0 and n or 2n and n
        assert (len(texts["train"]), len(texts["held_out"])) == (267, 123)
    else:
        assert len(texts["train"]) >= 10_000
        assert len(texts["held_out"]) >= 1000
    for one, other in combinations(keys, 2):
        assert not keys[one] & keys[other]
        assert not texts[one] & texts[other]


@TASKS
def test_answers_are_equally_likely_and_every_word_is_a_token(task):
    """`words` are the tokens of the tiny models. Single characters are, too, and captions have points (` b3`)."""
    env = task()
    counts = dict.fromkeys(env.generated_answers, 0)
    token = re.compile(
        "|".join(map(re.escape, sorted(env.words, key=len, reverse=True)))
        + "|[.?]|(?<= [a-e])[1-5]"
    )
    for seed in range(1000):
        text = env.reset(seed=seed)[0].text
        counts[env.question.gold] += 1
        assert token.sub("", WRONG + RIGHT + text + env.caption()) == ""
        assert (
            set(re.findall(r"\d+", env.caption())) <= set(re.findall(r"\d+", text)) or task is GeoQA
        )
    assert {f" {answer}" for answer in counts} <= set(env.words)
    share = 1 / len(counts)
    assert all(
        abs(n / 1000 - share) < 4 * math.sqrt(share * (1 - share) / 1000) for n in counts.values()
    )


@pytest.mark.parametrize(("style", "cell_size"), [("terse", 14), ("full", 56)])
def test_images_show_the_figure(style, cell_size):
    """Filled inside, white outside, red along the red side or around the red corner and nowhere else."""
    env, rng, seen = GeoQA(style=style), np.random.default_rng(0), set()
    for seed in range(40):
        image = env.reset(seed=seed)[0].images[0].astype(int)
        corners, red = env.question.image.polygon, env.question.image.red
        seen.add(len(red))
        assert image.shape == (4 * cell_size, 4 * cell_size, 3)
        margin, step = cell_size / 8, (4 * cell_size - cell_size / 4) / 4
        reds = (np.argwhere(np.abs(image - RED).sum(-1) < 90)[:, ::-1] + 0.5 - margin) / step
        assert bool(len(reds)) == bool(red)
        assert all(distance(point, red[0], red[-1]) < 0.3 for point in reds)
        assert all(np.hypot(*(reds - end).T).min() < 0.3 for end in red)
        for row, col in rng.integers(4 * cell_size, size=(60, 2)):
            x, y = (col + 0.5 - margin) / step, (row + 0.5 - margin) / step
            sides = list(pairwise((*corners, corners[0])))
            inside = sum(area((*side, (x, y))) for side in sides) < area(corners) + 1e-6
            off_lines = all(0.15 < c % 1 < 0.85 for c in (x, y))
            if off_lines and min(distance((x, y), *side) for side in sides) > 0.25:
                assert (image[row, col, 2] - image[row, col, 0] > 30) == inside
    assert seen == {0, 1, 2}


def distance(point, start, end):
    """Of a point to a segment, which may be a point."""
    p, along = complex(*point) - complex(*start), complex(*end) - complex(*start)
    return abs(p - min(max((p * along.conjugate()).real / (abs(along) ** 2 or 1), 0), 1) * along)


def png(shade, size=(60, 40), mode="RGB"):
    stream = io.BytesIO()
    Image.new(mode, size, (shade, shade, shade, 0)[: len(mode)]).save(stream, "PNG")
    return stream.getvalue()


def geo_row(k):
    return {
        "image": {"bytes": png(k), "path": None},
        "problem": f"Angle {k}?",
        "solution": f"<answer> {k}° </answer>",
    }


ROWS = {  # as parquet files of the hub have them
    GSM8K: [
        {"question": f"What is {k} + 1000?", "answer": f"We add.\n#### {k + 1000:,}"}
        for k in range(50)
    ],
    AIME: [{"Problem": f"Find {k} + 1.", "Answer": k + 1} for k in range(50)],
    GeoQA: [geo_row(k) for k in range(50)],
}


@TASKS
def test_questions_from_a_file(task, tmp_path):
    source = write_rows(tmp_path / "rows.parquet", ROWS[task])
    env, seen = task(style="full", data=source), {}
    for first in (42_000_000, EVAL_SEEDS):
        for seed in range(first, first + 60):
            observation = env.reset(seed=seed)[0]
            k = int(re.search(r"\d+", env.question.text)[0])
            assert env.question.text in observation.text
            gold = {GSM8K: f"{k + 1000}", AIME: f"{k + 1}", GeoQA: f"{k}°"}[task]
            assert env.read(env.question.gold) == env.read(gold)
            assert all(
                (image == k).all() and image.shape == (40, 60, 3) for image in observation.images
            )
            assert env.step(env.optimal_reply())[1] == 1.0
            seen.setdefault(first, set()).add(k)
    assert [len(found) for found in seen.values()] == [45, 5]
    assert not set.intersection(*seen.values())
    assert env.data_summary() == f"{source}: 45 rows for training, 5 held out"
    assert task().data_summary() == ""
    chance = (
        1 - (1 - 1 / 45) ** 3
    )  # the random policy chooses among the answers of the training rows
    assert [env.baselines(seed)["random"] for seed in (0, EVAL_SEEDS)] == [
        pytest.approx(chance),
        0.0,
    ]


BAD = [
    (GSM8K, {"answer": "#### many"}, "the field answer must end in #### and a number"),
    (
        GSM8K,
        {"question": "a <|im_end|> b"},
        "the field question must not hold tokens such as <|im_end|>",
    ),
    (AIME, {"Answer": 1000}, "the field answer is '1000', but must be an integer from 000"),
    (
        GeoQA,
        {"image": {"bytes": png(0)[:60], "path": None}},
        "the field image is no image that can be read",
    ),
    (
        GeoQA,
        {"solution": "<answer>1</answer><answer>2</answer>"},
        "the field solution must hold one short answer",
    ),
]


@pytest.mark.parametrize(("task", "change", "sentence"), BAD)
def test_bad_rows_are_named_in_one_sentence(task, change, sentence, tmp_path):
    source = write_rows(tmp_path / "rows.parquet", [*ROWS[task][:2], ROWS[task][2] | change])
    with pytest.raises(
        ValueError, match=rf"^{re.escape(source)}, train row 3: .*{re.escape(sentence)}[^\n]*$"
    ):
        task(data=source)


def test_a_folder_of_images_some_large_or_transparent(tmp_path):
    """As `datasets` reads it: metadata.jsonl names the file of each row."""
    images = {"large": png(0, (3000, 1000)), "clear": png(0, mode="RGBA")}
    rows = []
    for k, name in enumerate(("clear", "large", "clear")):
        (tmp_path / f"{k}.png").write_bytes(images[name])
        rows.append({"file_name": f"{k}.png", "problem": f"{name} {k}", "solution": "(B)"})
    write_rows(tmp_path / "metadata.jsonl", rows)
    env = GeoQA(data=str(tmp_path))
    shown = {
        text.split()[0]: images[0]
        for (text, images), _ in (env.reset(seed=seed) for seed in (0, 1))
    }
    assert shown["large"].shape == (299, MAX_SIDE, 3)
    assert (shown["clear"] == 255).all()
