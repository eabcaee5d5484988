"""How far a GGUF file's logits may be from the training model's, by type.

Twice the most that the type alone cost on models without an adapter (bench/export.py; docs/export.md has the figures).
"""

from __future__ import annotations

from .compare import LIMITS, Limit

_QUANTIZED = {
    "mxfp4": Limit(0.6, 1.5),
    "q6_k": Limit(0.12, 0.1),
    "q5_k_m": Limit(0.2, 0.2),
    "q5_k_s": Limit(0.2, 0.2),
    "q5_0": Limit(0.2, 0.2),
    "q5_1": Limit(0.2, 0.2),
    "q4_k_m": Limit(0.4, 0.5),
    "q4_k_s": Limit(0.4, 0.5),
    "q4_0": Limit(0.4, 0.5),
    "q4_1": Limit(0.4, 0.5),
    "q3_k_l": Limit(0.6, 1.5),
    "q3_k_m": Limit(0.6, 1.5),
    "q3_k_s": Limit(0.8, 2.0),
    "q2_k": Limit(1.0, 4.0),
}


def limit_of(kind: str) -> Limit:
    """The limit of a GGUF type; of the types that the converter writes itself, those in `compare`."""
    return LIMITS[kind] if kind in LIMITS else _QUANTIZED[kind]
