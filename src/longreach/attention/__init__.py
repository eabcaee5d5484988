"""Attention over a token tree: one operation, dense blocks merged exactly by their log-sum-exp."""

from .op import AttentionSpec, BlockCall, KeyValues, attention
from .select import Backend, select, use_backend

__all__ = ["AttentionSpec", "Backend", "BlockCall", "KeyValues", "attention", "select", "use_backend"]
