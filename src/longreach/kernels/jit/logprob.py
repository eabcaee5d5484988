"""Log-prob, entropy and their gradient in Triton.

A row is cut into blocks of fixed size, one program each, so that a few rows fill the card as well as many do and a row's
bits don't depend on how many rows are beside it. A second small kernel joins the blocks of a row.

Shape suffixes: C rows, V vocabulary, S blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, padded, warps

BLOCK = 8192
EACH_FORWARD = 32
BLOCK_BACKWARD = 4096
EACH_BACKWARD = 16


@triton.jit
def _scaled(x, inverse_temperature, softcap, SOFTCAP: tl.constexpr):
    """z, and the slope of the softcap (1 without one); tanh(y) = 2 sigmoid(2y) - 1."""
    if SOFTCAP:
        t = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        z = softcap * t * inverse_temperature
        slope = 1.0 - t * t
    else:
        z = x * inverse_temperature
        slope = 1.0
    return z, slope


@triton.jit
def _block_kernel(
    logits_ptr, partial_ptr, row_stride, inverse_temperature, softcap,
    V: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Of one block: m = max z, sum exp(z - m), sum exp(z - m) (z - m); written as [C, 3, S]."""
    program = tl.program_id(0)
    row = (program // S).to(tl.int64)
    block = program % S
    col = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + col, mask=col < V, other=float("-inf")).to(tl.float32)
    z, _ = _scaled(x, inverse_temperature, softcap, SOFTCAP)
    if SOFTCAP:
        z = tl.where(col < V, z, float("-inf"))
    top = tl.max(z, 0)
    # A block of -inf alone (masked tokens) has no maximum to subtract.
    d = z - tl.where(top == float("-inf"), 0.0, top)
    e = tl.exp(d)
    at = partial_ptr + row * (3 * S) + block
    tl.store(at, top)
    tl.store(at + S, tl.sum(e, 0))
    if ENTROPY:
        tl.store(at + 2 * S, tl.sum(e * tl.where(e > 0, d, 0.0), 0))


@triton.jit
def _join_kernel(
    logits_ptr, labels_ptr, partial_ptr, logprob_ptr, lse_ptr, entropy_ptr, row_stride, inverse_temperature, softcap,
    V: tl.constexpr, S: tl.constexpr, BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_S)
    at = partial_ptr + row * (3 * S) + block
    mask = block < S
    top_S = tl.load(at, mask=mask, other=float("-inf"))
    sum_S = tl.load(at + S, mask=mask, other=0.0)
    top = tl.max(top_S, 0)
    shift_S = tl.where(top_S == float("-inf"), 0.0, top_S - top)
    factor_S = tl.where(top_S == float("-inf"), 0.0, tl.exp(shift_S))
    total = tl.sum(sum_S * factor_S, 0)
    log_total = tl.log(total)
    label = tl.load(labels_ptr + row).to(tl.int64)
    valid = (label >= 0) & (label < V)
    x = tl.load(logits_ptr + row * row_stride + label, mask=valid, other=float("nan")).to(tl.float32)
    z, _ = _scaled(x, inverse_temperature, softcap, SOFTCAP)
    tl.store(logprob_ptr + row, (z - top) - log_total)
    tl.store(lse_ptr + row, top + log_total)
    if ENTROPY:
        moment_S = tl.load(at + 2 * S, mask=mask, other=0.0)
        moment = tl.sum((moment_S + sum_S * shift_S) * factor_S, 0)
        tl.store(entropy_ptr + row, log_total - moment / total)


@triton.jit
def _backward_kernel(
    logits_ptr, labels_ptr, lse_ptr, dlogprob_ptr, dentropy_ptr, entropy_ptr, row_stride, inverse_temperature, softcap,
    V: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // S).to(tl.int64)
    col = (program % S) * BLOCK + tl.arange(0, BLOCK)
    mask = col < V
    at = logits_ptr + row * row_stride + col
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    z, slope = _scaled(x, inverse_temperature, softcap, SOFTCAP)
    logp = z - tl.load(lse_ptr + row)
    p = tl.exp(logp)
    dlogprob = tl.load(dlogprob_ptr + row).to(tl.float32)
    label = tl.load(labels_ptr + row)
    dz = tl.where(col == label, dlogprob, 0.0) - p * dlogprob
    if ENTROPY:
        dentropy = tl.load(dentropy_ptr + row).to(tl.float32)
        entropy = tl.load(entropy_ptr + row)
        dz -= dentropy * p * tl.where(p > 0, logp + entropy, 0.0)
    dx = dz * slope * inverse_temperature
    tl.store(at, dx.to(logits_ptr.dtype.element_ty), mask=mask)


def row_logprob(
    logits_CV: Tensor,
    labels_C: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    C, V = logits_CV.shape
    block = min(BLOCK, padded(V))
    S = triton.cdiv(V, block)
    device = logits_CV.device
    partial = torch.empty(C, 3, S, dtype=torch.float32, device=device)
    logprob_C, lse_C = (torch.empty(C, dtype=torch.float32, device=device) for _ in range(2))
    entropy_C = torch.empty_like(lse_C) if want_entropy else None
    scale = (logits_CV.stride(0), 1 / temperature, softcap or 1.0)
    kinds = {"SOFTCAP": softcap is not None, "ENTROPY": want_entropy}
    launch(
        _block_kernel, (C * S,), logits_CV, partial, *scale,
        V=V, S=S, BLOCK=block, **kinds, num_warps=warps(block, EACH_FORWARD),
    )  # fmt: skip
    launch(
        _join_kernel, (C,), logits_CV, labels_C, partial, logprob_C, lse_C, lse_C if entropy_C is None else entropy_C,
        *scale, V=V, S=S, BLOCK_S=padded(S), **kinds, num_warps=1,
    )  # fmt: skip
    return logprob_C, lse_C, entropy_C


def row_logprob_backward(
    logits_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    dlogprob_C: Tensor,
    dentropy_C: Tensor | None = None,
    entropy_C: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    C, V = logits_CV.shape
    block = min(BLOCK_BACKWARD, padded(V))
    S = triton.cdiv(V, block)
    launch(
        _backward_kernel, (C * S,), logits_CV, labels_C, lse_C, dlogprob_C,
        lse_C if dentropy_C is None else dentropy_C, lse_C if entropy_C is None else entropy_C,
        logits_CV.stride(0), 1 / temperature, softcap or 1.0,
        V=V, S=S, BLOCK=block, SOFTCAP=softcap is not None, ENTROPY=dentropy_C is not None,
        num_warps=warps(block, EACH_BACKWARD),
    )  # fmt: skip
    return logits_CV
