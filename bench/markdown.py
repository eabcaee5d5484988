"""A Markdown table: first column to the left, the others to the right."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Its lines, with an empty one after it."""
    line = "|" + "|".join(" --- " if i == 0 else " ---: " for i in range(len(header))) + "|"
    return ["| " + " | ".join(header) + " |", line, *("| " + " | ".join(row) + " |" for row in rows), ""]
