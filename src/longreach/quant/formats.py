"""The 4-bit weight formats: what tensors a weight is stored in, how it is quantized, and what it means.

One idea: 4-bit codes, a table of 16 values, a scale per block of weights. NF4 is stored as bitsandbytes stores it (blocks of 64
in row-major order, scales quantized once more), MXFP4 as gpt-oss does (blocks of 32 along the input features, scales that are
powers of two). A stored weight is a `Packed`: the format, the weight's shape, and its tensors by name.

Shape suffixes: N weights in row-major order, B blocks, I input features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.dequant import (
    E2M1_VALUES,
    MX_BLOCK,
    NESTED_BLOCK,
    NF4_VALUES,
    dequantize_mxfp4,
    dequantize_nf4,
)

Shape = tuple[int, ...]
Spec = tuple[Shape, torch.dtype]

SLICE = 2**20  # weights quantized at once: bounds the fp32 workspace
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class FormatError(ValueError):
    """A stored weight that does not fit its format; the message names the tensor."""


@dataclass(frozen=True)
class NF4:
    """4-bit NormalFloat (QLoRA, arXiv 2305.14314), in the layout of bitsandbytes.

    Tensors of a weight of N elements in B = ceil(N / block) blocks:
        codes: uint8 [ceil(N / 2), 1], the first of two weights in the high half of a byte.
        absmax: largest magnitude of each block, fp32 [B]; with `double`, uint8 [B] for
            nested_map[absmax] * nested_absmax + nested_offset.
        nested_absmax fp32 [ceil(B / 256)], nested_map fp32 [256], nested_offset fp32 []: with `double` only.

    Attributes:
        block: weights that share a scale.
        double: scales are stored in 8 bits (section 3, "double quantization").
    """

    block: int = 64
    double: bool = True
    name: ClassVar[str] = "nf4"

    def __post_init__(self) -> None:
        if self.block not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            raise ValueError(f"NF4: block={self.block}: expected a power of two from 32 to 4096")

    def layout(self, shape: Shape) -> dict[str, Spec]:
        """Shape and dtype of each tensor of a weight."""
        count = math.prod(shape)
        blocks = -(-count // self.block)
        found: dict[str, Spec] = {
            "codes": ((-(-count // 2), 1), torch.uint8),
            "absmax": ((blocks,), torch.uint8 if self.double else torch.float32),
        }
        if self.double:
            found["nested_absmax"] = ((-(-blocks // NESTED_BLOCK),), torch.float32)
            found["nested_map"] = ((256,), torch.float32)
            found["nested_offset"] = ((), torch.float32)
        return found

    def quantize(self, weight: Tensor) -> Packed:
        """A weight of any shape and of 16 or 32 bits, on any device."""
        _check_weight(self.name, weight)
        bounds = _midpoints(NF4_VALUES, weight.device)
        codes_N, absmax_B = _quantize_blocks(weight.detach().reshape(-1), self.block, bounds)
        if len(codes_N) % 2:
            codes_N = torch.nn.functional.pad(codes_N, (0, 1), value=NF4_VALUES.index(0.0))
        tensors = {"codes": ((codes_N[::2] << 4) | codes_N[1::2])[:, None], "absmax": absmax_B}
        if self.double:
            offset = absmax_B.mean()
            table = dynamic_map().to(weight.device)
            codes_B, nested = _quantize_blocks(absmax_B - offset, NESTED_BLOCK, (table[:-1] + table[1:]) / 2)
            tensors |= {"absmax": codes_B, "nested_absmax": nested, "nested_map": table, "nested_offset": offset}
        return Packed(self, tuple(weight.shape), tensors)

    def dequantize(self, tensors: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Into `out`, contiguous and of the weight's shape, in its dtype."""
        nested = None
        if self.double:
            nested = (tensors["nested_absmax"], tensors["nested_map"], tensors["nested_offset"])
        return dequantize_nf4(tensors["codes"], tensors["absmax"], out, block=self.block, nested=nested)


