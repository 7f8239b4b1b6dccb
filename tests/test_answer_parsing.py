"""What earns 1: a table of our convention, numbers with a known value, and hostile text."""

import csv
import io
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from envs.aime import AIME
from envs.answer_parsing import MAX_ANSWER, read_measure, read_number, read_sentence
from envs.geoqa import GeoQA
from envs.gsm8k import GSM8K
from envs.question_answering import Question

TASKS = {"gsm8k": GSM8K, "aime": AIME, "geoqa": GeoQA}
ENVS = {task: TASKS[task](style="full") for task in TASKS}
PNG = io.BytesIO()
Image.new("RGB", (2, 2)).save(PNG, "PNG")


def reward(task, gold, reply):
    """Return the reward of a first reply to a question with this gold answer. The question comes
    from a row in the format of the task's data set."""
    solution = f"<answer> {gold} </answer>"
    rows = {
        "gsm8k": {"question": "q", "answer": f"We add.\n#### {gold}"},
        "aime": {"problem": "q", "answer": gold},
        "geoqa": {"problem": "q", "solution": solution, "image": {"bytes": PNG.getvalue()}},
    }
    env = ENVS[task]
    env.turn = 0
    env.feedback = ""
    env.question = env.from_row(rows[task])
    return env.step(reply)[1]


def test_the_table_of_answers():
    """tests/data/answers.csv: task, gold, reply (⏎ is a line break), paid or unpaid, why."""
    path = Path(__file__).parent / "data" / "answers.csv"
    with open(path, newline="", encoding="utf-8") as file:
        rows = [tuple(row.values()) for row in csv.DictReader(file)]
    assert len(rows) >= 200

    mistakes = []
    for task, gold, reply, verdict, why in rows:
        earned = reward(task, gold, reply.replace("⏎", "\n"))
        if (earned == 1.0) != (verdict == "paid"):
            mistakes.append(f"{task} {gold} {reply} {verdict} {why}")
    assert not mistakes, "\n".join(mistakes)


@settings(max_examples=100, deadline=None)
@given(top=st.integers(0, 10**7), bottom=st.integers(1, 60), sign=st.sampled_from(["", "-"]))
def test_rational_numbers_are_read_exactly(top, bottom, sign):
    value = Fraction(f"{sign}{top}") / bottom
    for text in (f"{top}/{bottom}", f"\\frac{{{top * 3}}}{{{bottom * 3}}}"):
        assert read_measure(sign + text)[0] == value

    for text in (f"{top}", f"{top:,}", f"{top}.00", f"{top}.{bottom}"):
        for around in ("{}", "**{}**", "\\({}\\)", "$ {} $", "\\boxed{{{}}}", "{}."):
            exact = Fraction(sign + text.replace(",", ""))
            assert read_number(around.format(sign + text)) == exact
            assert read_measure(around.format(sign + text))[0] == exact


@settings(max_examples=100, deadline=None)
@given(a=st.integers(1, 99), b=st.sampled_from([2, 3, 5, 6, 7]), more=st.integers(1, 99))
def test_an_expression_equals_its_other_spellings_and_no_other_value(a, b, more):
    spellings = [f"{a}√{b}", f"{a}√{{{b}}}", f"${a}\\sqrt{{{b}}}$", f"{a} \\sqrt{b} cm"]
    for gold in spellings:
        for reply in (*spellings, f"B. {a}√{b}"):
            assert GeoQA.right(GeoQA.read(reply), GeoQA.read(gold)), (gold, reply)
        for reply in (f"{a + more}√{b}", f"{a}√{b + 1}", f"{a}{b}", f"√{a}{b}", f"{a} {b}"):
            assert not GeoQA.right(GeoQA.read(reply), GeoQA.read(gold)), (gold, reply)


