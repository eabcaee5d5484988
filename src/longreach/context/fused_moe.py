"""Hand-written decoder layers with a mixture of experts: gpt-oss and Qwen3-MoE.

The attention half is that of `fused.py`, with gpt-oss's sinks (in the attention op) and its rotary tables (half as wide, YaRN's
scaling in them). The router is run by the same calls as in Transformers, so that it picks the same experts; the backward picks
them again from the same bits. Experts may be stored in 4 bits and may carry adapters: see `lora/experts.py`.

Shape suffixes: C tokens of the chunk, M hidden size, k chosen experts of a token, E experts, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels import route, wide_dtype
from ..lora import Experts, Linear
from ..lora.linear import Grads
from ..quant.mixture import mixture_backward, mixture_forward
from .fused import FAMILIES, QKV, Family, FusedLayer, find_linears, unhooked


@dataclass(frozen=True)
class MoeFamily:
    """How a family's layer differs from Llama's.

    Attributes:
        router: name of the router in the MLP.
        over_chosen: the router's softmax runs over the chosen experts only, in the dtype of its logits (gpt-oss); else over all
            of them in fp32, and the chosen ones are scaled to sum to one if the model says so.
        wide_norm: norms multiply by the weight in fp32, with one rounding.
    """

    router: str
    over_chosen: bool = False
    wide_norm: bool = False


MOE_FAMILIES = {
    "GptOssDecoderLayer": MoeFamily("router", over_chosen=True, wide_norm=True),
    "Qwen3MoeDecoderLayer": MoeFamily("gate"),
}


def fused_layer(
    layer: nn.Module, dtype: torch.dtype, *, keep: bool = True, keep_linears: bool = True, checked: bool = False
) -> FusedLayer | None:
    """The hand-written form of a layer for one pass over its chunks, or None where the module itself must run.

    `keep` (for a dense layer `keep_linears`), `checked`: as for `FusedLayer.of`.
    """
    kind = type(layer).__name__
    if kind in MOE_FAMILIES and hasattr(layer.mlp, "experts"):
        return FusedMoeLayer.of(layer, dtype, keep=keep, checked=checked)
    return FusedLayer.of(layer, dtype, keep=keep_linears, checked=checked) if kind in FAMILIES else None


class FusedMoeLayer(FusedLayer):
    """One layer for one pass over its chunks. Made by `FusedMoeLayer.of`."""

    def __init__(
        self, layer: Any, moe: MoeFamily, linears: dict[str, Linear], experts: Experts, dtype: torch.dtype, keep: bool
    ) -> None:
        super().__init__(layer, Family(unit_offset=moe.wide_norm), linears, dtype)
        self.moe, self.router = moe, getattr(layer.mlp, moe.router)
        self.experts, self.weights = experts, experts.weights(dtype, keep)
        self.lows = experts.low_ranks(dtype)
        self.adapters += tuple(
            None if adapter is None else (id(adapter.a), adapter.scale) for adapter in experts.adapters
        )
        self.scales = {m: _Scale(m, moe.wide_norm) for m in self.norms()}

    @classmethod
    def of(
        cls, layer: nn.Module, dtype: torch.dtype, *, keep: bool = True, checked: bool = False
    ) -> FusedMoeLayer | None:
        moe = MOE_FAMILIES.get(type(layer).__name__)
        if moe is None or not (checked or unhooked(layer)):
            return None
        linears = find_linears([(layer.self_attn, (*QKV, "o_proj"))], dtype, keep)
        router: Any = getattr(layer.mlp, moe.router)
        experts = Experts.of(layer.mlp.experts)  # type: ignore[union-attr, arg-type]
        if linears is None or experts is None or not experts.fits(dtype):
            return None
        if getattr(router, "weight", torch.empty(0)).dtype != dtype or hasattr(router, "base_layer"):
            return None
        fused = cls(layer, moe, linears, experts, dtype, keep)
        known = {p for line in linears.values() for p in line.parameters} | {m.weight for m in fused.norms()}
        known |= {*experts.parameters, router.weight, getattr(router, "bias", None), fused.sinks}
        if any(p.requires_grad and p not in known for p in layer.parameters()):
            return None
        return fused

    # ---- the experts

    def _mlp(self, h2_CM: Tensor) -> Tensor:
        x_CM, _ = self._norm(h2_CM, self.norm_mlp)
        expert_Ck, weight_Ck, _ = self.choose(x_CM)
        routing = route(expert_Ck, self.router.num_experts)
        return mixture_forward(x_CM, routing, weight_Ck, self.weights, self.lows, add=h2_CM)

    def _mlp_backward(self, dy_CM: Tensor, h2_CM: Tensor, grads: Grads) -> Tensor:
        x_CM, rstd = self._norm(h2_CM, self.norm_mlp)
        expert_Ck, weight_Ck, logits_CE = self.choose(x_CM)
        routing = route(expert_Ck, self.router.num_experts)
        dx_CM, dweight_Ck, found = mixture_backward(
            dy_CM.to(self.dtype), x_CM, routing, weight_Ck, self.weights, self.lows
        )
        self.experts.put(found, grads)
        self._choose_backward(dweight_Ck, expert_Ck, logits_CE, x_CM, dx_CM, grads)
        return self._norm_backward(dx_CM, h2_CM, self.norm_mlp, rstd, dy_CM, grads)

    def choose(self, x_CM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chosen experts [C, k], their weights [C, k] in the dtype of x, and the router's logits [C, E]."""
        logits_CE = functional.linear(x_CM, self.router.weight, getattr(self.router, "bias", None))
        k = self.router.top_k
        if self.moe.over_chosen:
            best_Ck, expert_Ck = torch.topk(logits_CE, k, dim=-1)
            return expert_Ck, torch.softmax(best_Ck, -1, dtype=best_Ck.dtype), logits_CE
        share_CE = torch.softmax(logits_CE, -1, dtype=wide_dtype(logits_CE.dtype))
        weight_Ck, expert_Ck = torch.topk(share_CE, k, dim=-1)
        if self.router.norm_topk_prob:
            weight_Ck = weight_Ck / weight_Ck.sum(-1, keepdim=True)
        return expert_Ck, weight_Ck.to(logits_CE.dtype), logits_CE

    def _choose_backward(
        self,
        dweight_Ck: Tensor,
        expert_Ck: Tensor,
        logits_CE: Tensor,
        x_CM: Tensor,
        dx_CM: Tensor,
        grads: Grads,
    ) -> None:
        """Through the softmax of the router: adds to dx, and gives the router's own gradients."""
        wide = wide_dtype(x_CM.dtype)
        dweight_Ck = dweight_Ck.to(wide)
        if self.moe.over_chosen or self.router.norm_topk_prob:
            # Shares scaled to sum to one are the softmax over the chosen logits.
            share_Ck = torch.softmax(logits_CE.gather(1, expert_Ck).to(wide), -1)
            dbest_Ck = share_Ck * (dweight_Ck - (dweight_Ck * share_Ck).sum(-1, keepdim=True))
            dlogits_CE = torch.zeros_like(logits_CE).scatter_(1, expert_Ck, dbest_Ck.to(logits_CE.dtype))
        else:
            share_CE = torch.softmax(logits_CE, -1, dtype=wide)
            dshare_CE = torch.zeros_like(share_CE).scatter_(1, expert_Ck, dweight_Ck)
            dlogits_CE = share_CE * (dshare_CE - (dshare_CE * share_CE).sum(-1, keepdim=True))
            dlogits_CE = dlogits_CE.to(logits_CE.dtype)
        dx_CM.addmm_(dlogits_CE, self.router.weight.detach())
        if self.router.weight.requires_grad:
            grads[self.router.weight] = dlogits_CE.t() @ x_CM
        bias = getattr(self.router, "bias", None)
        if bias is not None and bias.requires_grad:
            grads[bias] = dlogits_CE.sum(0)

    # ---- what gpt-oss does in another way

    def _norm(self, x_CM: Tensor, module: Any) -> tuple[Tensor, Tensor]:
        return super()._norm(x_CM, self.scales[module])

    def _norm_backward(
        self, dy_CM: Tensor, x_CM: Tensor, module: Any, rstd_C: Tensor, add: Tensor | None, grads: Grads
    ) -> Tensor:
        scale = self.scales[module]
        found: Grads = {}
        dx_CM = super()._norm_backward(dy_CM, x_CM, scale, rstd_C, add, found)
        if scale.weight in found:
            grads[module.weight] = found[scale.weight]
        return dx_CM

    def _rotate(self, q: Tensor | None, k: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Any]:
        return super()._rotate(q, k, self._whole(cos_sin))

    def _unrotate(self, dq, dk, q, k, cos_sin, stats, grads):  # type: ignore[no-untyped-def]
        return super()._unrotate(dq, dk, q, k, self._whole(cos_sin), stats, grads)

    def _whole(self, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotary tables [C, D]; gpt-oss's hold each angle once, [C, D / 2]."""
        cos, sin = cos_sin
        if cos.shape[-1] == self.head_dim:
            return cos_sin
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


class _Scale:
    """A norm as `FusedLayer` reads it. A weight that multiplies in fp32 stands as its distance from one, which is how the op
    takes a norm with one rounding."""

    def __init__(self, module: Any, wide: bool) -> None:
        weight = module.weight
        self.variance_epsilon = module.variance_epsilon
        self.weight: Tensor = weight
        if wide:
            self.weight = weight.detach().to(wide_dtype(weight.dtype)) - 1
            self.weight.requires_grad_(weight.requires_grad)
