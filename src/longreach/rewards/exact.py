"""Reading a single mathematical answer: clean-up, exact rational literals, and what disqualifies a slot.

Numbers are compared as exact fractions. Nothing is evaluated here: ``6 \\times 7`` is not a literal, so it is no answer
to a question whose answer is 42 (it may well be an echo of the question).
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

# Left out or inserted by models at will; they never change which number is meant.
_SPACING = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|bigl?|bigr?|Bigl?|Bigr?|quad|qquad)(?![A-Za-z])|(?<!\\)\\[,;:! ]|~"
)
_DIGIT_GAP = re.compile(r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3}(?!\d))")
_WRAPPER = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT_NAMES = (
    "cm|mm|km|m|in|inch|inches|ft|feet|foot|yd|yards?|miles?|meters?|metres?|centimeters?|centimetres?|kg|g|mg|grams?|"
    "lb|lbs|pounds?|s|sec|seconds?|min|minutes?|h|hr|hrs|hours?|days?|weeks?|months?|years?|degrees?|radians?|"
    "units?|dollars?|cents?|euros?|percent|points?|L|mL|liters?|litres?|mph|people|students?|ways?"
)
_UNIT = re.compile(
    rf"\s*(?P<unit>(?:(?:square|cubic)\s+)?(?:{_UNIT_NAMES})(?:\s*\^\s*\{{?[23]\}}?)?|\^\s*\{{?\\circ\}}?|°|\\?%|€|\\?\$)\s*$"
)
_CURRENCY = re.compile(r"^\s*(?P<unit>\\?\$|€|£)\s*(?=[\d.])")

_INTEGER = r"\d{1,3}(?:\{?,\}?\d{3})+|\d+"
_DECIMAL = re.compile(rf"^([+-]?)\s*(?:({_INTEGER})?(?:\.(\d*))?)$", re.ASCII)
_SCIENTIFIC = re.compile(
    r"^(.+?)(?:\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))|[eE]([+-]?\d+))$", re.ASCII
)
_LATEX_FRACTION = re.compile(
    r"^([+-]?)\s*(?:(\d+)\s*)?\\frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))$", re.ASCII
)
_POWER = re.compile(r"^(\d{1,9})\s*\^\s*(?:\{\s*(\d{1,3})\s*\}|(\d))$", re.ASCII)
_SLASHED = re.compile(r"^([+-]?[^/]+)/([^/]+)$")
_MAX_EXPONENT = 400  # 10^400 is past any float; larger exponents are a way to exhaust memory

# Signs that a slot holds a claim, a choice or a range instead of one value. Allowed only where the reference has them.
_MARKS = re.compile(
    r"=|≠|\\neq?(?![A-Za-z])|<|>|\\[lg]eq?(?![A-Za-z])|≤|≥|≈|\\approx|\\sim(?![A-Za-z])|\\pm|\\mp|±|\\lor|\\vee|\\land|"
    r"\\wedge|;|\?|\\in(?![A-Za-z])|∈|\\cup|\\cap|∪|\\l?dots|\\cdots|\.\.\.|…|\\infty|∞|\\mathbb|\\forall|\\exists|"
    r"\\implies|\\(?:L|l)?(?:eft)?(?:R|r)ightarrow|\\to(?![A-Za-z])|→|⇒|\\begin|\\not|\\neg|\\boxed|:|&|#|\||\\mid|\\tag"
)
_WORDS = re.compile(r"\b(?:or|and|not|nor|either|neither|approximately|about|between|to)\b", re.IGNORECASE)
_MEMBERSHIP = re.compile(r"^\s*[A-Za-z]\s*(?:\\in(?![A-Za-z])|∈)(?P<value>.+)$")
_ASSIGNMENT = re.compile(r"^\s*(?P<name>\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\s*\(\s*[A-Za-z]\s*\))?)\s*=(?P<value>[^=]+)$")


@dataclass(frozen=True)
class Quantity:
    """A rational number and the unit written after (or, for money, before) it; ``unit`` is empty when there is none."""

    value: Fraction
    unit: str = ""


def clean(latex: str) -> str:
    """``latex`` without delimiters, spacing commands, text wrappers and a final full stop."""
    text = unicodedata.normalize("NFKC", latex).replace("−", "-").replace("–", "-")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = text.strip()
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)]
    text = _WRAPPER.sub(r" \1 ", _SPACING.sub(" ", _DIGIT_GAP.sub("", text)))
    text = re.sub(r"\s+", " ", text).strip()
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def without_unit(text: str) -> tuple[str, str]:
    """``(rest, unit)`` of cleaned text; the unit is normalised for comparison."""
    leading = _CURRENCY.match(text)
    if leading:
        return text[leading.end() :], leading["unit"].lstrip("\\")
    trailing = _UNIT.search(text)
    if trailing and trailing.start() > 0 and re.match(r"[\d.})]", text[trailing.start() - 1]):
        unit = re.sub(r"[\s{}\\]", "", trailing["unit"]).lower()
        return text[: trailing.start()], {"percent": "%", "^circ": "°", "degrees": "°", "degree": "°"}.get(unit, unit)
    return text, ""


def rational(text: str) -> Fraction | None:
    """The exact value of a number literal, or ``None`` if ``text`` is not one.

    Literals are integers (with or without thousands separators), decimals, ``a/b``, ``\\frac{a}{b}``, mixed
    ``a\\frac{b}{c}``, ``a \\times 10^{n}`` or ``aEn``, and a whole number to a whole power.
    """
    text = text.strip()
    if len(text) > 400:
        return None
    if match := _DECIMAL.match(text):
        sign, whole, decimals = match.groups()
        if whole is None and not decimals:
            return None
        digits = re.sub(r"[{},]", "", whole or "0") + (decimals or "")
        value = Fraction(int(digits), 10 ** len(decimals or ""))
        return -value if sign == "-" else value
    if match := _LATEX_FRACTION.match(text):
        sign, whole, *parts = match.groups()
        ratio = _ratio(parts[0] or parts[1], parts[2] or parts[3])
        if ratio is None:
            return None
        mixed = int(whole or 0) + ratio
        return -mixed if sign == "-" else mixed
    if match := _SCIENTIFIC.match(text):
        mantissa, exponent = rational(match[1]), int((match[2] or match[3] or match[4])[:9])
        if mantissa is None or abs(exponent) > _MAX_EXPONENT:
            return None
        return mantissa * Fraction(10) ** exponent
    if match := _POWER.match(text):
        exponent = int(match[2] or match[3])
        return Fraction(int(match[1]) ** exponent) if exponent <= _MAX_EXPONENT else None
    if match := _SLASHED.match(text):
        return _ratio(*match.groups())
    return None


def _ratio(numerator: str, denominator: str) -> Fraction | None:
    above, below = rational(numerator), rational(denominator)
    return None if above is None or below is None or below == 0 else above / below


def quantity(text: str) -> Quantity | None:
    """A cleaned answer as number and unit, or ``None``."""
    rest, unit = without_unit(text)
    value = rational(rest)
    return None if value is None else Quantity(value, unit)


def parts(text: str) -> list[str]:
    """The top-level elements of a list or set; one for anything else. Thousands separators do not split."""
    if rational(text) is not None:
        return [text]
    inner = text
    if re.match(r"^\\?[{(\[]", text) and re.search(r"\\?[})\]]$", text):
        inner = re.sub(r"\\?[})\]]$", "", re.sub(r"^\\?[{(\[]", "", text))
    pieces, depth, start = [], 0, 0
    for i, character in enumerate(inner):
        depth += (character in "{([") - (character in "})]")
        if character == "," and depth == 0:
            pieces.append(inner[start:i].strip())
            start = i + 1
    return [*pieces, inner[start:].strip()]


def assigned(text: str) -> str:
    """``42`` of ``x = 42``, ``[0, 1]`` of ``x \\in [0, 1]``; ``text`` itself if it is not of that form."""
    if match := _MEMBERSHIP.match(text):
        return match["value"].strip()
    match = _ASSIGNMENT.match(text)
    if match is None or re.search(rf"(?<![A-Za-z\\]){re.escape(match['name'])}(?![A-Za-z])", match["value"]):
        return text
    return match["value"].strip()


def marks(text: str) -> set[str]:
    """Signs and words in ``text`` that make it a claim, a choice or a range instead of one value."""
    found = set(_MARKS.findall(text)) | {word.lower() for word in _WORDS.findall(re.sub(r"\\[A-Za-z]+", " ", text))}
    same = {"≠": "\\ne", "\\neq": "\\ne", "≤": "\\le", "\\leq": "\\le", "≥": "\\ge", "\\geq": "\\ge", "±": "\\pm"}
    same |= {"∞": "\\infty", "∈": "\\in", "∪": "\\cup"}
    return {same.get(mark, mark) for mark in found}


def is_words(text: str) -> bool:
    """Whether cleaned text is words (``Tuesday``, ``B``, ``even function``) instead of mathematics."""
    bare = re.sub(r"[\s.,'()-]", "", text)
    return (
        bool(bare) and bare.isalpha() and "\\" not in text and (len(bare) == 1 or bool(re.search(r"[A-Za-z]{4}", bare)))
    )


def same_words(left: str, right: str) -> bool:
    """Equality of words without regard to case, outer brackets and spacing."""

    def canonical(text: str) -> str:
        return re.sub(r"\s+", " ", text.casefold()).strip(" .,()")

    return canonical(left) == canonical(right) != ""


def exact_decimals(latex: str) -> str:
    """``latex`` with every decimal written as an exact fraction, so that sympy rounds nothing."""

    def fraction(match: re.Match[str]) -> str:
        value = Fraction(match[0])
        return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"

    return re.sub(r"(?<![\d.])\d*\.\d+(?![\d.])", fraction, latex)
