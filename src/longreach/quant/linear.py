"""A linear layer whose frozen weight is stored in 4 bits.

It computes with a plain matrix product on the dequantized weight, forward and for the gradient of its input; the dequantized
weight is never kept for the backward. Where many products use one weight in a row, `shared_weights` makes it once.

Shape suffixes: C rows, I input features, O output features.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .formats import Format, Packed

# Tokens of a pass up to which a hand-written dense layer makes a weight for each product, in room for one weight: a step of so
# few tokens waits for kernel launches more than for dequantization.
FEW_TOKENS = 8192


class FourBitLinear(nn.Linear):
    """y = x W' + b with W [O, I] in a 4-bit format.

    Attributes:
        format: of the weight.
        weight: its codes, a frozen uint8 parameter; the other tensors of the format are buffers of their names.
        bias: [O] or None, an ordinary parameter.

    Products run in the dtype of x (under autocast in autocast's), and so does the dequantized weight. The scales keep their
    dtype when the module is cast.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: Format,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """An empty layer, to be filled by `adopt` or `load_state_dict`; `dtype` is the bias's."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.format = in_features, out_features, format
        for name, (shape, kind) in format.layout((out_features, in_features)).items():
            self._put(name, torch.empty(shape, dtype=kind, device=device))
        made = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", made)

    @classmethod
    def of(cls, linear: nn.Linear, format: Format) -> FourBitLinear:
        """A linear layer quantized; its bias is shared."""
        made = cls(linear.in_features, linear.out_features, False, format=format, device="meta")
        made.adopt(format.quantize(linear.weight))
        made.bias = linear.bias
        return made.train(linear.training)

    @property
    def packed(self) -> Packed:
        """The stored weight."""
        shape = (self.out_features, self.in_features)
        tensors = {name: self.weight.data if name == "codes" else self._buffers[name] for name in self._part_names()}
        return Packed(self.format, shape, tensors)  # type: ignore[arg-type]

    def adopt(self, packed: Packed, name: str = "weight") -> None:
        """Take a stored weight. Raises FormatError, naming the tensor after `name`, if it does not fit."""
        shape = (self.out_features, self.in_features)
        if packed.shape != shape:
            raise ValueError(f"{name}: a weight of shape {list(packed.shape)} was stored; the layer has {list(shape)}")
        packed.check(name)
        for old in set(self._part_names()) - {"codes"}:
            del self._buffers[old]
        self.format = packed.format
        for part, tensor in packed.tensors.items():
            self._put(part, tensor)

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The weight [O, I] in `dtype`."""
        return self.packed.dequantize(dtype, out)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, self, bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}"

    def _part_names(self) -> list[str]:
        return list(self.format.layout((self.out_features, self.in_features)))

    def _put(self, name: str, tensor: Tensor) -> None:
        if name == "codes":
            self.weight = nn.Parameter(tensor, requires_grad=False)
        else:
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FourBitLinear:
        """Moves go through; casts do not reach the scales, whose dtype is part of the format."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class _Product(torch.autograd.Function):
    """x W' + b; the backward makes the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: FourBitLinear, bias: Tensor | None) -> Tensor:
        ctx.linear = linear
        return F.linear(x, _weight(linear, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        need_x, _, need_bias = ctx.needs_input_grad
        dx = dy @ _weight(ctx.linear, dy.dtype) if need_x else None
        return dx, None, dy.reshape(-1, dy.shape[-1]).sum(0) if need_bias else None


Made = dict[tuple[nn.Module, torch.dtype], Tensor]


class _Shared(threading.local):
    made: Made | None = None


_shared = _Shared()


@contextlib.contextmanager
def shared_weights(share: bool = True) -> Iterator[None]:
    """Inside, every 4-bit layer makes its weight once, forward and backward; at the end the weights are gone.

    For one pass of a decoder layer over many chunks. Of this thread; an inner one does nothing. The weights must not change
    inside.

    Args:
        share: False does nothing: where a pass has one chunk, keeping weights costs memory for little time.
    """
    if not share or _shared.made is not None:
        yield
        return
    _shared.made = {}
    try:
        yield
    finally:
        _shared.made = None


def shared(module: nn.Module, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
    """What `make` gives, kept for the module until the end of the enclosing `shared_weights`, if there is one."""
    made = _shared.made
    if made is None:
        return make()
    key = (module, dtype)
    if key not in made:
        made[key] = make()
    return made[key]


def _weight(linear: FourBitLinear, dtype: torch.dtype) -> Tensor:
    return shared(linear, dtype, lambda: linear.dequantize(dtype))
