"""Experts for few tokens in Triton.

For a handful of tokens every choice is a product of one row with its expert's weights. For more, choices are put in order of
their experts, sixteen or more to a tile, by one small kernel; tiles of decoded weights go through the matrix units.

Sizes of a model are not compile-time constants. Shape suffixes: A choices (token * k + number), E experts, O output features,
T choices of a tile, G blocks of weights that share a scale, J words of eight codes of a block, M hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_reference import ExpertWeight
from . import padded, parts, warps
from .early_start import launch, wait_for_inputs
from .fourbit_codes import MXFP4, code_table, code_tile, decoded, dot8, in_registers, packed

VECTOR_TOKENS = 2
TILE = 16  # choices of an expert that share its decoded weights; twice as many where experts have more of them each
MOST_EACH = 10
J = 4  # words of a block of 32


@triton.jit
def _gated(y_OT, alpha, limit, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr):
    """(clamp(up) + 1) * g * sigmoid(alpha * g) of neighbouring features gate and up: [O / 2, T]."""
    pairs = tl.permute(tl.reshape(y_OT, [BLOCK_O // 2, 2, BLOCK_T]), [0, 2, 1])
    gate, up = tl.split(pairs)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate * tl.sigmoid(alpha * gate)


# --- adapters -----------------------------------------------------------------------------------------------------


@triton.jit
def _low_kernel(
    x_ptr, expert_ptr, a_ptr, t_ptr, k, rank, width, x_row, GATHER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """t[choice] = x a' of the choice's expert."""
    wait_for_inputs(EARLY)
    choice = tl.program_id(1)
    row = choice
    if GATHER:
        row = choice // k
    expert = tl.load(expert_ptr + choice).to(tl.int64)
    r_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    a_at = a_ptr + (expert * rank + r_R)[:, None] * width
    acc = tl.zeros([BLOCK_R, BLOCK_I], tl.float32)
    for i in range(0, width, BLOCK_I):
        i_I = i + tl.arange(0, BLOCK_I)
        a = tl.load(a_at + i_I[None, :], mask=(r_R < rank)[:, None] & (i_I < width)[None, :], other=0.0)
        x = tl.load(x_ptr + row.to(tl.int64) * x_row + i_I, mask=i_I < width, other=0.0)
        acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(t_ptr + choice * rank + r_R, tl.sum(acc, 1).to(t_ptr.dtype.element_ty), mask=r_R < rank)


@triton.jit
def _low_tile_kernel(
    x_ptr, choice_ptr, tile_expert_ptr, a_ptr, t_ptr, k, rank, width, x_row, GATHER: tl.constexpr, TILE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """t[choice] = x a' of the tile's expert, for all choices of a tile: a is read once per tile."""
    wait_for_inputs(EARLY)
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= 0:
        choice_T = tl.load(choice_ptr + tile * TILE + tl.arange(0, TILE))
        inside_T = choice_T >= 0
        row_T = choice_T
        if GATHER:
            row_T = choice_T // k
        r_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        a_at = a_ptr + (expert * rank + r_R)[:, None] * width
        x_at = x_ptr + row_T.to(tl.int64)[:, None] * x_row
        acc_RT = tl.zeros([BLOCK_R, TILE], tl.float32)
        for i in tl.range(0, width, BLOCK_I, num_stages=STAGES):
            i_I = i + tl.arange(0, BLOCK_I)
            a_RI = tl.load(a_at + i_I[None, :], mask=(r_R < rank)[:, None] & (i_I < width)[None, :], other=0.0)
            x_TI = tl.load(x_at + i_I[None, :], mask=inside_T[:, None] & (i_I < width)[None, :], other=0.0)
            acc_RT = tl.dot(a_RI, tl.trans(x_TI), acc=acc_RT, input_precision=PRECISION)
        t_at = t_ptr + choice_T[None, :] * rank + r_R[:, None]
        tl.store(t_at, acc_RT.to(t_ptr.dtype.element_ty), mask=inside_T[None, :] & (r_R < rank)[:, None])


@triton.jit
def _low_row(t_ptr, b_ptr, choice, expert, rank, rows, o_O, BLOCK_R: tl.constexpr):
    """t b of one choice: [O]."""
    r_R = tl.arange(0, BLOCK_R)
    t_R = tl.load(t_ptr + choice * rank + r_R, mask=r_R < rank, other=0.0).to(tl.float32)
    b_at = b_ptr + (expert * rank + r_R)[:, None] * rows + o_O[None, :]
    b_RO = tl.load(b_at, mask=(r_R < rank)[:, None] & (o_O < rows)[None, :], other=0.0).to(tl.float32)
    return tl.sum(t_R[:, None] * b_RO, 0)


# --- a handful of tokens ------------------------------------------------------------------------------------------


@triton.jit
def _row_times(
    x_ptr, codes_ptr, scales_ptr, table_ptr, o_O, rows, width, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """One row times one expert's features o: [O], fp32; weights are fetched one step ahead."""
    groups = width // (J * 8)
    acc = tl.zeros([BLOCK_G, BLOCK_O, J], tl.float32)
    word, scale = packed(
        codes_ptr, scales_ptr, scales_ptr, scales_ptr, scales_ptr, o_O, rows, 0, groups, BLOCK_G, J, MXFP4
    )
    for g in range(0, groups, BLOCK_G):
        next_word, next_scale = packed(
            codes_ptr, scales_ptr, scales_ptr, scales_ptr, scales_ptr, o_O, rows, g + BLOCK_G, groups, BLOCK_G, J, MXFP4
        )
        v0, v1, v2, v3, v4, v5, v6, v7 = decoded(word, table_ptr, MXFP4, REGISTERS)
        acc += dot8(v0, v1, v2, v3, v4, v5, v6, v7, x_ptr, g, groups, BLOCK_G, J) * scale
        word, scale = next_word, next_scale
    return tl.sum(tl.sum(acc, 2), 0)


