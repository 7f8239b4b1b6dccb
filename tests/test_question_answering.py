"""GSM8K, AIME and GeoQA: attempts, data, and generated problems, which an oracle solves and which
no two splits share."""

import io
import math
import re
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from conftest import write_rows
from PIL import ExifTags, Image, ImageColor

from envs.aime import AIME
from envs.base import EVAL_SEEDS, WARM_START_SEEDS, UserError
from envs.geoqa import MAX_SIDE, RED, GeoQA, decode
from envs.gsm8k import GSM8K
from envs.question_answering import RIGHT, WRONG

TASKS = pytest.mark.parametrize("task", [GSM8K, AIME, GeoQA])
FIRST_SEEDS = {"train": 0, "held_out": EVAL_SEEDS, "warm_start": WARM_START_SEEDS}


@TASKS
@pytest.mark.parametrize("right_at", [1, 2, 3, None])
def test_three_attempts_and_reward_whenever_it_is_right(task, right_at):
    env = task(style="full")
    env.reset(seed=5)
    for turn in range(1, (right_at or 3) + 1):
        right = turn == right_at
        reply = env.optimal_reply() if right else "<answer>99</answer>"
        observation, *results, info = env.step(reply)

        assert results == [float(right), right, turn == 3]
        assert (info["success"], info["valid"]) == (right, True)
        assert ("Wrong" in observation.text) != right


def solve_gsm8k(text, _):
    """Return the answer from the text alone, and the numbers with their signs in order of size.
    Terse: the first number comes first."""
    signs = {"has": 1, "gets": 1, "loses": -1}
    signed = [signs[verb] * int(n) for verb, n in re.findall(r"(has|gets|loses) (\d+)", text)]
    first = 0 if " does " in text else 1
    return sum(signed), (*signed[:first], *sorted(signed[first:]))


def solve_aime(text, _):
    task, numbers = re.fullmatch(r"Find (.*?)((?: \d+)+)\.", text).groups()
    numbers = tuple(sorted(map(int, numbers.split())))

    def count_multiples(divisor):
        return len([n for n in numbers if n in range(0, 17, divisor)])

    if task == "the smallest of":
        return numbers[0], numbers
    if task == "the greatest common divisor of":
        return max(d for d in range(1, 17) if count_multiples(d) == 4), numbers
    divisor = re.fullmatch(r"how many multiples of (\d) there are among", task)[1]
    return count_multiples(int(divisor)), numbers


def solve_geoqa(text, env):
    """Return the answer from the corners in the caption and the red points, by formulas that the
    generator does not use, and the names of the corners."""
    names = env.caption().split()[1:]
    corners = [complex("abcde".index(name[0]), int(name[1]) - 1) for name in names]
    ends = [corners.index(complex(*point)) for point in env.question.image.red]

    if text == "area?":
        # The area is that of a fan of triangles around the first corner.
        triangles = pairwise(corner - corners[0] for corner in corners[1:])
        value = abs(sum((b.conjugate() * c).imag for b, c in triangles)) / 2
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
    """Solves every problem there is. Training has at least 10,000 different ones (full prompts of
    GSM8K: 390 in all), and the splits share neither texts nor numbers. Questions are from the split
    of their seed."""
    env = task(style=style)
    rng = np.random.default_rng(0)
    keys = {split: set() for split in FIRST_SEEDS}
    texts = {split: set() for split in FIRST_SEEDS}

    for split, answers in task.generated(style).items():
        for problem in chain(*(chain(*kinds.values()) for kinds in answers.values())):
            env.question = env.question_of(problem, rng)
            answer, key = SOLVE[task](env.question.text, env)
            assert answer == float(problem.answer) == float(env.question.gold)
            words = env.question.text if task is not GeoQA else repr((key, env.question.image.red))
            texts[split].add(re.sub("Ann|Ben|Mia|Tom|deer|fish|sheep|squid", "", words))
            keys[split].add(key)

    for split, first in FIRST_SEEDS.items():
        for seed in range(first, first + 100):
            text = env.reset(seed=seed)[0].text
            assert SOLVE[task](text, env)[1] in (keys[split] or keys["held_out"])

    if style == "full":
        # Two different numbers, but not 0 and n or 2n and n.
        assert sum(map(len, texts.values())) == 20 * 21 - 30
    else:
        assert len(texts["train"]) >= 10_000
        assert len(texts["held_out"]) >= 1000
    for one, other in combinations(keys, 2):
        assert not keys[one] & keys[other]
        assert not texts[one] & texts[other]


@TASKS
def test_answers_are_equally_likely_and_every_word_is_a_token(task):
    """The tokens of the tiny models are `words` and `actions`, which are the answers, and single
    characters. Captions have points (` b3`)."""
    env = task()
    counts = dict.fromkeys(env.actions, 0)
    words = sorted(env.words + env.actions, key=len, reverse=True)
    token = re.compile("|".join(map(re.escape, words)) + "|[.?]|(?<= [a-e])[1-5]")
    for seed in range(1000):
        text = env.reset(seed=seed)[0].text
        counts[f" {env.question.gold}"] += 1
        caption = env.caption()
        assert token.sub("", WRONG + RIGHT + text + caption) == ""

    share = 1 / len(counts)
    error = math.sqrt(share * (1 - share) / 1000)
    assert all(abs(n / 1000 - share) < 4 * error for n in counts.values())


