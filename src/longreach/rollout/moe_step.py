"""The experts of a decode step, chosen as in training: from 4-bit codes where there is a kernel, else as training runs them.

Shape suffixes: B rows of the step, M hidden size, k chosen experts of a row, E experts, r rank, I input features, O output
features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..context.fused_moe import FusedMoeLayer
from ..kernels import route
from ..kernels.decode_experts import FEW_TOKENS, choose_experts, decode_experts
from ..kernels.dequant import MX_BLOCK
from ..lora import Experts
from ..lora.experts import ExpertAdapter
from ..quant import MXFP4
from ..quant.experts import PRODUCTS, FourBitExperts
from ..quant.mixture import mixture_forward


class CodedExperts:
    """One layer of gpt-oss's experts in MXFP4, with adapters: a kernel reads the codes of those that are chosen.

    Adapters are copied, in the compute dtype and with their scale, at the start of each rollout; the copies stay in their place.
    """

    captures = True

    def __init__(self, form: FusedMoeLayer, module: nn.Module, dtype: torch.dtype) -> None:
        self.router, self.module = form.router, module
        assert form.experts is not None
        self.base: Any = form.experts.base
        gate_up, down = (self.base.packed(name).tensors for name in PRODUCTS)
        self.arguments = {
            "gate_up_codes": gate_up["codes"],
            "gate_up_scales": gate_up["scales"],
            "gate_up_bias": self.base.gate_up_proj_bias,
            "down_codes": down["codes"],
            "down_scales": down["scales"],
            "down_bias": self.base.down_proj_bias,
            "alpha": self.base.alpha,
            "limit": self.base.limit,
        }
        self.lows = [None if adapter is None else _room(adapter, dtype) for adapter in form.experts.adapters]
        self.refresh()

    @staticmethod
    def fits(experts: Experts | None) -> bool:
        base = None if experts is None else experts.base
        return (
            isinstance(base, FourBitExperts)
            and isinstance(base.format, MXFP4)
            and base.gating.interleaved
            and base.has_bias
            and base.alpha is not None
            and all(shape[-1] % MX_BLOCK == 0 for shape in base.shapes.values())  # no block lies in two rows
        )

    def current(self) -> bool:
        """Whether these are still the layer's experts, in the same place, with adapters of the same shapes."""
        experts = Experts.of(self.module)
        codes = self.base.packed(PRODUCTS[0]).tensors["codes"]
        return (
            self.fits(experts)
            and experts is not None
            and experts.base is self.base
            and codes.data_ptr() == self.arguments["gate_up_codes"].data_ptr()
            and all(_same_shape(low, adapter) for low, adapter in zip(self.lows, experts.adapters))
        )

    def refresh(self) -> None:
        """Copy the adapters as they are now."""
        experts = Experts.of(self.module)
        assert experts is not None
        for low, adapter in zip(self.lows, experts.adapters):
            if low is not None and adapter is not None:
                a_ErI, b_ErO = adapter.stacked()
                low[0].copy_(a_ErI.detach())
                low[1].copy_(b_ErO.detach() * adapter.scale)

    def __call__(self, x_BM: Tensor) -> Tensor:
        """[B, M], the weighted sum of the chosen experts' outputs."""
        logits_BE = functional.linear(x_BM, self.router.weight, self.router.bias)
        chosen = choose_experts(logits_BE, self.router.top_k)
        gate_up, down = self.lows
        parts = [
            decode_experts(*part, **self.arguments, gate_up_low=gate_up, down_low=down)
            for part in zip(*(x.split(FEW_TOKENS) for x in (x_BM, *chosen)))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _room(adapter: ExpertAdapter, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where a [E, r, I] and b [E, r, O] are copied to."""
    a, b = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in adapter.stacked())
    return a, b


def _same_shape(low: tuple[Tensor, Tensor] | None, adapter: ExpertAdapter | None) -> bool:
    if low is None or adapter is None:
        return low is None and adapter is None
    return all(mine.shape == theirs.shape for mine, theirs in zip(low, adapter.stacked()))


class MixedExperts:
    """One layer's experts by the training step's operation: any format, with adapters. It can't be captured in a graph."""

    captures = False

    def __init__(self, form: FusedMoeLayer, module: nn.Module, dtype: torch.dtype) -> None:
        self.form, self.module, self.dtype = form, module, dtype
        self.refresh()

    def current(self) -> bool:
        """Whether the layer's experts can still be run so; adapters are read anew in any case."""
        experts = Experts.of(self.module)
        return experts is not None and experts.fits(self.dtype) and not CodedExperts.fits(experts)

    def refresh(self) -> None:
        """Adapters as they are now."""
        experts = Experts.of(self.module)
        assert experts is not None
        self.weights, self.lows = experts.weights(self.dtype, False), experts.low_ranks(self.dtype)

    def __call__(self, x_BM: Tensor) -> Tensor:
        """[B, M], the weighted sum of the chosen experts' outputs."""
        expert_Bk, weight_Bk, _ = self.form.choose(x_BM)
        routing = route(expert_Bk, self.form.router.num_experts)
        return mixture_forward(x_BM, routing, weight_Bk, self.weights, self.lows)


def experts_of(form: FusedMoeLayer, module: nn.Module, dtype: torch.dtype) -> CodedExperts | MixedExperts:
    """How a step runs the experts of a layer."""
    return CodedExperts(form, module, dtype) if CodedExperts.fits(form.experts) else MixedExperts(form, module, dtype)
