"""Attention over a token tree: one operation, dense blocks merged exactly by their log-sum-exp."""

from .op import AttentionSpec, BlockCall, KeyValues, attention, attention_backward, attention_forward
from .select import Backend, explain, select, use_backend

__all__ = [
    "AttentionSpec",
    "Backend",
    "BlockCall",
    "KeyValues",
    "attention",
    "attention_backward",
    "attention_forward",
    "explain",
    "select",
    "use_backend",
]
