"""Strict extraction of the one final answer of a completion.

A lenient extractor is the commonest hole of a maths reward: it finds *some* right number among many, or in a sentence
that denies it. Here an answer counts only when it stands in a final slot (``\\boxed{...}``, ``<answer>...</answer>`` or
a last ``#### ...`` line), and only when all final slots of the completion agree. Everything before the last
``</think>`` is working, not an answer. There is no fallback to the text at large.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SlotName = Literal["any", "boxed", "tag", "hash"]
SLOTS: tuple[SlotName, ...] = ("any", "boxed", "tag", "hash")

# "The answer is not \boxed{42}": a slot that its own sentence takes back is no commitment.
_DENIED = re.compile(
    r"(?:\bnot|\bnever|\bcannot|n't|\bother than|\bexcept|\bunlike|\bneither|\bnor|\\neq?|≠|!=)"
    r"(?:\s+(?:equal(?:\s+to)?|be|exactly|simply|just|the|value|number|answer|is))*\s*[:=]?\s*(?:\$|\\\(|\\\[|\*|\s)*$",
    re.IGNORECASE,
)
_HASH_LINE = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_DENIAL_WINDOW = 80  # characters before a slot that are searched for a denial


@dataclass(frozen=True)
class Extraction:
    """The text of the one final slot, or ``None`` and the reason there is none."""

    text: str | None
    reason: str = ""


def prompt_text(prompt: Any) -> str:
    """All text of a plain or conversational prompt."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(m.get("content") or "") for m in prompt if isinstance(m, Mapping))


def without_thinking(text: str) -> str | None:
    """The text after the last ``</think>``; ``None`` if a ``<think>`` stays open: it never came to an answer."""
    tail = text.rsplit("</think>", 1)[-1]
    return None if "<think>" in tail else tail


def final_answer(text: str, slot: SlotName = "any", *, max_chars: int = 400) -> Extraction:
    """The content of the one final slot of ``text``.

    Args:
        text: the completion's text, with or without ``<think>`` working.
        slot: which slots count; ``"any"`` takes all kinds, which must then agree with each other.
        max_chars: longest accepted slot content, in characters.

    Repeating the same answer is allowed; two different ones are a conflict and no answer.
    """
    if slot not in SLOTS:
        raise ValueError(f"slot: got {slot!r}; it must be one of {', '.join(SLOTS)}")
    tail = without_thinking(text)
    if tail is None:
        return Extraction(None, "thinking never ends")
    found: list[tuple[int, str]] = []
    for name, finder in _FINDERS.items():
        if slot in ("any", name):
            slots = finder(tail)
            if slots is None:
                return Extraction(None, f"malformed {name} slot")
            found += slots
    if not found:
        return Extraction(None, "no final slot")
    contents = {re.sub(r"\s+", "", content): content for _, content in found}
    if len(contents) > 1:
        return Extraction(None, f"{len(contents)} different final answers")
    if any(_DENIED.search(tail[max(0, start - _DENIAL_WINDOW) : start]) for start, _ in found):
        return Extraction(None, "the answer is denied by its own sentence")
    (answer,) = contents.values()
    if not answer.strip():
        return Extraction(None, "empty final slot")
    if len(answer) > max_chars:
        return Extraction(None, f"final slot longer than {max_chars} characters")
    return Extraction(answer.strip())


def _boxed(text: str) -> list[tuple[int, str]] | None:
    """``(start, content)`` of every ``\\boxed{...}``; ``None`` if one is unclosed or nested in another."""
    slots = []
    position = 0
    while (start := text.find("\\boxed", position)) >= 0:
        opening = re.compile(r"\\boxed\s*\{").match(text, start)
        if opening is None:
            return None
        end = _closing_brace(text, opening.end())
        if end is None:
            return None
        content = text[opening.end() : end]
        if "\\boxed" in content:
            return None
        slots.append((start, content))
        position = end + 1
    return slots


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for i in range(start, len(text)):
        if text[i] in "{}" and (i == 0 or text[i - 1] != "\\"):
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return i
    return None


def _tagged(text: str) -> list[tuple[int, str]] | None:
    """``(start, content)`` of every ``<answer>...</answer>``, a box inside unwrapped; ``None`` if tags do not pair."""
    marks = [(m.start(), m.end(), m.group() == "<answer>") for m in re.finditer(r"</?answer>", text)]
    if len(marks) % 2 or any(opens != (i % 2 == 0) for i, (_, _, opens) in enumerate(marks)):
        return None
    slots = []
    for (start, inner, _), (outer, _, _) in zip(marks[::2], marks[1::2]):
        content = text[inner:outer].strip()
        if "\\boxed" in content:
            boxes = _boxed(content)
            if boxes is None or len(boxes) != 1 or content.strip("$ ").removesuffix(".") != f"\\boxed{{{boxes[0][1]}}}":
                return None
            content = boxes[0][1]
        slots.append((start, content))
    return slots


def _hashed(text: str) -> list[tuple[int, str]] | None:
    """``(start, content)`` of every line that starts with ``####``."""
    return [(m.start(), m.group(1)) for m in _HASH_LINE.finditer(text)]


_FINDERS: dict[str, Callable[[str], list[tuple[int, str]] | None]] = {"boxed": _boxed, "tag": _tagged, "hash": _hashed}
