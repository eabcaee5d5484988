"""Merging attention partials in Triton: a program takes a few rows of one head, so that lse is read in whole lines.

Shape suffixes: C query rows, H heads, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import launch, padded, parts, warps

ELEMENTS = 4096  # of one block
EACH = 16

_VARIABLE = ["C", "lse_a_head", "lse_b_head"]


@triton.jit
def _weighted(out, lse, merged):
    """out * exp(lse - merged), 0 where no key was seen: the weight is 0 there, or NaN if merged is -inf as well."""
    weight = tl.exp(lse - merged)[:, None]
    return tl.where(weight > 0, out * weight, 0.0)


@triton.jit
def _log_add(a, b):
    high = tl.maximum(a, b)
    return tl.where(high == float("-inf"), high, high + tl.log(tl.exp(a - high) + tl.exp(b - high)))


@triton.jit(do_not_specialize=_VARIABLE)
def _merge_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, a_row, a_head, b_row, b_head,
    lse_a_head, lse_a_row, lse_b_head, lse_b_row, C,
    D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    head = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = row < C
    mask = inside[:, None] & (col < D)
    at_a = out_a_ptr + row[:, None] * a_row + head * a_head + col
    at_lse = lse_a_ptr + head * lse_a_head + row * lse_a_row
    a = tl.load(at_a, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(out_b_ptr + row[:, None] * b_row + head * b_head + col, mask=mask, other=0.0).to(tl.float32)
    lse_a = tl.load(at_lse, mask=inside, other=0.0)
    lse_b = tl.load(lse_b_ptr + head * lse_b_head + row * lse_b_row, mask=inside, other=0.0)
    merged = _log_add(lse_a, lse_b)
    out = _weighted(a, lse_a, merged) + _weighted(b, lse_b, merged)
    tl.store(at_a, out.to(out_a_ptr.dtype.element_ty), mask=mask)
    tl.store(at_lse, merged, mask=inside)


@triton.jit(do_not_specialize=["C", "lse_head"])
def _sink_kernel(
    out_ptr, lse_ptr, sinks_ptr, out_row, out_head, lse_head, lse_row, C,
    D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    head = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = row < C
    mask = inside[:, None] & (col < D)
    at = out_ptr + row[:, None] * out_row + head * out_head + col
    at_lse = lse_ptr + head * lse_head + row * lse_row
    out = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(at_lse, mask=inside, other=0.0)
    merged = _log_add(lse, tl.load(sinks_ptr + head).to(tl.float32))
    out = _weighted(out, lse, merged)
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(at_lse, merged, mask=inside)


def _shape(out_CHD: Tensor) -> tuple[tuple[int, ...], dict[str, int]]:
    C, H, D = out_CHD.shape
    block_d = padded(D)
    block_c = max(1, ELEMENTS // block_d)
    sizes = {"D": D, "BLOCK_C": block_c, "BLOCK_D": block_d, "num_warps": warps(block_c * block_d, EACH)}
    return (parts(C, block_c), H), sizes


def merge_blocks(out_a_CHD: Tensor, lse_a_HC: Tensor, out_b_CHD: Tensor, lse_b_HC: Tensor) -> None:
    grid, sizes = _shape(out_a_CHD)
    launch(
        _merge_kernel, grid, out_a_CHD, lse_a_HC, out_b_CHD, lse_b_HC, *out_a_CHD.stride()[:2], *out_b_CHD.stride()[:2],
        *lse_a_HC.stride(), *lse_b_HC.stride(), len(out_a_CHD), **sizes,
    )  # fmt: skip


def apply_sink(out_CHD: Tensor, lse_HC: Tensor, sinks_H: Tensor) -> None:
    grid, sizes = _shape(out_CHD)
    launch(_sink_kernel, grid, out_CHD, lse_HC, sinks_H, *out_CHD.stride()[:2], *lse_HC.stride(), len(out_CHD), **sizes)
