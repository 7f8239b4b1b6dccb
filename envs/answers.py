"""What a reply answers, and which number that is: the scorers of GSM8K, AIME and GeoQA. No eval, exact fractions.

Paper: appendix D, binary reward for the right answer; how an answer is read is not given.

A policy under reinforcement finds every weakness of a scorer, so the rules are strict: one answer, in one place,
which is one number. Several tags, a list of candidates, or an expression to be worked out (6*7) are no answer,
and nothing inside <think> is. All of it is linear in the length of the reply.
"""

import re
from fractions import Fraction

from envs.base import outside_think, parse_answer

MAX_ANSWER = 60  # characters: longer is no answer but an essay

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(rf"([-+]?)\s*({_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:\s*/\s*([0-9]+))?")
_CURRENCY = re.compile(r"([-+]?)\s*(?:\$|€|£|¥|USD|EUR)")
_UNIT = re.compile(r"\s*(?:%|°|/?[A-Za-z]+(?:/[A-Za-z]+)?(?:[²³]|\^[23])?)?(?:\s+[A-Za-z]+){0,3}\.?")
# after a number these change its value, or offer another one
_NOT_UNITS = set(
    "e k hundred hundreds thousand thousands million millions billion billions trillion dozen dozens pair pairs half "
    "halves third thirds quarter quarters and or to plus minus times over by not maybe nan inf infinity i pi".split()
)


def final_answer(reply: str, last_number: bool) -> str | None:
    r"""The text that a reply offers as its answer: that of its only answer tag; without any tag, that of its only
    \boxed{...}; without either and with `last_number`, the number that its last line with a number ends in.
    None where there is no such text, or more than one.
    """
    spoken = outside_think(reply)
    if spoken is None:
        return None
    if "<answer>" in spoken or "</answer>" in spoken:
        text = parse_answer(spoken)
        if text is not None and text.startswith("\\boxed"):
            text = _boxed(text) if text.endswith("}") else None
    elif "\\boxed" in spoken:
        text = _boxed(spoken)
    else:
        text = _last_number(spoken) if last_number else None
    return text if text and len(text) <= MAX_ANSWER else None


def _boxed(text: str) -> str | None:
    r"""The inside of the only \boxed{...}, whose braces may be nested."""
    parts = text.split("\\boxed{")
    if len(parts) != 2 or "\\boxed" in parts[0] + parts[1]:
        return None
    depth = 1
    for k, character in enumerate(parts[1]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return parts[1][:k].strip()
    return None


def _last_number(text: str) -> str | None:
    """The only word with a digit in the last line that has one, after its last equals sign: `So 3 + 4 = 7 apples.`
    ends in 7, while `7 8 9`, `6*7` and `7 or 8` end in nothing."""
    for line in reversed(text.splitlines()):
        if any(character.isnumeric() for character in line):
            words = [w for w in line.rpartition("=")[2].split() if any(character.isnumeric() for character in w)]
            return words[0].strip(".,;:!?*()[]\"'`") if len(words) == 1 else None
    return None


def plain(text: str) -> str:
    r"""LaTeX's ways to write a number, undone: `\$1{,}000\text{ cm}^{2}` is `$1,000 cm^2`."""
    text = text.strip().removesuffix(".")
    if len(text) > 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    for written, meant in (
        ("{,}", ","), ("\\!", ""), ("\\,", " "), ("\\ ", " "), ("~", " "), ("\\%", "%"), ("\\$", "$"), ("−", "-"),
        ("^{\\circ}", "°"), ("^\\circ", "°"), ("\\circ", "°"), ("^{2}", "^2"), ("^{3}", "^3"),
    ):  # fmt: skip
        text = text.replace(written, meant)
    text = re.sub(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r" \1/\2", text)
    return re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text).strip()


def read_number(text: str) -> Fraction | None:
    r"""The exact value of a text that is one number: an integer (commas between thousands), a decimal, a fraction
    `a/b` or `\frac{a}{b}`, with a sign, a currency before it, or a unit or % after it (60% is 60: it is a unit).

    >>> read_number("$1,250.50"), read_number("3/4 cup"), read_number("6*7"), read_number("1e999")
    (Fraction(2501, 2), Fraction(3, 4), None, None)
    """
    if len(text) > MAX_ANSWER:
        return None
    text = _CURRENCY.sub(r"\1", plain(text), count=1)
    found = _NUMBER.match(text)
    if not found:
        return None
    sign, top, bottom = found.groups()
    unit = text[found.end() :]
    if not _UNIT.fullmatch(unit) or _NOT_UNITS.intersection(re.findall("[a-z]+", unit.lower())):
        return None
    value = Fraction(sign + top.replace(",", ""))
    if bottom is None:
        return value
    if int(bottom) == 0 or "." in top or value % int(bottom) == 0:  # 144/2 is no fraction but a division left undone
        return None
    return value / int(bottom)
