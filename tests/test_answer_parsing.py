"""Answers are judged as a fair human grader would: a table of them, numbers with a known value, and hostile text."""

import csv
import io
import math
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from envs.aime import AIME
from envs.answer_parsing import MAX_ANSWER, final_answer, read_choice, read_number
from envs.geoqa import GeoQA
from envs.gsm8k import GSM8K
from envs.question_answering import Question

TASKS = {"gsm8k": GSM8K, "aime": AIME, "geoqa": GeoQA}
ENVS = {(task, style): make(style=style) for task, make in TASKS.items() for style in ("full", "terse")}


def reward(task, gold, reply, style):
    """Of a first reply to a question with this gold, from a row in the format of the task's dataset."""
    Image.new("RGB", (2, 2)).save(png := io.BytesIO(), "PNG")
    rows = {
        "gsm8k": {"question": "q", "answer": f"We add.\n#### {gold}"},
        "aime": {"problem": "q", "answer": gold},
        "geoqa": {"problem": "q", "solution": f"<answer> {gold} </answer>", "image": png.getvalue()},
    }
    env = ENVS[task, style]
    env.turn, env.feedback, env.question = 0, "", env.from_row(rows[task])
    return env.step(reply)[1]


def test_the_table_of_answers():
    """tests/data/answers.csv: task, gold, reply (⏎ is a line break), verdict, why. Terse prompts want tags or a box."""
    with open(Path(__file__).parent / "data" / "answers.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len({(row["task"], row["gold"], row["reply"]) for row in rows}) == len(rows) >= 300
    mistakes = []
    for row in rows:
        reply, right = row["reply"].replace("⏎", "\n"), row["verdict"] == "right"
        marked = re.search("</answer>|boxed", reply, re.IGNORECASE)
        for style, expected in (("full", right), ("terse", right and bool(marked))):
            if (reward(row["task"], row["gold"], reply, style) == 1.0) != expected:
                mistakes.append((style, *row.values()))
    assert not mistakes, "\n".join(map(str, mistakes))


def written(value):
    """The ways to write a positive fraction."""
    top, bottom = value.as_integer_ratio()
    yield from (f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}", f"\\dfrac{{{top * 3}}}{{{bottom * 3}}}")
    whole, rest = divmod(top, bottom)
    if whole and rest:
        yield from (f"{whole} {rest}/{bottom}", f"{whole}\\frac{{{rest}}}{{{bottom}}}")
    if bottom == 1:
        yield from (f"{top}", f"{top:,}", f"{top:,}".replace(",", " "), f"{top:,}".replace(",", "{,}"), f"{top}.0")
    if 100 % bottom == 0:
        yield from (f"{top / bottom:.2f}", f"{top / bottom:,.2f}")


@settings(max_examples=100, deadline=None)
@given(top=st.integers(0, 10**7), bottom=st.integers(1, 60), sign=st.sampled_from(["", "-"]))
def test_rational_numbers_are_read_exactly(top, bottom, sign):
    value = Fraction(top, bottom)
    for text in written(value):
        for around in ("{}", "**{}**", "\\({}\\)", "${}", "{} apples", "x = {}", "The answer is: {}."):
            assert read_number(around.format(sign + text)).value == (-value if sign else value), (around, text)


@settings(max_examples=100, deadline=None)
@given(a=st.integers(1, 99), b=st.sampled_from([2, 3, 5, 6, 7]), c=st.integers(1, 12))
def test_roots_and_multiples_of_pi_have_their_value(a, b, c):
    root, pi = math.sqrt(b), math.pi
    values = {f"{a}+{c}√{b}": a + c * root, f"({a}π-{c}√{b})/2": (a * pi - c * root) / 2}
    values |= dict.fromkeys((f"{a}π/{c}", f"\\frac{{{a}\\pi}}{{{c}}}", f"\\frac{{{a}}}{{{c}}}pi"), a * pi / c)
    surds = (f"{a}√{b}/{c}", f"\\frac{{{a}\\sqrt{{{b}}}}}{{{c}}}", f"\\frac{{{a}}}{{{c}}}\\sqrt{b}")
    values |= dict.fromkeys((*surds, f"{a}*sqrt({b})/{c} cm"), a * root / c)
    for text, value in values.items():
        assert read_number(text).value == pytest.approx(value, rel=1e-12), text
    assert read_number(f"{a}√{c * c}") is None  # left undone
    gold, value = GeoQA.read(f"{a}√{b}/{c}"), a * root / c
    for answer, right in ((f"{value:.3f}", 1), (f"{value + 0.002:.3f}", 0), (f"{value * 1.006:.6f}", 0)):
        assert GeoQA.right(GeoQA.read(answer), gold) == bool(right), answer


SOLUTION = "She sold 48/2 = 24 clips in May.\n\n1. April: 48 clips.\n2. May: 24 clips.\n\nSo 48 + 24 is what we want: "


@pytest.mark.parametrize("gold", ["72", "48", "24", "2", "1", "4", "7"])
@pytest.mark.parametrize("end", ["\n#### 72.", "the answer is 72.", "<answer>72</answer>", "$\\boxed{72}$."])
def test_a_reply_that_was_cut_earns_nothing(gold, end):
    """Cut anywhere before its answer is complete, it is not paid for a number that it passed."""
    reply = SOLUTION + end
    for cut in range(reply.index("72") + (1 if end.endswith("72.") else 3)):
        assert reward("gsm8k", gold, reply[:cut], "full") <= 0, reply[:cut]
    assert (reward("gsm8k", gold, reply, "full") == 1.0) == (gold == "72")


SENTENCES = {  # to "Tom has 4 fish and gets 3."
    1.0: ["Tom has 4 + 3 = 7 fish now.", "Tom has 7 fish.", "He now has 7!", "4+3=7.", "7", "7 fish"]
    + ["Tom had 4 and gets 3, so 4 + 3 = 7 fish.", "After getting 3 Tom has 7 fish left.", "4 plus 3 equals 7."]
    + ["<answer>7</answer>", "Answer: Tom's fish are 7 in total.", "4 fish + 3 fish = 7 fish.", "The answer is 7."],
    0.0: ["Tom has 8 fish.", "Tom has 4 fish now.", "4 + 3 = 8.", "So 3 is all he has.", "4 - 3 = 1."],
    -0.15: ["Tom has 4 + 3 = 7 fish", "Tom has 7 fish, and 9 more.", "Tom has 7 fish. He is happy.", "Has Tom 7 fish?"]
    + ["Tom has no 7 fish.", "He has 1 + 2 = 3 and 4 + 3 = 7.", "He has 7 or 8 fish.", "4 + 3 = 7 - 1 = 6.", "4 + 3."]
    + ["Tom has more than 7 fish.", "Tom does not have 4 + 3 = 7 fish.", "1. Add 3.\n7.", "4 + 3 = 7 - 5 = 2."]
    + ["Tom has more than 4 + 3 = 7 fish.", "Tom has 8 fish as 4 + 3 = 7.", "So the answer is 7", "Answer: Tom has 7"]
    + ["Tom has 7 fish and eight deer.", "Tom has -7 fish.", "3 - 4 = -7.", "Tom has 1,007 fish.", "Tom\nhas 7 fish."]
    + ["Tom has twice 4 + 3 = 7 fish.", "Tom has 7" + " fish" * 20 + ".", "Tom has 7 hundred fish.", "Tom has 7?!"],
}


@pytest.mark.parametrize("earned", SENTENCES)
def test_a_question_with_given_numbers_accepts_one_whole_sentence(earned):
    env = GSM8K(style="full")
    for reply in SENTENCES[earned]:
        env.turn, env.question = 0, Question("q", "7", given=frozenset(("4", "3")))
        assert env.step(reply)[1] == earned, reply


PIECES = ["9", "1,", "<answer>", "</answer>", "<think>", "\\boxed{", "\\boxed{1}", "{", "answer is ", "#### ", "1 "]
PIECES += ["1\n2 3", "٧", "<answer>1", "\\text{", "\\frac{1}", "√{", "answer: \n", "(", "- ", "12 1/2 ", "**", "1 a "]


@pytest.mark.parametrize("task", TASKS)
def test_huge_replies_are_read_in_no_time_and_earn_nothing(task):
    for piece in PIECES:
        text = piece * (100_000 // len(piece))
        for reply in (text, text + "=", f"<answer>{text}</answer>", f"The answer is {text}.", f"\\boxed{{{text}}}"):
            began = time.perf_counter()
            assert reward(task, "72", reply, "full") <= 0
            assert time.perf_counter() - began < 1.0, reply[:50]
        for longest in (text[:MAX_ANSWER], text[: MAX_ANSWER - 1] + "!"):
            began = time.perf_counter()
            assert read_number(longest) is None or read_choice(longest) is None
            assert time.perf_counter() - began < 0.1, longest


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80) | st.text("0123456789.,/$%-+= eE\\{}√π()²*", max_size=25))
def test_arbitrary_text_is_read_as_nothing_or_as_its_own_digits(text):
    for reply in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"The answer is {text}", text * 50):
        assert final_answer(reply, untagged=True) in reply
        assert final_answer(reply, untagged=True, given=frozenset("12")) in reply
    for task in TASKS.values():
        task.read(text[:MAX_ANSWER])
    number = read_number(text)
    if number is not None and not re.search(r"[/=√π²³½¼¾⅓]|frac|pi|sqrt", text):
        digits = "".join(re.findall("[0-9]", text))
        assert int(digits) in (abs(number.value) * 10**k for k in range(len(digits) + 1))
