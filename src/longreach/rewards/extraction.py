"""Taking the one final answer out of a completion, strictly: no answer and two answers are both no answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_FENCE = re.compile(r"^(?P<ticks>`{3,}|~{3,})[ \t]*(?P<tag>[^\s`]*)[^\n`]*$")
PYTHON_TAGS = frozenset({"", "python", "py", "python3"})

Blocks = Literal["one", "last"]


@dataclass(frozen=True)
class Extracted:
    """The answer's text, or why there is none (then ``text`` is empty)."""

    text: str
    problem: str = ""


def without_reasoning(text: str, *, opening: str = "<think>", closing: str = "</think>") -> Extracted:
    """What follows the reasoning. A completion may start inside it (chat templates open it in the prompt).

    Reasoning that never ends leaves no answer, and so does reasoning that ends twice: what would be inside is
    anybody's guess.
    """
    closings = text.count(closing)
    if closings > 1 or text.count(opening) > 1:
        return Extracted("", f"{opening} … {closing} occurs more than once")
    if closings == 1:
        before, after = text.split(closing)
        if opening in after:
            return Extracted("", f"{opening} after {closing}")
        if opening in before and before.split(opening)[0].strip():
            return Extracted("", f"text before {opening}")
        return Extracted(after)
    if opening in text:
        return Extracted("", f"{opening} is never closed")
    return Extracted(text)


def fenced_blocks(text: str) -> tuple[list[tuple[str, str]], bool]:
    """(language tag in lower case, content) of every Markdown code block, and whether the last one is left open."""
    blocks: list[tuple[str, str]] = []
    fence, tag = "", ""
    lines: list[str] = []
    for line in text.splitlines():
        match = _FENCE.match(line.strip())
        if not fence:
            if match:
                fence, tag, lines = match["ticks"], match["tag"].lower(), []
        elif match and not match["tag"] and match["ticks"].startswith(fence):
            blocks.append((tag, "\n".join(lines) + "\n"))
            fence = ""
        else:
            lines.append(line)
    return blocks, bool(fence)


def extract_code(completion: str, *, blocks: Blocks = "one") -> Extracted:
    """The program in a completion: its only Python code block after the reasoning.

    blocks  ``"one"``: more than one distinct Python block is a conflict, hence no answer; ``"last"``: the last one
    counts
    """
    answer = without_reasoning(completion)
    if answer.problem:
        return answer
    found, left_open = fenced_blocks(answer.text)
    if left_open:
        return Extracted("", "the last code block is not closed")
    programs = [content for tag, content in found if tag in PYTHON_TAGS and content.strip()]
    if not programs:
        return Extracted("", "no Python code block")
    if blocks == "one" and len(set(programs)) > 1:
        return Extracted("", f"{len(set(programs))} different Python code blocks; exactly one is the answer")
    return Extracted(programs[-1])
