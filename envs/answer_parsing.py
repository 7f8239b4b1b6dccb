r"""Read the answer in a reply, for GSM8K, AIME and GeoQA. Exact fractions, no eval, linear in the reply's length.

Paper: appendix D gives a right answer 1 and any other 0, and does not say how it is read. Our rule: what a fair human
grader would accept earns 1 (tests/data/answers.csv has examples). An answer is one value in one place. Several
candidates (72 or 73), words that change the value (72 squared) and work left undone (36+36, √1600) are no answer.

The place is between <answer> tags, else inside \boxed{}. Full prompts also accept a reply without either if it
announces its answer ("#### 72", "The answer is 72 apples.") or is nothing else ("72", "x = 72"). No other number
counts, so a reply that was cut is not paid for a step of its reasoning.
"""

import ast
import math
import operator
import re
from fractions import Fraction
from typing import NamedTuple

from envs.base import outside_think, split_tags

MAX_ANSWER = 100  # characters of an answer and the words around it

_BOX = re.compile(r"\\boxed(?:\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+)\})?")  # "" if it is not closed
_ANNOUNCED = re.compile(  # what follows, up to the next "answer" or the end of the line
    r"(?i)(?:####|\banswer\b[^\n.]{0,60}?(?:\bis\b|\bbe\b|\bwas\b|[:=]))[\s*:]*((?:(?!\banswer\b)[^\n])*)"
)


