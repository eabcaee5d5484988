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


# A few positions where a router chooses other experts move the mean KL of a mixture of experts this far, whatever the format.
_ROUTED = 5e-3
# A model reloaded in Transformers, by what it computes in. In 16 bits, training model and export both round.
COMPUTED = {"fp32": Limit(2.4e-2, _ROUTED), "half": Limit(6e-2, _ROUTED)}
# A GGUF file in libllama, against a training model that computed in fp32.
GGUF = {
    "f32": Limit(1.5e-3, _ROUTED),
    "f16": Limit(3.8e-3, _ROUTED),
    "bf16": Limit(2.6e-2, _ROUTED),
    "q8_0": Limit(9e-2, _ROUTED),
    "q6_k": Limit(0.23, _ROUTED),
    "q5_k_m": Limit(0.4, 0.03),
    "q5_k_s": Limit(0.44, 0.03),
    "q5_0": Limit(0.54, 0.06),
    "q5_1": Limit(0.46, 0.03),
    "q4_k_m": Limit(0.65, 0.06),
    "q4_k_s": Limit(0.65, 0.04),
    "q4_0": Limit(1.0, 0.17),
    "q4_1": Limit(0.93, 0.15),
    "q3_k_l": Limit(1.05, 0.04),
    "q3_k_m": Limit(1.1, 0.045),
    "q3_k_s": Limit(1.5, 0.22),
    "q2_k": Limit(1.8, 0.22),
    "mxfp4": Limit(0.26, 0.01),
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
