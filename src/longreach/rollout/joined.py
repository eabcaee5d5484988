"""Linear layers that share an input as one matrix product a step, adapters and all.

The weights of a group, and under them its adapters' A, lie in one tensor: y and t = x A' come out of one product. The model's own
parameters become views of that tensor, so there is no second copy; they stay the same parameters, trained, saved and loaded as
before. Weights in 4 bits stay where they are: their kernel takes the layers of a group side by side. Adapters are copied (in the
compute dtype) at the start of each rollout.

Shape suffixes: B rows, I input features, O output features of the group, r common rank, R ranks of the group side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.dequant import MX_BLOCK
from ..kernels.few_row_matmul import few_row_matmul
from ..kernels.fourbit_matmul import FEW_ROWS, FourBitRows, fourbit_matmul
from ..lora import Linear
from ..quant import NF4
from ..quant.linear import FourBitLinear

FEW_DENSE_ROWS = 16  # up to which the kernel for few rows is faster than cuBLAS (H200)


class JoinedLinears:
    """A group of linear layers with one input, all in the compute dtype or all in 4 bits.

    Attributes:
        lora_b_Or: the adapters' B with their scale, rows as the outputs; None without adapters.
        bias_O: None if no layer has one.
        width: O, without the columns of t.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self.modules, self.dtype = tuple(modules), dtype
        lines = self._lines()
        self.shapes = [_shape(line) for line in lines]
        self.rows = [line.base.out_features for line in lines]
        self.inputs = lines[0].base.in_features
        self.width = sum(self.rows)
        self.rank = max(0 if line.a is None else len(line.a) for line in lines)
        self.ranks = self.rank * len(lines)
        device = lines[0].base.weight.device
        self.lora_b_Or = torch.zeros(self.width, self.rank, dtype=dtype, device=device) if self.rank else None
        biased = any(line.base.bias is not None for line in lines)
        self.bias_O = torch.zeros(self.width, dtype=dtype, device=device) if biased else None
        self.parts = [_stored(line.base) for line in lines if isinstance(line.base, FourBitLinear)]
        if self.parts:
            self.weight_OI = torch.zeros(self.ranks, self.inputs, dtype=dtype, device=device)  # A alone
        elif len(lines) == 1 and not self.ranks:
            self.weight_OI = lines[0].base.weight.detach()
        else:
            self.weight_OI = torch.zeros(self.width + self.ranks, self.inputs, dtype=dtype, device=device)
            _join([line.base for line in lines], self.weight_OI)
        self.a_RI = self.weight_OI[len(self.weight_OI) - self.ranks :]
        self.places = [line.base.weight.data_ptr() for line in lines]

    @staticmethod
    def joins(modules: Sequence[nn.Module], dtype: torch.dtype) -> bool:
        """Whether a group can be joined."""
        lines = [Linear.of(m, dtype) for m in modules]
        if any(line is None for line in lines):
            return False
        fourbit = [isinstance(line.base, FourBitLinear) for line in lines if line is not None]
        plain = [line.base.weight.dtype == dtype for line in lines if line is not None]
        if all(fourbit):
            return all(_fits_kernel(line.base) for line in lines if line is not None)
        return all(plain) and not any(fourbit)

    def _lines(self) -> list[Linear]:
        found = [Linear.of(m, self.dtype) for m in self.modules]
        return [line for line in found if line is not None]

    def current(self) -> bool:
        """Whether the layers are still those that were joined: same weights in the same place, adapters of the same shape."""
        lines = self._lines()
        return (
            len(lines) == len(self.modules)
            and [_shape(line) for line in lines] == self.shapes
            and [line.base.weight.data_ptr() for line in lines] == self.places
        )

    def refresh(self) -> None:
        """Copy adapters and biases as they are now."""
        at, rank_at = 0, 0
        for line in self._lines():
            rows = slice(at, at + line.base.out_features)
            if self.bias_O is not None and line.base.bias is not None:
                self.bias_O[rows] = line.base.bias.detach()
            if self.lora_b_Or is not None and line.a is not None and line.b is not None:
                rank = len(line.a)
                self.a_RI[rank_at : rank_at + rank] = line.a.detach()
                self.lora_b_Or[rows, :rank] = line.b.detach() * line.scale
            at, rank_at = rows.stop, rank_at + self.rank

    def __call__(self, x_BI: Tensor) -> Tensor:
        """[B, O + R]: outputs without bias and adapters, then t."""
        if not self.parts:
            if x_BI.is_cuda and len(x_BI) <= FEW_DENSE_ROWS:
                return few_row_matmul(x_BI, self.weight_OI)
            return F.linear(x_BI, self.weight_OI)
        out_BN = x_BI.new_empty(len(x_BI), self.width + self.ranks)
        if len(x_BI) <= FEW_ROWS:
            return fourbit_matmul(x_BI, self.parts, out_BN, a_RI=self.a_RI if self.ranks else None)
        at = 0
        for module, rows in zip(self.modules, self.rows):
            base: Any = getattr(module, "base_layer", module)
            torch.mm(x_BI, base.dequantize(self.dtype).t(), out=out_BN[:, at : at + rows])
            at += rows
        if self.ranks:
            torch.mm(x_BI, self.a_RI.t(), out=out_BN[:, self.width :])
        return out_BN


def _join(bases: Sequence[nn.Linear], weight_OI: Tensor) -> None:
    """Weights into one tensor; the parameters become views of it."""
    at = 0
    for base in bases:
        part = weight_OI[at : at + base.out_features]
        part.copy_(base.weight.detach())
        base.weight.data = part
        at += base.out_features


def _fits_kernel(base: Any) -> bool:
    """Whether blocks of scales end where rows do."""
    form = base.format
    return base.in_features % (form.block if isinstance(form, NF4) else MX_BLOCK) == 0


def _stored(base: FourBitLinear) -> FourBitRows:
    """A 4-bit weight as the kernel takes it."""
    packed = base.packed
    tensors, form = packed.tensors, packed.format
    if isinstance(form, NF4):
        nested = (tensors["nested_absmax"], tensors["nested_map"], tensors["nested_offset"]) if form.double else None
        scales, block = tensors["absmax"], form.block
    else:
        nested, scales, block = None, tensors["scales"], MX_BLOCK
    return FourBitRows(form.name, base.out_features, base.in_features, tensors["codes"], scales, block, nested)


def _shape(line: Linear) -> tuple[Any, ...]:
    base = line.base
    return (base.out_features, base.in_features, base.bias is not None, 0 if line.a is None else len(line.a))
