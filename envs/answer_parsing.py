r"""Read the answers of GSM8K, AIME and GeoQA: numbers, and texts in one spelling.

Paper: appendix D gives a right answer 1 and any other 0, and does not say how it is read.

Our convention: the answer stands alone between the only <answer> tags, as the prompt asks, in the
form of its data set. Marks around it are allowed ($72$, **72**, \boxed{72}). Prose is not allowed.
So no wrong answer earns 1, and a right one in another form may earn nothing
(tests/data/answers.csv).

The library math-verify is not used. It takes a number out of prose ("can't be 72", "72 hundred"),
and its evaluation of $9^{9^{9^{9}}}$ does not end. Here an answer has at most MAX_ANSWER
characters, and integers and decimals are exact fractions.
"""

import re
from fractions import Fraction

from envs.base import outside_think

MAX_ANSWER = 100  # characters

_MARKED = r"(?s)(?:\*\*|`|“|\$|\\\(|\\\[|\\boxed\{)(.*)(?:\*\*|`|”|\$|\\\)|\\\]|\})"
_DECIMAL = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_AMOUNT = rf"([-+]?)(?:\\?[$€£])?({_DECIMAL})(?: ?\\?[%$€£])?"


def bare(answer: str) -> str:
    """Return an answer without marks of LaTeX or Markdown around it and without a full stop, or ""
    if it is longer than MAX_ANSWER."""
    if len(answer) > MAX_ANSWER:
        return ""
    text = answer.strip().removesuffix(".")
    marked = re.fullmatch(_MARKED, text)
    if marked:
        return bare(marked[1])
    return text.replace("−", "-")  # the minus of typesetting


def read_number(answer: str) -> Fraction | None:
    """Return the value of an integer or decimal, or None. It may have a sign, commas between
    thousands, and a sign of a currency or %, because these do not change the number. Other units,
    fractions (1/2), powers (1e3), expressions (70+2) and words are not read."""
    amount = re.fullmatch(_AMOUNT, bare(answer))
    return Fraction(amount[1] + amount[2].replace(",", "")) if amount else None


# Words that change no value.
_FILLERS = "a answer correct had he in is it left now of remaining she so the then total".split()
_TOKEN = "[a-z']+|[0-9]+"
# Work with its = or words with their verb, the value, and words.
_SENTENCE = (
    r"((?:[a-z0-9'](?:[-+*/×=a-z0-9', ]*[a-z0-9'])? ?=|[a-z0-9', ]*\b(?:has|have|is))? ?)"
    r"([0-9]+)([a-z' ]*)[.!]"
)


def read_sentence(reply: str, question: str) -> str:
    """Return the value of a reply of one whole sentence to a question in words, or "". The value
    stands behind the last = or behind has, have or is, and no number follows ("Tom has 4 + 3 = 7
    fish."). All other numbers and words must be those of the question or _FILLERS. A sentence with
    another word is not read, because the word may change the value ("twice", "not", "hundred")."""
    text = outside_think(reply).strip().lower()
    if len(text) > MAX_ANSWER:
        return ""
    sentence = re.fullmatch(_SENTENCE, text)
    if not sentence:
        return ""

    before, value, behind = sentence.groups()
    allowed = {*_FILLERS, *re.findall(_TOKEN, question.lower())}
    return value if allowed.issuperset(re.findall(_TOKEN, before + behind)) else ""


_END = "(?![0-9.,])"  # what follows a closed group is no part of its number
_SPELLINGS = {
    r"\\left|\\right|\\[,!;]": " ",
    r"\\(?:text|mathrm)\{([^{}]*)\}": r" \1 ",
    r"\^?(?:\\circ|\{\\circ\})|\\degree| degrees?": "°",
    r"\^2|\^\{2\}": "²",
    r"\^3|\^\{3\}": "³",
    r"\\pi": "π",
    rf"\\sqrt(?=\{{| ?[0-9]{_END})": "√",  # \sqrt12 is the root of 1
    rf"√ ?\{{([0-9]+)\}}{_END}": r"√\1",
    r"\\[dt]frac": r"\\frac",
    rf"(?<![0-9}}√])\\frac\{{([0-9]+)\}}\{{([0-9]+)\}}{_END}": r"\1/\2",
    r"\s+": " ",
    r"(?<![0-9.,]) | (?![0-9.,])": "",
}
_UNIT = r"(?<=.)(?:°|[cdkm]?m[²³]?)\Z"


def read_measure(answer: str) -> tuple[Fraction | str, str]:
    r"""Return a number, a fraction (7/2, \frac{7}{2}) or any other text in one spelling (2\sqrt{3}
    is 2√3), and the unit of length, area, volume or angle behind it, or "". Nothing is worked out:
    36+36 and 3.46 are not 72 and 2√3."""
    text = bare(answer)
    for spelling, plain in _SPELLINGS.items():
        text = re.sub(spelling, plain, text)

    source = re.sub(_UNIT, "", text)
    unit = text.removeprefix(source)
    is_number = re.fullmatch(f"[-+]?(?:{_DECIMAL}|[0-9]+/0*[1-9][0-9]*)", source)
    return Fraction(source.replace(",", "")) if is_number else source, unit
