"""Which models the rollout engine can decode; the others generate through Transformers."""

from __future__ import annotations

from typing import Any

from ..context.support import UnsupportedModelError, check_supported

GROWING_ROPE = ("dynamic", "longrope")


def obstacle(config: Any) -> str | None:
    """Why a text config can't be decoded here, or None."""
    try:
        check_supported(config)
    except UnsupportedModelError as error:
        return str(error)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return "its linear-attention layers keep a state instead of keys and values"
    found = getattr(config, "rope_parameters", None) or {}
    for rope in (found, *(v for v in found.values() if isinstance(v, dict))):
        kind = rope.get("rope_type", "default")
        if kind in GROWING_ROPE:
            return f"its rotary angles (rope_type={kind!r}) depend on the longest sequence of a batch"
    return None


def check_rollout(config: Any) -> None:
    """Raise `UnsupportedModelError` for a model that can't be decoded here."""
    reason = obstacle(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} can't be decoded by the rollout engine: {reason}. Generate with Transformers "
            "instead (rollout='transformers')."
        )
