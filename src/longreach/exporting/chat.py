"""Chat template and stop tokens, compared as token ids on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

CONVERSATIONS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "What is 12 + 30?"},),
    ({"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is water wet?"}),
    (
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "  Another one,\nplease: "},
    ),
)


def render(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, template: str | None = None, prompt: bool = True
) -> str | None:
    """A conversation's text, with a prompt for the answer if `prompt`; None where the template refuses it (some have no system
    role).

    Args:
        template: Jinja; None for the tokenizer's own.
    """
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
        )
    except TemplateError:
        return None


def rendered(tokenizer: Any, *, template: str | None = None) -> list[str | None]:
    """`render` of each of the conversations."""
    return [render(tokenizer, conversation, template=template) for conversation in CONVERSATIONS]


def chat_ids(tokenizer: Any) -> list[list[int] | None]:
    """Token ids of `rendered`."""
    return [None if t is None else tokenizer(t, add_special_tokens=False)["input_ids"] for t in rendered(tokenizer)]


def chat_faults(
    expected: Any, texts: Sequence[str | None], tokenize: Callable[[str], list[int]], *, where: str
) -> list[str]:
    """Where an export's rendered conversations give other token ids than the training tokenizer's.

    Args:
        expected: the training tokenizer.
        texts: the conversations as the export's own template renders them.
        tokenize: the export's tokenizer, which adds nothing to the text.
    """
    faults = []
    for number, (wanted, text) in enumerate(zip(chat_ids(expected), texts), 1):
        got = None if text is None else tokenize(text)
        if got == wanted:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(wanted or (), got or ())) if a != b),
            min(len(wanted or ()), len(got or ())),
        )
        faults.append(
            f"chat template in {where}: conversation {number} differs at token {place}: "
            f"{(wanted or [])[place : place + 4]} expected, {(got or [])[place : place + 4]} found"
        )
    return faults
