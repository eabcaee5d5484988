"""Products of few rows with 4-bit weights in Triton.

One kernel per number of rows: up to VECTOR_ROWS, numbers are multiplied and added as they are decoded; beyond, tiles of decoded
weights go through the matrix units. Output features of all weights of a launch are dealt out in tiles, those of the adapters'
first matrices after them. Where there are few tiles, their input features are cut as well; the last program of a tile to arrive
adds the partial sums, in a fixed order.

Sizes of a model are not compile-time constants: one compilation serves all its layers. Shape suffixes: B rows, I input
features, O output features, G blocks of weights that share a scale, J words of eight codes of a block, S parts of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fourbit_matmul import FourBitRows
from . import padded, parts
from .early_start import launch, wait_for_inputs
from .fourbit_codes import MXFP4, NF4_NESTED, NF4_SINGLE, code_table, code_tile, decoded, dot8, in_registers, packed
from .split_sum import arrivals, finish, share, splits_of

VECTOR_ROWS = 4


# --- few rows: numbers are used where they are decoded ------------------------------------------------------------


@triton.jit
def _vector_tile(
    x_ptr, x_row, codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, table_ptr, out_ptr, out_row, o_O, rows, width,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    REGISTERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    groups = width // (J * 8)
    acc0 = tl.zeros([BLOCK_G, BLOCK_O, J], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    # Weights are fetched one step ahead; the first before the kernel that makes x is done.
    word, scale = packed(codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, o_O, rows, 0, groups, BLOCK_G, J, KIND)
    wait_for_inputs(EARLY)
    for g in range(0, groups, BLOCK_G):
        next_word, next_scale = packed(
            codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, o_O, rows, g + BLOCK_G, groups, BLOCK_G, J, KIND
        )
        v0, v1, v2, v3, v4, v5, v6, v7 = decoded(word, table_ptr, KIND, REGISTERS)
        acc0 += dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr, g, groups, BLOCK_G, J) * scale
        if ROWS > 1:
            acc1 += dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr + x_row, g, groups, BLOCK_G, J) * scale
        if ROWS > 2:
            acc2 += dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr + 2 * x_row, g, groups, BLOCK_G, J) * scale
        if ROWS > 3:
            acc3 += dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr + 3 * x_row, g, groups, BLOCK_G, J) * scale
        word, scale = next_word, next_scale
    _put_row(out_ptr + o_O, acc0, o_O < rows)
    if ROWS > 1:
        _put_row(out_ptr + out_row + o_O, acc1, o_O < rows)
    if ROWS > 2:
        _put_row(out_ptr + 2 * out_row + o_O, acc2, o_O < rows)
    if ROWS > 3:
        _put_row(out_ptr + 3 * out_row + o_O, acc3, o_O < rows)


@triton.jit
def _put_row(at_O, acc_GOJ, mask_O):
    y_O = tl.sum(tl.sum(acc_GOJ, 2), 0)
    tl.store(at_O, y_O.to(at_O.dtype.element_ty), mask=mask_O)


@triton.jit
def _dense_vector_tile(
    x_ptr, x_row, w_ptr, out_ptr, out_row, o_O, rows, width, ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip
    acc0 = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for i in range(0, width, BLOCK_I):
        i_I = i + tl.arange(0, BLOCK_I)
        inside = i_I < width
        w = tl.load(
            w_ptr + o_O[:, None] * width + i_I[None, :], mask=(o_O < rows)[:, None] & inside[None, :], other=0.0
        )
        w = w.to(tl.float32)
        acc0 += w * tl.load(x_ptr + i_I, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ROWS > 1:
            acc1 += w * tl.load(x_ptr + x_row + i_I, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ROWS > 2:
            acc2 += w * tl.load(x_ptr + 2 * x_row + i_I, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ROWS > 3:
            acc3 += w * tl.load(x_ptr + 3 * x_row + i_I, mask=inside, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + o_O, tl.sum(acc0, 1).to(dtype), mask=o_O < rows)
    if ROWS > 1:
        tl.store(out_ptr + out_row + o_O, tl.sum(acc1, 1).to(dtype), mask=o_O < rows)
    if ROWS > 2:
        tl.store(out_ptr + 2 * out_row + o_O, tl.sum(acc2, 1).to(dtype), mask=o_O < rows)
    if ROWS > 3:
        tl.store(out_ptr + 3 * out_row + o_O, tl.sum(acc3, 1).to(dtype), mask=o_O < rows)


# Codes are loaded a word a thread, so that words lie as x does and no number changes threads: hence no wider alignment.
@triton.jit(do_not_specialize_on_alignment=["codes0_ptr", "codes1_ptr", "codes2_ptr"])
def _vector_kernel(
    x_ptr, codes0_ptr, codes1_ptr, codes2_ptr, scales0_ptr, scales1_ptr, scales2_ptr, nested0_ptr, nested1_ptr, nested2_ptr,
    offset0_ptr, offset1_ptr, offset2_ptr, map0_ptr, map1_ptr, map2_ptr,
    table_ptr, a_ptr, out_ptr, rows0, rows1, rows2, rows_a, width, x_row, out_row,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    REGISTERS: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles0 = (rows0 + BLOCK_O - 1) // BLOCK_O
    tiles1 = tiles0 + (rows1 + BLOCK_O - 1) // BLOCK_O
    tiles2 = tiles1 + (rows2 + BLOCK_O - 1) // BLOCK_O
    if tile < tiles2:
        codes_ptr, scales_ptr, nested_ptr, offset_ptr, map_ptr = (
            codes0_ptr,
            scales0_ptr,
            nested0_ptr,
            offset0_ptr,
            map0_ptr,
        )
        first, rows, column = tile, rows0, 0
        if tile >= tiles0:
            codes_ptr, scales_ptr, nested_ptr = codes1_ptr, scales1_ptr, nested1_ptr
            offset_ptr, map_ptr = offset1_ptr, map1_ptr
            first, rows, column = tile - tiles0, rows1, rows0
        if tile >= tiles1:
            codes_ptr, scales_ptr, nested_ptr = codes2_ptr, scales2_ptr, nested2_ptr
            offset_ptr, map_ptr = offset2_ptr, map2_ptr
            first, rows, column = tile - tiles1, rows2, rows0 + rows1
        _vector_tile(
            x_ptr, x_row, codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, table_ptr, out_ptr + column, out_row,
            first * BLOCK_O + tl.arange(0, BLOCK_O), rows, width, ROWS, BLOCK_O, BLOCK_G, J, KIND, REGISTERS, EARLY,
        )  # fmt: skip
    else:
        wait_for_inputs(EARLY)
        _dense_vector_tile(
            x_ptr, x_row, a_ptr, out_ptr + (rows0 + rows1 + rows2), out_row,
            (tile - tiles2) * BLOCK_A + tl.arange(0, BLOCK_A), rows_a, width, ROWS, BLOCK_A, BLOCK_I,
        )  # fmt: skip


# --- more rows: decoded tiles go through the matrix units ---------------------------------------------------------


@triton.jit(do_not_specialize=["B"])
def _matrix_kernel(
    x_ptr, codes0_ptr, codes1_ptr, codes2_ptr, scales0_ptr, scales1_ptr, scales2_ptr, nested0_ptr, nested1_ptr, nested2_ptr,
    offset0_ptr, offset1_ptr, offset2_ptr, map0_ptr, map1_ptr, map2_ptr,
    table_ptr, a_ptr, out_ptr, partial_ptr, arrived_ptr,
    rows0, rows1, rows2, rows_a, width, x_row, out_row, B, splits,
    BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    REGISTERS: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    BLOCK_I: tl.constexpr = BLOCK_G * J * 8
    tile = tl.program_id(0) // splits
    part = tl.program_id(0) % splits
    start, end = share(part, splits, width, BLOCK_I)
    tiles0 = (rows0 + BLOCK_O - 1) // BLOCK_O
    tiles1 = tiles0 + (rows1 + BLOCK_O - 1) // BLOCK_O
    tiles2 = tiles1 + (rows2 + BLOCK_O - 1) // BLOCK_O
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    b_B = tl.arange(0, BLOCK_B)
    x_at = x_ptr + b_B.to(tl.int64)[:, None] * x_row
    acc_OB = tl.zeros([BLOCK_O, BLOCK_B], tl.float32)
    codes_ptr, scales_ptr, nested_ptr, offset_ptr, map_ptr = codes0_ptr, scales0_ptr, nested0_ptr, offset0_ptr, map0_ptr
    first, rows, column = tile, rows0, 0
    if tile >= tiles0:
        codes_ptr, scales_ptr, nested_ptr = codes1_ptr, scales1_ptr, nested1_ptr
        offset_ptr, map_ptr = offset1_ptr, map1_ptr
        first, rows, column = tile - tiles0, rows1, rows0
    if tile >= tiles1:
        codes_ptr, scales_ptr, nested_ptr = codes2_ptr, scales2_ptr, nested2_ptr
        offset_ptr, map_ptr = offset2_ptr, map2_ptr
        first, rows, column = tile - tiles1, rows2, rows0 + rows1
    if tile >= tiles2:
        first, rows, column = tile - tiles2, rows_a, rows0 + rows1 + rows2
    o_O = first * BLOCK_O + tl.arange(0, BLOCK_O)
    inside_O = o_O < rows
    if tile < tiles2:
        for i in tl.range(start, end, BLOCK_I, num_stages=STAGES):
            i_I = i + tl.arange(0, BLOCK_I)
            x_BI = tl.load(x_at + i_I[None, :], mask=(b_B < B)[:, None] & (i_I < width)[None, :], other=0.0)
            w_OI = code_tile(
                codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, table_ptr, o_O, inside_O,
                i // (J * 8) + tl.arange(0, BLOCK_G), width // (J * 8), dtype, BLOCK_O, BLOCK_G, J, KIND, REGISTERS,
            )  # fmt: skip
            acc_OB = tl.dot(w_OI, tl.trans(x_BI), acc=acc_OB, input_precision=PRECISION)
    else:
        for i in tl.range(start, end, BLOCK_I, num_stages=STAGES):
            i_I = i + tl.arange(0, BLOCK_I)
            x_BI = tl.load(x_at + i_I[None, :], mask=(b_B < B)[:, None] & (i_I < width)[None, :], other=0.0)
            w_OI = tl.load(
                a_ptr + o_O[:, None] * width + i_I[None, :], mask=inside_O[:, None] & (i_I < width)[None, :], other=0.0
            )
            acc_OB = tl.dot(w_OI, tl.trans(x_BI), acc=acc_OB, input_precision=PRECISION)
    finish(
        acc_OB, out_ptr + column, out_row, o_O, inside_O, B, partial_ptr, arrived_ptr, tile, part, splits,
        BLOCK_O, BLOCK_B, SPLIT,
    )  # fmt: skip


# --- launching ----------------------------------------------------------------------------------------------------


def _operands(given: Sequence[FourBitRows], x_BI: Tensor, a_RI: Tensor | None) -> tuple[list[Tensor], list[int], int]:
    """Pointers in the kernels' order, rows of the three weights and of a, and the kind."""
    table = code_table(given[0].kind, x_BI.device, in_registers(x_BI))
    filled = [given[min(i, len(given) - 1)] for i in range(3)]
    nested = [table if part.nested is None else part.nested[0] for part in filled]
    offsets = [table if part.nested is None else part.nested[2] for part in filled]
    maps = [table if part.nested is None else part.nested[1] for part in filled]
    rows = [given[i].rows if i < len(given) else 0 for i in range(3)] + [0 if a_RI is None else len(a_RI)]
    if given[0].kind == "mxfp4":
        kind = MXFP4.value
    else:
        kind = NF4_SINGLE.value if given[0].nested is None else NF4_NESTED.value
    pointers = [p.codes for p in filled] + [p.scales for p in filled] + nested + offsets + maps
    return [*pointers, table, x_BI if a_RI is None else a_RI], rows, kind


