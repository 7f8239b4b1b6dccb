"""GeoQA: a picture of a geometric figure and a question about it, with three attempts.

Paper: appendix D, "GeoQA" (VLM). Data: the fields `image`, `problem` and `solution` of `leonardPKU/GEOQA_R1V_Train_8K`,
which has one split, and whose solutions hold the answer as `<answer> 145° </answer>`. A picture is what `datasets`
and parquet hold ({"bytes", "path"}), bytes, or a path beside the file. The paper does not say which version it used.

Without data, questions are GENERATED: triangles, rectangles and circles on a grid of 4 x 4 squares, the length of the
red line, the angle at the red mark, or the area, one of eleven values, each as likely. They are ours, not GeoQA's, and
their numbers say nothing about GeoQA.
"""

import io
import math
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from PIL import Image, ImageDraw

from envs.answers import MAX_ANSWER, final_answer, plain, read_number
from envs.attempts import FEEDBACK, MAX_QUESTION, Attempts, Question
from envs.base import FORMAT_PENALTY, FreeText

SIDE = 4  # squares
VALUES = ("1", "2", "3", "4", "6", "8", "9", "12", "45", "90", "135")
QUESTIONS = {
    "length": ("length?", "How long is the red line? The lines of the grid are 1 apart."),
    "angle": ("angle?", "How large is the angle at the red mark, in degrees?"),
    "area": ("area?", "How large is the area of the figure? The lines of the grid are 1 apart."),
}
TOLERANCE = 0.005  # of a value that is no integer, relative: 3.46 for 2√3
MAX_SIDE = 896  # pixels; larger pictures are scaled down, to at most 1024 tokens of Qwen2.5-VL

Point = tuple[int, int]  # column from the left, row from the top, in squares


class Figure(NamedTuple):
    """`points`: corners in order, or for a circle its centre and a point of its rim. `red`: the ends of the red line,
    or the number of the corner with the red mark."""

    shape: str  # "triangle", "rectangle", "circle"
    points: tuple[Point, ...]
    question: str  # "length", "angle", "area"
    red: tuple[Point, ...] = ()


# -- generated figures -----------------------------------------------------------------------------------------


