"""RMS norm in Triton: one row a program, read once, the row kept in registers.

Shape suffixes: T tokens, H hidden size, P partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, padded, parts, warps

# Elements a thread holds: more loads in flight per thread against more threads per multiprocessor.
EACH = 32
EACH_DWEIGHT = 16  # beside the sums
# Weight gradient: at most this many partial sums, of at least ROWS rows each; fixed, so the bits don't depend on the card.
PARTIALS = 1024
ROWS = 4


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    y_stride,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < H
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd
    if UNIT_OFFSET:
        y = y * (1.0 + weight)
    else:
        y = y.to(dtype).to(tl.float32) * weight
    tl.store(y_ptr + row * y_stride + col, y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    add_ptr,
    dx_ptr,
    dweight_ptr,
    dy_stride,
    x_stride,
    add_stride,
    dx_stride,
    T,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    DWEIGHT: tl.constexpr,
):
    """Program p takes rows p, p + P, p + 2P, ... and writes the sum of their weight gradients as row p of [P, H]."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    mask = col < H
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range((T - program + programs - 1) // programs):
        row = program.to(tl.int64) + step * programs
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            add = tl.load(add_ptr + row * add_stride + col, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        xhat = x * rstd
        if DWEIGHT:
            dweight += dy * xhat
        g = dy * weight
        dx = rstd * (g - xhat * (tl.sum(g * xhat, 0) / H))
        if ADD:
            dx += add
        tl.store(dx_ptr + row * dx_stride + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if DWEIGHT:
        tl.store(dweight_ptr + program * H + col, dweight, mask=mask)


def rms_norm(
    x_TH: Tensor, weight_H: Tensor, eps: float, *, unit_offset: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    y_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device) if out is None else out
    T, H = x_TH.shape
    rstd_T = torch.empty(T, dtype=torch.float32, device=x_TH.device)
    block = padded(H)
    launch(
        _forward_kernel, (T,), x_TH, weight_H, y_TH, rstd_T, x_TH.stride(0), y_TH.stride(0), eps,
        H=H, BLOCK=block, UNIT_OFFSET=unit_offset, num_warps=warps(block, EACH),
    )  # fmt: skip
    return y_TH, rstd_T


def rms_norm_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor,
    rstd_T: Tensor,
    *,
    unit_offset: bool = False,
    add: Tensor | None = None,
    need_dweight: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    T, H = x_TH.shape
    dx_TH = out if out is not None else add
    if dx_TH is None:
        dx_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    programs = min(parts(T, ROWS), PARTIALS) if need_dweight else T
    partial_PH = torch.empty(programs, H, dtype=torch.float32, device=x_TH.device) if need_dweight else None
    block = padded(H)
    launch(
        _backward_kernel, (programs,), dy_TH, x_TH, weight_H, rstd_T, x_TH if add is None else add, dx_TH,
        rstd_T if partial_PH is None else partial_PH,
        dy_TH.stride(0), x_TH.stride(0), 0 if add is None else add.stride(0), dx_TH.stride(0),
        T, H=H, BLOCK=block, ADD=add is not None, UNIT_OFFSET=unit_offset, DWEIGHT=need_dweight,
        num_warps=warps(block, EACH_DWEIGHT if need_dweight else EACH),
    )  # fmt: skip
    return dx_TH, None if partial_PH is None else partial_PH.sum(0).to(weight_H.dtype)
