"""GeoQA: an image of a geometric figure and a question about it, in up to three attempts.

Paper: appendix D, "GeoQA" (VLM). Data: the fields `image`, `problem` and `solution` of `leonardPKU/GEOQA_R1V_Train_8K`,
which has one split, and whose solutions hold the answer as `<answer> 145° </answer>`. An image is what `datasets` and
parquet hold ({"bytes", "path"}), bytes, or a path beside the file. The paper does not say which version it used.

Without data, triangles and quadrilaterals on a grid of 4 x 4 squares are generated, with a question for the length of
the red side, the angle at the red dot, or the area. Eleven values are equally likely. There are 10,163 problems for
training and 1,488 held out, which share no figure. They are ours, and scores on them say nothing about GeoQA.
"""

import io
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from PIL import Image, ImageDraw

from envs.answer_parsing import MAX_ANSWER, Number, final_answer, plain, read_choice, read_number
from envs.base import FORMAT_PENALTY, FreeText
from envs.question_answering import FEEDBACK, MAX_QUESTION, Problem, Question, QuestionAnswering

SIDE = 4  # squares
VALUES = ("1", "2", "3", "4", "5", "6", "8", "10", "45", "90", "135")
QUESTIONS = {
    "length?": "How long is the red side? The lines of the grid are 1 apart.",
    "angle?": "How large is the angle at the red dot, in degrees?",
    "area?": "How large is the area of the figure? The lines of the grid are 1 apart.",
}
FILL, EDGE, RED = (170, 210, 250), (16, 32, 96), (224, 24, 40)
TOLERANCE = 0.005  # relative, for decimals such as 3.46 for 2√3
MAX_SIDE = 896  # pixels; larger images are scaled down, to at most 1024 tokens of Qwen2.5-VL

Point = tuple[int, int]  # column from the left, row from the top, in squares
Polygon = tuple[Point, ...]  # corners in order


class Figure(NamedTuple):
    """`red` are the ends of the red side, or the corner with the red dot."""

    polygon: Polygon
    question: str
    red: tuple[Point, ...] = ()


def polygons() -> list[Polygon]:
    """Return every triangle, and every quadrilateral with two sides along the same direction of the grid."""
    points = [(x, y) for x in range(SIDE + 1) for y in range(SIDE + 1)]
    found: dict[Polygon, Polygon] = {corners: corners for corners in combinations(points, 3) if area(corners)}
    pairs = list(combinations(range(SIDE + 1), 2))
    for (a, b), (c, d), (near, far) in product(pairs, repeat=3):
        for corners in (((a, near), (b, near), (d, far), (c, far)), ((near, a), (near, b), (far, d), (far, c))):
            found[tuple(sorted(corners))] = corners  # rectangles are found twice
    return list(found.values())


def area(polygon: Polygon) -> float:
    return abs(sum(polygon[k - 1][0] * y - x * polygon[k - 1][1] for k, (x, y) in enumerate(polygon))) / 2


def draw(figure: Figure, cell_size: int) -> np.ndarray:
    """Draw a figure on its grid, uint8 [4 cell_size, 4 cell_size, 3], at four times its size and scaled down.

    The lines of the grid shade from dark to light, so that row and column can be seen in the image itself: a tiny
    vision tower cannot yet tell them from positions alone.
    """
    side, scale = SIDE * cell_size, 4 * cell_size
    margin = scale // 8  # figures on the rim of the grid stay inside the image
    image = Image.new("RGB", (4 * side, 4 * side), (255, 255, 255))
    pen = ImageDraw.Draw(image)

    def at(*points: Point) -> list[tuple[float, float]]:
        step = (4 * side - 2 * margin) / SIDE
        return [(margin + step * x, margin + step * y) for x, y in points]

    thin, thick = max(1, scale // 14), max(2, scale // 7)
    for k in range(SIDE + 1):
        shade = (60 + 45 * k,) * 3
        pen.line(at((k, 0), (k, SIDE)), fill=shade, width=thin)
        pen.line(at((0, k), (SIDE, k)), fill=shade, width=thin)
    pen.polygon(at(*figure.polygon), fill=FILL)
    pen.line(at(*figure.polygon, figure.polygon[0]), fill=EDGE, width=thick, joint="curve")
    if len(figure.red) == 2:
        pen.line(at(*figure.red), fill=RED, width=2 * thick)
    elif figure.red:
        pen.circle(at(*figure.red)[0], 1.5 * thick, fill=RED)
    return np.asarray(image.resize((side, side), Image.Resampling.BOX))


_drawn = lru_cache(1024)(draw)


def decode(encoded: bytes) -> np.ndarray:
    """Decode an image file to uint8 [H, W, 3], transparent parts white, at most MAX_SIDE a side. Raises ValueError."""
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            image = opened.convert("RGBA")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"the field image is no image that can be read: {error}") from error
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    white.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.asarray(white.convert("RGB"))


class AnySize(gymnasium.spaces.Box):
    """The space of images of any size up to that of the box."""

    def contains(self, x: Any) -> bool:
        image = isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.ndim == 3 and x.shape[2] == 3
        return image and max(x.shape) <= max(self.shape)