@cache
def generated_figures() -> dict[str, dict[str, list[Figure]]]:
    """answer: question: every figure with this answer."""
    lattice = [(x, y) for x in range(SIDE + 1) for y in range(SIDE + 1)]
    found: dict[str, dict[str, list[Figure]]] = {value: {} for value in VALUES}

    def add(answer: float, figure: Figure) -> None:
        if f"{answer:g}" in found:
            found[f"{answer:g}"].setdefault(figure.question, []).append(figure)

    for x, y in lattice:
        for w in range(1, SIDE + 1 - x):
            for h in range(1, SIDE + 1 - y):
                corners: tuple[Point, ...] = ((x, y), (x + w, y), (x + w, y + h), (x, y + h))
                add(w * h, Figure("rectangle", corners, "area"))
                add(w, Figure("rectangle", corners, "length", corners[:2]))
                add(h, Figure("rectangle", corners, "length", corners[1:3]))
                for k in range(4):
                    right_angle, legs = corners[k], (corners[k - 1], corners[(k + 1) % 4])
                    add(90, Figure("rectangle", corners, "angle", (right_angle,)))
                    triangle = (right_angle, *legs)
                    add(w * h / 2, Figure("triangle", triangle, "area"))
                    for leg in legs:
                        add(math.dist(right_angle, leg), Figure("triangle", triangle, "length", (right_angle, leg)))
        for radius in (1, 2):
            if radius <= min(x, y) and max(x, y) <= SIDE - radius:
                for dx, dy in ((radius, 0), (0, radius), (-radius, 0), (0, -radius)):
                    rim = (x + dx, y + dy)
                    add(radius, Figure("circle", ((x, y), rim), "length", ((x, y), rim)))
                    add(2 * radius, Figure("circle", ((x, y), rim), "length", ((x - dx, y - dy), rim)))
        turn = [(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]  # every 45 degrees
        for first, (dx, dy) in enumerate(turn):
            for eighths in (1, 2, 3):
                ex, ey = turn[(first + eighths) % 8]
                for arm in (2, 3, 4):
                    corners = ((x, y), (x + arm * dx, y + arm * dy), (x + arm * ex, y + arm * ey))
                    if set(corners) <= set(lattice):
                        add(45 * eighths, Figure("triangle", corners, "angle", ((x, y),)))
    return found


def draw(figure: Figure, cell_size: int) -> np.ndarray:
    """The figure on its grid, uint8 [4 cell_size, 4 cell_size, 3], drawn at four times its size and scaled down.

    The lines of the grid shade from dark to light, so that row and column can be seen in the picture itself: a tiny
    vision tower cannot yet tell them from positions alone.
    """
    side, scale = SIDE * cell_size, 4 * cell_size
    margin = scale // 8  # figures on the rim of the grid stay inside the picture
    step = (4 * side - 2 * margin) / SIDE
    picture = Image.new("RGB", (4 * side, 4 * side), (255, 255, 255))
    pen = ImageDraw.Draw(picture)

    def at(point: Point) -> tuple[float, float]:
        return margin + step * point[0], margin + step * point[1]

    thin, thick = max(1, scale // 14), max(2, scale // 7)
    for k in range(SIDE + 1):
        shade = (60 + 45 * k,) * 3
        pen.line([at((k, 0)), at((k, SIDE))], fill=shade, width=thin)
        pen.line([at((0, k)), at((SIDE, k))], fill=shade, width=thin)
    corners = [at(point) for point in figure.points]
    if figure.shape == "circle":
        (x, y), radius = corners[0], math.dist(*corners)
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=FILL, outline=EDGE, width=thick)
    else:
        pen.polygon(corners, fill=FILL)
        pen.line([*corners, corners[0]], fill=EDGE, width=thick, joint="curve")
    if figure.question == "length":
        pen.line([at(point) for point in figure.red], fill=RED, width=2 * thick)
    if figure.question == "angle":
        (x, y), k, mark = at(figure.red[0]), figure.points.index(figure.red[0]), 0.6 * step
        before, after = corners[k - 1], corners[(k + 1) % len(corners)]
        start, end = (math.degrees(math.atan2(q - y, p - x)) for p, q in (before, after))
        if (end - start) % 360 > 180:
            start, end = end, start
        pen.pieslice((x - mark, y - mark, x + mark, y + mark), start, end, fill=RED)
    return np.asarray(picture.resize((side, side), Image.Resampling.BOX))


FILL, EDGE, RED = (170, 210, 250), (16, 32, 96), (224, 24, 40)


def decode(encoded: bytes) -> np.ndarray:
    """A picture file as uint8 [H, W, 3], transparent parts white, at most MAX_SIDE on a side. Raises ValueError."""
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            picture = opened.convert("RGBA")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"the field image is no picture that can be read: {error}") from error
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    white.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.asarray(white.convert("RGB"))


class AnySize(gymnasium.spaces.Box):
    """Pictures of any size up to that of the box."""

    def contains(self, x: Any) -> bool:
        return (
            isinstance(x, np.ndarray)
            and x.dtype == np.uint8
            and x.ndim == 3
            and x.shape[2] == 3
            and all(n <= limit for n, limit in zip(x.shape, self.shape, strict=True))
        )


