"""Attention kernels that ship with PyTorch for CUDA, behind the backend interface of `reference.py`.

cuDNN's masks are aligned top-left, which is all the same for the square and unmasked calls it gets; the two flash kernels
take bottom-right masks and windows. All of them take the merged lse back in their backward.

Shape suffixes: Q query rows, N key rows, H query heads, K key/value heads, G = H / K, D query/key head size, W value head size.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from .boundaries import capability, deterministic_kernels, joined, longest, on_device, padded, rounded

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)
KEYS = 32768  # keys whose gradients live once per query head, in kernels that sum grouped heads only afterwards
# cuDNN plans anew, for tenths of a second, for every length it meets: rows are padded to a multiple of this.
CUDNN_ROWS = 256


class CudnnAttention:
    """cuDNN's fused attention: one pair of queries and keys, square causal or unmasked, on Hopper and Blackwell.

    PyTorch gives no way to its deterministic backward: dq of unmasked blocks differs in the last bits between two runs. Under
    `torch.use_deterministic_algorithms(True)` others are chosen.
    """

    name = "aten-cudnn"

    def unsupported(
        self, *, device, dtype, head_dim, value_dim, windowed=False, softcap=None, varlen=False
    ) -> str | None:
        reason = _unsupported(device, dtype, HALF, softcap)
        if reason is not None:
            return reason
        major, minor = capability(device)
        if major not in (9, 10):
            return f"is used on compute capability 9 and 10, this GPU has {major}.{minor}"
        if not torch.backends.cudnn.is_available() or (torch.backends.cudnn.version() or 0) < 90000:
            return f"needs cuDNN 9, PyTorch has {torch.backends.cudnn.version()}"
        if torch.are_deterministic_algorithms_enabled():
            return "has no deterministic backward, which torch.use_deterministic_algorithms asks for"
        if windowed:
            return "has no sliding window"
        if varlen:
            return "plans anew for every length, so bundles of sequences are left to others"
        if max(head_dim, value_dim) > 128:
            return f"takes head sizes to 128, not {max(head_dim, value_dim)}"
        return None

    def forward(self, q_QHD, k_NKD, v_NKW, cu_q, cu_k, *, causal, window, softcap, scale) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for i in range(len(cu_q) - 1):
            n, q, k, v = _cudnn_pair(q_QHD, k_NKD, v_NKW, cu_q, cu_k, i, causal)
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=scale
            )
            outs.append(out[0].transpose(0, 1)[:n, :, : v_NKW.shape[-1]])
            lses.append(lse.reshape(lse.shape[1], -1)[:, :n])
        return joined(outs, 0), joined(lses, 1)

    def backward(
        self, dout_QHW, q_QHD, k_NKD, v_NKW, out_QHW, lse_HQ, cu_q, cu_k, *, causal, window, softcap, scale
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = []
        for i in range(len(cu_q) - 1):
            n, q, k, v = _cudnn_pair(q_QHD, k_NKD, v_NKW, cu_q, cu_k, i, causal)
            rows = slice(cu_q[i], cu_q[i + 1])
            dout, out = (_rows(padded(x[rows], v.shape[-1]), q.shape[2]) for x in (dout_QHW, out_QHW))
            # Rows of padding have q = dout = 0, so whatever their lse, they add nothing.
            lse = torch.nn.functional.pad(lse_HQ[:, rows], (0, q.shape[2] - n)).contiguous()[None]
            lse = lse[..., None] if _cudnn_lse_has_size() else lse
            seed = _no_dropout(q.device)
            dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
            )  # fmt: skip
            m = cu_k[i + 1] - cu_k[i]
            grads.append([g[0].transpose(0, 1)[:r] for g, r in ((dq, n), (dk, m), (dv, m))])
        dq, dk, dv = (joined(parts, 0) for parts in zip(*grads))
        return dq[..., : q_QHD.shape[-1]], dk[..., : k_NKD.shape[-1]], dv[..., : v_NKW.shape[-1]]


class FlashAttention2:
    """FlashAttention-2 as PyTorch builds it: varlen, windows, GQA, head sizes to 256, on Ampere and newer.

    Args:
        deterministic: sum dq in a fixed order, so that two runs give the same bits; False leaves it to
            `torch.use_deterministic_algorithms`, as PyTorch does: it costs the backward 40 to 70% on long sequences (H200).
    """

    name = "aten-flash"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def unsupported(
        self, *, device, dtype, head_dim, value_dim, windowed=False, softcap=None, varlen=False
    ) -> str | None:
        reason = _unsupported(device, dtype, HALF, softcap)
        if reason is not None:
            return reason
        major, minor = capability(device)
        if major < 8:
            return f"needs compute capability 8.0, this GPU has {major}.{minor}"
        if not torch.backends.cuda.is_flash_attention_available():
            return "is not part of this PyTorch build"
        if max(head_dim, value_dim) > 256:
            return f"takes head sizes to 256, not {max(head_dim, value_dim)}"
        return None

    def forward(self, q_QHD, k_NKD, v_NKW, cu_q, cu_k, *, causal, window, softcap, scale) -> tuple[Tensor, Tensor]:
        q, k, v = _one_size(q_QHD, k_NKD, v_NKW)
        lengths: tuple[Any, ...]
        if len(cu_q) == 2:
            q, k, v, lengths = q[None], k[None], v[None], (None, None, cu_q[1], cu_k[1])
        else:
            lengths = _lengths(cu_q, cu_k, q.device)
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, causal, False, scale=scale, window_size_left=window and window - 1
        )  # fmt: skip
        if len(cu_q) == 2:
            out, lse = out[0], lse[0]
        return out[..., : v_NKW.shape[-1]], lse

    def backward(
        self, dout_QHW, q_QHD, k_NKD, v_NKW, out_QHW, lse_HQ, cu_q, cu_k, *, causal, window, softcap, scale
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _one_size(q_QHD, k_NKD, v_NKW)
        dout, out = (padded(x, v.shape[-1]) for x in (dout_QHW, out_QHW))
        lse, seed = lse_HQ.contiguous(), _no_dropout(q.device)

        def run(k: Tensor, v: Tensor) -> list[Tensor]:
            one = len(cu_q) == 2
            lengths = (None, None, cu_q[1], len(k)) if one else _lengths(cu_q, cu_k, q.device)
            inputs = [x[None] if one else x for x in (dout, q, k, v, out, lse)]
            with deterministic_kernels(self.deterministic):
                grads = aten._flash_attention_backward(
                    *inputs, *lengths, 0.0, causal, seed, seed, scale=scale, window_size_left=window and window - 1
                )  # fmt: skip
            return [g[0] if one else g for g in grads]

        dq, dk, dv = _by_keys(run, k, v, split=len(cu_q) == 2 and not causal)
        return dq[..., : q_QHD.shape[-1]], dk[..., : k_NKD.shape[-1]], dv[..., : v_NKW.shape[-1]]


class EfficientAttention:
    """The memory-efficient kernels (CUTLASS): fp16 and fp32 on Turing and older too, any head size, windows.

    Grouped heads are strides of zero for one pair; bundles get their keys repeated, which are short. One block of threads walks
    all keys of a head in the backward, so the same bits come out of every run.
    """

    name = "aten-efficient"

    def unsupported(
        self, *, device, dtype, head_dim, value_dim, windowed=False, softcap=None, varlen=False
    ) -> str | None:
        reason = _unsupported(device, dtype, (*HALF, torch.float32), softcap)
        if reason is not None:
            return reason
        major, minor = capability(device)
        if (major, minor) < (7, 0):
            return f"is used from compute capability 7.0, this GPU has {major}.{minor}"
        if dtype == torch.bfloat16 and major < 8:
            return f"needs compute capability 8.0 for bfloat16, this GPU has {major}.{minor}: use float16"
        return None

    def forward(self, q_QHD, k_NKD, v_NKW, cu_q, cu_k, *, causal, window, softcap, scale) -> tuple[Tensor, Tensor]:
        H, K, one = q_QHD.shape[1], k_NKD.shape[1], len(cu_q) == 2
        q, k, v = (padded(x, rounded(x.shape[-1], 8)) for x in (q_QHD, k_NKD, v_NKW))
        q, k, v = (_by_key_head(q, K, one), *(_shared(x, H, one) for x in (k, v)))
        lengths = (None, None, None, None) if one else _lengths(cu_q, cu_k, q.device)
        out, lse, *_ = aten._efficient_attention_forward(
            q, k, v, None, *lengths, 0.0, 2 if causal else 0, True, scale=scale, window_size=window
        )  # fmt: skip
        out = _join_heads(out, one)[..., : v_NKW.shape[-1]]
        if one:
            return out, lse.flatten(0, 1)[:, : cu_q[1]]
        return out, torch.cat([lse[i, :, : b - a] for i, (a, b) in enumerate(itertools.pairwise(cu_q))], 1)

    def backward(
        self, dout_QHW, q_QHD, k_NKD, v_NKW, out_QHW, lse_HQ, cu_q, cu_k, *, causal, window, softcap, scale
    ) -> tuple[Tensor, Tensor, Tensor]:
        if window is not None and cu_q != cu_k:
            return self._backward_of_square(
                dout_QHW, q_QHD, k_NKD, v_NKW, out_QHW, lse_HQ, cu_q, cu_k,
                causal=causal, window=window, softcap=softcap, scale=scale,
            )  # fmt: skip
        H, K, one = q_QHD.shape[1], k_NKD.shape[1], len(cu_q) == 2
        q, k, v, dout, out = (padded(x, rounded(x.shape[-1], 8)) for x in (q_QHD, k_NKD, v_NKW, dout_QHW, out_QHW))
        # The kernel takes any strides but those of `out`, whose rows it expects one after the other.
        dout, q, out = _by_key_head(dout, K, one), _by_key_head(q, K, one), _by_key_head(out, K, one).contiguous()
        lse = _efficient_lse(lse_HQ, cu_q, K)
        seed = _no_dropout(q.device)

        def run(k: Tensor, v: Tensor) -> list[Tensor]:
            lengths = (None, None, cu_q[1], len(k)) if one else _lengths(cu_q, cu_k, q.device)
            dq, dk, dv, _ = aten._efficient_attention_backward(
                dout, q, _shared(k, H, one), _shared(v, H, one), None, out, *lengths, lse, 0.0, seed, seed,
                2 if causal else 0, False, scale=scale, num_splits_key=1, window_size=window,
            )  # fmt: skip
            return [_join_heads(dq, one), _summed(dk, K, one), _summed(dv, K, one)]

        dq, dk, dv = _by_keys(run, k, v, split=one and not causal)
        return dq[..., : q_QHD.shape[-1]], dk[..., : k_NKD.shape[-1]], dv[..., : v_NKW.shape[-1]]

    def _backward_of_square(
        self, dout_QHW, q_QHD, k_NKD, v_NKW, out_QHW, lse_HQ, cu_q, cu_k, **mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel gets dq wrong where a window meets fewer queries than keys: rows of no weight make each pair square."""
        rows = _last_rows(cu_q, cu_k, q_QHD.device)

        def spread(x: Tensor, fill: float) -> Tensor:
            return x.new_full((cu_k[-1], *x.shape[1:]), fill).index_copy_(0, rows, x)

        dout, q, out = (spread(x, 0.0) for x in (dout_QHW, q_QHD, out_QHW))
        lse = spread(lse_HQ.transpose(0, 1), float("inf")).transpose(0, 1)
        dq, dk, dv = self.backward(dout, q, k_NKD, v_NKW, out, lse, cu_k, cu_k, **mask)
        return dq.index_select(0, rows), dk, dv


