"""y = x W' for few rows of x, W in 4 bits: codes are read once and become numbers in registers.

Where every weight is used a few times only, reading it is the whole cost: 4-bit codes are read in a quarter of the time of 16-bit
weights. For many rows, dequantize once (`dequant`) and use a plain matrix product.

Shape suffixes: B rows, I input features, O output features, N all columns of the result, R ranks of a group's adapters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import decode_reference
from .dequant import MX_BLOCK
from .dispatch import check_rows, check_shape, implementation

FEW_ROWS = 64
MOST_PARTS = 3
KINDS = ("nf4", "mxfp4")


@dataclass(frozen=True)
class FourBitRows:
    """A weight [rows, columns] in 4 bits, as `kernels.dequant` takes it.

    Attributes:
        kind: "nf4" or "mxfp4".
        rows, columns: output and input features; columns is a multiple of the block.
        codes: uint8, contiguous, rows * columns / 2 elements of any shape.
        scales: one per block in row-major order: fp32, or uint8 with `nested` (NF4); uint8 exponents (MXFP4).
        block: weights that share a scale; 32 for MXFP4, a multiple of 32 for NF4.
        nested: (scales, table, offset) of double quantization, NF4 only.
    """

    kind: str
    rows: int
    columns: int
    codes: Tensor
    scales: Tensor
    block: int = 64
    nested: tuple[Tensor, Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"FourBitRows: kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.kind == "mxfp4" and (self.block != MX_BLOCK or self.nested is not None):
            raise ValueError(f"FourBitRows: block={self.block}: MXFP4 has blocks of {MX_BLOCK} and no nested scales")
        if self.block < 32 or self.block & (self.block - 1) or self.columns % self.block:
            raise ValueError(
                f"FourBitRows: block={self.block}: expected a power of two from 32 up that divides columns={self.columns}"
            )
        for name, x, count in (
            ("codes", self.codes, self.rows * self.columns // 2),
            ("scales", self.scales, self.rows * self.columns // self.block),
        ):
            if x.numel() != count or not x.is_contiguous():
                raise ValueError(
                    f"FourBitRows: {name} has shape {tuple(x.shape)}, strides {x.stride()}; expected {count} contiguous elements"
                )
        wide = torch.float32 if self.kind == "nf4" and self.nested is None else torch.uint8
        for name, x, dtype in (("codes", self.codes, torch.uint8), ("scales", self.scales, wide)):
            if x.dtype != dtype:
                raise ValueError(f"FourBitRows: {name} is {x.dtype}; expected {dtype}")

    @property
    def form(self) -> tuple[str, int, int, bool]:
        """What weights of one launch must share."""
        return self.kind, self.columns, self.block, self.nested is not None


def fourbit_matmul(x_BI: Tensor, parts: Sequence[FourBitRows], out_BN: Tensor, *, a_RI: Tensor | None = None) -> Tensor:
    """Products of x with one to three weights, side by side, and with the adapters' first matrices, in one launch.

    Beyond a few rows a dequantized weight is rounded to x's dtype, as a plain matrix product needs it; products are summed in
    fp32, in an order that depends on the shapes alone.

    Args:
        x_BI: [B, I], B at most FEW_ROWS on a CUDA device; any stride along B.
        parts: weights of one kind, block and number of columns I.
        out_BN: [B, N] in x's dtype, any stride along B: columns [0, O) take x W', O the rows of all parts, and with a_RI the
            columns [O, O + R) take x A'. N may be larger; what is left stays as it is.
        a_RI: [R, I] in x's dtype, contiguous.

    Returns:
        out.
    """
    op = "fourbit_matmul"
    if not 1 <= len(parts) <= MOST_PARTS:
        raise ValueError(f"{op}: {len(parts)} parts; expected 1 to {MOST_PARTS}")
    if any(part.form != parts[0].form for part in parts):
        forms = [part.form for part in parts]
        raise ValueError(f"{op}: parts are of different forms {forms}; expected one kind, columns, block and nesting")
    B, features, R = len(x_BI), sum(part.rows for part in parts), 0 if a_RI is None else len(a_RI)
    check_shape(op, "x", x_BI, (B, parts[0].columns), "the weights' columns")
    if out_BN.dim() != 2 or len(out_BN) != B or out_BN.shape[1] < features + R or out_BN.dtype != x_BI.dtype:
        raise ValueError(
            f"{op}: out has shape {tuple(out_BN.shape)} and dtype {out_BN.dtype}; expected {B} rows of at least {features + R} "
            f"columns in {x_BI.dtype}"
        )
    if a_RI is not None:
        check_shape(op, "a", a_RI, (R, x_BI.shape[1]), "x")
        if a_RI.dtype != x_BI.dtype or not a_RI.is_contiguous():
            raise ValueError(f"{op}: a is {a_RI.dtype} with strides {a_RI.stride()}; expected contiguous {x_BI.dtype}")
    if x_BI.is_cuda and B > FEW_ROWS:
        raise ValueError(
            f"{op}: x has {B} rows; expected at most {FEW_ROWS}: beyond that dequantize and use a matrix product"
        )
    check_rows(op, x=x_BI, out=out_BN)
    implementation(x_BI, "fourbit_matmul", decode_reference).fourbit_matmul(x_BI, parts, out_BN, a_RI)
    return out_BN