SOLUTION = """She sold 48/2 = 24 clips in May.

1. April: 48 clips.
2. May: 24 clips.

The sum: <answer>72</answer>"""
QUESTION = "Tom has 4 fish and gets 3. How many fish does Tom have now?"
SENTENCES = {
    1.0: """Tom has 4 + 3 = 7 fish now.|Tom has 7 fish.|He now has 7!|4+3=7.|7 fish.
4 fish + 3 fish = 7 fish.|Tom has a total of 4 + 3 = 7 fish.|So Tom gets 3 fish and has 7 fish left.
The answer is 7.|<answer>7</answer>|<think>8 - 1.</think>Tom has 7 fish.""",
    0.0: """Tom has 8 fish.|Tom has 4 fish now.|4 + 3 = 8.|4 - 3 = 1.|Tom has 4 + 3 = 4 fish.""",
    -0.15: """Tom has 4 + 3 = 7 fish|7|Tom has 7 fish, and 9 more.|Tom has 7 fish. He is happy.
Has Tom 7 fish?|-7.|4 + 3 = -7.|Tom has 4 + 7 fish.|Tom has 7/3 fish.|x + 7.|Tom has 4, 7 fish.
-fish = 7.|Tom has 4 7 fish.|Tom doesn't have 7 fish.|Tom has no 7 fish.|4 + 3 is not = 7.
Tom does not have 4 + 3 = 7 fish.|He has 1 + 2 = 3 and 4 + 3 = 7.|He has 7 or 8 fish.|4 + 3.
4 + 3 = 7 - 1 = 6.|4 + 3 = 7 + 0.|Tom has more than 4 + 3 = 7 fish.|Tom has 8 fish as 4 + 3 = 7.
Tom has twice 4 + 3 = 7 fish.|Ann has 7 fish.|Tom has 7 fish and eight deer.|Tom has 1,007 fish.
Tom has 4,007 fish.|Tom has 7.5 fish.|4 + 3 = 7².|Tom has 7 hundred fish.|Tom has half of 7 fish.
Tom gets 7 fish.|Tom⏎has 7 fish.|Tom has 7?!|<answer>Tom has 7 fish.</answer>
<answer></answer>Tom has 7 fish.""",
}
SENTENCES[-0.15] += f"|Tom has 7{20 * ' fish'}."


@pytest.mark.parametrize("earned", SENTENCES)
def test_a_question_in_one_sentence_accepts_one_whole_sentence(earned):
    env = GSM8K(style="full")
    for reply in re.split(r"[|\n]", SENTENCES[earned]):
        reply = reply.replace("⏎", "\n")
        env.turn = 0
        env.question = Question(QUESTION, "7", one_sentence=True)
        assert env.step(reply)[1] == earned, reply
        if "<" not in reply:
            assert reward("gsm8k", "7", reply) == -0.15  # a question from data


@pytest.mark.parametrize("gold", ["72", "48", "2", "7"])
def test_a_reply_that_was_cut_earns_nothing(gold):
    """Cut anywhere before its answer is complete, it is not paid for a number that it passed."""
    sentence = f"Tom has 48 + 24 = {gold} fish now."
    for cut in range(len(SOLUTION)):
        assert reward("gsm8k", gold, SOLUTION[:cut]) <= 0, SOLUTION[:cut]
        assert not read_sentence(sentence[: min(cut, len(sentence) - 1)], sentence)
    assert (reward("gsm8k", gold, SOLUTION) == 1.0) == (gold == "72")
    assert read_sentence(sentence, sentence) == gold


PIECES = r"""9;1,;<answer>;</answer>;<think>;\boxed{;\boxed{1};{;$;**;1 ;a ;= ;1
2 3;٧;<answer>1;\text{;\frac{1};√{;√;π;(;((1)/;- ;9**;9/;°""".split(";")


@pytest.mark.parametrize("task", TASKS)
def test_huge_replies_are_read_at_once_and_earn_nothing(task):
    """In quadratic time each would take minutes, and 9**9**9 for ever."""
    for piece in PIECES:
        text = piece * (200_000 // len(piece))
        replies = [text, f"<answer>{text}</answer>", f"has {text}.", f"\\boxed{{{text}}}"]
        replies += [f"<answer>{text[:MAX_ANSWER]}</answer>", f"has {text[:90]}= 1."]
        began = time.process_time()
        for reply in replies:
            assert reward(task, "72", reply) <= 0
            assert read_sentence(reply, "1 9") == ""
        assert time.process_time() - began < 2.0, piece


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80) | st.text("0123456789.,/$%-+= eE\\{}√π()²*°m", max_size=25))
def test_arbitrary_text_is_read_as_nothing_or_as_its_own_digits(text):
    assert read_sentence(text, QUESTION) in text
    for task in TASKS.values():
        task.read(text)
    measured, _ = read_measure(text)
    digits = "".join(re.findall("[0-9]", text.replace("^2", "").replace("^3", "")))
    for value in (read_number(text), measured):
        if not isinstance(value, Fraction) or "/" in text:
            continue
        assert int(digits) in (abs(value) * 10**k for k in range(len(digits) + 1))
