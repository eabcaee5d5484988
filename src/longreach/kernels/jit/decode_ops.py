"""What a decoding step does between its matrix products, in Triton: the adapters' second products ride along.

Rows are taken sixteen at a time, the least that the matrix units take; sizes of a model are compile-time constants. Shape
suffixes: B rows, O output features of a tile, r rank, H query heads, K key heads, D head size, M hidden size, F MLP width,
V vocabulary, S blocks of a row of logits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import padded, parts, warps
from .early_start import launch, wait_for_inputs
from .swiglu import _squash

ROWS = 16
BLOCK_F = 64
BLOCK_M = 64
BLOCK_V = 2048
EACH = 16
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _constants(
    lora_ptr, bias_ptr, first, SIZE, BLOCK: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Bias [BLOCK], B [BLOCK, BLOCK_R] of columns [first, first + SIZE): read before the wait, as no step writes them."""
    o_O = tl.arange(0, BLOCK)
    bias_O = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        bias_O = tl.load(bias_ptr + first + o_O, mask=o_O < SIZE, other=0.0).to(tl.float32)
    b_Or = tl.zeros([BLOCK, BLOCK_R], lora_ptr.dtype.element_ty)
    if RANK > 0:
        r_R = tl.arange(0, BLOCK_R)
        mask = (o_O < SIZE)[:, None] & (r_R < RANK)[None, :]
        b_Or = tl.load(lora_ptr + (first + o_O)[:, None] * RANK + r_R[None, :], mask=mask, other=0.0)
    return bias_O, b_Or