def final_answer(reply: str, untagged: bool, given: frozenset[str] = frozenset()) -> str:
    r"""Return the text between <answer> tags, else in \boxed{}, else, with `untagged`, the one that is announced; "" if
    there is none, if several differ, or if it is longer than MAX_ANSWER. <think> is not read. `given`: the numbers of a
    question that asks for one sentence, which then announces its only other number ("Tom has 4 + 3 = 7 fish now.")."""
    spoken = outside_think(reply)
    parts = split_tags(spoken, "answer")
    if len(parts) > 1:
        texts = parts[2::4] if parts[1::2] == ["", "/"] * (len(parts) // 4) else []
    elif "\\boxed" in spoken or not untagged:
        texts = [spoken if "\\boxed" in spoken else ""]
    elif given and (new := _new_number(spoken.strip(), given)):
        texts = [new]
    elif not given and (announced := _ANNOUNCED.findall(spoken)):
        announced = [re.split(r"(?<!\b[A-F])[.!](?:\s|$)", text)[0] for text in announced]  # to the end of the sentence
        offered = any(re.search(r"(?i)\bor(?: the| my)?\s*$", text) for text in announced)
        values = [text for text in announced if re.search("[0-9]", text) or read_choice(text)]
        texts = [] if offered else (values or announced)[-1:]
    else:
        alone = read_number(spoken) and re.match("(?:[^0-9=]{0,20}=)?[^A-Za-z=]*[0-9][^=]*$", spoken.strip())
        texts = [spoken if alone or read_choice(spoken) else ""]
    found = {answer.strip() for text in texts for answer in (_BOX.findall(text) if "\\boxed" in text else [text])}
    answer = found.pop() if len(found) == 1 else ""
    return answer if len(answer) <= MAX_ANSWER else ""


def _new_number(sentence: str, given: frozenset[str]) -> str:
    """Return the only number of a sentence, up to its full stop, that is not `given`, or its only number; else ""."""
    whole = re.fullmatch(r"[^.!?\n]{1,99}[.!]", sentence)
    if not whole or _DENIED.search(sentence) or _OTHER_VALUE.search(sentence):
        return ""
    numbers = set(re.findall("[0-9]+", sentence))
    new = numbers - given or numbers
    return new.pop() if len(new) == 1 else ""


_MARK = "\x00"  # of LaTeX, Markdown or a currency; no number goes on behind it: 12$50 is not 1250
_SPELLINGS = {
    **dict.fromkeys(r"\$ $ € £ ¥ ₹ ¢ ** __ ` \( \) \[ \]".split(), _MARK),
    **dict.fromkeys(("\\,", "\\;", "\\:", "\\ ", "~", "\u00a0", "\u2009", "\u202f"), " "),
    "\\!": "", "\\left": "", "\\right": "", "{,}": ",", "\\%": "%", "−": "-", "–": "-", "^{\\circ}": "°",
    "^\\circ": "°", "^{o}": "°", "^o": "°", "\\circ": "°", "\\degree": "°", "^°": "°", "˚": "°", "º": "°", "^{2}": "²",
    "^{3}": "³", "^2": "²", "^3": "³", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cdot": "*", "\\times": "*",
    "×": "*", "·": "*", "÷": "/", "\\angle": "∠", "\\approx": "=", "≈": "=", "\\pi": "π", "\\sqrt": "√", "sqrt": "√",
    "½": "\\frac12", "¼": "\\frac14", "¾": "\\frac34", "⅓": "\\frac13",
}  # fmt: skip
_SPELLING = re.compile("|".join(re.escape(written) for written in sorted(_SPELLINGS, key=len, reverse=True)))
_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_GROUPS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9]|\s*/)"  # 1,250 and 1 250
_DECIMAL = rf"(?:(?:{_GROUPS}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_MIXED = r"([0-9]+) +([0-9]+) */ *([0-9]+)"  # 3 1/2
_NUMBER = re.compile(rf"[-+]?[\s\0]*(?:{_MIXED}|{_DECIMAL}(?: */ *{_DECIMAL})?)(?![0-9])")
_SURD = re.compile(r"(?:[-+*/().0-9√π]|[\s\0](?=[\s\0]*[-+*/(.0-9√π]))*")
_ARITHMETIC = r"[-0-9\s\0.,+*/x()²³√π%°]*"
# what may stand before the = of an equation: a name or the work that leads to a value, but no other number
_UNDONE = re.compile(rf"{_ARITHMETIC}(?:[√π]|[0-9)²³%°][\s\0]*[-+*/x][\s\0]*[-(0-9.]){_ARITHMETIC}")
_WORK = re.compile(rf"{_UNDONE.pattern}|[^0-9]*")
_BEFORE = re.compile(r"((?:[A-Za-z',:∠△\s\0]|\.(?![0-9]))*)(.*)", re.S)  # words before a number, and the rest
_DENIED = re.compile(  # beside a number: words that deny it or offer another
    r"(?i)≠|n't|\b(?:not|cannot|never|none|neither|n?or|if|unless|but|except|either|maybe|perhaps|possibly|vs|wrong|"
    r"incorrect|no,? wait)\b"
)
_ONES = "one two three four five six seven eight nine".split()
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SAYINGS = ["zero", *_ONES, *_TEENS, *(ten + end for ten in _TENS for end in ("", *(f"-{one}" for one in _ONES)))]
_SPOKEN = {saying: str(value) for value, saying in enumerate(_SAYINGS)}
_SAID = re.compile(rf"(?i)\b(?:(?:{'|'.join(_TENS)})[ -](?:{'|'.join(_ONES)})|{'|'.join(_SPOKEN)})\b")
_WORDS = "|".join((*_ONES[1:], *_TEENS, *_TENS))
_SCALES = (
    r"k|[mbt]n|mil|bil|mio|mrd|grand|hundred|thousand|[mbtr]+illion|dozen|lakh|crore|gross|half|third|quarter|fold|itself|"
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+tie|hundred|thousand|[mbtr]+illion)th|tens|halve|twice|double|"
    r"triple|root|power|factorial"
)
_SCALED_BEFORE = re.compile(
    rf"(?i)\b(?:{_SCALES}|(?:{_WORDS}),?|(?<!total )of|than|at least|at most|up to|over|under|above|below|between|no|"
    r"log|ln|plus|times|(?:multiplied|divided) by)[\s\0]*$"
)
_THOUSANDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_MULTIPLIED = re.compile(rf"(?i)[\s\0]*({'|'.join(_THOUSANDS)})\b")
_TERM = re.compile(r"(?i)(?<![\w'])[a-z][\s\0]*[-+]|[a-z][\s\0]*\+[\s\0]")  # x + 7
_SCALED_BEHIND = re.compile(
    rf"(?i)^\W*(?:squared|cubed)|^\W*(?:(?:and|wait|actually|more|less|than|point)\W+)*(?:{_WORDS})\b|\bso\W*$|"
    rf"\b(?:(?:{_SCALES})[ds]?|at least|at most|plus|minus|divided|multiplied|rads?|radians?|pi|nan|inf|"
    rf"(?:times|over|by) (?:one|{_WORDS}|itself|[xyn]))\b"
)
_OTHER_VALUE = re.compile(  # in a sentence: words that change a value or are one, and a minus sign
    rf"(?i)\b(?:{_SCALES}|{_WORDS}|than|least|most|up to|about|no|false|squared|cubed)\b|(?:=\s*|[a-z]\s)[-−–][0-9]"
)
_UNIT = re.compile(r"(?<![A-Za-z])[cdkm]?m[23]|[A-Za-z]+[²³]?")
_LETTERS = frozenset("mglLshtAVWNJCFpcd")  # units of one letter
_CHOICE = re.compile(  # letter, delimiter, remainder
    r"(?is)(?:[^0-9]*\b(?:is|be|answer|option|choice)[\s\0:]+)?[(\[]?([A-F])(?![A-Z])[)\]]?(?: is (?:correct|right))?"
    r"[\s\0]*([.:)]?)[\s\0]*(.*)"
)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Number(NamedTuple):
    value: Fraction | float  # a float if a root or π stands in it
    decimals: int  # digits after its point
    unit: str  # the word behind it


