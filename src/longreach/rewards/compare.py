"""Comparing a candidate's value, already rebuilt from bytes, with the expected one. Fails closed on anything
unexpected.
"""

from __future__ import annotations

import math
from typing import Any

MAX_DEPTH = 60


def matches(expected: Any, got: Any, *, rel_tol: float = 1e-9, abs_tol: float = 1e-12) -> bool:
    """Whether ``got`` is the expected value.

    Integers must be exact; floats agree within the tolerances and an expected NaN only with NaN; True is not 1;
    lists and tuples may stand for each other; everything else must have the same type. ``got`` holds builtin types
    (and NumPy arrays) only, which is what the sandbox returns: an object with an ``__eq__`` of its own does not
    match.
    """
    try:
        return _matches(expected, got, rel_tol, abs_tol, 0)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False


def _matches(expected: Any, got: Any, rel: float, ab: float, depth: int) -> bool:
    if depth > MAX_DEPTH:
        return False
    if type(expected).__module__ == "numpy" or type(got).__module__ == "numpy":
        return _arrays_match(expected, got, rel, ab)
    kind = type(got)
    if expected is None or isinstance(expected, bool | str | bytes):
        return kind is type(expected) and bool(got == expected)
    if isinstance(expected, int | float):
        return kind in (int, float) and _numbers_match(expected, got, rel, ab)
    if isinstance(expected, complex):
        if kind not in (int, float, complex):
            return False
        got = complex(got)
        return _numbers_match(expected.real, got.real, rel, ab) and _numbers_match(expected.imag, got.imag, rel, ab)
    if isinstance(expected, list | tuple):
        if kind not in (list, tuple) or len(got) != len(expected):
            return False
        return all(_matches(e, g, rel, ab, depth + 1) for e, g in zip(expected, got))
    if isinstance(expected, dict):
        if kind is not dict or _typed(expected) != _typed(got):
            return False
        return all(_matches(value, got[key], rel, ab, depth + 1) for key, value in expected.items())
    if isinstance(expected, set | frozenset):
        return kind in (set, frozenset) and _typed(expected) == _typed(got)
    return False


def _typed(items: Any) -> set[Any]:
    """Elements with their kind, because ``{True} == {1}``."""
    return {(isinstance(item, bool), item) for item in items}


def _numbers_match(expected: int | float, got: int | float, rel: float, ab: float) -> bool:
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got
    if math.isnan(expected) or math.isnan(got):
        return math.isnan(expected) and math.isnan(got)
    return math.isclose(expected, got, rel_tol=rel, abs_tol=ab)


def _arrays_match(expected: Any, got: Any, rel: float, ab: float) -> bool:
    import numpy

    if not isinstance(got, numpy.ndarray | list | int | float | complex):
        return False
    expected, got = numpy.asarray(expected), numpy.asarray(got)
    if expected.shape != got.shape or got.dtype.kind not in "biufc":
        return False
    if expected.dtype.kind in "biu":
        return bool(numpy.array_equal(expected, got))
    return bool(numpy.allclose(got, expected, rtol=rel, atol=ab, equal_nan=True))


def show(value: Any, length: int = 80) -> str:
    """A value for a message, clipped; never raises."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of many thousand digits; a very deep list
        text = f"a {type(value).__name__}"
    return text if len(text) <= length else text[: length - 1] + "…"


def same_output(expected: str, got: bytes, *, rel_tol: float | None = None) -> bool:
    """A program's whole standard output against the expected text.

    Trailing spaces of lines and trailing empty lines do not matter; every line is compared, and there may be
    neither fewer nor more. With ``rel_tol``, words that are both numbers agree within it.
    """
    try:
        text = got.decode("utf-8")
    except UnicodeDecodeError:
        return False
    ours, theirs = _lines(expected), _lines(text)
    if len(ours) != len(theirs):
        return False
    if rel_tol is None:
        return ours == theirs
    return all(_words_match(a.split(), b.split(), rel_tol) for a, b in zip(ours, theirs))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _words_match(expected: list[str], got: list[str], rel_tol: float) -> bool:
    if len(expected) != len(got):
        return False
    for ours, theirs in zip(expected, got):
        if ours == theirs:
            continue
        try:
            wanted, said = float(ours), float(theirs)
        except ValueError:
            return False
        if not (math.isfinite(said) and math.isclose(wanted, said, rel_tol=rel_tol, abs_tol=rel_tol)):
            return False
    return True
