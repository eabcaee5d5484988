"""Grammars of constrained completions, as llguidance reads them: from a regular expression or a JSON schema."""

from __future__ import annotations

import functools
import importlib
import json
from typing import Any


def library(name: str = "llguidance") -> Any:
    """The package, or a module of it. Raises ImportError, with what to install, where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "regex and json_schema need llguidance, which is not installed: pip install 'longreach[constraints]'"
        ) from error


def grammar_of(regex: str | None, json_schema: Any) -> str:
    """The grammar, checked.

    Raises:
        ValueError: a pattern or schema that can't be followed; the message names it and says why.
        ImportError: llguidance is not installed.
    """
    if regex is not None:
        return _checked("regex", regex)
    try:
        text = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
    except (TypeError, ValueError) as error:
        raise ValueError(f"json_schema={json_schema!r} is not JSON: {error}") from None
    return _checked("json_schema", text)


@functools.lru_cache(maxsize=256)
def _checked(kind: str, text: str) -> str:
    matcher = library().LLMatcher
    shown = f"{kind}={text!r}" if kind == "regex" else f"{kind}={text}"
    try:
        grammar = matcher.grammar_from_regex(text) if kind == "regex" else matcher.grammar_from_json_schema(text)
    except ValueError as error:
        raise ValueError(f"{shown} can't be followed: {error}") from None
    reason = matcher.validate_grammar(grammar)
    if reason:
        raise ValueError(f"{shown} can't be followed: {reason.strip()}")
    return grammar