def plain(text: str) -> str:
    r"""Return a text without LaTeX, Markdown and outer brackets: `**\(x = \frac72\)**` becomes `x =  7/2`."""

    def fraction(found: re.Match) -> str:
        top, bottom = found[1] or found[2], found[3] or found[4]
        return f" {top}/{bottom}{_MARK}" if f"{top}{bottom}".lstrip("-").isdigit() else f"(({top})/({bottom}))"

    text = re.sub("<<[^<>]*>>", "", text)  # GSM8K's own: 48 + 24 = <<48+24=72>>72
    text = re.sub(r"\\(?:text|math|mbox|fbox)[a-z]*\s*\{([^{}]*)\}", rf"{_MARK}\1{_MARK}", text)
    text = _SPELLING.sub(lambda found: _SPELLINGS[found[0]], text.replace(f"{_MARK}^", "^"))
    for _ in range(3):  # from the inside out
        text = _FRACTION.sub(fraction, re.sub(r"√\s*\{([^{}]*)\}", r"√(\1)", text))
    text = re.sub(r"(?<![A-Za-z])pi(?![A-Za-z])", "π", text)
    return _bare(re.sub(r"\b(?:minus|negative)\s+(?=[0-9])", "-", text, flags=re.I))


def _bare(text: str) -> str:
    text = text.strip(" \t\r\n*_\"'\0").rstrip(" \t\r\n*_\"'\0.,;:")
    inside = re.fullmatch(r"\(([^()]*)\)|\[([^\[\]]*)\]|\{([^{}]*)\}", text)
    return _bare(inside[inside.lastindex or 0]) if inside else text


