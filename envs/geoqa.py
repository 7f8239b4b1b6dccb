"""GeoQA: an image of a geometric figure and a question about it, in up to three attempts.

Paper: appendix D, "GeoQA" (VLM). It does not say which version it used.
Data: the fields `image`, `problem` and `solution` (`<answer> 145° </answer>`) of `leonardPKU/GEOQA_R1V_Train_8K`.

Without data: a triangle or a quadrilateral on a grid of 4 x 4 squares, with a question for the length of the red side,
the angle at the red dot, or the area: 10,163 problems for training and 1,488 held out (full prompts: 4,532).
"""

import io
import math
import re
from collections.abc import Hashable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from envs.answer_parsing import MAX_ANSWER, Measure, bare, read_measure
from envs.base import parse_answer
from envs.question_answering import FEEDBACK, Question, QuestionAnswering

SIDE = 4  # squares
QUESTIONS = {
    "length?": "How long is the red side? The lines of the grid are 1 apart.",
    "angle?": "How large is the angle at the red dot, in degrees?",
    "area?": "How large is the area of the figure? The lines of the grid are 1 apart.",
}
FILL, EDGE, RED = (170, 210, 250), (16, 32, 96), (224, 24, 40)
TOLERANCE = 0.005  # relative, for decimals such as 3.46 for 2√3
CHOICE = re.compile(r"\(?([A-F])(?:[).:]+ *(.*))?")  # letter and what is behind it
MAX_SIDE = 896  # pixels; larger images are scaled down, to at most 1024 tokens of Qwen2.5-VL

Polygon = tuple[
    tuple[int, ...], ...
]  # corners in order: column from the left, row from the top, in squares


class Figure(NamedTuple):
    polygon: Polygon
    question: str
    red: Polygon = ()  # the ends of the red side, or the corner with the red dot


class Answer(NamedTuple):
    letter: str  # of a choice, or ""
    text: str = ""  # without the letter
    value: Measure | None = None  # of the text, if it is a number


def same(a: Measure | None, b: Measure | None) -> bool:
    """Return whether two values with their units are equal. Only a decimal with two digits or more
    behind its point may be the rounded value of an expression with a root or π."""
    if not a or not b or (a.unit and b.unit and a.unit != b.unit):
        return False
    exact = isinstance(a.value, Fraction)
    if exact == isinstance(b.value, Fraction):
        return a.value == b.value if exact else math.isclose(a.value, b.value, rel_tol=1e-12)

    decimals, size = max(a.decimals, b.decimals), abs(float(b.value))
    allowed = min(0.5 * 10**-decimals, TOLERANCE * size)
    return decimals >= 2 and abs(float(a.value) - float(b.value)) <= allowed


def polygons() -> list[Polygon]:
    """Return every triangle, and every quadrilateral with two sides along the same direction of the grid."""
    points = list(product(range(SIDE + 1), repeat=2))
    found: dict[Polygon, Polygon] = {
        corners: corners for corners in combinations(points, 3) if area(corners)
    }
    pairs = list(combinations(range(SIDE + 1), 2))
    for (a, b), (c, d), (near, far) in product(pairs, repeat=3):
        for corners in (
            ((a, near), (b, near), (d, far), (c, far)),
            ((near, a), (near, b), (far, d), (far, c)),
        ):
            found[tuple(sorted(corners))] = corners  # rectangles are found twice
    return list(found.values())


def area(polygon: Polygon) -> float:
    return (
        abs(sum(polygon[k - 1][0] * y - x * polygon[k - 1][1] for k, (x, y) in enumerate(polygon)))
        / 2
    )


