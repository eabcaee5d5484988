"""Transformers' own loop over experts, run on weights that are stored in 4 bits: the independent check of everything else here.

An expert's weight is made when the loop asks for it, and again in the backward: two of them exist at a time.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels import Gating

if TYPE_CHECKING:
    from .experts import Adapters, FourBitExperts

GPT_OSS = "GptOssExperts"
# Transformers' classes whose experts are silu(gate) * up without bias, stored [E, out, in].
SILU = ("MixtralExperts", "Qwen2MoeExperts", "Qwen3MoeExperts")


def gating_of(base: Any) -> Gating | None:
    """How a module's experts combine gate and up; None for a kind that is not known."""
    kind = getattr(base, "stock", type(base)).__name__
    if kind == GPT_OSS:
        return Gating(interleaved=True, limit=float(base.limit), alpha=float(base.alpha))
    if kind in SILU and type(getattr(base, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation"):
        return Gating()
    return None


def stock_forward(
    experts: FourBitExperts, x_TM: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, adapters: Adapters
) -> Tensor:
    """What the stock module gives on the dequantized weights, adapters added to them."""
    stacks = {name: _Stack(experts, name, x_TM.dtype, adapters.get(name)) for name in ("gate_up_proj", "down_proj")}
    stand_in = SimpleNamespace(
        num_experts=experts.num_experts, alpha=experts.alpha, limit=experts.limit, act_fn=getattr(experts, "act_fn", None),
        gate_up_proj_bias=experts.gate_up_proj_bias, down_proj_bias=experts.down_proj_bias, **stacks,
    )  # fmt: skip
    if hasattr(experts.stock, "_apply_gate"):
        stand_in._apply_gate = lambda gate_up: experts.stock._apply_gate(stand_in, gate_up)
    loop = inspect.unwrap(experts.stock.forward)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: _Stack.pack(stacks.values(), t), lambda held: held.again() if isinstance(held, _Again) else held
    ):
        return loop(stand_in, x_TM, expert_Tk, weight_Tk)


class _Stack:
    """A weight of all experts, of which one is made at a time."""

    def __init__(
        self, experts: FourBitExperts, name: str, dtype: torch.dtype, adapter: tuple[Tensor, Tensor, float] | None
    ) -> None:
        self.experts, self.name, self.dtype, self.adapter = experts, name, dtype, adapter
        self.current: tuple[int, Tensor] | None = None

    def __getitem__(self, expert: Any) -> Tensor:
        made = self.make(int(expert))
        self.current = (int(expert), made)
        return made

    def make(self, e: int) -> Tensor:
        """An expert's weight in the stock layout."""
        granule = self.experts.granule
        first = e // granule * granule
        last = min(first + granule, self.experts.num_experts)
        weight = self.experts.dequantize_range(self.name, slice(first, last), self.dtype)[e - first]
        weight = weight.t().contiguous() if self.experts.is_transposed else weight.clone()
        if self.adapter is None:
            return weight
        a_ErI, b_ErO, scale = self.adapter
        a, b = a_ErI[e].to(self.dtype), b_ErO[e].to(self.dtype)
        return weight + scale * (a.t() @ b if self.experts.is_transposed else b.t() @ a)

    @staticmethod
    def pack(stacks: Any, saved: Tensor) -> Any:
        """What autograd keeps for the backward: how to make a weight again in its place."""
        for stack in stacks:
            if stack.current is not None:
                e, made = stack.current
                if saved.untyped_storage().data_ptr() == made.untyped_storage().data_ptr():
                    return _Again(stack, e, saved)
        return saved


class _Again:
    """A view of an expert's weight, to be made again."""

    def __init__(self, stack: _Stack, expert: int, saved: Tensor) -> None:
        self.stack, self.expert = stack, expert
        self.view = saved.shape, saved.stride(), saved.storage_offset()

    def again(self) -> Tensor:
        with torch.no_grad():
            return self.stack.make(self.expert).as_strided(*self.view)
