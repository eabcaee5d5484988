"""Stop strings: found in the text as it grows, wherever tokens end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .scheduler import Request

MARGIN = 16  # tokens beyond those that a stop string can span: some have no text of their own


class StopWatch:
    """Looks for requests' stop strings after each token.

    Raises:
        ValueError: a request has stop strings but there is no tokenizer.
    """

    def __init__(self, tokenizer: Any, requests: Sequence[Request]) -> None:
        self.tokenizer = tokenizer
        given = next((r.params.stop for r in requests if r.params.stop), None)
        if given is not None and tokenizer is None:
            raise ValueError(f"stop={given!r}: stop strings need the tokenizer; pass tokenizer=")

    def stops(self, request: Request) -> bool:
        """Whether the text of a request holds one of its stop strings."""
        strings = request.params.stop
        if not strings:
            return False
        # A token has a byte or more of text, but for a few; earlier tokens were looked at before.
        tail = request.ids[-(max(len(s.encode()) for s in strings) + MARGIN) :]
        text = self.decode(tail)
        return any(s in text for s in strings)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def cut_at_stop(text: str, strings: Sequence[str]) -> str:
    """The text before the first stop string."""
    found = [at for at in (text.find(s) for s in strings) if at >= 0]
    return text[: min(found)] if found else text