def read_number(text: str) -> Number | None:
    r"""Return the number that a text states, or None if it is not one number. Read are integers (1,250 or 1 250),
    decimals, fractions (7/2, \frac72), mixed numbers (3 1/2), roots and multiples of π (\frac{2\sqrt3}{3}, 9π), with a
    sign, a currency or unit, and words or an equation that lead to them, and words up to ninety-nine."""
    text = text if len(text) <= MAX_ANSWER else ""
    if not re.search("[0-9]", text):  # seventy-two
        text = _SAID.sub(lambda found: _SPOKEN[found[0].lower().replace(" ", "-")], text)
    left, _, right = plain(text).rpartition("=")
    if _NUMBER.match(left) and _UNDONE.fullmatch(right) and not _UNDONE.fullmatch(left):  # 72 = 48 + 24
        left, right = right, left
    *names, work = re.sub(r"(?:_\{?|∠)\s*[0-9A-Za-z]{1,3}\}?|(?<=[0-9])(?:\s+[A-Za-z]{2,})+", "", left).split("=")
    if re.search("[0-9]", "".join(names)) or not _WORK.fullmatch(work):
        return None
    words, body = _BEFORE.match(_bare(right)).groups()  # type: ignore[union-attr]
    surd = re.search("[√π]", body)
    found = (_SURD if surd else _NUMBER).match(body)
    if not found or _DENIED.search(f"{left} {words}") or _SCALED_BEFORE.search(words) or _TERM.search(words + body[:2]):
        return None
    scale = _MULTIPLIED.match(body, found.end())
    value, unit = _evaluate(found[0]), _unit(body[scale.end() if scale else found.end() :])
    if value is None or unit is None:
        return None
    value *= _THOUSANDS[scale[1].lower()] if scale else 1
    if surd and math.isclose(value, Fraction(value).limit_denominator(1000), rel_tol=1e-12):
        return None  # √1600 is work left undone
    decimals = "" if surd or "/" in found[0] else found[0].partition(".")[2]
    return Number(value, len(decimals), unit)


def _unit(rest: str) -> str | None:
    """Return the first word behind a number, without exponent and in lower case, or None if this is no unit."""
    words = [word.rstrip("23²³") for word in _UNIT.findall(rest)]
    marks = r"[\s\0]*[%°]?[\s\0().,/'!-]*" if words else r"[\s\0]*[%°]?[\s\0]*"
    if not re.fullmatch(marks, _UNIT.sub("", rest)) or _DENIED.search(rest) or _SCALED_BEHIND.search(rest):
        return None
    letters = [word for k, word in enumerate(words) if len(word) == 1 and not (k and word == "a")]  # 540 m a week
    return "".join(words[:1]).lower() if len(words) <= 6 and _LETTERS.issuperset(letters) else None


def _evaluate(source: str) -> Fraction | float | None:
    """Return the value of an expression of numbers, + - * /, √ and π, or None if it is not well formed."""
    source = re.sub(r"√[\s\0]*([0-9.]+|π)", r"√(\1)", re.sub(_MIXED, r"(\1+\2/\3)", source))
    source = re.sub(r"(?<=[0-9)π])[\s\0]*(?=[√π(])", "*", source)  # 2√3
    source = re.sub(r"[\s\0,]+", "", source).lstrip("+").replace("√", "sqrt").replace("π", "pi")
    source = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", source)
    try:
        return _value(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError):  # the last two: the root of -1, a division by 0
        return None


def _value(node: ast.AST) -> Fraction | float:
    match node:
        case ast.Constant(value=value):
            return Fraction(str(value))
        case ast.Name(id="pi"):
            return math.pi
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
            return math.sqrt(_value(argument))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError("not a sum of products with roots and π")


def read_choice(text: str) -> tuple[str, str] | None:
    """Return letter and remainder of a choice, such as `B`, `(B)`, `Option B` or `B. 145°`, or None."""
    found = _CHOICE.fullmatch(plain(text)) if len(text) <= MAX_ANSWER else None
    if not found or _DENIED.search(text):
        return None
    letter, colon, rest = found.groups()
    named = colon and re.fullmatch("[A-Za-z]{2}[A-Za-z -]*", rest)  # as in `B. a rectangle`
    return (letter.upper(), rest) if not rest or named or read_number(rest) else None