class GeoQA(Attempts):
    """`cell_size`: pixels of a square of the generated figures' grid."""

    words = (*(short for short, _ in QUESTIONS.values()), " circle", " triangle", " rectangle", " a", " b", " c", " d")
    words += (" e", *FEEDBACK, *(f" {value}" for value in VALUES))  # in captions a point is a column and a row
    warm_start = ((250, 1), (150, 3))  # first to see, then to play
    generated_answers = VALUES
    fields = ("image", "problem", "solution")
    rules = (
        "Answer a question about the figure in the picture. You have {turns} attempts; after a wrong answer you may "
        "try again."
    )
    form = (
        "Reply with your reasoning, then the value, or the letter of the right choice, in the form "
        "<answer> value </answer>."
    )

    def __init__(
        self,
        style: str = "terse",
        format_penalty: float = FORMAT_PENALTY,
        max_turns: int = 0,
        data: str = "",
        cell_size: int = 14,
    ):
        super().__init__(style, format_penalty, max_turns, data)
        self.cell_size = cell_size
        side = max(MAX_SIDE, SIDE * cell_size)
        picture = AnySize(0, 255, (side, side, 3), np.uint8)
        spaces = (FreeText(2 * MAX_QUESTION, min_length=0), gymnasium.spaces.Sequence(picture))
        self.observation_space = gymnasium.spaces.Tuple(spaces)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        solution = str(row["solution"])
        # as a reply is read, or a right one might never match; it may also be the answer alone
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
            raise ValueError(f"the field image must be a picture, but is a {type(image).__name__}")
        decode(image)  # now, not in the middle of a run
        return Question(row["problem"], gold, picture=image)

    def generate(self, rng: np.random.Generator) -> Question:
        answer = VALUES[rng.integers(len(VALUES))]
        questions = generated_figures()[answer]
        figures = questions[list(questions)[rng.integers(len(questions))]]
        figure = figures[rng.integers(len(figures))]
        points = "".join(f" {'abcde'[x]}{y + 1}" for x, y in figure.points)
        text = QUESTIONS[figure.question][self.style == "full"]
        return Question(text, answer, f" {figure.shape}{points}", figure)

    def pictures(self) -> tuple[np.ndarray, ...]:
        picture = self.question.picture
        return (_drawn(picture, self.cell_size).copy() if isinstance(picture, Figure) else decode(picture),)

    @staticmethod
    def read(answer: str) -> Any:
        """A value: a number, exact (read_number), or with a root or π, as float; else a text, such as the letter of a
        choice, without case, spaces and punctuation."""
        number = read_number(answer)
        if number is not None:
            return number
        found = _ROOT.fullmatch(plain(answer))
        if found and (found[2] or found[3]):
            factor, root, pi, divisor = found.groups()
            if root and math.isqrt(int(root)) ** 2 == int(root):  # left undone
                return None
            value = float(factor or 1) * (math.sqrt(float(root)) if root else 1.0) * (math.pi if pi else 1.0)
            return value / float(divisor or 1) if float(divisor or 1) else None
        return re.sub(r"[\W_]+", "", answer).lower() or None

    @staticmethod
    def right(value: Any, gold: Any) -> bool:
        """Texts and integers must be equal; other values may differ by TOLERANCE."""
        if isinstance(value, str) or isinstance(gold, str) or value == gold:
            return value == gold
        integers = getattr(value, "denominator", 0) == getattr(gold, "denominator", 0) == 1
        return not integers and abs(float(value) - float(gold)) <= TOLERANCE * abs(float(gold))


# 2√3, 2\sqrt{3}, √2/2, 9π, 3√3π/2, and a unit
_ROOT = re.compile(
    r"([0-9]{0,6}(?:\.[0-9]{1,6})?)\s*\*?\s*(?:(?:√|\\sqrt)\s*[{(]?\s*([0-9]{1,6})\s*[})]?)?\s*(π|\\pi)?"
    r"(?:\s*/\s*([0-9]{1,6}))?\s*(?:[a-z]{1,6}(?:\^?[23²³])?)?"
)


@cache
def _drawn(figure: Figure, cell_size: int) -> np.ndarray:
    return draw(figure, cell_size)


if __name__ == "__main__":
    from envs.play import main

    main(GeoQA)
