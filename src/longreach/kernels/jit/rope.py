"""Per-head RMS norm and rotary embedding in Triton: one token a program, all its query and key heads, each read once.

A head is held as three pieces: the two halves of its rotary part and the rest. Shape suffixes: T tokens, H query heads,
K key heads, D head size, R rotary width.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, padded, warps

EACH = 32  # elements of q a thread holds


@triton.jit
def _angles(cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK_R: tl.constexpr):
    """cos and sin of both halves, [1, BLOCK_R] each: nothing says that the halves hold the same angles."""
    col = tl.arange(0, BLOCK_R)[None, :]
    mask = col < HALF
    cos_a = tl.load(cos_ptr + col, mask=mask, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + HALF + col, mask=mask, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + col, mask=mask, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + HALF + col, mask=mask, other=0.0).to(tl.float32)
    return cos_a, cos_b, sin_a, sin_b


@triton.jit
def _piece(
    ptr, head_stride, FIRST: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns [FIRST, FIRST + SIZE) of every head of one token, in fp32."""
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    return tl.load(ptr + head * head_stride + FIRST + col, mask=(head < HEADS) & (col < SIZE), other=0.0).to(tl.float32)


@triton.jit
def _put(
    ptr, value, head_stride, FIRST: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (col < SIZE)
    tl.store(ptr + head * head_stride + FIRST + col, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weights(ptr, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    col = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(ptr + FIRST + col, mask=col < SIZE, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    return weight


@triton.jit
def _turn(
    x_ptr, y_ptr, weight_ptr, rstd_ptr, x_head, y_head, eps, cos_a, cos_b, sin_a, sin_b,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr,
    REST: tl.constexpr, BLOCK_P: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Norm and rotate all heads of one token; the pointers stand at its row."""
    a = _piece(x_ptr, x_head, 0, HALF, HEADS, BLOCK_H, BLOCK_R)
    b = _piece(x_ptr, x_head, HALF, HALF, HEADS, BLOCK_H, BLOCK_R)
    if REST > 0:
        rest = _piece(x_ptr, x_head, 2 * HALF, REST, HEADS, BLOCK_H, BLOCK_P)
    if NORM:
        square = tl.sum(a * a + b * b, 1)
        if REST > 0:
            square += tl.sum(rest * rest, 1)
        rstd = tl.rsqrt(square / D + eps)
        head = tl.arange(0, BLOCK_H)
        tl.store(rstd_ptr + head, rstd, mask=head < HEADS)
        a = a * rstd[:, None] * _weights(weight_ptr, 0, HALF, BLOCK_R, UNIT_OFFSET)
        b = b * rstd[:, None] * _weights(weight_ptr, HALF, HALF, BLOCK_R, UNIT_OFFSET)
        if REST > 0:
            rest = rest * rstd[:, None] * _weights(weight_ptr, 2 * HALF, REST, BLOCK_P, UNIT_OFFSET)
    _put(y_ptr, a * cos_a - b * sin_a, y_head, 0, HALF, HEADS, BLOCK_H, BLOCK_R)
    _put(y_ptr, b * cos_b + a * sin_b, y_head, HALF, HALF, HEADS, BLOCK_H, BLOCK_R)
    if REST > 0:
        _put(y_ptr, rest, y_head, 2 * HALF, REST, HEADS, BLOCK_H, BLOCK_P)


@triton.jit
def _turn_back(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, rstd_ptr, dweight_ptr, dy_head, x_head, dx_head, cos_a, cos_b, sin_a, sin_b,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr,
    REST: tl.constexpr, BLOCK_P: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, DWEIGHT: tl.constexpr,
):  # fmt: skip
    """Gradient of `_turn`; writes this token's share of the weight gradient to dweight_ptr[0..D)."""
    dya = _piece(dy_ptr, dy_head, 0, HALF, HEADS, BLOCK_H, BLOCK_R)
    dyb = _piece(dy_ptr, dy_head, HALF, HALF, HEADS, BLOCK_H, BLOCK_R)
    ga = dya * cos_a + dyb * sin_b
    gb = dyb * cos_b - dya * sin_a
    if REST > 0:
        gr = _piece(dy_ptr, dy_head, 2 * HALF, REST, HEADS, BLOCK_H, BLOCK_P)
    if NORM:
        head = tl.arange(0, BLOCK_H)
        rstd = tl.load(rstd_ptr + head, mask=head < HEADS, other=0.0)[:, None]
        xa = _piece(x_ptr, x_head, 0, HALF, HEADS, BLOCK_H, BLOCK_R) * rstd
        xb = _piece(x_ptr, x_head, HALF, HALF, HEADS, BLOCK_H, BLOCK_R) * rstd
        if REST > 0:
            xr = _piece(x_ptr, x_head, 2 * HALF, REST, HEADS, BLOCK_H, BLOCK_P) * rstd
        if DWEIGHT:
            col = tl.arange(0, BLOCK_R)
            tl.store(dweight_ptr + col, tl.sum(ga * xa, 0), mask=col < HALF)
            tl.store(dweight_ptr + HALF + col, tl.sum(gb * xb, 0), mask=col < HALF)
            if REST > 0:
                last = tl.arange(0, BLOCK_P)
                tl.store(dweight_ptr + 2 * HALF + last, tl.sum(gr * xr, 0), mask=last < REST)
        ga = ga * _weights(weight_ptr, 0, HALF, BLOCK_R, UNIT_OFFSET)
        gb = gb * _weights(weight_ptr, HALF, HALF, BLOCK_R, UNIT_OFFSET)
        mean = tl.sum(ga * xa + gb * xb, 1)
        if REST > 0:
            gr = gr * _weights(weight_ptr, 2 * HALF, REST, BLOCK_P, UNIT_OFFSET)
            mean += tl.sum(gr * xr, 1)
        mean = (mean / D)[:, None]
        ga = rstd * (ga - xa * mean)
        gb = rstd * (gb - xb * mean)
        if REST > 0:
            gr = rstd * (gr - xr * mean)
    _put(dx_ptr, ga, dx_head, 0, HALF, HEADS, BLOCK_H, BLOCK_R)
    _put(dx_ptr, gb, dx_head, HALF, HALF, HEADS, BLOCK_H, BLOCK_R)
    if REST > 0:
        _put(dx_ptr, gr, dx_head, 2 * HALF, REST, HEADS, BLOCK_H, BLOCK_P)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, q_rstd_ptr, k_rstd_ptr,
    q_token, q_head, k_token, k_head, cos_token, sin_token, qo_token, qo_head, ko_token, ko_head, eps,
    H: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, REST: tl.constexpr, BLOCK_P: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cos_a, cos_b, sin_a, sin_b = _angles(cos_ptr + t * cos_token, sin_ptr + t * sin_token, HALF, BLOCK_R)
    _turn(
        q_ptr + t * q_token, q_out_ptr + t * qo_token, q_weight_ptr, q_rstd_ptr + t * H, q_head, qo_head, eps,
        cos_a, cos_b, sin_a, sin_b, H, BLOCK_H, D, HALF, BLOCK_R, REST, BLOCK_P, NORM, UNIT_OFFSET,
    )  # fmt: skip
    _turn(
        k_ptr + t * k_token, k_out_ptr + t * ko_token, k_weight_ptr, k_rstd_ptr + t * K, k_head, ko_head, eps,
        cos_a, cos_b, sin_a, sin_b, K, BLOCK_K, D, HALF, BLOCK_R, REST, BLOCK_P, NORM, UNIT_OFFSET,
    )  # fmt: skip


@triton.jit
def _backward_kernel(
    dq_ptr, dk_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_rstd_ptr, k_rstd_ptr,
    dq_out_ptr, dk_out_ptr, dq_weight_ptr, dk_weight_ptr,
    dq_token, dq_head, dk_token, dk_head, q_token, q_head, k_token, k_head, cos_token, sin_token,
    qo_token, qo_head, ko_token, ko_head,
    H: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, REST: tl.constexpr, BLOCK_P: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, DWEIGHT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cos_a, cos_b, sin_a, sin_b = _angles(cos_ptr + t * cos_token, sin_ptr + t * sin_token, HALF, BLOCK_R)
    _turn_back(
        dq_ptr + t * dq_token, q_ptr + t * q_token, dq_out_ptr + t * qo_token, q_weight_ptr, q_rstd_ptr + t * H,
        dq_weight_ptr + t * D, dq_head, q_head, qo_head, cos_a, cos_b, sin_a, sin_b,
        H, BLOCK_H, D, HALF, BLOCK_R, REST, BLOCK_P, NORM, UNIT_OFFSET, DWEIGHT,
    )  # fmt: skip
    _turn_back(
        dk_ptr + t * dk_token, k_ptr + t * k_token, dk_out_ptr + t * ko_token, k_weight_ptr, k_rstd_ptr + t * K,
        dk_weight_ptr + t * D, dk_head, k_head, ko_head, cos_a, cos_b, sin_a, sin_b,
        K, BLOCK_K, D, HALF, BLOCK_R, REST, BLOCK_P, NORM, UNIT_OFFSET, DWEIGHT,
    )  # fmt: skip


@functools.cache
def _sizes(H: int, K: int, D: int, R: int) -> dict[str, int]:
    return {
        "H": H, "K": K, "BLOCK_H": padded(H), "BLOCK_K": padded(K), "D": D,
        "HALF": R // 2, "BLOCK_R": padded(R // 2), "REST": D - R, "BLOCK_P": padded(max(D - R, 1)),
        "num_warps": warps(padded(H) * padded(D), EACH),
    }  # fmt: skip


def qk_norm_rope(
    q_THD: Tensor,
    k_TKD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    *,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    T, H, D = q_THD.shape
    y_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device) if q_out is None else q_out
    y_TKD = torch.empty(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device) if k_out is None else k_out
    stats = None
    if q_weight_D is not None:
        stats = (
            torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device),
            torch.empty(k_TKD.shape[:2], dtype=torch.float32, device=k_TKD.device),
        )
    # Without a norm these four pointers are never read; any tensor stands in for them.
    norm = (cos_TR,) * 4 if stats is None else (q_weight_D, k_weight_D, *stats)
    launch(
        _forward_kernel, (T,), q_THD, k_TKD, cos_TR, sin_TR, norm[0], norm[1], y_THD, y_TKD, norm[2], norm[3],
        *q_THD.stride()[:2], *k_TKD.stride()[:2], cos_TR.stride(0), sin_TR.stride(0),
        *y_THD.stride()[:2], *y_TKD.stride()[:2], eps,
        **_sizes(H, k_TKD.shape[1], D, cos_TR.shape[1]), NORM=stats is not None, UNIT_OFFSET=unit_offset,
    )  # fmt: skip
    return y_THD, y_TKD, stats


def qk_norm_rope_backward(
    dq_THD: Tensor,
    dk_TKD: Tensor,
    q_THD: Tensor | None,
    k_TKD: Tensor | None,
    cos_TR: Tensor,
    sin_TR: Tensor,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    stats: tuple[Tensor, Tensor] | None = None,
    unit_offset: bool = False,
    *,
    need_dweight: bool = False,
    dq_out: Tensor | None = None,
    dk_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    T, H, D = dq_THD.shape
    dq_out = dq_THD if dq_out is None else dq_out
    dk_out = dk_TKD if dk_out is None else dk_out
    norm: tuple[Tensor, ...] = (cos_TR,) * 4
    x: tuple[Tensor, Tensor] = (dq_THD, dk_TKD)
    if q_weight_D is not None:
        assert q_THD is not None and k_TKD is not None and k_weight_D is not None and stats is not None
        norm, x = (q_weight_D, k_weight_D, *stats), (q_THD, k_TKD)
    need_dweight = need_dweight and q_weight_D is not None
    # Every token's share is written down and summed afterwards: a fixed order, without atomics.
    shares_TD = [torch.empty(T, D, dtype=torch.float32, device=dq_THD.device) if need_dweight else cos_TR for _ in x]
    launch(
        _backward_kernel, (T,), dq_THD, dk_TKD, *x, cos_TR, sin_TR, *norm, dq_out, dk_out, *shares_TD,
        *dq_THD.stride()[:2], *dk_TKD.stride()[:2], *x[0].stride()[:2], *x[1].stride()[:2],
        cos_TR.stride(0), sin_TR.stride(0), *dq_out.stride()[:2], *dk_out.stride()[:2],
        **_sizes(H, dk_TKD.shape[1], D, cos_TR.shape[1]), NORM=q_weight_D is not None,
        UNIT_OFFSET=unit_offset, DWEIGHT=need_dweight,
    )  # fmt: skip
    if not need_dweight:
        return dq_out, dk_out, None, None
    assert q_weight_D is not None and k_weight_D is not None
    return dq_out, dk_out, shares_TD[0].sum(0).to(q_weight_D.dtype), shares_TD[1].sum(0).to(k_weight_D.dtype)