def fourbit_matmul(x_BI: Tensor, given: Sequence[FourBitRows], out_BN: Tensor, a_RI: Tensor | None) -> None:
    pointers, rows, kind = _operands(given, x_BI, a_RI)
    B, width = x_BI.shape
    J = given[0].block // 8
    if B <= VECTOR_ROWS and x_BI.dtype != torch.float32:
        tile = _vector_sizes(sum(rows), width, J)
        grid = sum(parts(n, tile["BLOCK_O"]) for n in rows[:3]) + parts(rows[3], tile["BLOCK_A"])
        launch(
            _vector_kernel, (grid,), x_BI, *pointers, out_BN, *rows, width, x_BI.stride(0), out_BN.stride(0),
            ROWS=B, J=J, KIND=kind, REGISTERS=in_registers(x_BI), **tile,
        )  # fmt: skip
        return
    tile = _matrix_sizes(B, J, x_BI.dtype)
    tiles = sum(parts(n, tile["BLOCK_O"]) for n in rows)
    splits = splits_of(tiles, parts(width, tile["BLOCK_G"] * J * 8))
    partial, arrived = x_BI, x_BI
    if splits > 1:
        size = tiles * splits * tile["BLOCK_O"] * tile["BLOCK_B"]
        partial = torch.empty(size, dtype=torch.float32, device=x_BI.device)
        arrived = arrivals(x_BI.device)
    launch(
        _matrix_kernel, (tiles * splits,), x_BI, *pointers, out_BN, partial, arrived, *rows, width, x_BI.stride(0),
        out_BN.stride(0), B, splits, J=J, KIND=kind, REGISTERS=in_registers(x_BI), SPLIT=splits > 1,
        PRECISION="ieee" if x_BI.dtype == torch.float32 else "tf32",
        enable_fp_fusion=False,  # a nested scale's product and sum are rounded one after the other, as in `dequant`
        **tile,
    )  # fmt: skip


def _vector_sizes(features: int, width: int, J: int) -> dict[str, int]:
    """Tiles with a word of each output feature a thread, as `dot8` needs it; fewer threads where the last step would be idle."""
    num_warps = 4 if width % 1024 == 0 or width > 8192 else 2
    return {"BLOCK_O": 8 if features > 4096 else 4, "BLOCK_G": max(1, 32 * num_warps // J), "BLOCK_A": 2, "BLOCK_I": 1024,
            "num_warps": num_warps}  # fmt: skip


def _matrix_sizes(B: int, J: int, dtype: torch.dtype) -> dict[str, int]:
    wide = dtype == torch.float32
    return {"BLOCK_B": max(16, padded(B)), "BLOCK_O": 64, "BLOCK_G": max(1, (64 if wide else 128) // (J * 8)),
            "STAGES": 1 if wide else 3, "num_warps": 4}  # fmt: skip
