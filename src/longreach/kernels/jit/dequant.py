"""Dequantization in Triton: a program takes a few blocks of weights, a thread runs of weights in a row, so that codes come in
words and results leave in 16 bytes.

Shape suffixes: G blocks of weights, P pairs of weights of a block.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import E2M1_VALUES, NESTED_BLOCK, NF4_VALUES
from . import launch, parts

WEIGHTS = 4096  # of one program
WARPS = 4

_NESTED_BLOCK = tl.constexpr(NESTED_BLOCK)
FLOAT_SCALE, NESTED_SCALE, POWER_SCALE = (tl.constexpr(i) for i in range(3))


@triton.jit
def _scale(scales_ptr, nested_ptr, map_ptr, offset_ptr, block_G, inside_G, KIND: tl.constexpr):
    """fp32 scales of blocks."""
    scale = tl.load(scales_ptr + block_G, mask=inside_G, other=0)
    if KIND == NESTED_SCALE:
        outer = tl.load(nested_ptr + block_G // _NESTED_BLOCK, mask=inside_G, other=0.0)
        scale = tl.load(map_ptr + scale.to(tl.int32)) * outer + tl.load(offset_ptr)
    if KIND == POWER_SCALE:
        # The exponent's place in fp32; 2**-127 is the one power that has no exponent there.
        bits = scale.to(tl.int32)
        scale = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit(do_not_specialize=["count"])
def _dequant_kernel(
    codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, table_ptr, out_ptr, count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr, HIGH_FIRST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    block_G = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside_G = block_G * BLOCK < count
    scale_G = _scale(scales_ptr, nested_ptr, map_ptr, offset_ptr, block_G, inside_G, KIND)
    pair_GP = block_G[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    at = block_G[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if WHOLE:  # a mask that is the same along a block keeps accesses wide
        mask_pairs, mask = inside_G[:, None], inside_G[:, None]
    else:
        mask_pairs, mask = pair_GP * 2 < count, at < count
    byte_GP = tl.load(codes_ptr + pair_GP, mask=mask_pairs, other=0).to(tl.int32)
    first = tl.load(table_ptr + ((byte_GP >> 4) if HIGH_FIRST else (byte_GP & 15))) * scale_G[:, None]
    second = tl.load(table_ptr + ((byte_GP & 15) if HIGH_FIRST else (byte_GP >> 4))) * scale_G[:, None]
    tl.store(out_ptr + at, tl.interleave(first, second).to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _run(codes: Tensor, scales: Tensor, nested: tuple[Tensor, ...], out: Tensor, table: Tensor, block: int, kind: int):
    blocks = max(1, WEIGHTS // block)
    launch(
        _dequant_kernel, (parts(out.numel(), blocks * block),), codes, scales, *nested, table, out, out.numel(),
        BLOCK=block, BLOCKS=blocks, KIND=kind, HIGH_FIRST=kind != POWER_SCALE.value, WHOLE=out.numel() % block == 0,
        num_warps=WARPS,
        enable_fp_fusion=False,  # a scale's product and sum are rounded one after the other, as in the reference
    )  # fmt: skip
    return out


def dequantize_nf4(
    codes: Tensor, absmax: Tensor, out: Tensor, *, block: int = 64, nested: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    table = _table(NF4_VALUES, out.device)
    if nested is None:
        return _run(codes, absmax, (absmax, table, table), out, table, block, FLOAT_SCALE.value)
    return _run(codes, absmax, nested, out, table, block, NESTED_SCALE.value)


def dequantize_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    table = _table(E2M1_VALUES, out.device)
    return _run(codes, scales, (table, table, table), out, table, 32, POWER_SCALE.value)
