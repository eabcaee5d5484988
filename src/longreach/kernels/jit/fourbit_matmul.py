"""Products of few rows with 4-bit weights in Triton.

One kernel per number of rows: up to VECTOR_ROWS, numbers are multiplied and added as they are decoded; beyond, tiles of decoded
weights go through the matrix units. Output features of all weights of a launch are dealt out in tiles, those of the adapters'
first matrices after them. Where there are few tiles, their input features are cut as well; the last program of a tile to arrive
adds the partial sums, in a fixed order.

Sizes of a model are not compile-time constants: one compilation serves all its layers. Shape suffixes: B rows, I input
features, O output features, G blocks of weights that share a scale, J words of eight codes of a block, S parts of a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fourbit_matmul import FourBitRows
from ..reference import E2M1_VALUES, NESTED_BLOCK, NF4_VALUES
from . import launch, padded, parts

VECTOR_ROWS = 4
PROGRAMS = 528  # tiles from which on nothing more is cut
MOST_SPLITS = 8

_NESTED_BLOCK = tl.constexpr(NESTED_BLOCK)
NF4_SINGLE, NF4_NESTED, MXFP4 = (tl.constexpr(i) for i in range(3))


# --- decoding -----------------------------------------------------------------------------------------------------


def _planes(values: Sequence[float]) -> list[int]:
    """High bytes of sixteen fp16 numbers, four to a word, then low bytes."""
    bits = torch.tensor(values, dtype=torch.float16).view(torch.int16).tolist()
    rows = [bytes((x >> shift) & 0xFF for x in bits) for shift in (8, 0)]
    return [int.from_bytes(row[i : i + 4], "little", signed=True) for row in rows for i in range(0, 16, 4)]


def _lookup(planes: int, high_first: bool) -> str:
    """PTX that turns a word of eight codes ($8) into eight fp32 numbers ($0 to $7); $9 and on hold `_planes`.

    Sixteen values are looked up in registers: `prmt` picks four bytes of eight by the low three bits of four codes, twice, and
    once more by their high bit. Values are fp16: exact for e2m1, whose low bytes are zero, and within 2^-12 for NF4.
    """
    lines = ["{ .reg .b32 s, m, a, b, h, l, p, q; .reg .b16 x0, x1, x2, x3;"]
    for half in range(2):
        word = "p" if half else "$8"
        if half:
            lines.append("shr.b32 p, $8, 16;")
        lines += [
            f"and.b32 s, {word}, 0x7777;",
            f"shr.b32 m, {word}, 1; and.b32 m, m, 0x4444; or.b32 m, m, 0x3210;",
            "prmt.b32 a, $9, $10, s; prmt.b32 b, $11, $12, s; prmt.b32 h, a, b, m;",
        ]
        if planes == 2:
            lines.append("prmt.b32 a, $13, $14, s; prmt.b32 b, $15, $16, s; prmt.b32 l, a, b, m;")
            lines.append("prmt.b32 p, l, h, 0x5140; prmt.b32 q, l, h, 0x7362;")
        else:
            lines.append("prmt.b32 p, h, 0, 0x1404; prmt.b32 q, h, 0, 0x3424;")
        lines.append("mov.b32 {x0, x1}, p; mov.b32 {x2, x3}, q;")
        order = [1, 0, 3, 2] if high_first else [0, 1, 2, 3]
        lines += [f"cvt.f32.f16 ${4 * half + i}, x{order[i]};" for i in range(4)]
    return " ".join([*lines, "}"])


NF4_LOOKUP = tl.constexpr(_lookup(2, True))
E2M1_LOOKUP = tl.constexpr(_lookup(1, False))
_RESULTS = tl.constexpr("=f,=f,=f,=f,=f,=f,=f,=f,r,r,r,r,r")  # results, the word, four words of high bytes


@triton.jit
def _plane(at):
    """A word that stays in a register: what the assembler knows to be the same in all threads, it would fetch at every use.

    No lane is above another that has bit 31, so what is added is zero.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %lanemask_lt; and.b32 t, t, 0x80000000; xor.b32 $0, $1, t; }",
        "=r,r", [tl.load(at)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _values(word, table_ptr, KIND: tl.constexpr, REGISTERS: tl.constexpr):
    """The eight numbers of a word of codes, in fp32 and in their order."""
    if REGISTERS:
        h0, h1 = _plane(table_ptr), _plane(table_ptr + 1)
        h2, h3 = _plane(table_ptr + 2), _plane(table_ptr + 3)
        if KIND == MXFP4:
            return tl.inline_asm_elementwise(
                E2M1_LOOKUP, _RESULTS, [word, h0, h1, h2, h3], dtype=(tl.float32,) * 8, is_pure=True, pack=1
            )
        else:
            l0, l1 = _plane(table_ptr + 4), _plane(table_ptr + 5)
            l2, l3 = _plane(table_ptr + 6), _plane(table_ptr + 7)
            return tl.inline_asm_elementwise(
                NF4_LOOKUP, _RESULTS + ",r,r,r,r", [word, h0, h1, h2, h3, l0, l1, l2, l3],
                dtype=(tl.float32,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
    else:  # what Triton's interpreter can do
        SWAP: tl.constexpr = 0 if KIND == MXFP4 else 4  # the first of two codes in the high half of a byte
        v0 = tl.load(table_ptr + ((word >> SWAP) & 15))
        v1 = tl.load(table_ptr + ((word >> (4 - SWAP)) & 15))
        v2 = tl.load(table_ptr + ((word >> (8 + SWAP)) & 15))
        v3 = tl.load(table_ptr + ((word >> (12 - SWAP)) & 15))
        v4 = tl.load(table_ptr + ((word >> (16 + SWAP)) & 15))
        v5 = tl.load(table_ptr + ((word >> (20 - SWAP)) & 15))
        v6 = tl.load(table_ptr + ((word >> (24 + SWAP)) & 15))
        v7 = tl.load(table_ptr + ((word >> (28 - SWAP)) & 15))
        return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _scale(scales_ptr, nested_ptr, map_ptr, offset_ptr, at, mask, KIND: tl.constexpr):
    """fp32 scales of blocks."""
    raw = tl.load(scales_ptr + at, mask=mask, other=0)
    if KIND == NF4_NESTED:
        outer = tl.load(nested_ptr + at // _NESTED_BLOCK, mask=mask, other=0.0)
        return tl.load(map_ptr + raw.to(tl.int32)) * outer + tl.load(offset_ptr)
    elif KIND == MXFP4:
        bits = raw.to(tl.int32)
        return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    else:
        return raw


@triton.jit
def _halves(x_GJE):
    """Even and odd elements of the last axis."""
    return tl.split(tl.reshape(x_GJE, [x_GJE.shape[0], x_GJE.shape[1], x_GJE.shape[2] // 2, 2]))


@triton.jit
def _dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr, at_GJ, mask_GJ):
    """Sum of a word's eight numbers times x, [O, G, J]; x is read in the order of memory and taken apart in registers."""
    x_GJE = tl.load(x_ptr + at_GJ[:, :, None] * 8 + tl.arange(0, 8)[None, None, :], mask=mask_GJ[:, :, None], other=0.0)
    even, odd = _halves(x_GJE)
    x04, x26 = _halves(even)
    x15, x37 = _halves(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    sum_OGJ = v0 * x0[None] + v1 * x1[None] + v2 * x2[None] + v3 * x3[None]
    return sum_OGJ + v4 * x4[None] + v5 * x5[None] + v6 * x6[None] + v7 * x7[None]


# --- few rows: numbers are used where they are decoded ------------------------------------------------------------


@triton.jit
def _vector_tile(
    x_ptr, x_row, codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, table_ptr, out_ptr, out_row, o_O, rows, width,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    groups = width // (J * 8)
    j_J = tl.arange(0, J)
    acc0 = tl.zeros([BLOCK_O, BLOCK_G, J], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for g in range(0, groups, BLOCK_G):
        g_G = g + tl.arange(0, BLOCK_G)
        mask_OG = (o_O < rows)[:, None] & (g_G < groups)[None, :]
        at_OG = o_O[:, None] * groups + g_G[None, :]
        word = tl.load(words_ptr + at_OG[:, :, None] * J + j_J[None, None, :], mask=mask_OG[:, :, None], other=0)
        scale = _scale(scales_ptr, nested_ptr, map_ptr, offset_ptr, at_OG, mask_OG, KIND)[:, :, None]
        at_GJ = g_G[:, None] * J + j_J[None, :]
        mask_GJ = (g_G < groups)[:, None] & (j_J < J)[None, :]
        v0, v1, v2, v3, v4, v5, v6, v7 = _values(word, table_ptr, KIND, REGISTERS)
        acc0 += _dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr, at_GJ, mask_GJ) * scale
        if ROWS > 1:
            acc1 += _dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr + x_row, at_GJ, mask_GJ) * scale
        if ROWS > 2:
            acc2 += _dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr + 2 * x_row, at_GJ, mask_GJ) * scale
        if ROWS > 3:
            acc3 += _dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr + 3 * x_row, at_GJ, mask_GJ) * scale
    _put_row(out_ptr + o_O, acc0, o_O < rows)
    if ROWS > 1:
        _put_row(out_ptr + out_row + o_O, acc1, o_O < rows)
    if ROWS > 2:
        _put_row(out_ptr + 2 * out_row + o_O, acc2, o_O < rows)
    if ROWS > 3:
        _put_row(out_ptr + 3 * out_row + o_O, acc3, o_O < rows)


@triton.jit
def _put_row(at_O, acc_OGJ, mask_O):
    y_O = tl.sum(tl.sum(acc_OGJ, 2), 1)
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


@triton.jit
def _vector_kernel(
    x_ptr, codes0_ptr, codes1_ptr, codes2_ptr, scales0_ptr, scales1_ptr, scales2_ptr, nested0_ptr, nested1_ptr, nested2_ptr,
    offset0_ptr, offset1_ptr, offset2_ptr, map0_ptr, map1_ptr, map2_ptr,
    table_ptr, a_ptr, out_ptr, rows0, rows1, rows2, rows_a, width, x_row, out_row,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    REGISTERS: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_I: tl.constexpr,
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
            first * BLOCK_O + tl.arange(0, BLOCK_O), rows, width, ROWS, BLOCK_O, BLOCK_G, J, KIND, REGISTERS,
        )  # fmt: skip
    else:
        _dense_vector_tile(
            x_ptr, x_row, a_ptr, out_ptr + (rows0 + rows1 + rows2), out_row,
            (tile - tiles2) * BLOCK_A + tl.arange(0, BLOCK_A), rows_a, width, ROWS, BLOCK_A, BLOCK_I,
        )  # fmt: skip


# --- more rows: decoded tiles go through the matrix units ---------------------------------------------------------


@triton.jit
def _code_tile(
    codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, table_ptr, o_O, inside_O, g_G, groups, dtype: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Decoded weights [O, G * J * 8], rounded to dtype."""
    mask_OG = inside_O[:, None] & (g_G < groups)[None, :]
    at_OG = o_O[:, None] * groups + g_G[None, :]
    scale = _scale(scales_ptr, nested_ptr, map_ptr, offset_ptr, at_OG, mask_OG, KIND)[:, :, None]
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    word = tl.load(
        words_ptr + at_OG[:, :, None] * J + tl.arange(0, J)[None, None, :], mask=mask_OG[:, :, None], other=0
    )
    v0, v1, v2, v3, v4, v5, v6, v7 = _values(word, table_ptr, KIND, REGISTERS)
    even = tl.join(
        tl.join((v0 * scale).to(dtype), (v4 * scale).to(dtype)), tl.join((v2 * scale).to(dtype), (v6 * scale).to(dtype))
    )
    odd = tl.join(
        tl.join((v1 * scale).to(dtype), (v5 * scale).to(dtype)), tl.join((v3 * scale).to(dtype), (v7 * scale).to(dtype))
    )
    return tl.reshape(tl.join(even, odd), [BLOCK_O, BLOCK_G * J * 8])


@triton.jit
def _share(number, splits, width, BLOCK_I: tl.constexpr):
    """The input features of one part of a split sum, [start, end), in whole steps."""
    steps = (width + BLOCK_I - 1) // BLOCK_I
    each = (steps + splits - 1) // splits
    return number * each * BLOCK_I, tl.minimum((number + 1) * each * BLOCK_I, width)


@triton.jit
def _finish(acc_OB, out_ptr, out_row, o_O, inside_O, B, partial_ptr, arrived_ptr, tile, part, splits,
            BLOCK_O: tl.constexpr, BLOCK_B: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Store y, or a part of it; the last part to come adds all, first to last."""
    b_B = tl.arange(0, BLOCK_B)
    last = True
    if SPLIT:
        at_OB = tl.arange(0, BLOCK_O)[:, None] * BLOCK_B + b_B[None, :]
        partial_ptr += tile.to(tl.int64) * splits * (BLOCK_O * BLOCK_B)
        tl.store(partial_ptr + part * (BLOCK_O * BLOCK_B) + at_OB, acc_OB)
        tl.debug_barrier()  # all threads' parts are written before the arrival is counted
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1
        tl.debug_barrier()
        if last:
            acc_OB = tl.zeros([BLOCK_O, BLOCK_B], tl.float32)
            for s in range(splits):
                acc_OB += tl.load(partial_ptr + s * (BLOCK_O * BLOCK_B) + at_OB, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if last:
        mask = inside_O[:, None] & (b_B < B)[None, :]
        at = out_ptr + b_B.to(tl.int64)[None, :] * out_row + o_O[:, None]
        tl.store(at, acc_OB.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B"])
def _matrix_kernel(
    x_ptr, codes0_ptr, codes1_ptr, codes2_ptr, scales0_ptr, scales1_ptr, scales2_ptr, nested0_ptr, nested1_ptr, nested2_ptr,
    offset0_ptr, offset1_ptr, offset2_ptr, map0_ptr, map1_ptr, map2_ptr,
    table_ptr, a_ptr, out_ptr, partial_ptr, arrived_ptr,
    rows0, rows1, rows2, rows_a, width, x_row, out_row, B, splits,
    BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    REGISTERS: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCK_I: tl.constexpr = BLOCK_G * J * 8
    tile = tl.program_id(0) // splits
    part = tl.program_id(0) % splits
    start, end = _share(part, splits, width, BLOCK_I)
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
            w_OI = _code_tile(
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
    _finish(
        acc_OB, out_ptr + column, out_row, o_O, inside_O, B, partial_ptr, arrived_ptr, tile, part, splits,
        BLOCK_O, BLOCK_B, SPLIT,
    )  # fmt: skip


# --- launching ----------------------------------------------------------------------------------------------------


def in_registers(x: Tensor) -> bool:
    """Whether codes are looked up by PTX; Triton's interpreter has none."""
    return x.is_cuda


@functools.cache
def code_table(kind: str, device: torch.device, registers: bool) -> Tensor:
    """The sixteen values, in the form that `_values` looks them up in."""
    values = E2M1_VALUES if kind == "mxfp4" else NF4_VALUES
    if registers:
        return torch.tensor(_planes(values), dtype=torch.int32, device=device)
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """Counters of split sums, zero between launches: kernels that use them must run one after the other."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


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
    splits = _splits(tiles, parts(width, tile["BLOCK_G"] * J * 8))
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


def _splits(tiles: int, steps: int) -> int:
    """Into how many parts the sums are cut: from the shapes alone, so that the bits don't depend on the card."""
    splits = 1
    while splits < MOST_SPLITS and tiles * splits * 2 <= PROGRAMS and steps >= splits * 4:
        splits *= 2
    return splits


def _vector_sizes(features: int, width: int, J: int) -> dict[str, int]:
    """Tiles of about eight words a thread; fewer output features and more input features where the weight is narrow."""
    block_o = 4 if features <= 8192 else 8
    words = 1024 // block_o
    return {"BLOCK_O": block_o, "BLOCK_G": max(1, min(words // J, padded(parts(width, J * 8)))), "BLOCK_A": 2, "BLOCK_I": 1024,
            "num_warps": 4}  # fmt: skip


def _matrix_sizes(B: int, J: int, dtype: torch.dtype) -> dict[str, int]:
    wide = dtype == torch.float32
    return {"BLOCK_B": max(16, padded(B)), "BLOCK_O": 64, "BLOCK_G": max(1, (64 if wide else 128) // (J * 8)),
            "STAGES": 1 if wide else 3, "num_warps": 4}  # fmt: skip
