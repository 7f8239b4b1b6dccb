"""GeoQA: an image of a geometric figure and a question about it, in up to three attempts.

Paper: appendix D, "GeoQA" (VLM). It does not say which version it used.
Data: the fields `image`, `problem` and `solution` (`<answer> 145° </answer>`) of
`leonardPKU/GEOQA_R1V_Train_8K`. The images are those of `datasets`: `{"bytes": ...}`.

A reply's answer is the letter of a choice, a value (envs/answer_parsing.py), or both, as "B) 60°".
It is right if it shares the letter or the value with the gold answer and contradicts neither. The
data set has answers of all these forms. A letter before anything but a value is not read, because
words may say anything about it.

Without data: a triangle or a quadrilateral on a grid of 4 x 4 squares. A question asks for the
length of the red side, the angle at the red dot, or the area: 10,163 problems for training and
1,488 held out (full prompts: 4,532).
"""

import io
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from envs.answer_parsing import bare, read_measure
from envs.base import UserError, parse_answer
from envs.question_answering import FEEDBACK, Problem, Question, QuestionAnswering

SIDE = 4  # squares
QUESTIONS = {
    "length?": "How long is the red side? The lines of the grid are 1 apart.",
    "angle?": "How large is the angle at the red dot, in degrees?",
    "area?": "How large is the area of the figure? The lines of the grid are 1 apart.",
}
COLUMNS = [f" {letter}" for letter in "abcde"]  # of the points in a caption: " b3"
ANSWERS = "1 2 3 4 5 6 8 10 45 90 135".split()  # to generated questions
FILL = "#aad2fa"
EDGE = "#102060"
RED = "#e01828"
CHOICE = r"\(?([A-F])(?:$|[).:]+ *)(.*)"  # letter and what is behind it
# A value in one spelling, or nothing
TERM = r"(?:[0-9.,:√π²³°%^{}]|\\frac|\([-+0-9.,/√π]+\))"
VALUE = rf"|(?=.*[0-9π]){TERM}*(?:[-+/]{TERM}+)*"
FORMATS = "PNG JPEG WEBP GIF BMP TIFF".split()  # others may start programs
MAX_SIDE = 896  # pixels; larger images are scaled down, to at most 1024 tokens of Qwen2.5-VL

# Corners in order: column from the left and row from the top, in squares.
Polygon = tuple[tuple[int, ...], ...]


class Figure(NamedTuple):
    polygon: Polygon
    question: str
    red: Polygon = ()  # the ends of the red side, or the corner with the red dot


class Answer(NamedTuple):
    """The parts of an answer, "" for those that it does not have. A unit has a value."""

    letter: str  # of a choice
    value: Fraction | str
    unit: str


class GeoQA(QuestionAnswering):
    words = (*QUESTIONS, " triangle", " quadrilateral", *COLUMNS, *FEEDBACK)
    warm_start = ((250, 1), (150, 3))  # first to see, then to play
    rules = "Answer a question about the figure in the image."
    form = (
        "End your reply with the value or the right letter, "
        "such as <answer>60°</answer> or <answer>B</answer>."
    )

    fields = ("problem", "solution")
    gold = staticmethod(parse_answer)

    @classmethod
    def from_row(cls, row: dict) -> Question:
        image: Any = row.get("image")
        try:
            # A broken image is an error now, not in the middle of a run.
            decode(image["bytes"])
        # Its readers raise errors of many types.
        except Exception as error:
            allowed = f"{{'bytes': a file, {', '.join(FORMATS)}}}"
            sentence = f"the field image is {image!r:.80}, but must be {allowed}: {error}"
            raise UserError(sentence) from error
        return super().from_row(row)._replace(image=image["bytes"])

    @classmethod
    def problems(cls, style: str) -> Iterator[Problem]:
        """Yield all problems. Their content is a `Figure`."""
        for polygon in polygons():
            for figure, value in questions_about(polygon):
                answer = f"{value:.9g}"
                if answer in ANSWERS:
                    yield Problem(answer, tuple(sorted(polygon)), figure)

    def question_of(self, problem: Problem, rng: np.random.Generator) -> Question:
        figure = problem.content
        text = QUESTIONS[figure.question] if self.style == "full" else figure.question
        caption = " triangle" if len(figure.polygon) == 3 else " quadrilateral"
        for column, row in figure.polygon:
            caption += f"{COLUMNS[column]}{row + 1}"
        return Question(text, problem.answer, caption, figure)

    def images(self) -> tuple[np.ndarray, ...]:
        image = self.question.image
        return (draw(image, self.cell_size) if isinstance(image, Figure) else decode(image),)

    @staticmethod
    def read(answer: str) -> Answer | None:
        """Return an answer as the letter of a choice and what is behind it. None: it has neither a
        letter nor a digit. A letter is a choice if it stands alone (B, (B), B.) or before a value
        ("B) 60°")."""
        text = bare(answer)
        if not re.search(r"\w", text):
            return None

        choice = re.fullmatch(CHOICE, text)
        if choice:
            value, unit = read_measure(choice[2])
            if re.fullmatch(VALUE, str(value)):
                return Answer(choice[1], value, unit)
        return Answer("", *read_measure(text))

    @staticmethod
    def right(answer: Answer, gold: Answer) -> bool:
        """Return whether answer and gold share a letter or a value, and differ in no part. A part
        that one of them lacks is not compared."""
        same = {one == other for one, other in zip(answer, gold) if "" not in (one, other)}
        return same == {True}