@pytest.mark.parametrize(("style", "cell_size"), [("terse", 14), ("full", 56)])
def test_images_show_the_figure(style, cell_size):
    """It is filled inside and white outside. Only the red side, or a dot at a corner, is red."""
    env = GeoQA(style=style)
    margin = cell_size / 8
    pixels = np.indices((4 * cell_size, 4 * cell_size))[::-1].reshape(2, -1).T
    points = (pixels + 0.5 - margin) / (cell_size - margin / 2)  # in squares, [H W, 2]
    off_lines = (np.abs(points % 1 - 0.5) < 0.35).all(axis=1)
    red_points = set()
    for seed in range(40):
        image = env.reset(seed=seed)[0].images[0].astype(int).reshape(-1, 3)
        corners, _, red = env.question.image
        red_points.add(len(red))

        reds = points[np.abs(image - ImageColor.getrgb(RED)).sum(-1) < 90]
        assert bool(len(reds)) == bool(red)
        if red:
            # A red side is along the grid.
            assert (reds > np.min(red, axis=0) - 0.3).all()
            assert (reds < np.max(red, axis=0) + 0.3).all()
            assert all(np.hypot(*(reds - end).T).min() < 0.3 for end in red)

        # Figures are convex: within, a point is on the same side of all lines.
        distances = []
        for start, end in pairwise(np.array([*corners, corners[0]])):
            x, y = (end - start) / np.hypot(*(end - start))
            distances.append((points - start) @ (-y, x))
        far = off_lines & (np.abs(distances).min(axis=0) > 0.25)
        filled = image[:, 2] - image[:, 0] > 30
        assert (filled == (np.abs(np.sign(distances).sum(axis=0)) == len(corners)))[far].all()
    assert red_points == {0, 1, 2}


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(shade, size=(60, 40)):
    return encoded(Image.new("RGB", size, (shade, shade, shade)))


# As parquet files of the hub have them.
ROWS = {GSM8K: [], AIME: [], GeoQA: []}
for k in range(50):
    gsm8k = {"question": f"What is {k} + 1000?", "answer": f"We add.\n#### {k + 1000:,}"}
    ROWS[GSM8K].append(gsm8k)
    ROWS[AIME].append({"Problem": f"Find {k} + 0.", "Answer": k})  # 0 is not empty
    image = {"bytes": png(k), "path": None}
    solution = f"<answer> {k}° </answer>"
    ROWS[GeoQA].append({"image": image, "problem": f"Angle {k}?", "solution": solution})


@TASKS
def test_questions_from_a_file(task, tmp_path):
    source = write_rows(tmp_path / "rows.parquet", ROWS[task])
    env = task(style="full", data=source)
    rows = {42_000_000: set(), EVAL_SEEDS: set()}  # by first seed
    for first in rows:
        for seed in range(first, first + 60):
            observation = env.reset(seed=seed)[0]
            assert env.question.text in observation.text
            k = int(re.search(r"\d+", env.question.text)[0])
            gold = {GSM8K: f"{k + 1000}", AIME: f"{k}", GeoQA: f"{k}°"}[task]
            assert env.read(env.question.gold) == env.read(gold)
            for image in observation.images:
                np.testing.assert_array_equal(image, np.full((40, 60, 3), k))
            assert env.step(env.optimal_reply())[1] == 1.0
            rows[first].add(k)

    assert [len(split) for split in rows.values()] == [45, 5]
    # The random policy chooses among the answers of the training rows.
    assert len(env.actions) == 45


BAD = [  # task, field, value, a part of the sentence
    (GSM8K, "answer", "#### many", "the right answer is 'many', which"),
    (AIME, "Answer", 1000, "the right answer is '1000', which"),
    (GeoQA, "solution", 2 * "<answer>1</answer>", "the right answer is '', which"),
    (
        GeoQA,
        "image",
        {"bytes": png(0)[:60]},
        "image is {'bytes': .*: image file is truncated",
    ),
    (GeoQA, "image", {"bytes": encoded(Image.new("I;16", (9, 9)))}, "must have 8 bits a channel"),
    # Pillow gives EPS to Ghostscript, whatever the file's name.
    (
        GeoQA,
        "image",
        {"bytes": encoded(Image.new("L", (8, 4)), "EPS")},
        "cannot identify image file",
    ),
    (GeoQA, "image", "a.png", "image is 'a.png', but must be {'bytes': a file, PNG"),
    (GeoQA, "image", None, "image is None, but must be {'bytes': a file, PNG"),
]


@pytest.mark.parametrize(("task", "field", "value", "sentence"), BAD)
def test_bad_rows_are_named_in_one_sentence(task, field, value, sentence, tmp_path):
    source = write_rows(tmp_path / "rows.parquet", [ROWS[task][0] | {field: value}])
    with pytest.raises(UserError, match=rf"^{source}, train row 1: .*{sentence}[^\n]*$"):
        task(data=source)


def test_images_are_read_as_a_person_sees_them():
    """Large ones are scaled down, transparent ones are white, and one of a camera that was turned
    is shown upright: 6 in its EXIF data is a quarter to the right."""
    assert decode(png(0, (3000, 1000))).shape == (299, MAX_SIDE, 3)
    assert (decode(encoded(Image.new("RGBA", (60, 40)))) == 255).all()

    image = Image.new("RGB", (60, 40))
    image.paste((255, 255, 255), (0, 0, 60, 20))  # the upper half
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    expected = np.asarray(image.rotate(-90, expand=True))
    np.testing.assert_array_equal(decode(encoded(image, exif=turned)), expected)