@lru_cache(1024)
def draw(figure: Figure, cell_size: int) -> np.ndarray:
    """Draw a figure on its grid, uint8 [4 cell_size, 4 cell_size, 3], at four times its size and scaled down. The lines
    of the grid shade from dark to light, for the same reason as the ruler of FrozenLake's images."""
    side, scale = SIDE * cell_size, 4 * cell_size
    margin, thick = scale // 8, scale // 7  # figures on the rim of the grid stay inside the image
    image = Image.new("RGB", (4 * side, 4 * side), "white")
    pen = ImageDraw.Draw(image)

    def at(*points: tuple[int, ...]) -> list[tuple[float, float]]:
        step = (4 * side - 2 * margin) / SIDE
        return [(margin + step * x, margin + step * y) for x, y in points]

    for k in range(SIDE + 1):
        for ends in (((k, 0), (k, SIDE)), ((0, k), (SIDE, k))):
            pen.line(at(*ends), fill=(60 + 45 * k,) * 3, width=scale // 14)
    pen.polygon(at(*figure.polygon), fill=FILL)
    pen.line(at(*figure.polygon, figure.polygon[0]), fill=EDGE, width=thick, joint="curve")
    if len(figure.red) == 2:
        pen.line(at(*figure.red), fill=RED, width=2 * thick)
    elif figure.red:
        pen.circle(at(*figure.red)[0], 1.5 * thick, fill=RED)
    return np.asarray(image.resize((side, side), Image.Resampling.BOX))


def decode(source: bytes | str) -> np.ndarray:
    """Decode an image file to uint8 [H, W, 3], transparent parts white, at most MAX_SIDE a side. Raises ValueError."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            image = opened.convert("RGBA")
    except (OSError, AttributeError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"the field image is no image that can be read: {error}") from error
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.array(image.convert("RGB"))


class GeoQA(QuestionAnswering):
    generated_answers = ("1", "2", "3", "4", "5", "6", "8", "10", "45", "90", "135")
    words = (
        *QUESTIONS,
        " triangle",
        " quadrilateral",
        " a",
        " b",
        " c",
        " d",
        " e",
    )  # a point of a caption: " b3"
    words += (*FEEDBACK, *map(" {}".format, generated_answers))
    warm_start = ((250, 1), (150, 3))  # first to see, then to play
    fields = ("image", "problem", "solution")
    rules = "Answer a question about the figure in the image."
    form = "End your reply with the value or the right letter, such as <answer>60°</answer> or <answer>B</answer>."

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Question:
        solution, image = str(row["solution"]), row["image"]
        tagged = solution if "<answer>" in solution else f"<answer>{solution}</answer>"
        if cls.read(gold := parse_answer(tagged) or "") is None:
            raise ValueError(
                f"the field solution must hold one short answer, but is {solution[:MAX_ANSWER]!r}"
            )
        if isinstance(image, dict):  # an image column of `datasets`
            image = image.get("bytes") or image.get("path")
        decode(image)  # now, not in the middle of a run
        return Question(str(row["problem"]), gold, image=image)

    @classmethod
    def problems(cls, style: str) -> Iterator[tuple[str, int, Hashable, Any]]:
        for polygon in polygons():
            found = []
            for k, corner in enumerate(polygon):
                after = polygon[k + 1 - len(polygon)]
                one, other = np.subtract(polygon[k - 1], corner), np.subtract(after, corner)
                degrees = math.degrees(
                    math.acos(one @ other / math.hypot(*one) / math.hypot(*other))
                )
                found.append((round(degrees, 6), Figure(polygon, "angle?", (corner,))))
                if 0 in other:  # a side along the grid
                    found.append((math.hypot(*other), Figure(polygon, "length?", (corner, after))))
            if len(found) > len(polygon):
                found.append((area(polygon), Figure(polygon, "area?")))
            for value, figure in found:
                yield f"{value:.9g}", 0, tuple(sorted(polygon)), figure

    def question_of(self, content: Any, answer: str, rng: np.random.Generator) -> Question:
        shape = " triangle" if len(content.polygon) == 3 else " quadrilateral"
        points = "".join(f" {'abcde'[x]}{y + 1}" for x, y in content.polygon)
        text = QUESTIONS[content.question] if self.style == "full" else content.question
        return Question(text, answer, shape + points, content)

    def images(self) -> tuple[np.ndarray, ...]:
        image = self.question.image
        return (draw(image, self.cell_size).copy() if isinstance(image, Figure) else decode(image),)

    @classmethod
    def read(cls, answer: str) -> Answer | None:
        """Return an answer as the letter of a choice, the text without it, and its value."""
        text = bare(answer)
        if not re.search(r"\w", text):
            return None

        choice = CHOICE.fullmatch(text)
        if choice and not choice[2]:
            return Answer(choice[1])
        if choice and (value := read_measure(choice[2])):
            return Answer(choice[1], choice[2], value)
        return Answer("", text, read_measure(text))

    @staticmethod
    def right(answer: Answer, gold: Answer) -> bool:
        """Return whether answer and gold share a letter, a text or a value, and differ in none."""
        shared = []
        if answer.letter and gold.letter:
            shared.append(answer.letter == gold.letter)
        if answer.text and gold.text:
            shared.append(answer.text == gold.text or same(answer.value, gold.value))
        return bool(shared) and all(shared)
