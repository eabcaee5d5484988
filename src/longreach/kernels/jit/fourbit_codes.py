"""Decoding 4-bit weights in registers, in Triton: what the kernels that multiply with them share.

Shape suffixes: O output features, G blocks of weights that share a scale, J words of eight codes of a block, E codes of a word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import E2M1_VALUES, NESTED_BLOCK, NF4_VALUES

_NESTED_BLOCK = tl.constexpr(NESTED_BLOCK)
NF4_SINGLE, NF4_NESTED, MXFP4 = (tl.constexpr(i) for i in range(3))


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


def _e2m1_times_scale() -> str:
    """PTX that turns a word of eight e2m1 codes ($8) and a power of two, twice in bf16 ($9), into eight bf16 products ($0 to $7).

    `prmt` looks up high and low bytes of four bf16 values by the low three bits of their codes. By the codes' whole nibbles it
    spreads the top bit of 0x80 where the high bit of a code is set: its bit 6 then is the sign. Products are exact. The tables
    are kept in registers as in `_plane`.
    """
    lines = [
        "{ .reg .b32 t, x, y, z, m, w, h, l, s, p, q; mov.u32 t, %lanemask_lt; and.b32 t, t, 0x80000000;",
        "xor.b32 x, t, 0x3F3F3F00; xor.b32 y, t, 0xC0800000; xor.b32 z, t, 0x80808080;",
        "and.b32 m, $8, 0x77777777; mov.b32 w, $8;",
    ]
    for first in (0, 4):
        if first:
            lines.append("shr.u32 m, m, 16; shr.u32 w, w, 16;")
        lines += [
            "prmt.b32 h, x, 0x40404040, m; prmt.b32 l, y, 0xC0804000, m;",
            "prmt.b32 s, z, z, w; shl.b32 s, s, 1; and.b32 s, s, 0x80808080; or.b32 h, h, s;",
            "prmt.b32 p, l, h, 0x5140; prmt.b32 q, l, h, 0x7362; mul.rn.bf16x2 p, p, $9; mul.rn.bf16x2 q, q, $9;",
            f"mov.b32 {{${first}, ${first + 1}}}, p; mov.b32 {{${first + 2}, ${first + 3}}}, q;",
        ]
    return " ".join([*lines, "}"])


NF4_LOOKUP = tl.constexpr(_lookup(2, True))
E2M1_LOOKUP = tl.constexpr(_lookup(1, False))
E2M1_TIMES_SCALE = tl.constexpr(_e2m1_times_scale())
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
def decoded(word, table_ptr, KIND: tl.constexpr, REGISTERS: tl.constexpr):
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
def block_scale(scales_ptr, nested_ptr, map_ptr, offset_ptr, at, mask, KIND: tl.constexpr):
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
def packed(codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, o_O, rows, g, groups, BLOCK_G: tl.constexpr, J: tl.constexpr,
           KIND: tl.constexpr):  # fmt: skip
    """Words [G, O, J] and scales [G, O, 1] of the blocks from g on; zero outside the weight."""
    g_G = g + tl.arange(0, BLOCK_G)
    mask_GO = (g_G < groups)[:, None] & (o_O < rows)[None, :]
    at_GO = o_O[None, :] * groups + g_G[:, None]
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    word = tl.load(
        words_ptr + at_GO[:, :, None] * J + tl.arange(0, J)[None, None, :], mask=mask_GO[:, :, None], other=0
    )
    scale = block_scale(scales_ptr, nested_ptr, map_ptr, offset_ptr, at_GO, mask_GO, KIND)
    return word, scale[:, :, None]


@triton.jit
def _halves(x_JGE):
    """Even and odd elements of the last axis."""
    return tl.split(tl.reshape(x_JGE, [x_JGE.shape[0], x_JGE.shape[1], x_JGE.shape[2] // 2, 2]))


@triton.jit
def _piece(x_JG):
    return tl.trans(x_JG)[:, None, :].to(tl.float32)


@triton.jit
def dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr, g, groups, BLOCK_G: tl.constexpr, J: tl.constexpr):
    """Sum of a word's eight numbers times x, [G, O, J].

    A thread reads eight elements of x in a row, those of one word. The axes [J, G] make it the thread that has this word in
    [G, O, J] as well: nothing changes threads.
    """
    j_J, g_G = tl.arange(0, J), g + tl.arange(0, BLOCK_G)
    at_JG = g_G[None, :] * J + j_J[:, None]
    mask_JG = (g_G < groups)[None, :] & (j_J < J)[:, None]
    x_JGE = tl.load(x_ptr + at_JG[:, :, None] * 8 + tl.arange(0, 8)[None, None, :], mask=mask_JG[:, :, None], other=0.0)
    even, odd = _halves(x_JGE)
    x04, x26 = _halves(even)
    x15, x37 = _halves(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    sum_GOJ = v0 * _piece(x0) + v1 * _piece(x1) + v2 * _piece(x2) + v3 * _piece(x3)
    return sum_GOJ + v4 * _piece(x4) + v5 * _piece(x5) + v6 * _piece(x6) + v7 * _piece(x7)


@triton.jit
def code_tile(
    codes_ptr, scales_ptr, nested_ptr, map_ptr, offset_ptr, table_ptr, o_O, inside_O, g_G, groups, dtype: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Decoded weights [O, G * J * 8], rounded to dtype."""
    mask_OG = inside_O[:, None] & (g_G < groups)[None, :]
    at_OG = o_O[:, None] * groups + g_G[None, :]
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    word = tl.load(
        words_ptr + at_OG[:, :, None] * J + tl.arange(0, J)[None, None, :], mask=mask_OG[:, :, None], other=0
    )
    if KIND == MXFP4 and REGISTERS and dtype == tl.bfloat16:
        bits = tl.load(scales_ptr + at_OG, mask=mask_OG, other=0).to(tl.int32)
        scale = tl.maximum(bits * 0x00800080, 0x00400040)[:, :, None]  # the power of two, twice in bf16
        w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
            E2M1_TIMES_SCALE,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [word, scale],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        scale = block_scale(scales_ptr, nested_ptr, map_ptr, offset_ptr, at_OG, mask_OG, KIND)[:, :, None]
        v0, v1, v2, v3, v4, v5, v6, v7 = decoded(word, table_ptr, KIND, REGISTERS)
        w0, w1, w2, w3 = (v0 * scale).to(dtype), (v1 * scale).to(dtype), (v2 * scale).to(dtype), (v3 * scale).to(dtype)
        w4, w5, w6, w7 = (v4 * scale).to(dtype), (v5 * scale).to(dtype), (v6 * scale).to(dtype), (v7 * scale).to(dtype)
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.join(even, odd), [BLOCK_O, BLOCK_G * J * 8])


def in_registers(x: Tensor) -> bool:
    """Whether codes are looked up by PTX: Triton's interpreter has none, and fp32 deserves a table of fp32."""
    return x.is_cuda and x.dtype != torch.float32


@functools.cache
def code_table(kind: str, device: torch.device, registers: bool) -> Tensor:
    """The sixteen values, in the form that `decoded` looks them up in."""
    values = E2M1_VALUES if kind == "mxfp4" else NF4_VALUES
    if registers:
        return torch.tensor(_planes(values), dtype=torch.int32, device=device)
    return torch.tensor(values, dtype=torch.float32, device=device)