def _unsupported(device, dtype, dtypes, softcap) -> str | None:
    if device.type != "cuda":
        return f"runs on CUDA GPUs, not on {device.type}"
    if dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        return f"takes {names}, not {str(dtype).removeprefix('torch.')}"
    return "has no logit softcap" if softcap is not None else None


def _lengths(cu_q: tuple[int, ...], cu_k: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    return on_device(cu_q, device), on_device(cu_k, device), longest(cu_q), longest(cu_k)


@functools.lru_cache(maxsize=1024)
def _last_rows(cu_q: tuple[int, ...], cu_k: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each query stands among its pair's keys if the last of both are aligned; int64, copied once."""
    pairs = zip(itertools.pairwise(cu_q), cu_k[1:])
    rows = torch.cat([torch.arange(end - (b - a), end) for (a, b), end in pairs])
    return rows.pin_memory().to(device, non_blocking=True)


@functools.lru_cache(maxsize=16)
def _no_dropout(device: torch.device) -> Tensor:
    """The random state the backward functions ask for; never read without dropout."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _one_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    size = rounded(max(x.shape[-1] for x in tensors), 8)
    return tuple(padded(x, size) for x in tensors)


def _by_keys(run, k_NKD: Tensor, v_NKW: Tensor, *, split: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `run(k, v)`; unmasked keys in ranges of KEYS, as each range's gradients need only the merged lse."""
    if not split or len(k_NKD) <= KEYS:
        return tuple(run(k_NKD, v_NKW))
    dq, dk, dv = run(k_NKD[:KEYS], v_NKW[:KEYS])
    dq, dks, dvs = dq.float(), [dk], [dv]
    for start in range(KEYS, len(k_NKD), KEYS):
        part, dk, dv = run(k_NKD[start : start + KEYS], v_NKW[start : start + KEYS])
        dq += part
        dks.append(dk)
        dvs.append(dv)
    return dq, torch.cat(dks), torch.cat(dvs)


def _cudnn_pair(q_QHD, k_NKD, v_NKW, cu_q, cu_k, i: int, causal: bool) -> tuple[int, Tensor, Tensor, Tensor]:
    """(query rows, q, k, v) of a pair as [1, heads, rows, size] views of packed rows, queries padded to CUDNN_ROWS.

    Keys are padded only under the causal mask, which hides them.
    """
    q, k, v = q_QHD[cu_q[i] : cu_q[i + 1]], k_NKD[cu_k[i] : cu_k[i + 1]], v_NKW[cu_k[i] : cu_k[i + 1]]
    if causal and len(q) != len(k):
        raise ValueError(
            f"{CudnnAttention.name}: a causal call needs as many keys as queries, got {len(q)} and {len(k)}"
        )
    q_rows = rounded(len(q), CUDNN_ROWS)
    k_rows = q_rows if causal else len(k)
    n = len(q)
    q, k, v = (padded(x, rounded(x.shape[-1], 8)) for x in (q, k, v))
    return n, _rows(q, q_rows), _rows(k, k_rows), _rows(v, k_rows)


@functools.lru_cache(maxsize=1)
def _cudnn_lse_has_size() -> bool:
    """Whether this PyTorch's cuDNN ops know the lse as [1, H, Q, 1], not [1, H, Q]: asked without a device."""
    x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
    return aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].dim() == 4


def _rows(x: Tensor, rows: int) -> Tensor:
    x = x if len(x) == rows else torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - len(x)))
    return x.contiguous()[None].transpose(1, 2)