@dataclass(frozen=True)
class MXFP4:
    """Microscaling FP4 (OCP Microscaling Formats 1.0): e2m1 values, an e8m0 scale for 32 of them along the last axis.

    Tensors of a weight [..., I] in G = ceil(I / 32) groups, as gpt-oss stores them (`*_blocks` and `*_scales`):
        codes: uint8 [..., G, 16], the first of two weights in the low half of a byte.
        scales: uint8 [..., G], the exponent plus 127.
    A last group that is not full is filled with zeros, which no result contains.
    """

    name: ClassVar[str] = "mxfp4"

    def layout(self, shape: Shape) -> dict[str, Spec]:
        """Shape and dtype of each tensor of a weight."""
        groups = (*shape[:-1], -(-shape[-1] // MX_BLOCK))
        return {"codes": ((*groups, MX_BLOCK // 2), torch.uint8), "scales": (groups, torch.uint8)}

    def quantize(self, weight: Tensor) -> Packed:
        """A weight [..., I] of 16 or 32 bits, on any device, with the scales of the specification (section 6.3):
        the largest power of two in a block's largest magnitude, over that of e2m1."""
        _check_weight(self.name, weight)
        shape = tuple(weight.shape)
        flat = weight.detach().reshape(-1, shape[-1])
        if shape[-1] % MX_BLOCK:
            flat = torch.nn.functional.pad(flat, (0, -shape[-1] % MX_BLOCK))
        groups = flat.reshape(-1, MX_BLOCK)
        codes = torch.empty(len(groups), MX_BLOCK // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(len(groups), dtype=torch.uint8, device=weight.device)
        rows = SLICE // MX_BLOCK
        for start in range(0, len(groups), rows):
            part = slice(start, start + rows)
            codes[part], scales[part] = _quantize_e2m1(groups[part].float())
        layout = self.layout(shape)
        return Packed(
            self, shape, {"codes": codes.view(layout["codes"][0]), "scales": scales.view(layout["scales"][0])}
        )

    def dequantize(self, tensors: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Into `out`, contiguous and of the weight's shape, in its dtype."""
        if out.shape[-1] % MX_BLOCK == 0:
            return dequantize_mxfp4(tensors["codes"], tensors["scales"], out)
        whole = out.new_empty(*out.shape[:-1], tensors["scales"].shape[-1] * MX_BLOCK)
        return out.copy_(dequantize_mxfp4(tensors["codes"], tensors["scales"], whole)[..., : out.shape[-1]])


Format = NF4 | MXFP4
FORMATS: dict[str, Format] = {"nf4": NF4(), "mxfp4": MXFP4()}


@dataclass(frozen=True)
class Packed:
    """A weight in 4 bits.

    Attributes:
        format: how to read it.
        shape: of the weight.
        tensors: as `format.layout(shape)` says.
    """

    format: Format
    shape: Shape
    tensors: Mapping[str, Tensor]

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The weight in `dtype`, in `out` if one is given (any tensor of that dtype with enough elements, contiguous)."""
        device = self.tensors["codes"].device
        if out is None:
            out = torch.empty(self.shape, dtype=dtype, device=device)
        return self.format.dequantize(self.tensors, out.view(-1)[: math.prod(self.shape)].view(self.shape))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def check(self, name: str) -> Packed:
        """Itself, if every tensor is there with the shape and dtype of the layout; else FormatError naming the tensor."""
        layout = self.format.layout(self.shape)
        kind = f"a weight of shape {list(self.shape)} in {self.format.name}"
        missing = [part for part in layout if part not in self.tensors]
        if missing:
            raise FormatError(f"{name}: its {missing[0]!r} is missing; {kind} consists of {', '.join(layout)}")
        for part, (shape, dtype) in layout.items():
            tensor = self.tensors[part]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise FormatError(
                    f"{name}: its {part!r} is {str(tensor.dtype)[6:]} {list(tensor.shape)}; {kind} has {str(dtype)[6:]} "
                    f"{list(shape)} there"
                )
        return self


def packed_bytes(format: Format, shape: Shape) -> int:
    """Bytes of a weight of a shape."""
    return sum(math.prod(s) * dtype.itemsize for s, dtype in format.layout(shape).values())


def dynamic_map() -> Tensor:
    """The 256 values of double-quantized scales, fp32, ascending (Dettmers et al., arXiv 2110.02861, section 2.1: dynamic
    tree quantization): for each power of ten from -6 to 0 twice as many fractions as for the one before, with both signs,
    and 0 and 1."""
    return _dynamic_map().clone()


@functools.cache
def _dynamic_map() -> Tensor:
    values = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        fractions = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [fractions, -fractions]
    return torch.cat(values).sort().values


def _check_weight(name: str, weight: Tensor) -> None:
    if weight.dtype not in FLOATS or weight.numel() == 0 or weight.dim() == 0:
        raise ValueError(
            f"{name}: can't quantize {weight.dtype} {list(weight.shape)}; expected a tensor with elements of a floating dtype"
        )


@functools.cache
def _midpoints(values: tuple[float, ...], device: torch.device) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=device)
    return (table[:-1] + table[1:]) / 2


def _quantize_blocks(x_N: Tensor, block: int, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N] of x over its block's largest magnitude, fp32 [B], by the midpoints of an ascending table."""
    count = len(x_N)
    codes_N = torch.empty(count, dtype=torch.uint8, device=x_N.device)
    absmax_B = torch.empty(-(-count // block), dtype=torch.float32, device=x_N.device)
    step = block * max(1, SLICE // block)
    for start in range(0, count, step):
        part = x_N[start : start + step].float()
        size = len(part)
        if size % block:
            part = torch.nn.functional.pad(part, (0, -size % block))
        rows = part.view(-1, block)
        absmax = rows.abs().amax(1)
        scaled = (rows * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
        codes_N[start : start + size] = torch.bucketize(scaled.view(-1)[:size], bounds, out_int32=True).to(torch.uint8)
        absmax_B[start // block : start // block + len(rows)] = absmax
    return codes_N, absmax_B


def _quantize_e2m1(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [G, 16] and scales [G], both uint8, of fp32 groups [G, 32]: nearest value, ties to the even code."""
    largest = groups.abs().amax(1)
    _, exponent = torch.frexp(largest)  # largest = m 2**exponent with m in [0.5, 1)
    # e2m1's largest power is 2**2. What is larger than its 6 then, less than a quarter of a power, is cut off.
    scales = torch.where(largest > 0, exponent - 1 - 2 + 127, 127).clamp_(0, 254).to(torch.int32)
    scaled = torch.ldexp(groups, (127 - scales)[:, None])
    magnitudes = torch.tensor(E2M1_VALUES[:8], device=groups.device)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    size = scaled.abs()
    up, down = (torch.bucketize(size, middles, right=right, out_int32=True) for right in (True, False))
    codes = torch.where(up % 2 == 0, up, down).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scales.to(torch.uint8)
