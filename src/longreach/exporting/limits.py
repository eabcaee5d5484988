"""How far an export's logits may be from the training model's.

Twice the most that writing weights in the format cost on models without an adapter: bench/export.py measures it, and its figures
are in bench/results/export.json.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Limit:
    """The largest relative difference and KL divergence, nats; both as `compare.Difference` has them."""

    relative: float
    kl: float


# A model reloaded in Transformers, by what it computes in. In 16 bits, training model and export both round.
COMPUTED = {"fp32": Limit(2.2e-2, 5e-4), "half": Limit(6e-2, 3e-3)}
# A GGUF file in libllama, against a training model that computed in fp32.
GGUF = {
    "f32": Limit(2e-3, 1e-5),
    "f16": Limit(4e-3, 1e-5),
    "bf16": Limit(2.4e-2, 6e-4),
    "q8_0": Limit(8e-2, 2e-3),
    "q6_k": Limit(8e-2, 4e-3),
    "q5_k_m": Limit(0.4, 0.03),
    "q5_k_s": Limit(0.5, 0.03),
    "q5_0": Limit(0.5, 0.06),
    "q5_1": Limit(0.5, 0.03),
    "q4_k_m": Limit(0.5, 0.06),
    "q4_k_s": Limit(0.5, 0.06),
    "q4_0": Limit(0.9, 0.16),
    "q4_1": Limit(0.9, 0.16),
    "q3_k_l": Limit(0.8, 0.07),
    "q3_k_m": Limit(0.8, 0.07),
    "q3_k_s": Limit(0.9, 0.2),
    "q2_k": Limit(0.9, 0.2),
    "mxfp4": Limit(0.3, 0.02),
}


def computed_limit(dtype: torch.dtype) -> Limit:
    """For a reload in Transformers that computes in this dtype, as the training model did."""
    return COMPUTED["fp32" if dtype == torch.float32 else "half"]


def gguf_limit(kind: str, reference: torch.dtype) -> Limit:
    """For a GGUF type. A reference that computed in 16 bits has a rounding of its own, which is added."""
    own = GGUF[kind]
    if reference == torch.float32:
        return own
    return Limit(own.relative + COMPUTED["half"].relative, own.kl + COMPUTED["half"].kl)
