"""Names that nobody knows, and the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.6  # similarity from which a name counts as misspelt
LISTED = 24  # more valid names than this are not listed


def nearest(name: str, valid: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the closest valid name, or the valid names when nothing is close."""
    shown = sorted(valid)
    match = difflib.get_close_matches(name, shown, n=1, cutoff=ALIKE)
    if match:
        return f"; did you mean {match[0]!r}?"
    return f"; valid names: {', '.join(shown)}" if 0 < len(shown) <= LISTED else ""


def check_names(owner: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Raise TypeError, as Python does, for the first name that ``owner`` doesn't take, with the one that was probably meant."""
    known = set(valid)
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} takes no {name!r}{nearest(name, known)}")
