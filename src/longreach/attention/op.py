"""Attention of one chunk of a token tree: dense blocks over the layer's keys, merged through the log-sum-exp.

Shape suffixes: C query rows of the chunk, T packed tokens of the step, N key rows of one block, H query heads,
K key/value heads, D query/key head size, W value head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import apply_sink, merge_blocks, wide_dtype
from .select import Backend, select

Ranges = tuple[tuple[int, int], ...]  # of packed tokens, [start, stop) each


@dataclass(frozen=True)
class BlockCall:
    """One kernel call of a chunk: query rows [q0, q1) of the chunk against some of the layer's keys.

    Attributes:
        q0, q1: rows of the chunk.
        keys: ranges of packed tokens whose keys, joined in this order, the call sees.
        cu_q, cu_k: boundaries of the varlen pairs within the call's queries and keys.
        causal: bottom-right aligned causal mask within each pair; False for no mask.
        window: with causal, the last `window` keys only.
    """

    q0: int
    q1: int
    keys: Ranges
    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    causal: bool
    window: int | None = None


class KeyValues:
    """Keys and values of one layer for all packed tokens and, in a backward pass, what each is owed.

    Keys and values are in the model's dtype; what they are owed is summed in at least fp32, in a fixed order. The buffers are
    made when the first chunk shows the layer's shapes, and serve one layer after the other. This form keeps everything on the
    model's device; `context.stream.HostKeyValues` keeps it in host memory.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._held: dict[str, Tensor] = {}
        self._zeroed = False

    def write(self, start: int, k_CKD: Tensor, v_CKW: Tensor) -> None:
        """Store a chunk's keys and values."""
        for name, new in (("k", k_CKD), ("v", v_CKW)):
            buffer = self._buffer(name, (self.tokens, *new.shape[1:]), new.dtype, new.device)
            buffer[start : start + len(new)] = new

    def read(self, ranges: Ranges) -> tuple[Tensor, Tensor]:
        """(k [N, K, D], v [N, K, W]) of ranges of packed tokens, one after the other."""
        return _gather(self._held["k"], ranges), _gather(self._held["v"], ranges)

    def prefetch(self, ranges: Ranges, owed: bool = False) -> None:
        """Ranges that will be read next and, with `owed`, added to."""

    def begin_forward(self) -> None:
        """A layer begins to store its keys and values."""

    def begin_backward(self) -> None:
        """Forget the gradient sums; they are zeroed when first used."""
        self._zeroed = False

    def begin_chunk(self, start: int, stop: int) -> None:
        """The chunk [start, stop) is the one whose gradients are asked for next."""

    def add(self, ranges: Ranges, dk_NKD: Tensor, dv_NKW: Tensor) -> None:
        """Add to what the keys and values of these ranges are owed."""
        dk_TKD, dv_TKW = self._sums()
        at = 0
        for start, stop in ranges:
            part = slice(at, at + stop - start)
            dk_TKD[start:stop] += dk_NKD[part]
            dv_TKW[start:stop] += dv_NKW[part]
            at += stop - start

    def owed(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Gradients of the keys and values of tokens [start, stop), in the dtype of the keys."""
        dk_TKD, dv_TKW = self._sums()
        return dk_TKD[start:stop].to(self._held["k"].dtype), dv_TKW[start:stop].to(self._held["v"].dtype)

    def _sums(self) -> tuple[Tensor, Tensor]:
        """(dk_TKD, dv_TKW), the running sums of this layer's backward."""
        if not self._zeroed:
            for name in ("k", "v"):
                held = self._held[name]
                self._buffer("d" + name, held.shape, wide_dtype(held.dtype), held.device).zero_()
            self._zeroed = True
        return self._held["dk"], self._held["dv"]

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        held = self._held.get(name)
        if held is None or held.shape != shape or held.dtype != dtype or held.device != device:
            held = self._held[name] = torch.empty(shape, dtype=dtype, device=device)
        return held


@dataclass(frozen=True)
class AttentionSpec:
    """What a chunk's attention needs beside q, k, v.

    Attributes:
        kv: the layer's key/value buffers.
        start: packed index of the chunk's first token.
        calls: the kernel calls that together cover every key a query sees.
        scale, softcap: of the scores.
        saved: (out_CHW, lse_HC) of an earlier forward of the same chunk, sink included: the forward is then skipped.
        backend: None to choose by `select`.
    """

    kv: KeyValues
    start: int
    calls: tuple[BlockCall, ...]
    scale: float
    softcap: float | None = None
    saved: tuple[Tensor, Tensor] | None = None
    backend: Backend | None = None


def attention(
    q_CHD: Tensor, k_CKD: Tensor, v_CKW: Tensor, spec: AttentionSpec, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention output of a chunk and its log-sum-exp.

    The chunk's keys and values are put into `spec.kv`; keys of earlier chunks are read from there, and the backward adds
    their gradients there in place. The chunk's own k, v get everything owed to them: by this chunk and by every chunk whose
    backward ran before. Chunks must therefore go first to last in the forward, last to first in the backward.

    Args:
        q_CHD: queries; bf16, fp16, fp32 or fp64.
        k_CKD, v_CKW: the chunk's own keys and values; H must be a multiple of K.
        sinks_H: logits of one extra key per head whose value is zero (gpt-oss), or None.

    Returns:
        out [C, H, W] in q's dtype, differentiable; lse [H, C], sink included, not differentiable.

    Raises:
        ValueError: H is no multiple of K.
    """
    if q_CHD.shape[1] % k_CKD.shape[1]:
        raise ValueError(f"attention: {q_CHD.shape[1]} query heads are not a multiple of {k_CKD.shape[1]} key heads")
    if torch.is_grad_enabled() and (q_CHD.requires_grad or k_CKD.requires_grad or v_CKW.requires_grad):
        return _ChunkAttention.apply(q_CHD, k_CKD, v_CKW, sinks_H, spec)
    return attention_forward(q_CHD, k_CKD, v_CKW, spec, sinks_H)


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_CHD, k_CKD, v_CKW, sinks_H, spec: AttentionSpec):
        out_CHW, lse_HC = attention_forward(q_CHD, k_CKD, v_CKW, spec, sinks_H)
        ctx.spec = spec
        ctx.save_for_backward(q_CHD, out_CHW, lse_HC, sinks_H)
        ctx.mark_non_differentiable(lse_HC)
        return out_CHW, lse_HC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_CHW, _dlse):
        q_CHD, out_CHW, lse_HC, sinks_H = ctx.saved_tensors
        wanted = sinks_H if ctx.needs_input_grad[3] else None
        return *attention_backward(dout_CHW, q_CHD, out_CHW, lse_HC, ctx.spec, wanted), None


def attention_forward(
    q_CHD: Tensor, k_CKD: Tensor, v_CKW: Tensor, spec: AttentionSpec, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attention` without autograd: stores k, v and returns (out [C, H, W], lse [H, C])."""
    spec.kv.write(spec.start, k_CKD, v_CKW)
    return spec.saved if spec.saved is not None else _forward(q_CHD, sinks_H, spec)


def attention_backward(
    dout_CHW: Tensor, q_CHD: Tensor, out_CHW: Tensor, lse_HC: Tensor, spec: AttentionSpec, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of a chunk's q, of its own k and v (all that is owed to them), and of the sinks if given.

    Adds what earlier keys are owed to `spec.kv`.
    """
    kv = spec.kv
    kv.begin_chunk(spec.start, spec.start + len(q_CHD))
    wide = wide_dtype(q_CHD.dtype)
    dq_CHD = None
    for call, following in itertools.zip_longest(spec.calls, spec.calls[1:]):
        rows = slice(call.q0, call.q1)
        k_NKD, v_NKW = kv.read(call.keys)
        if following is not None:
            kv.prefetch(following.keys, owed=True)
        dq, dk, dv = _backend(spec, q_CHD, v_NKW, call).backward(
            dout_CHW[rows], q_CHD[rows], k_NKD, v_NKW, out_CHW[rows], lse_HC[:, rows], call.cu_q, call.cu_k,
            causal=call.causal, window=call.window, softcap=spec.softcap, scale=spec.scale,
        )  # fmt: skip
        if dq_CHD is None:  # the first call is the chunk's own block: it covers every query
            dq_CHD = dq if following is None else dq.to(wide)
        else:
            dq_CHD[rows] += dq
        kv.add(call.keys, dk, dv)
        del dq, dk, dv, k_NKD, v_NKW  # before the next call makes its own
    assert dq_CHD is not None
    dsinks_H = None
    if sinks_H is not None:
        delta_HC = (dout_CHW.to(wide) * out_CHW.to(wide)).sum(-1).transpose(0, 1)
        weight_HC = torch.exp(sinks_H.to(wide)[:, None] - lse_HC.to(wide))
        dsinks_H = -(weight_HC * delta_HC).sum(-1).to(sinks_H.dtype)
    dk_CKD, dv_CKW = kv.owed(spec.start, spec.start + len(q_CHD))
    return dq_CHD.to(q_CHD.dtype), dk_CKD, dv_CKW, dsinks_H


def _forward(q_CHD: Tensor, sinks_H: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Run the calls and merge their outputs, and the sink, through their lse."""
    kv = spec.kv
    # Rounded after every merge, so outputs wait in fp32 unless there is only one merge to come.
    wide = wide_dtype(q_CHD.dtype) if len(spec.calls) + (sinks_H is not None) > 2 else q_CHD.dtype
    out_CHW = lse_HC = None
    for call, following in itertools.zip_longest(spec.calls, spec.calls[1:]):
        rows = slice(call.q0, call.q1)
        k_NKD, v_NKW = kv.read(call.keys)
        if following is not None:
            kv.prefetch(following.keys)
        out, lse = _backend(spec, q_CHD, v_NKW, call).forward(
            q_CHD[rows], k_NKD, v_NKW, call.cu_q, call.cu_k,
            causal=call.causal, window=call.window, softcap=spec.softcap, scale=spec.scale,
        )  # fmt: skip
        del k_NKD, v_NKW
        if out_CHW is None:
            # The first call is the chunk's own block: it covers every query, so all rows are set here.
            assert call.q0 == 0 and call.q1 == len(q_CHD)
            out_CHW, lse_HC = out.to(wide), lse
            continue
        assert lse_HC is not None
        merge_blocks(out_CHW[rows], lse_HC[:, rows], out, lse)
    assert out_CHW is not None and lse_HC is not None
    if sinks_H is not None:
        apply_sink(out_CHW, lse_HC, sinks_H)
    return out_CHW.to(q_CHD.dtype), lse_HC


def _gather(x_TKD: Tensor, ranges: Ranges) -> Tensor:
    parts = [x_TKD[start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _backend(spec: AttentionSpec, q_CHD: Tensor, v_NKW: Tensor, call: BlockCall) -> Backend:
    if spec.backend is not None:
        return spec.backend
    return select(
        q_CHD.device,
        q_CHD.dtype,
        q_CHD.shape[-1],
        value_dim=v_NKW.shape[-1],
        windowed=call.window is not None,
        softcap=spec.softcap,
        varlen=len(call.cu_q) > 2,
    )
