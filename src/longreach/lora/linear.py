"""Linear layers that share an input, with their adapters, as few matrix products; forward and hand-written backward.

y_i = x W_i' + b_i + s_i (x A_i') B_i'   (LoRA, arXiv 2106.09685, equation 3)

The A_i of a group stand under one another, so that x is read once for all of them; the low-rank product is added inside the
matrix product that makes it. PEFT's parameters are used as they are; products run in the dtype of x. A weight that is stored in
4 bits or in another dtype is made once for the pass.

Shape suffixes: C rows, I input features, O output features, r rank (R: the ranks of a group side by side).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..quant.linear import FourBitLinear

PLAIN = (nn.Linear, FourBitLinear)
Grads = dict[Tensor, Tensor]  # by parameter


class Linear:
    """One linear layer for one pass: weight and bias in the compute dtype, and at most one adapter.

    Args:
        base: the layer; its weight may be in 4 bits or in another floating dtype than the pass computes in.
        dtype: of the products; None for the weight's own.
        a, b, scale: the adapter.
        keep: make a weight that is stored otherwise once and keep it as long as this object lives (for a pass over many
            chunks); False makes it for each product, which needs room for one weight only.
    """

    def __init__(
        self,
        base: nn.Linear,
        a: nn.Parameter | None = None,
        b: nn.Parameter | None = None,
        scale: float = 1.0,
        *,
        dtype: torch.dtype | None = None,
        keep: bool = True,
    ):
        if dtype is None and isinstance(base, FourBitLinear):
            raise ValueError("Linear: a weight in 4 bits has no dtype to compute in; give dtype=")
        self.base, self.keep = base, keep
        self.dtype = base.weight.dtype if dtype is None else dtype
        self.bias = None if base.bias is None else base.bias.detach().to(self.dtype)
        self.a, self.b, self.scale = a, b, scale
        self._made: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype | None = None, *, keep: bool = True) -> Linear | None:
        """The view of a torch, 4-bit or PEFT linear layer; None for what this form can't express (dropout, DoRA, several
        adapters)."""
        if type(module) in PLAIN:
            return cls(module, dtype=dtype, keep=keep)  # type: ignore[arg-type]
        lora: Any = module
        if not (hasattr(lora, "base_layer") and hasattr(lora, "lora_A") and type(lora.base_layer) in PLAIN):
            return None
        names = [] if lora.disable_adapters else [n for n in lora.active_adapters if n in lora.lora_A]
        if not names:
            return cls(lora.base_layer, dtype=dtype, keep=keep) if not lora.merged_adapters else None
        dropout = lora.lora_dropout[names[0]]
        drops = isinstance(dropout, nn.Dropout) and dropout.p > 0 and dropout.training
        if len(names) > 1 or lora.merged_adapters or drops or getattr(lora, "lora_variant", None):
            return None
        a, b = lora.lora_A[names[0]], lora.lora_B[names[0]]
        if type(a) is not nn.Linear or type(b) is not nn.Linear or b.bias is not None:
            return None
        return cls(lora.base_layer, a.weight, b.weight, float(lora.scaling[names[0]]), dtype=dtype, keep=keep)

    @property
    def weight(self) -> Tensor:
        """[O, I] in the compute dtype."""
        if self._made is not None:
            return self._made
        base = self.base
        if not isinstance(base, FourBitLinear) and base.weight.dtype == self.dtype:
            return base.weight
        made = base.dequantize(self.dtype) if isinstance(base, FourBitLinear) else base.weight.detach().to(self.dtype)
        if self.keep:
            self._made = made
        return made

    @property
    def parameters(self) -> list[nn.Parameter]:
        everything: tuple[Any, ...] = (self.base.weight, self.base.bias, self.a, self.b)
        return [p for p in everything if p is not None]


class LinearGroup:
    """Linear layers with one input. Made for one layer pass: adapters are cast and joined once for all chunks."""

    def __init__(self, linears: Sequence[Linear], dtype: torch.dtype) -> None:
        self.linears = tuple(linears)
        adapted = [line.a.detach().to(dtype) for line in self.linears if line.a is not None]
        self.a_RI = torch.cat(adapted) if adapted else None
        self.b_Or = [None if line.b is None else line.b.detach().to(dtype) for line in self.linears]
        self.ranks: list[slice] = []
        at = 0
        for line in self.linears:
            rank = 0 if line.a is None else len(line.a)
            self.ranks.append(slice(at, at + rank))
            at += rank

    def forward(self, x_CI: Tensor, first: int = 0) -> tuple[list[Tensor], Tensor | None]:
        """Outputs, one [C, O] per layer from the `first` on, and x A' [C, R], which the backward wants back."""
        t_CR = self.low_rank(x_CI)
        outs = []
        for line, b_Or, rank in zip(self.linears[first:], self.b_Or[first:], self.ranks[first:]):
            y_CO = F.linear(x_CI, line.weight, line.bias)
            if b_Or is not None and t_CR is not None:
                y_CO.addmm_(t_CR[:, rank], b_Or.t(), alpha=line.scale)
            outs.append(y_CO)
        return outs, t_CR

    def low_rank(self, x_CI: Tensor) -> Tensor | None:
        """x A' [C, R]; None without adapters."""
        return None if self.a_RI is None else x_CI @ self.a_RI.t()

    def add_to(self, residual_CO: Tensor, x_CI: Tensor) -> tuple[Tensor, Tensor | None]:
        """residual + y of a group of one, without a tensor for y; and x A'."""
        if residual_CO.dtype != x_CI.dtype:  # a residual stream in fp32 beside fp16 products
            (y_CO,), t_CR = self.forward(x_CI)
            return residual_CO + y_CO, t_CR
        (line,), (b_Or,) = self.linears, self.b_Or
        sum_CO = torch.addmm(residual_CO, x_CI, line.weight.t())
        if line.bias is not None:
            sum_CO += line.bias
        t_CR = self.low_rank(x_CI)
        if t_CR is not None and b_Or is not None:
            sum_CO.addmm_(t_CR, b_Or.t(), alpha=line.scale)
        return sum_CO, t_CR

    def backward(
        self, dys_CO: Sequence[Tensor], x_CI: Tensor, t_CR: Tensor | None, grads: Grads, *, need_dx: bool = True
    ) -> Tensor | None:
        """dx [C, I] of the group (None unless needed); puts the gradient of every trainable parameter into `grads`."""
        dt_CR = self.low_rank_backward(dys_CO)
        dx_CI = self.input_backward(dys_CO, dt_CR) if need_dx else None
        self.parameter_backward(dys_CO, x_CI, t_CR, dt_CR, grads)
        return dx_CI

    def low_rank_backward(self, dys_CO: Sequence[Tensor]) -> Tensor | None:
        """Gradient of x A' [C, R]; None without adapters."""
        if self.a_RI is None:
            return None
        dt_CR = dys_CO[0].new_empty(len(dys_CO[0]), len(self.a_RI))
        for line, dy_CO, b_Or, rank in zip(self.linears, dys_CO, self.b_Or, self.ranks):
            if b_Or is not None:
                torch.mul(dy_CO @ b_Or, line.scale, out=dt_CR[:, rank])
        return dt_CR

    def input_backward(self, dys_CO: Sequence[Tensor], dt_CR: Tensor | None) -> Tensor:
        """dx [C, I] from the outputs' gradients and `low_rank_backward`."""
        dx_CI = dys_CO[0] @ self.linears[0].weight
        for line, dy_CO in zip(self.linears[1:], dys_CO[1:]):
            dx_CI.addmm_(dy_CO, line.weight)
        return dx_CI if dt_CR is None or self.a_RI is None else dx_CI.addmm_(dt_CR, self.a_RI)

    def parameter_backward(
        self, dys_CO: Sequence[Tensor], x_CI: Tensor, t_CR: Tensor | None, dt_CR: Tensor | None, grads: Grads
    ) -> None:
        """Gradients of what is trained: weights, biases, adapters."""
        for line, dy_CO, rank in zip(self.linears, dys_CO, self.ranks):
            weight, bias = line.base.weight, line.base.bias
            if weight.requires_grad:
                grads[weight] = dy_CO.t() @ x_CI
            if bias is not None and bias.requires_grad:
                grads[bias] = dy_CO.sum(0)
            if line.b is not None and line.b.requires_grad and t_CR is not None:
                grads[line.b] = (dy_CO.t() @ t_CR[:, rank]).mul_(line.scale)
        if dt_CR is not None and any(line.a is not None and line.a.requires_grad for line in self.linears):
            da_RI = dt_CR.t() @ x_CI
            for line, rank in zip(self.linears, self.ranks):
                if line.a is not None and line.a.requires_grad:
                    grads[line.a] = da_RI[rank]
