"""Weighted sum of experts' rows and the experts' gated activation in Triton.

Shape suffixes: T tokens, k choices of a token, S slots, R rows, E experts, M hidden size, F width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, padded, parts, warps

if TYPE_CHECKING:
    from ..experts import Gating

BLOCK = 1024
EACH = 8


@triton.jit
def _gather_kernel(
    x_ptr, row_ptr, y_ptr, x_stride, M: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    to = (program // BLOCKS).to(tl.int64)
    col = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + to).to(tl.int64)
    tl.store(y_ptr + to * M + col, tl.load(x_ptr + row * x_stride + col, mask=col < M), mask=col < M)


@triton.jit
def _combine_kernel(
    y_ptr, place_ptr, weight_ptr, expert_ptr, bias_ptr, add_ptr, out_ptr, y_stride, bias_stride, add_stride, out_stride,
    M: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    col = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = col < M
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        slot = tl.load(place_ptr + row * K + j).to(tl.int64)
        value = tl.load(y_ptr + slot * y_stride + col, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(expert_ptr + row * K + j).to(tl.int64)
            value += tl.load(bias_ptr + expert * bias_stride + col, mask=mask, other=0.0).to(tl.float32)
        if WEIGHT:
            value *= tl.load(weight_ptr + row * K + j).to(tl.float32)
        total += value
    if ADD:
        total += tl.load(add_ptr + row * add_stride + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + col, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_up(ptr, at, F: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up columns [at, at + BLOCK) of one row, in fp32."""
    if INTERLEAVED:
        both = 2 * at + tl.arange(0, 2 * BLOCK)
        x = tl.load(ptr + both, mask=both < 2 * F, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(x, (BLOCK, 2)))
    else:
        col = at + tl.arange(0, BLOCK)
        gate = tl.load(ptr + col, mask=col < F, other=0.0).to(tl.float32)
        up = tl.load(ptr + F + col, mask=col < F, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _biased(
    x_ptr, bias_ptr, at, F: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    gate, up = _gate_up(x_ptr, at, F, BLOCK, INTERLEAVED)
    if BIAS:
        gate_bias, up_bias = _gate_up(bias_ptr, at, F, BLOCK, INTERLEAVED)
        gate += gate_bias
        up += up_bias
    return gate, up


@triton.jit
def _forward_kernel(
    x_ptr, expert_ptr, bias_ptr, h_ptr, x_stride, bias_stride, h_stride, limit, alpha,
    F: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    at = (program % BLOCKS) * BLOCK
    if BIAS:
        bias_ptr += tl.load(expert_ptr + row).to(tl.int64) * bias_stride
    gate, up = _biased(x_ptr + row * x_stride, bias_ptr, at, F, BLOCK, INTERLEAVED, BIAS)
    if CLAMP:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    col = at + tl.arange(0, BLOCK)
    h = gate * tl.sigmoid(alpha * gate) * up
    tl.store(h_ptr + row * h_stride + col, h.to(h_ptr.dtype.element_ty), mask=col < F)


@triton.jit
def _backward_kernel(
    dh_ptr, x_ptr, weight_ptr, expert_ptr, bias_ptr, dweight_ptr, dh_stride, x_stride, bias_stride, limit, alpha,
    F: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """One row a program: the weight's gradient is a sum over all of its columns."""
    row = tl.program_id(0).to(tl.int64)
    dh_ptr += row * dh_stride
    x_ptr += row * x_stride
    if BIAS:
        bias_ptr += tl.load(expert_ptr + row).to(tl.int64) * bias_stride
    weight = tl.load(weight_ptr + row).to(tl.float32)
    shares = tl.zeros([BLOCK], tl.float32)
    for at in tl.static_range(0, F, BLOCK):
        col = at + tl.arange(0, BLOCK)
        mask = col < F
        gate, up = _biased(x_ptr, bias_ptr, at, F, BLOCK, INTERLEAVED, BIAS)
        dh = tl.load(dh_ptr + col, mask=mask, other=0.0).to(tl.float32)
        gate_open = gate <= limit
        up_open = tl.abs(up) <= limit
        if CLAMP:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        s = tl.sigmoid(alpha * gate)
        act = gate * s
        shares += dh * act * up
        tl.store(dh_ptr + col, (act * up).to(dh_ptr.dtype.element_ty), mask=mask)
        dh *= weight
        dgate = dh * up * (s + alpha * act * (1.0 - s))
        dup = dh * act
        if CLAMP:
            dgate = tl.where(gate_open, dgate, 0.0)
            dup = tl.where(up_open, dup, 0.0)
        if INTERLEAVED:
            both = 2 * at + tl.arange(0, 2 * BLOCK)
            dx = tl.interleave(dgate, dup)
            tl.store(x_ptr + both, dx.to(x_ptr.dtype.element_ty), mask=both < 2 * F)
        else:
            tl.store(x_ptr + col, dgate.to(x_ptr.dtype.element_ty), mask=mask)
            tl.store(x_ptr + F + col, dup.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(dweight_ptr + row, tl.sum(shares, 0))


def gather_rows(x_TM: Tensor, row_R: Tensor) -> Tensor:
    R, M = len(row_R), x_TM.shape[1]
    y_RM = torch.empty(R, M, dtype=x_TM.dtype, device=x_TM.device)
    block = min(BLOCK, padded(M))
    launch(
        _gather_kernel, (R * parts(M, block),), x_TM, row_R, y_RM, x_TM.stride(0),
        M=M, BLOCKS=parts(M, block), BLOCK=block, num_warps=warps(block, EACH),
    )  # fmt: skip
    return y_RM


def combine_rows(
    y_SM: Tensor,
    place_Tk: Tensor,
    weight_Tk: Tensor | None = None,
    *,
    expert_Tk: Tensor | None = None,
    bias_EM: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    (T, k), M = place_Tk.shape, y_SM.shape[1]
    if out is None:
        out = torch.empty(T, M, dtype=y_SM.dtype if add is None else add.dtype, device=y_SM.device)
    block = min(BLOCK, padded(M))
    # Pointers of what is not given are never read; y stands in for them.
    weight, expert, bias, added = (y_SM if x is None else x for x in (weight_Tk, expert_Tk, bias_EM, add))
    launch(
        _combine_kernel, (T * parts(M, block),), y_SM, place_Tk.contiguous(), weight.contiguous(), expert.contiguous(), bias,
        added, out, y_SM.stride(0), bias.stride(0), added.stride(0), out.stride(0),
        M=M, K=k, BLOCKS=parts(M, block), BLOCK=block, num_warps=warps(block, EACH),
        WEIGHT=weight_Tk is not None, BIAS=bias_EM is not None, ADD=add is not None,
    )  # fmt: skip
    return out


def _flags(gating: Gating, bias_EG: Tensor | None) -> dict[str, bool]:
    return {"INTERLEAVED": gating.interleaved, "BIAS": bias_EG is not None, "CLAMP": gating.limit is not None}


def expert_swiglu(
    x_RG: Tensor, gating: Gating, expert_R: Tensor | None = None, bias_EG: Tensor | None = None
) -> Tensor:
    R, F = len(x_RG), x_RG.shape[1] // 2
    h_RF = torch.empty(R, F, dtype=x_RG.dtype, device=x_RG.device)
    block = min(BLOCK, padded(F))
    expert, bias = (x_RG if x is None else x for x in (expert_R, bias_EG))
    launch(
        _forward_kernel, (R * parts(F, block),), x_RG, expert, bias, h_RF, x_RG.stride(0), bias.stride(0), h_RF.stride(0),
        float(gating.limit or 0.0), float(gating.alpha),
        F=F, BLOCKS=parts(F, block), BLOCK=block, num_warps=warps(2 * block, EACH), **_flags(gating, bias_EG),
    )  # fmt: skip
    return h_RF


def expert_swiglu_backward(
    dh_RF: Tensor,
    x_RG: Tensor,
    weight_R: Tensor,
    gating: Gating,
    expert_R: Tensor | None = None,
    bias_EG: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    R, F = dh_RF.shape
    dweight_R = torch.empty(R, dtype=torch.float32, device=x_RG.device)
    block = min(BLOCK, padded(F))
    expert, bias = (x_RG if x is None else x for x in (expert_R, bias_EG))
    launch(
        _backward_kernel, (R,), dh_RF, x_RG, weight_R, expert, bias, dweight_R, dh_RF.stride(0), x_RG.stride(0),
        bias.stride(0), float(gating.limit or 0.0), float(gating.alpha),
        F=F, BLOCK=block, num_warps=warps(2 * block, EACH), **_flags(gating, bias_EG),
    )  # fmt: skip
    return x_RG, dh_RF, dweight_R