def polygons() -> Iterator[Polygon]:
    """Yield every triangle, and every quadrilateral with two sides along the same direction of the
    grid."""
    points = product(range(SIDE + 1), repeat=2)
    # Corners in one line have no area.
    yield from filter(area, combinations(points, 3))

    # Both orientations have every rectangle, so the sorted corners tell which one it is.
    quadrilaterals = {}
    spans = combinations(range(SIDE + 1), 2)
    for (a, b), (c, d), (near, far) in product(spans, repeat=3):
        horizontal = ((a, near), (b, near), (d, far), (c, far))
        vertical = tuple(corner[::-1] for corner in horizontal)
        for corners in (horizontal, vertical):
            quadrilaterals[tuple(sorted(corners))] = corners
    yield from quadrilaterals.values()


def area(polygon: Polygon) -> float:
    """Return the area of a polygon by the shoelace formula."""
    x, y = np.transpose(polygon)
    return abs(np.roll(x, 1) @ y - x @ np.roll(y, 1)) / 2


def questions_about(polygon: Polygon) -> Iterator[tuple[Figure, float]]:
    """Yield the questions about a polygon with their answers: for every angle, for the length of
    every side along the grid, and for the area if there is such a side."""
    along_grid = False
    for k, corner in enumerate(polygon):
        after = polygon[k + 1 - len(polygon)]
        to_before = np.subtract(polygon[k - 1], corner)
        to_after = np.subtract(after, corner)
        length = math.hypot(*to_after)

        cosine = to_before @ to_after / math.hypot(*to_before) / length
        yield Figure(polygon, "angle?", (corner,)), math.degrees(math.acos(cosine))

        if 0 in to_after:
            along_grid = True
            yield Figure(polygon, "length?", (corner, after)), length

    if along_grid:
        yield Figure(polygon, "area?"), area(polygon)


def draw(figure: Figure, cell_size: int) -> np.ndarray:
    """Draw a figure on its grid, uint8 [4 cell_size, 4 cell_size, 3]. It is drawn at four times its
    size and scaled down. The lines of the grid shade from dark to light, for the same reason as the
    ruler of FrozenLake's images."""
    side = SIDE * cell_size
    image = Image.new("RGB", (4 * side, 4 * side), "white")
    pen = ImageDraw.Draw(image)
    line_width = 4 * cell_size // 7

    # Lines on the rim of the grid stay inside the image.
    margin = cell_size // 2
    step = (4 * side - 2 * margin) / SIDE

    def pixels(points: Polygon) -> list[float]:
        """Return the coordinates x, y, x, y, ... of points."""
        return (margin + step * np.array(points)).ravel().tolist()

    for k in range(SIDE + 1):
        shade = 60 + 45 * k
        for ends in (((k, 0), (k, SIDE)), ((0, k), (SIDE, k))):
            pen.line(pixels(ends), fill=(shade, shade, shade), width=line_width // 2)

    pen.polygon(pixels(figure.polygon), fill=FILL)
    outline = (*figure.polygon, figure.polygon[0])
    pen.line(pixels(outline), fill=EDGE, width=line_width, joint="curve")

    red = pixels(figure.red)
    if len(figure.red) == 2:
        pen.line(red, fill=RED, width=2 * line_width)
    elif red:
        pen.circle(red, 1.5 * line_width, fill=RED)
    return np.array(image.resize((side, side), Image.Resampling.BOX))


def decode(source: bytes) -> np.ndarray:
    """Decode an image file to uint8 [H, W, 3], at most MAX_SIDE a side. Transparent parts become
    white. Raises an error of any type if it cannot be read."""
    opened = Image.open(io.BytesIO(source), formats=FORMATS)
    if opened.mode.startswith(("I", "F")):
        raise ValueError(f"it has the mode {opened.mode}, but must have 8 bits a channel")

    image = ImageOps.exif_transpose(opened).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(white, image)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.array(image.convert("RGB"))