class GeoQA(QuestionAnswering):
    """`cell_size`: pixels of a square of the generated figures' grid."""

    words = (*QUESTIONS, " triangle", " quadrilateral", " a", " b", " c", " d", " e")  # a point of a caption: " b3"
    words += (*FEEDBACK, *(f" {value}" for value in VALUES))
    warm_start = ((250, 1), (150, 3))  # first to see, then to play
    generated_answers = VALUES
    fields = ("image", "problem", "solution")
    rules = "Answer a question about the figure in the image."
    form = (
        "End your reply with the value, or the letter of the right choice, between tags, for example "
        "<answer>60°</answer> or <answer>B</answer>."
    )

    def __init__(
        self,
        style: str = "terse",
        format_penalty: float = FORMAT_PENALTY,
        max_turns: int = 0,
        data: str = "",
        cell_size: int = 14,
    ):
        """Raises ValueError if `cell_size` is below 1, or as the base class does."""
        super().__init__(style, format_penalty, max_turns, data)
        if cell_size < 1:
            raise ValueError(f"cell_size must be 1 or more, got {cell_size}")
        self.cell_size = cell_size
        side = max(MAX_SIDE, SIDE * cell_size)
        images = gymnasium.spaces.Sequence(AnySize(0, 255, (side, side, 3), np.uint8))
        self.observation_space = gymnasium.spaces.Tuple((FreeText(2 * MAX_QUESTION, min_length=0), images))

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        solution = str(row["solution"])  # with the tags of a reply, or the answer alone
        gold = final_answer(solution, False) or final_answer(f"<answer>{solution}</answer>", False)
        if gold is None or cls.read(gold) is None:
            limit, shown = f"at most {MAX_ANSWER} characters", solution[:MAX_ANSWER]
            raise ValueError(f"the field solution must hold one answer of {limit}, but is {shown!r}")
        image = row["image"]
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if isinstance(image, str):
            try:
                image = (Path(row["folder"]) / image).read_bytes()
            except OSError as error:
                raise ValueError(f"the field image names a file that cannot be read: {error}") from error
        if not isinstance(image, bytes):
            raise ValueError(f"the field image must be an image, but is a {type(image).__name__}")
        decode(image)  # now, not in the middle of a run
        return Question(row["problem"], gold, image=image)

    @classmethod
    def problems(cls) -> Iterator[Problem]:
        """Yield all problems. Those with the same polygon are in the same split."""
        for polygon in polygons():
            n, found = len(polygon), []
            for k, corner in enumerate(polygon):
                before, after = np.subtract(polygon[k - 1], corner), np.subtract(polygon[(k + 1) % n], corner)
                degrees = math.degrees(math.acos(before @ after / math.hypot(*before) / math.hypot(*after)))
                found.append((round(degrees, 6), Figure(polygon, "angle?", (corner,))))
                if 0 in after:  # a side along the grid
                    found.append((math.hypot(*after), Figure(polygon, "length?", (corner, polygon[(k + 1) % n]))))
            if len(found) > n:
                found.append((area(polygon), Figure(polygon, "area?")))
            for value, figure in found:
                yield Problem(f"{value:.9g}", tuple(sorted(polygon)), figure)

    def question_of(self, problem: Problem, rng: np.random.Generator) -> Question:
        figure = problem.content
        shape = " triangle" if len(figure.polygon) == 3 else " quadrilateral"
        points = "".join(f" {'abcde'[x]}{y + 1}" for x, y in figure.polygon)
        text = QUESTIONS[figure.question] if self.style == "full" else figure.question
        return Question(text, problem.answer, f"{shape}{points}", figure)

    def images(self) -> tuple[np.ndarray, ...]:
        image = self.question.image
        return (_drawn(image, self.cell_size).copy() if isinstance(image, Figure) else decode(image),)

    @staticmethod
    def read(answer: str) -> tuple[str, Number | None, str] | None:
        """Return an answer as the letter of a choice or "", a number or None, and bare text."""
        choice, rest = read_choice(answer) or ("", answer)
        text = re.sub(r"[\s\0]", "", plain(answer)).lower()
        return (choice, read_number(rest), text) if re.search(r"\w", text) else None

    @staticmethod
    def right(value: tuple[str, Number | None, str], gold: tuple[str, Number | None, str]) -> bool:
        """Return whether letters, numbers or texts are the same. Decimals of a number that is no integer may be off by
        less than 1 in the last digit and by TOLERANCE."""
        (choice, a, text), (gold_choice, b, gold_text) = value, gold
        if choice and gold_choice:
            return choice == gold_choice
        if a is None or b is None:
            return text == gold_text
        if len({a.unit, b.unit} & {"mm", "cm", "dm", "m", "km"}) == 2:
            return False
        digits = [places for places in (a.decimals, b.decimals * (b.decimals > 1)) if places]
        off, size = abs(Fraction(a.value) - Fraction(b.value)), abs(Fraction(b.value))
        surds = isinstance(a.value, float) or isinstance(b.value, float)
        near = bool(digits) and off < Fraction(1, 10 ** min(digits)) and off <= TOLERANCE * size
        return near or off <= (1e-9 * size if surds else 0)


if __name__ == "__main__":
    from envs.play import main

    main(GeoQA)
