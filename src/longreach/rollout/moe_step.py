"""The experts of a decode step: chosen as in training, run from their 4-bit codes.

Shape suffixes: B rows of the step, M hidden size, k chosen experts of a row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ..context.fused_moe import FusedMoeLayer
from ..kernels.decode_experts import choose_experts, decode_experts
from ..quant import MXFP4
from ..quant.experts import PRODUCTS, FourBitExperts


class ExpertStep:
    """One layer's experts."""

    def __init__(self, form: FusedMoeLayer) -> None:
        self.form = form
        base: Any = form.experts.base
        gate_up, down = (base.packed(name).tensors for name in PRODUCTS)
        self.arguments = {
            "gate_up_codes": gate_up["codes"],
            "gate_up_scales": gate_up["scales"],
            "gate_up_bias": base.gate_up_proj_bias,
            "down_codes": down["codes"],
            "down_scales": down["scales"],
            "down_bias": base.down_proj_bias,
            "alpha": base.alpha,
            "limit": base.limit,
        }

    @staticmethod
    def fits(form: FusedMoeLayer) -> bool:
        """Whether a decode step has a kernel for these experts: gpt-oss's in MXFP4, without adapters."""
        base = form.experts.base
        return (
            isinstance(base, FourBitExperts)
            and isinstance(base.format, MXFP4)
            and base.gating.interleaved
            and base.has_bias
            and base.alpha is not None
            and not any(form.experts.adapters)
        )

    def __call__(self, x_BM: Tensor) -> Tensor:
        """[B, M], the weighted sum of the chosen experts' outputs."""
        router: Any = self.form.router
        logits_BE = functional.linear(x_BM, router.weight, router.bias)
        expert_Bk, weight_Bk = choose_experts(logits_BE, router.top_k)
        return decode_experts(x_BM, expert_Bk, weight_Bk, **self.arguments)
