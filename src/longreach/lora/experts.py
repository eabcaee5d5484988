"""Experts as the mixture op sees them: weights, biases, and at most one adapter for each of the two products.

Adapters are PEFT's own for `target_parameters` (`mlp.experts.gate_up_proj`, `mlp.experts.down_proj`): lora_A [r * E, in] and
lora_B [out, r * E], of which an expert has lora_A[e * r : (e + 1) * r] and lora_B[:, e :: E]. They are used as they are, and no
delta [E, in, out] is ever made.

Shape suffixes: E experts, r rank, I input features, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import Gating
from ..quant.experts import PRODUCTS, FourBitExperts
from ..quant.mixture import DenseWeights, ExpertWeights, LowRank, LowRankGrads
from ..quant.stock_experts import gating_of
from .linear import Grads


@dataclass(frozen=True)
class ExpertAdapter:
    """PEFT's two matrices for one parameter of all experts."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float
    rank: int

    def stacked(self) -> tuple[Tensor, Tensor]:
        """a [E, r, I] and b [E, r, O], views of the parameters."""
        return self.a.view(-1, self.rank, self.a.shape[1]), self.b.view(len(self.b), self.rank, -1).permute(2, 1, 0)

    def low_rank(self, dtype: torch.dtype) -> LowRank:
        """In the layout and dtype of the op."""
        return LowRank.of(*self.stacked(), self.scale, dtype, (self.a.requires_grad, self.b.requires_grad))

    def put(self, found: LowRankGrads, grads: Grads) -> None:
        """Gradients in the shapes of the parameters."""
        da_ErI, db_ErO = found.done()
        if da_ErI is not None:
            grads[self.a] = da_ErI.reshape(self.a.shape)
        if db_ErO is not None:
            grads[self.b] = db_ErO.permute(2, 1, 0).reshape(self.b.shape)


class Experts:
    """All experts of one layer; made by `Experts.of`."""

    def __init__(self, base: Any, gating: Gating, adapters: dict[str, ExpertAdapter]) -> None:
        self.base, self.gating = base, gating
        self.adapters = tuple(adapters.get(name) for name in PRODUCTS)

    @classmethod
    def of(cls, module: nn.Module) -> Experts | None:
        """The view of Transformers' experts, bare or in PEFT's wrappers; None for what this form can't express (other kinds of
        experts, several or merged adapters, weights that are trained themselves)."""
        unwrapped = unwrap(module)
        if unwrapped is None:
            return None
        base, adapters = unwrapped
        gating = gating_of(base)
        if gating is None or any(p.requires_grad for p in base.parameters(recurse=False)):
            return None
        return cls(base, gating, adapters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that the op reads."""
        found = [p for adapter in self.adapters if adapter is not None for p in (adapter.a, adapter.b)]
        return [*found, *self.base.parameters(recurse=False)]

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether products can run in a dtype: 4 bits give any."""
        return isinstance(self.base, FourBitExperts) or self.base.gate_up_proj.dtype == dtype

    def weights(self, dtype: torch.dtype, keep: bool) -> ExpertWeights:
        """For one pass over a layer; `keep` as for `FourBitExperts.weights`."""
        base = self.base
        if isinstance(base, FourBitExperts):
            return base.weights(dtype, keep)
        gate_up, down = (getattr(base, name).detach() for name in PRODUCTS)
        if not base.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        biases = [getattr(base, name + "_bias").detach() if base.has_bias else None for name in PRODUCTS]
        return DenseWeights(gate_up, down, self.gating, *biases)

    def low_ranks(self, dtype: torch.dtype) -> tuple[LowRank | None, LowRank | None]:
        """Adapters of the two products, for one pass over a layer."""
        first, second = (None if adapter is None else adapter.low_rank(dtype) for adapter in self.adapters)
        return first, second

    def put(self, found: tuple[LowRankGrads | None, LowRankGrads | None], grads: Grads) -> None:
        """What `mixture_backward` found for the adapters, by parameter."""
        for adapter, sums in zip(self.adapters, found):
            if adapter is not None and sums is not None:
                adapter.put(sums, grads)


def unwrap(module: Any) -> tuple[Any, dict[str, ExpertAdapter]] | None:
    """Experts inside PEFT's nested parameter wrappers, and the active adapter of each parameter."""
    adapters: dict[str, ExpertAdapter] = {}
    while hasattr(module, "base_layer"):
        if not hasattr(module, "parameter_name") or module.parameter_name not in PRODUCTS or module.merged_adapters:
            return None
        names = [] if module.disable_adapters else [n for n in module.active_adapters if n in module.lora_A]
        if len(names) > 1:
            return None
        if names:
            adapter = _adapter(module, names[0])
            if adapter is None:
                return None
            adapters[module.parameter_name] = adapter
        module = module.base_layer
    return module, adapters


def _adapter(wrapper: Any, name: str) -> ExpertAdapter | None:
    a, b = wrapper.lora_A[name], wrapper.lora_B[name]
    # PEFT has to know which axis is the input's; where it takes them the other way round, A acts on the output.
    turned = getattr(wrapper, "_did_swap_in_out_features", False)
    transposed = getattr(wrapper.get_base_layer(), "is_transposed", False)
    if type(a) is not nn.Linear or type(b) is not nn.Linear or b.bias is not None or turned == transposed:
        return None
    return ExpertAdapter(a.weight, b.weight, float(wrapper.scaling[name]), int(wrapper.r[name]))


def expert_parameters(model: nn.Module) -> list[str]:
    """Names for PEFT's `target_parameters` that reach all experts of known kinds; none for a dense model."""
    owners = {".".join(name.split(".")[-2:]) for name, module in model.named_modules() if gating_of(module) is not None}
    return [f"{owner}.{name}" for owner in sorted(owners) for name in PRODUCTS]