@triton.jit
def _gate_up_row_kernel(
    x_ptr, expert_ptr, codes_ptr, scales_ptr, bias_ptr, t_ptr, b_ptr, table_ptr, h_ptr, k, rank, rows, width, x_row,
    bias_row, alpha, limit,
    BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, BIAS: tl.constexpr, LOW: tl.constexpr,
    REGISTERS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    choice = tl.program_id(1)
    expert = tl.load(expert_ptr + choice).to(tl.int64)
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    y_O = _row_times(
        x_ptr + (choice // k) * x_row, codes_ptr + expert * rows * (width // 2), scales_ptr + expert * rows * (width // 32),
        table_ptr, o_O, rows, width, BLOCK_O, BLOCK_G, J, REGISTERS,
    )  # fmt: skip
    if BIAS:
        y_O += tl.load(bias_ptr + expert * bias_row + o_O, mask=o_O < rows, other=0.0).to(tl.float32)
    if LOW > 0:
        y_O += _low_row(t_ptr, b_ptr, choice, expert, rank, rows, o_O, LOW)
    h_P = tl.reshape(_gated(tl.reshape(y_O, [BLOCK_O, 1]), alpha, limit, BLOCK_O, 1), [BLOCK_O // 2])
    p_P = tl.program_id(0) * (BLOCK_O // 2) + tl.arange(0, BLOCK_O // 2)
    tl.store(h_ptr + choice.to(tl.int64) * (rows // 2) + p_P, h_P.to(h_ptr.dtype.element_ty), mask=p_P < rows // 2)


@triton.jit
def _down_row_kernel(
    h_ptr, expert_ptr, weight_ptr, codes_ptr, scales_ptr, bias_ptr, t_ptr, b_ptr, table_ptr, out_ptr, k, rank, rows,
    width, bias_row,
    BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, BIAS: tl.constexpr, LOW: tl.constexpr,
    REGISTERS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    token = tl.program_id(1)
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    sum_O = tl.zeros([BLOCK_O], tl.float32)
    for number in range(k):
        choice = token * k + number
        expert = tl.load(expert_ptr + choice).to(tl.int64)
        y_O = _row_times(
            h_ptr + choice.to(tl.int64) * width, codes_ptr + expert * rows * (width // 2),
            scales_ptr + expert * rows * (width // 32), table_ptr, o_O, rows, width, BLOCK_O, BLOCK_G, J, REGISTERS,
        )  # fmt: skip
        if BIAS:
            y_O += tl.load(bias_ptr + expert * bias_row + o_O, mask=o_O < rows, other=0.0).to(tl.float32)
        if LOW > 0:
            y_O += _low_row(t_ptr, b_ptr, choice, expert, rank, rows, o_O, LOW)
        sum_O += y_O * tl.load(weight_ptr + choice).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * rows + o_O, sum_O.to(out_ptr.dtype.element_ty), mask=o_O < rows)


# --- more tokens --------------------------------------------------------------------------------------------------


@triton.jit
def _order_kernel(
    expert_ptr, choice_ptr, tile_expert_ptr, A, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choices in order of their experts, each expert's beginning a tile: choice [tiles * TILE], -1 where there is none, and the
    expert of each tile, -1 behind the last."""
    wait_for_inputs(EARLY)
    s_S = tl.arange(0, BLOCK_S)
    tl.store(choice_ptr + s_S, tl.full([BLOCK_S], -1, tl.int32))
    a_A = tl.arange(0, BLOCK_A)
    expert_A = tl.load(expert_ptr + a_A, mask=a_A < A, other=BLOCK_E).to(tl.int32)
    e_E = tl.arange(0, BLOCK_E)
    chosen_AE = (expert_A[:, None] == e_E[None, :]).to(tl.int32)
    tiles_E = (tl.sum(chosen_AE, 0) + TILE - 1) // TILE
    end_E = tl.cumsum(tiles_E, 0)
    n_N = tl.arange(0, BLOCK_N)
    total = tl.sum(tiles_E, 0)
    tile_expert = tl.sum((n_N[:, None] >= end_E[None, :]).to(tl.int32), 1)
    tl.store(tile_expert_ptr + n_N, tl.where(n_N < total, tile_expert, -1))
    place_AE = tl.cumsum(chosen_AE, 0) - 1 + ((end_E - tiles_E) * TILE)[None, :]
    place_A = tl.sum(place_AE * chosen_AE, 1)
    tl.debug_barrier()  # the places are empty before choices are put into them
    tl.store(choice_ptr + place_A, a_A, mask=a_A < A)


@triton.jit
def _tile_kernel(
    x_ptr, choice_ptr, tile_expert_ptr, weight_ptr, codes_ptr, scales_ptr, bias_ptr, t_ptr, b_ptr, table_ptr, out_ptr, k,
    rank, rows, width, x_row,
    bias_row, alpha, limit, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr, J: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, LOW: tl.constexpr, REGISTERS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Gated: h[choice] from x[choice // k]. Else out[choice] = weight * (W x[choice] + bias), fp32."""
    wait_for_inputs(EARLY)
    BLOCK_I: tl.constexpr = BLOCK_G * J * 8
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= 0:
        choice_T = tl.load(choice_ptr + tile * TILE + tl.arange(0, TILE))
        inside_T = choice_T >= 0
        row_T = choice_T
        if GATED:
            row_T = choice_T // k
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        codes_ptr += expert * rows * (width // 2)
        scales_ptr += expert * rows * (width // 32)
        o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        acc_OT = tl.zeros([BLOCK_O, TILE], tl.float32)
        x_at = x_ptr + row_T.to(tl.int64)[:, None] * x_row
        for i in tl.range(0, width, BLOCK_I, num_stages=STAGES):
            i_I = i + tl.arange(0, BLOCK_I)
            x_TI = tl.load(x_at + i_I[None, :], mask=inside_T[:, None] & (i_I < width)[None, :], other=0.0)
            w_OI = code_tile(
                codes_ptr, scales_ptr, scales_ptr, scales_ptr, scales_ptr, table_ptr, o_O, o_O < rows,
                i // (J * 8) + tl.arange(0, BLOCK_G), width // (J * 8), dtype, BLOCK_O, BLOCK_G, J, MXFP4, REGISTERS,
            )  # fmt: skip
            acc_OT = tl.dot(w_OI, tl.trans(x_TI), acc=acc_OT, input_precision=PRECISION)
        if BIAS:
            acc_OT += tl.load(bias_ptr + expert * bias_row + o_O, mask=o_O < rows, other=0.0).to(tl.float32)[:, None]
        if LOW > 0:
            r_R = tl.arange(0, LOW)
            t_at = t_ptr + choice_T[:, None] * rank + r_R[None, :]
            t_TR = tl.load(t_at, mask=inside_T[:, None] & (r_R < rank)[None, :], other=0.0)
            b_at = b_ptr + (expert * rank + r_R)[None, :] * rows + o_O[:, None]
            b_OR = tl.load(b_at, mask=(o_O < rows)[:, None] & (r_R < rank)[None, :], other=0.0)
            acc_OT = tl.dot(b_OR, tl.trans(t_TR), acc=acc_OT, input_precision=PRECISION)
        if GATED:
            h_PT = _gated(acc_OT, alpha, limit, BLOCK_O, TILE)
            p_P = tl.program_id(0) * (BLOCK_O // 2) + tl.arange(0, BLOCK_O // 2)
            at_PT = out_ptr + choice_T.to(tl.int64)[None, :] * (rows // 2) + p_P[:, None]
            tl.store(at_PT, h_PT.to(out_ptr.dtype.element_ty), mask=inside_T[None, :] & (p_P < rows // 2)[:, None])
        else:
            acc_OT *= tl.load(weight_ptr + choice_T, mask=inside_T, other=0.0).to(tl.float32)[None, :]
            at_OT = out_ptr + choice_T.to(tl.int64)[None, :] * rows + o_O[:, None]
            tl.store(at_OT, acc_OT, mask=inside_T[None, :] & (o_O < rows)[:, None])


@triton.jit
def _sum_kernel(y_ptr, out_ptr, k, M, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Sum of a token's choices, first to last."""
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    m_M = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for number in range(k):
        acc += tl.load(y_ptr + (token * k + number) * M + m_M, mask=m_M < M, other=0.0)
    tl.store(out_ptr + token * M + m_M, acc.to(out_ptr.dtype.element_ty), mask=m_M < M)


# --- choosing -----------------------------------------------------------------------------------------------------


@triton.jit
def _choose_kernel(
    logits_ptr, expert_ptr, weight_ptr, k, E, logits_row, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    e_E = tl.arange(0, BLOCK_E)
    k_K = tl.arange(0, BLOCK_K)
    logit_E = tl.load(logits_ptr + token * logits_row + e_E, mask=e_E < E, other=float("-inf")).to(tl.float32)
    left_E = (e_E < E).to(tl.int32)
    best_K = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for number in range(k):
        top = tl.max(tl.where(left_E > 0, logit_E, float("-inf")), 0)
        expert = tl.min(tl.where((left_E > 0) & (logit_E == top), e_E, BLOCK_E), 0)
        left_E = tl.where(e_E == expert, 0, left_E)
        best_K = tl.where(k_K == number, top, best_K)
        tl.store(expert_ptr + token * k + number, expert.to(tl.int64))
    share_K = tl.exp(best_K - tl.max(best_K, 0))
    share_K = share_K / tl.sum(share_K, 0)
    tl.store(weight_ptr + token * k + k_K, share_K.to(weight_ptr.dtype.element_ty), mask=k_K < k)


# --- launching ----------------------------------------------------------------------------------------------------


def decode_experts(
    x_BM: Tensor,
    expert_Bk: Tensor,
    weight_Bk: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    alpha: float,
    limit: float,
) -> Tensor:
    expert_Bk, weight_Bk = expert_Bk.contiguous(), weight_Bk.contiguous()
    registers = in_registers(x_BM)
    table = code_table("mxfp4", x_BM.device, registers)
    run = _rows if len(x_BM) <= VECTOR_TOKENS else _tiles
    return run(x_BM, expert_Bk, weight_Bk, gate_up, down, alpha, limit, table, registers)


def _rows(x_BM, expert_Bk, weight_Bk, gate_up, down, alpha, limit, table, registers) -> Tensor:
    (B, M), k, features = x_BM.shape, expert_Bk.shape[1], gate_up.codes.shape[1]
    width = features // 2
    h_AF = torch.empty(B * k, width, dtype=x_BM.dtype, device=x_BM.device)
    out_BM = torch.empty(B, M, dtype=x_BM.dtype, device=x_BM.device)
    first, second = _row_sizes(B * k * features), _row_sizes(B * M)
    t, b, low = _low(x_BM, expert_Bk, gate_up, gather=True)
    launch(
        _gate_up_row_kernel, (parts(features, first["BLOCK_O"]), B * k), x_BM, expert_Bk, gate_up.codes, gate_up.scales,
        x_BM if gate_up.bias is None else gate_up.bias, t, b, table, h_AF, k, low["rank"], features, M, x_BM.stride(0),
        _bias_row(gate_up), alpha, limit, J=J, BIAS=gate_up.bias is not None, LOW=low["LOW"], REGISTERS=registers, **first,
    )  # fmt: skip
    t, b, low = _low(h_AF, expert_Bk, down, gather=False)
    launch(
        _down_row_kernel, (parts(M, second["BLOCK_O"]), B), h_AF, expert_Bk, weight_Bk, down.codes, down.scales,
        h_AF if down.bias is None else down.bias, t, b, table, out_BM, k, low["rank"], M, width, _bias_row(down),
        J=J, BIAS=down.bias is not None, LOW=low["LOW"], REGISTERS=registers, **second,
    )  # fmt: skip
    return out_BM


def _bias_row(weight: ExpertWeight) -> int:
    return 0 if weight.bias is None else weight.bias.stride(0)


def _low(x: Tensor, expert_Bk: Tensor, weight: ExpertWeight, *, gather: bool) -> tuple[Tensor, Tensor, dict[str, int]]:
    """x a' of every choice, b, and their sizes; x stands in for what is not there."""
    if weight.low is None:
        return x, x, {"rank": 0, "LOW": 0}
    a_ErI, b_ErO = weight.low
    rank, width = a_ErI.shape[1:]
    choices = expert_Bk.numel()
    t_Ar = torch.empty(choices, rank, dtype=x.dtype, device=x.device)
    launch(
        _low_kernel, (parts(rank, 8), choices), x, expert_Bk, a_ErI, t_Ar, expert_Bk.shape[1], rank, width, x.stride(0),
        GATHER=gather, BLOCK_R=8, BLOCK_I=512, num_warps=4,
    )  # fmt: skip
    return t_Ar, b_ErO, {"rank": rank, "LOW": max(16, padded(rank))}


def _low_tiles(
    x: Tensor,
    choice: Tensor,
    tile_expert: Tensor,
    tiles: int,
    size: int,
    weight: ExpertWeight,
    k: int,
    choices: int,
    precision: str,
    *,
    gather: bool,
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """`_low` of choices that lie in tiles."""
    if weight.low is None:
        return x, x, {"rank": 0, "LOW": 0}
    a_ErI, b_ErO = weight.low
    rank, width = a_ErI.shape[1:]
    t_Ar = torch.empty(choices, rank, dtype=x.dtype, device=x.device)
    launch(
        _low_tile_kernel, (parts(rank, 16), tiles), x, choice, tile_expert, a_ErI, t_Ar, k, rank, width, x.stride(0),
        GATHER=gather, TILE=size, BLOCK_R=16, BLOCK_I=256 if x.element_size() == 2 else 64, STAGES=3, PRECISION=precision,
        num_warps=4,
    )  # fmt: skip
    return t_Ar, b_ErO, {"rank": rank, "LOW": max(16, padded(rank))}


def _row_sizes(features: int) -> dict[str, int]:
    """Tiles with a word of each output feature a thread, as `dot8` needs it; of fewer features where there are few."""
    num_warps = 4
    return {"BLOCK_O": 4 if features <= 8192 else 8, "BLOCK_G": 32 * num_warps // J, "num_warps": num_warps}


def _tiles(x_BM, expert_Bk, weight_Bk, gate_up, down, alpha, limit, table, registers) -> Tensor:
    (B, M), k, (E, features) = x_BM.shape, expert_Bk.shape[1], gate_up.codes.shape[:2]
    choices, width = B * k, features // 2
    size = TILE if choices <= MOST_EACH * E else 2 * TILE
    most = min(choices, E) + choices // size  # tiles, whatever is chosen
    choice, tile_expert = (
        torch.empty(n, dtype=torch.int32, device=x_BM.device) for n in (padded(most * size), padded(most))
    )
    launch(
        _order_kernel, (1,), expert_Bk, choice, tile_expert, choices, BLOCK_A=padded(choices), BLOCK_E=padded(E),
        BLOCK_S=padded(most * size), BLOCK_N=padded(most), TILE=size,
        num_warps=warps(padded(choices) * padded(E), 16),
    )  # fmt: skip
    h_AF = torch.empty(choices, width, dtype=x_BM.dtype, device=x_BM.device)
    y_AM = torch.empty(choices, M, dtype=torch.float32, device=x_BM.device)
    out_BM = torch.empty(B, M, dtype=x_BM.dtype, device=x_BM.device)
    precision = "ieee" if x_BM.dtype == torch.float32 else "tf32"
    for gated, given, out, weight in ((True, x_BM, h_AF, gate_up), (False, h_AF, y_AM, down)):
        rows = weight.codes.shape[1]
        tile = _tile_sizes(x_BM.dtype)
        t, b, low = _low_tiles(given, choice, tile_expert, most, size, weight, k, choices, precision, gather=gated)
        launch(
            _tile_kernel, (parts(rows, tile["BLOCK_O"]), most), given, choice, tile_expert, weight_Bk, weight.codes,
            weight.scales, given if weight.bias is None else weight.bias, t, b, table, out, k, low["rank"], rows,
            given.shape[1], given.stride(0), _bias_row(weight), alpha, limit, J=J, TILE=size, GATED=gated,
            BIAS=weight.bias is not None, LOW=low["LOW"], REGISTERS=registers, PRECISION=precision, **tile,
        )  # fmt: skip
    block = min(1024, padded(M))
    launch(_sum_kernel, (B, parts(M, block)), y_AM, out_BM, k, M, BLOCK=block, num_warps=4)
    return out_BM


def _tile_sizes(dtype: torch.dtype) -> dict[str, int]:
    """In 16 bits two warps: decoded weights then go to the matrix units from registers (four would take `wgmma`, through shared
    memory: 1.4 times as long at 32 tokens on an H200)."""
    if dtype == torch.float32:
        return {"BLOCK_O": 64, "BLOCK_G": 2, "STAGES": 1, "num_warps": 4}
    return {"BLOCK_O": 64, "BLOCK_G": 4, "STAGES": 3, "num_warps": 2}


def choose_experts(logits_BE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    B, E = logits_BE.shape
    expert_Bk = torch.empty(B, k, dtype=torch.int64, device=logits_BE.device)
    weight_Bk = torch.empty(B, k, dtype=logits_BE.dtype, device=logits_BE.device)
    launch(
        _choose_kernel, (B,), logits_BE, expert_Bk, weight_Bk, k, E, logits_BE.stride(0),
        BLOCK_E=padded(E), BLOCK_K=padded(k), num_warps=1,
    )  # fmt: skip
    return expert_Bk, weight_Bk
