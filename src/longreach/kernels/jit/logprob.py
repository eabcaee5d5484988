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

from . import launch, padded, parts, warps

BLOCK = 4096
EACH_FORWARD = 32
EACH_BACKWARD = 16


# Exponents are kept in units of log 2: exp2 is what the hardware has, and the factor joins that of the temperature.
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _capped(x, softcap, SOFTCAP: tl.constexpr):
    """The logit, capped if asked for, and the slope of the cap; tanh(y) = 2 sigmoid(2y) - 1."""
    slope = 1.0
    if SOFTCAP:
        t = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        x = softcap * t
        slope = 1.0 - t * t
    return x, slope


@triton.jit
def _block_kernel(
    logits_ptr, partial_ptr, row_stride, inverse_temperature, softcap,
    V: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Of one block: the largest logit m; with d = (logit - m) / temperature / log 2, the sums of 2^d and 2^d d: [C, 3, S].

    Differences are taken before anything is scaled, so a token of probability one gets log-prob zero exactly.
    """
    program = tl.program_id(0)
    row = (program // S).to(tl.int64)
    block = program % S
    col = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + col, mask=col < V, other=float("-inf")).to(tl.float32)
    x, _ = _capped(x, softcap, SOFTCAP)
    if SOFTCAP:
        x = tl.where(col < V, x, float("-inf"))
    top = tl.max(x, 0)
    # A block of -inf alone (tokens ruled out) has no maximum to subtract; and -inf times 0 has no value.
    d = (x - tl.where(top == float("-inf"), 0.0, top)) * (inverse_temperature * LOG2_E)
    d = tl.maximum(d, -1000.0)
    e = tl.exp2(d)
    at = partial_ptr + row * (3 * S) + block
    tl.store(at, top)
    tl.store(at + S, tl.sum(e, 0))
    if ENTROPY:
        tl.store(at + 2 * S, tl.sum(e * d, 0))


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
    shift_S = tl.where(top_S == float("-inf"), 0.0, (top_S - top) * (inverse_temperature * LOG2_E))
    factor_S = tl.where(top_S == float("-inf"), 0.0, tl.exp2(shift_S))
    total = tl.sum(sum_S * factor_S, 0)
    log_total = tl.log2(total) * LOG_2
    label = tl.load(labels_ptr + row).to(tl.int64)
    valid = (label >= 0) & (label < V)
    x = tl.load(logits_ptr + row * row_stride + label, mask=valid, other=float("nan")).to(tl.float32)
    x, _ = _capped(x, softcap, SOFTCAP)
    tl.store(logprob_ptr + row, (x - top) * inverse_temperature - log_total)
    tl.store(lse_ptr + row, top * inverse_temperature + log_total)
    if ENTROPY:
        moment_S = tl.load(at + 2 * S, mask=mask, other=0.0)
        moment = tl.sum((moment_S + sum_S * shift_S) * factor_S, 0)
        tl.store(entropy_ptr + row, log_total - moment / total * LOG_2)


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
    x, slope = _capped(x, softcap, SOFTCAP)
    logp = x * inverse_temperature - tl.load(lse_ptr + row)
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
    S = parts(V, block)
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
    block = min(BLOCK, padded(V))
    S = parts(V, block)
    launch(
        _backward_kernel, (C * S,), logits_CV, labels_C, lse_C, dlogprob_C,
        lse_C if dentropy_C is None else dentropy_C, lse_C if entropy_C is None else entropy_C,
        logits_CV.stride(0), 1 / temperature, softcap or 1.0,
        V=V, S=S, BLOCK=block, SOFTCAP=softcap is not None, ENTROPY=dentropy_C is not None,
        num_warps=warps(block, EACH_BACKWARD),
    )  # fmt: skip
    return logits_CV