def _by_key_head(x_QHD: Tensor, kv_heads: int, one: bool) -> Tensor:
    """[K, Q, G, D] if there is one pair (a batch row per key head), else [1, Q, H, D]; views."""
    return x_QHD.unflatten(1, (kv_heads, -1)).transpose(0, 1) if one else x_QHD[None]


def _shared(x_NKD: Tensor, heads: int, one: bool) -> Tensor:
    """Keys for every query head: a view [K, N, G, D] if there is one pair, else a copy [1, N, H, D]."""
    group = heads // x_NKD.shape[1]
    if one:
        return x_NKD.transpose(0, 1)[:, :, None].expand(-1, -1, group, -1)
    return x_NKD.repeat_interleave(group, 1)[None]


def _join_heads(x: Tensor, one: bool) -> Tensor:
    return x.transpose(0, 1).flatten(1, 2) if one else x[0]


def _summed(dx: Tensor, kv_heads: int, one: bool) -> Tensor:
    """Gradients [N, K, D] in fp32 of keys that a group of query heads shares."""
    if one:
        return dx.sum(2, dtype=torch.float32).transpose(0, 1)
    return dx[0].unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32)


def _efficient_lse(lse_HQ: Tensor, cu_q: tuple[int, ...], kv_heads: int) -> Tensor:
    """The lse in rows padded to 32 with +inf (weights of zero): [K, G, Q] for one pair, else [pairs, H, longest]."""
    rows = rounded(longest(cu_q), 32)
    parts = [
        torch.nn.functional.pad(lse_HQ[:, a:b], (0, rows - (b - a)), value=float("inf"))
        for a, b in itertools.pairwise(cu_q)
    ]
    if len(parts) == 1:
        return parts[0].unflatten(0, (kv_heads, -1))
    return torch.stack(parts)
