"""Products of few rows with a whole weight in Triton: up to VECTOR_ROWS in plain arithmetic, beyond on the matrix units.

Sizes of a model are not compile-time constants. Shape suffixes: B rows, I input features, O output features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import padded, parts
from .early_start import launch, wait_for_inputs
from .split_sum import arrivals, finish, share, splits_of

VECTOR_ROWS = 2


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, out_ptr, rows, width, x_row, out_row, ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Weights are fetched one step ahead; the first before the kernel that makes x is done."""
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    inside_O = o_O < rows
    w_at = w_ptr + o_O.to(tl.int64)[:, None] * width
    i_I = tl.arange(0, BLOCK_I)
    acc0 = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    acc1 = acc0
    w_OI = tl.load(w_at + i_I[None, :], mask=inside_O[:, None] & (i_I < width)[None, :], other=0.0)
    wait_for_inputs(EARLY)
    for _ in range(0, width, BLOCK_I):
        next_I = i_I + BLOCK_I
        next_OI = tl.load(w_at + next_I[None, :], mask=inside_O[:, None] & (next_I < width)[None, :], other=0.0)
        wide = w_OI.to(tl.float32)
        acc0 += wide * tl.load(x_ptr + i_I, mask=i_I < width, other=0.0).to(tl.float32)[None, :]
        if ROWS > 1:
            acc1 += wide * tl.load(x_ptr + x_row + i_I, mask=i_I < width, other=0.0).to(tl.float32)[None, :]
        w_OI, i_I = next_OI, next_I
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + o_O, tl.sum(acc0, 1).to(dtype), mask=inside_O)
    if ROWS > 1:
        tl.store(out_ptr + out_row + o_O, tl.sum(acc1, 1).to(dtype), mask=inside_O)


@triton.jit(do_not_specialize=["B"])
def _matrix_kernel(
    x_ptr, w_ptr, out_ptr, partial_ptr, arrived_ptr, rows, width, x_row, out_row, B, splits,
    BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    tile = tl.program_id(0) // splits
    part = tl.program_id(0) % splits
    start, end = share(part, splits, width, BLOCK_I)
    b_B = tl.arange(0, BLOCK_B)
    o_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    inside_O = o_O < rows
    x_at = x_ptr + b_B.to(tl.int64)[:, None] * x_row
    w_at = w_ptr + o_O.to(tl.int64)[:, None] * width
    acc_OB = tl.zeros([BLOCK_O, BLOCK_B], tl.float32)
    for i in tl.range(start, end, BLOCK_I, num_stages=STAGES):
        i_I = i + tl.arange(0, BLOCK_I)
        w_OI = tl.load(w_at + i_I[None, :], mask=inside_O[:, None] & (i_I < width)[None, :], other=0.0)
        x_BI = tl.load(x_at + i_I[None, :], mask=(b_B < B)[:, None] & (i_I < width)[None, :], other=0.0)
        acc_OB = tl.dot(w_OI, tl.trans(x_BI), acc=acc_OB, input_precision=PRECISION)
    finish(
        acc_OB,
        out_ptr,
        out_row,
        o_O,
        inside_O,
        B,
        partial_ptr,
        arrived_ptr,
        tile,
        part,
        splits,
        BLOCK_O,
        BLOCK_B,
        SPLIT,
    )


def few_row_matmul(x_BI: Tensor, weight_OI: Tensor, out: Tensor) -> None:
    B, width = x_BI.shape
    rows = len(weight_OI)
    if B <= VECTOR_ROWS:
        tile = _vector_sizes(rows, width)
        launch(
            _vector_kernel, (parts(rows, tile["BLOCK_O"]),), x_BI, weight_OI, out, rows, width, x_BI.stride(0), out.stride(0),
            ROWS=B, **tile,
        )  # fmt: skip
        return
    tile = _matrix_sizes(B, x_BI.dtype)
    tiles = parts(rows, tile["BLOCK_O"])
    splits = splits_of(tiles, parts(width, tile["BLOCK_I"]))
    partial, arrived = x_BI, x_BI
    if splits > 1:
        size = tiles * splits * tile["BLOCK_O"] * tile["BLOCK_B"]
        partial = torch.empty(size, dtype=torch.float32, device=x_BI.device)
        arrived = arrivals(x_BI.device)
    launch(
        _matrix_kernel, (tiles * splits,), x_BI, weight_OI, out, partial, arrived, rows, width, x_BI.stride(0), out.stride(0),
        B, splits, SPLIT=splits > 1, PRECISION="ieee" if x_BI.dtype == torch.float32 else "tf32", **tile,
    )  # fmt: skip


def _vector_sizes(rows: int, width: int) -> dict[str, int]:
    """The fastest of a sweep over Qwen3-4B's products on an H200 (`bench.decode_kernels --sweep dense`)."""
    if rows > 8192:
        return {"BLOCK_O": 8, "BLOCK_I": 256, "num_warps": 2}
    return {"BLOCK_O": 8 if width > 8192 else 4, "BLOCK_I": 512, "num_warps": 4}


def _matrix_sizes(B: int, dtype: torch.dtype) -> dict[str, int]:
    wide = dtype == torch.float32
    return {"BLOCK_B": max(16, padded(B)), "BLOCK_O": 64, "BLOCK_I": 32 if wide else 128, "STAGES": 1 if wide else 4,
            "num_warps": 4}  # fmt: skip