@triton.jit
def _columns(
    y_ptr, bias_O, b_Or, b_B, inside_B, y_row, first, t_first, SIZE, BLOCK: tl.constexpr, RANK: tl.constexpr,
    BLOCK_R: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns [first, first + SIZE) of y with bias and t B', rounded once, in fp32 [B, BLOCK]; t's columns start at t_first."""
    o_O = tl.arange(0, BLOCK)
    at_B = y_ptr + b_B.to(tl.int64)[:, None] * y_row
    mask = inside_B[:, None] & (o_O < SIZE)[None, :]
    y_BO = tl.load(at_B + first + o_O[None, :], mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y_BO += bias_O[None, :]
    if RANK > 0:
        r_R = tl.arange(0, BLOCK_R)
        t_Br = tl.load(at_B + t_first + r_R[None, :], mask=inside_B[:, None] & (r_R < RANK)[None, :], other=0.0)
        y_BO += tl.dot(t_Br, tl.trans(b_Or), input_precision=PRECISION)
    return y_BO.to(y_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _scaled(x_BO, rstd_B, weight_ptr, first, SIZE: tl.constexpr, BLOCK: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    o_O = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + first + o_O, mask=o_O < SIZE, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    return x_BO * rstd_B[:, None] * weight[None, :]


@triton.jit
def _angle(table_ptr, position_B, inside_B, row, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    o_O = tl.arange(0, BLOCK)
    mask = inside_B[:, None] & (o_O < SIZE)[None, :]
    return tl.load(table_ptr + position_B[:, None] * row + first + o_O[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put(at_B, x_BO, inside_B, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    o_O = tl.arange(0, BLOCK)
    mask = inside_B[:, None] & (o_O < SIZE)[None, :]
    tl.store(at_B[:, None] + first + o_O[None, :], x_BO.to(at_B.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B"])
def _qkv_kernel(
    y_ptr, lora_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, pages_ptr, length_ptr,
    q_ptr, k_ptr, v_ptr, B, y_row, cos_row, sin_row, pages_row, k_page, k_token, k_head, v_page, v_token, v_head, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of a few rows, as three pieces: the halves of its rotary part and what is left."""
    head = tl.program_id(1)
    first = head * D
    bias_a, low_a = _constants(lora_ptr, bias_ptr, first, HALF, BLOCK_HALF, RANK, BLOCK_R, BIAS)
    bias_b, low_b = _constants(lora_ptr, bias_ptr, first + HALF, HALF, BLOCK_HALF, RANK, BLOCK_R, BIAS)
    if REST > 0:
        bias_rest, low_rest = _constants(lora_ptr, bias_ptr, first + 2 * HALF, REST, BLOCK_REST, RANK, BLOCK_R, BIAS)
    wait_for_inputs(EARLY)
    b_B = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_B = b_B < B
    part = (head >= H).to(tl.int32) + (head >= H + K).to(tl.int32)
    t_first = (H + 2 * K) * D + part * RANK
    # What leads to other reads comes first.
    n_B = tl.load(length_ptr + b_B, mask=inside_B, other=0)
    position_B = tl.load(position_ptr + b_B, mask=inside_B, other=0).to(tl.int64)
    writes_B = n_B > 0
    page_B = tl.load(pages_ptr + b_B * pages_row + (n_B - 1) // P, mask=writes_B, other=0).to(tl.int64)
    cos_a = _angle(cos_ptr, position_B, inside_B, cos_row, 0, HALF, BLOCK_HALF)
    cos_b = _angle(cos_ptr, position_B, inside_B, cos_row, HALF, HALF, BLOCK_HALF)
    sin_a = _angle(sin_ptr, position_B, inside_B, sin_row, 0, HALF, BLOCK_HALF)
    sin_b = _angle(sin_ptr, position_B, inside_B, sin_row, HALF, HALF, BLOCK_HALF)
    a = _columns(y_ptr, bias_a, low_a, b_B, inside_B, y_row, first, t_first, HALF, BLOCK_HALF, RANK, BLOCK_R, BIAS,
                 PRECISION)  # fmt: skip
    b = _columns(y_ptr, bias_b, low_b, b_B, inside_B, y_row, first + HALF, t_first, HALF, BLOCK_HALF, RANK, BLOCK_R, BIAS,
                 PRECISION)  # fmt: skip
    if REST > 0:
        rest = _columns(y_ptr, bias_rest, low_rest, b_B, inside_B, y_row, first + 2 * HALF, t_first, REST, BLOCK_REST, RANK,
                        BLOCK_R, BIAS, PRECISION)  # fmt: skip
    if part < 2:
        if NORM:
            weight_ptr = q_norm_ptr
            if part == 1:
                weight_ptr = k_norm_ptr
            square_B = tl.sum(a * a + b * b, 1)
            if REST > 0:
                square_B += tl.sum(rest * rest, 1)
            rstd_B = tl.rsqrt(square_B / D + eps)
            a = _scaled(a, rstd_B, weight_ptr, 0, HALF, BLOCK_HALF, UNIT_OFFSET)
            b = _scaled(b, rstd_B, weight_ptr, HALF, HALF, BLOCK_HALF, UNIT_OFFSET)
            if REST > 0:
                rest = _scaled(rest, rstd_B, weight_ptr, 2 * HALF, REST, BLOCK_REST, UNIT_OFFSET)
        turned = a * cos_a - b * sin_a
        b = b * cos_b + a * sin_b
        a = turned
    at_B = q_ptr + b_B.to(tl.int64) * (H * D) + first
    if part > 0:
        inside_B = writes_B
        token_B = (n_B - 1) % P
        at_B = k_ptr + page_B * k_page + token_B * k_token + (head - H).to(tl.int64) * k_head
        if part > 1:
            at_B = v_ptr + page_B * v_page + token_B * v_token + (head - H - K).to(tl.int64) * v_head
    _put(at_B, a, inside_B, 0, HALF, BLOCK_HALF)
    _put(at_B, b, inside_B, HALF, HALF, BLOCK_HALF)
    if REST > 0:
        _put(at_B, rest, inside_B, 2 * HALF, REST, BLOCK_REST)


@triton.jit(do_not_specialize=["B"])
def _swiglu_kernel(
    y_ptr, lora_ptr, bias_ptr, h_ptr, B, y_row, F: tl.constexpr, BLOCK_F: tl.constexpr, RANK: tl.constexpr,
    BLOCK_R: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # The last tile begins earlier where F is no multiple: it writes some results once more.
    first = tl.minimum(tl.program_id(1) * BLOCK_F, tl.maximum(F - BLOCK_F, 0))
    SIZE: tl.constexpr = min(BLOCK_F, F)
    gate_bias, gate_low = _constants(lora_ptr, bias_ptr, first, SIZE, BLOCK_F, RANK, BLOCK_R, BIAS)
    up_bias, up_low = _constants(lora_ptr, bias_ptr, F + first, SIZE, BLOCK_F, RANK, BLOCK_R, BIAS)
    wait_for_inputs(EARLY)
    b_B = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_B = b_B < B
    gate = _columns(y_ptr, gate_bias, gate_low, b_B, inside_B, y_row, first, 2 * F, SIZE, BLOCK_F, RANK, BLOCK_R, BIAS,
                    PRECISION)  # fmt: skip
    up = _columns(y_ptr, up_bias, up_low, b_B, inside_B, y_row, F + first, 2 * F + RANK, SIZE, BLOCK_F, RANK, BLOCK_R, BIAS,
                  PRECISION)  # fmt: skip
    _put(h_ptr + b_B.to(tl.int64) * F + first, gate * _squash(gate, GELU) * up, inside_B, 0, SIZE, BLOCK_F)


@triton.jit(do_not_specialize=["B"])
def _complete_kernel(
    y_ptr, lora_ptr, bias_ptr, B, y_row, M: tl.constexpr, BLOCK_M: tl.constexpr, RANK: tl.constexpr,
    BLOCK_R: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y += bias + t B', in place."""
    first = tl.program_id(1) * BLOCK_M
    bias_O, low_Or = _constants(lora_ptr, bias_ptr, first, M - first, BLOCK_M, RANK, BLOCK_R, BIAS)
    wait_for_inputs(EARLY)
    b_B = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_B = b_B < B
    o_O = tl.arange(0, BLOCK_M)
    at_B = y_ptr + b_B.to(tl.int64) * y_row
    y_BO = _columns(
        y_ptr, bias_O, low_Or, b_B, inside_B, y_row, first, M, M - first, BLOCK_M, RANK, BLOCK_R, BIAS, PRECISION
    )
    mask = inside_B[:, None] & (first + o_O < M)[None, :]
    tl.store(at_B[:, None] + first + o_O[None, :], y_BO.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_kernel(
    h_ptr, y_ptr, bias_ptr, post_ptr, weight_ptr, x_ptr, y_row, eps, M: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < M
    dtype = y_ptr.dtype.element_ty
    # No step writes these: they are read before the wait.
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if POST:
        post = tl.load(post_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    y = tl.load(y_ptr + row * y_row + col, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + row * M + col, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y = (y + bias).to(dtype).to(tl.float32)
    if POST:
        y = _normed(y, post, eps, dtype, M, UNIT_OFFSET)
    h = (h + y).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + row * M + col, h, mask=mask)
    x = _normed(h.to(tl.float32), weight, eps, dtype, M, UNIT_OFFSET)
    tl.store(x_ptr + row * M + col, x.to(dtype), mask=mask)


@triton.jit
def _normed(x, weight, eps, dtype: tl.constexpr, M: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """RMS norm of a row, rounded as `rms_norm` rounds, in fp32."""
    y = x * tl.rsqrt(tl.sum(x * x, 0) / M + eps)
    if UNIT_OFFSET:
        y = y * (1.0 + weight)
    else:
        y = y.to(dtype).to(tl.float32) * weight
    return y.to(dtype).to(tl.float32)


# --- sampling -----------------------------------------------------------------------------------------------------


@triton.jit
def _minus_log1m(v):
    """-log(1 - v): by its series, as 2 artanh(v / (2 - v)), where 1 - v would lose what decides."""
    w = v / (2.0 - v)
    s = w * w
    series = 2.0 * w * (1.0 + s * (0.3333333333333333 + s * (0.2 + s * (0.14285714285714285 + s * 0.1111111111111111))))
    return tl.where(v < 0.25, series, -tl.log(1.0 - v))


@triton.jit
def _block_kernel(
    logits_ptr, temperature_ptr, seed_ptr, count_ptr, partial_ptr, id_ptr, row_stride,
    V: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of one block: best score, its z, largest z, sum of exp(z - largest): [B, 4, S]; and the token of the best score."""
    wait_for_inputs(EARLY)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    col = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0.0
    z = tl.load(logits_ptr + row * row_stride + col, mask=col < V, other=float("-inf")).to(tl.float32)
    z = z / tl.where(greedy, 1.0, temperature)
    quarter = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr + row), quarter, tl.load(count_ptr + row).to(tl.int32), 0, 0)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    # A signed word counts from -2^31.
    v = (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    score = tl.where(greedy, z, z - tl.log(_minus_log1m(v)))
    score = tl.where(z == float("-inf"), float("-inf"), score)
    best, at = tl.max(score, 0, return_indices=True)
    top = tl.max(z, 0)
    e = tl.exp2((z - tl.where(top == float("-inf"), 0.0, top)) * LOG2_E)
    out_ptr = partial_ptr + row * (4 * S) + block
    tl.store(out_ptr, best)
    tl.store(out_ptr + S, tl.sum(tl.where(tl.arange(0, BLOCK) == at, z, 0.0), 0))
    tl.store(out_ptr + 2 * S, top)
    tl.store(out_ptr + 3 * S, tl.sum(e, 0))
    tl.store(id_ptr + row * S + block, block * BLOCK + at)


@triton.jit
def _choose_kernel(
    partial_ptr, block_id_ptr, id_ptr, logprob_ptr, S: tl.constexpr, BLOCK_S: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    s_S = tl.arange(0, BLOCK_S)
    mask = s_S < S
    at = partial_ptr + row * (4 * S) + s_S
    best_S = tl.load(at, mask=mask, other=float("-inf"))
    top_S = tl.load(at + 2 * S, mask=mask, other=float("-inf"))
    sum_S = tl.load(at + 3 * S, mask=mask, other=0.0)
    _, block = tl.max(best_S, 0, return_indices=True)
    top = tl.max(top_S, 0)
    total = tl.sum(tl.where(top_S == float("-inf"), 0.0, sum_S * tl.exp2((top_S - top) * LOG2_E)), 0)
    z = tl.load(partial_ptr + row * (4 * S) + S + block)
    tl.store(id_ptr + row, tl.load(block_id_ptr + row * S + block).to(tl.int64))
    tl.store(logprob_ptr + row, (z - top) - tl.log2(total) * LOG_2)


# --- launching ----------------------------------------------------------------------------------------------------


def _low_rank(y_BN: Tensor, lora_b_Or: Tensor | None, bias_O: Tensor | None) -> dict[str, int | str | bool]:
    rank = 0 if lora_b_Or is None else lora_b_Or.shape[1]
    return {
        "RANK": rank, "BLOCK_R": max(16, padded(max(rank, 1))), "BIAS": bias_O is not None, "ROWS": ROWS,
        "PRECISION": "ieee" if y_BN.dtype == torch.float32 else "tf32",
    }  # fmt: skip


@functools.cache
def _pieces(D: int, R: int) -> dict[str, int]:
    return {"D": D, "HALF": R // 2, "BLOCK_HALF": max(16, padded(R // 2)), "REST": D - R,
            "BLOCK_REST": max(16, padded(max(D - R, 1)))}  # fmt: skip


def decode_qkv(
    y_BN: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos_SR: Tensor,
    sin_SR: Tensor,
    position_B: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    own_pages_BN: Tensor,
    own_length_B: Tensor,
    lora_b_Or: Tensor | None,
    bias_O: Tensor | None,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> Tensor:
    B = len(y_BN)
    q_BHD = torch.empty(B, heads, head_dim, dtype=y_BN.dtype, device=y_BN.device)
    stand_in = y_BN  # for what is not there; never read
    launch(
        _qkv_kernel, (parts(B, ROWS), heads + 2 * kv_heads), y_BN, stand_in if lora_b_Or is None else lora_b_Or,
        stand_in if bias_O is None else bias_O, stand_in if q_norm_D is None else q_norm_D,
        stand_in if k_norm_D is None else k_norm_D, cos_SR, sin_SR, position_B, own_pages_BN, own_length_B,
        q_BHD, k_pages, v_pages, B, y_BN.stride(0), cos_SR.stride(0), sin_SR.stride(0), own_pages_BN.stride(0),
        *k_pages.stride()[:3], *v_pages.stride()[:3], eps,
        H=heads, K=kv_heads, **_pieces(head_dim, cos_SR.shape[1]), P=k_pages.shape[1], NORM=q_norm_D is not None,
        UNIT_OFFSET=unit_offset, **_low_rank(y_BN, lora_b_Or, bias_O), num_warps=2,
    )  # fmt: skip
    return q_BHD


def decode_swiglu(
    y_BN: Tensor, features: int, lora_b_Or: Tensor | None, bias_O: Tensor | None, activation: str
) -> Tensor:
    B = len(y_BN)
    h_BF = torch.empty(B, features, dtype=y_BN.dtype, device=y_BN.device)
    launch(
        _swiglu_kernel, (parts(B, ROWS), parts(features, BLOCK_F)), y_BN, y_BN if lora_b_Or is None else lora_b_Or,
        y_BN if bias_O is None else bias_O, h_BF, B, y_BN.stride(0), F=features, BLOCK_F=BLOCK_F,
        GELU=activation == "gelu_tanh", **_low_rank(y_BN, lora_b_Or, bias_O), num_warps=2,
    )  # fmt: skip
    return h_BF


def decode_add_norm(
    h_BM: Tensor,
    y_BN: Tensor,
    weight_M: Tensor,
    eps: float,
    lora_b_Or: Tensor | None,
    bias_M: Tensor | None,
    post_weight_M: Tensor | None,
    unit_offset: bool,
) -> Tensor:
    B, M = h_BM.shape
    if lora_b_Or is not None:
        launch(
            _complete_kernel, (parts(B, ROWS), parts(M, BLOCK_M)), y_BN, lora_b_Or, y_BN if bias_M is None else bias_M,
            B, y_BN.stride(0), M=M, BLOCK_M=BLOCK_M, **_low_rank(y_BN, lora_b_Or, bias_M), num_warps=2,
        )  # fmt: skip
        bias_M = None
    x_BM = torch.empty(B, M, dtype=y_BN.dtype, device=y_BN.device)
    block = padded(M)
    launch(
        _norm_kernel, (B,), h_BM, y_BN, h_BM if bias_M is None else bias_M, h_BM if post_weight_M is None else post_weight_M,
        weight_M, x_BM, y_BN.stride(0), eps, M=M, BLOCK=block, BIAS=bias_M is not None, POST=post_weight_M is not None,
        UNIT_OFFSET=unit_offset, num_warps=warps(block, 8),
    )  # fmt: skip
    return x_BM


def decode_sample(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
    B, V = logits_BV.shape
    blocks = parts(V, BLOCK_V)
    partial = torch.empty(B, 4, blocks, dtype=torch.float32, device=logits_BV.device)
    block_id = torch.empty(B, blocks, dtype=torch.int32, device=logits_BV.device)
    id_B = torch.empty(B, dtype=torch.int64, device=logits_BV.device)
    logprob_B = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    launch(
        _block_kernel, (blocks, B), logits_BV, temperature_B, seed_B, count_B, partial, block_id, logits_BV.stride(0),
        V=V, S=blocks, BLOCK=BLOCK_V, num_warps=warps(BLOCK_V, EACH),
    )  # fmt: skip
    launch(_choose_kernel, (B,), partial, block_id, id_B, logprob_B, S=blocks, BLOCK_S=padded(blocks), num_warps=1)
    return id_B, logprob_B
