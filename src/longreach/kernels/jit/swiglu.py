"""Gated activation in Triton: elementwise over blocks of one row. Shape suffixes: T tokens, F MLP width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import CUBIC, TWO_ROOT
from . import launch, padded, parts, warps

BLOCK = 2048
EACH = 16

_TWO_ROOT = tl.constexpr(TWO_ROOT)
_CUBIC = tl.constexpr(CUBIC)


@triton.jit
def _squash(gate, GELU: tl.constexpr):
    """sigmoid(z(gate)): either activation is gate times this."""
    if GELU:
        z = _TWO_ROOT * (gate + _CUBIC * gate * gate * gate)
    else:
        z = gate
    return tl.sigmoid(z)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, h_ptr, gate_stride, up_stride, h_stride,
    F: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    col = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = col < F
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    h = gate * _squash(gate, GELU) * up
    tl.store(h_ptr + row * h_stride + col, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride,
    F: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, WANT_H: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    col = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = col < F
    dh = tl.load(dh_ptr + row * dh_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    s = _squash(gate, GELU)
    act = gate * s
    slope = act * (1.0 - s)
    if GELU:
        slope *= _TWO_ROOT * (1.0 + 3.0 * _CUBIC * gate * gate)
    dgate = dh * up * (s + slope)
    tl.store(gate_ptr + row * gate_stride + col, dgate.to(gate_ptr.dtype.element_ty), mask=mask)
    tl.store(up_ptr + row * up_stride + col, (dh * act).to(up_ptr.dtype.element_ty), mask=mask)
    if WANT_H:
        tl.store(dh_ptr + row * dh_stride + col, (act * up).to(dh_ptr.dtype.element_ty), mask=mask)


def _shape(gate_TF: Tensor) -> tuple[tuple[int, ...], dict[str, int]]:
    T, F = gate_TF.shape
    block = min(BLOCK, padded(F))
    blocks = parts(F, block)
    return (T * blocks,), {"F": F, "BLOCKS": blocks, "BLOCK": block, "num_warps": warps(block, EACH)}


def swiglu(gate_TF: Tensor, up_TF: Tensor, *, activation: str = "silu", out: Tensor | None = None) -> Tensor:
    h_TF = torch.empty(gate_TF.shape, dtype=gate_TF.dtype, device=gate_TF.device) if out is None else out
    grid, sizes = _shape(gate_TF)
    launch(
        _forward_kernel, grid, gate_TF, up_TF, h_TF, gate_TF.stride(0), up_TF.stride(0), h_TF.stride(0),
        **sizes, GELU=activation == "gelu_tanh",
    )  # fmt: skip
    return h_TF


def swiglu_backward(
    dh_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, *, activation: str = "silu", return_h: bool = False
) -> tuple[Tensor, ...]:
    grid, sizes = _shape(gate_TF)
    launch(
        _backward_kernel, grid, dh_TF, gate_TF, up_TF, dh_TF.stride(0), gate_TF.stride(0), up_TF.stride(0),
        **sizes, GELU=activation == "gelu_tanh", WANT_H=return_h,
    )  # fmt: skip
    return (gate_TF, up_TF, dh_TF) if return_h else (gate_TF, up_TF)
