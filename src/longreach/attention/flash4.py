"""flash-attn-4 (CuTe DSL) on Hopper and Blackwell, behind the backend interface of `reference.py`.

Its autograd functions keep their own lse; blocks merged by their lse need the merged one in the backward, so the two
functions underneath are called directly. A call with one pair takes the dense kernels and a bundle the varlen ones.
Kernels are compiled at first use, some seconds each, per dtype, head sizes, mask and layout, not per length.

Shape suffixes: Q query rows, N key rows, H query heads, K key/value heads, D query/key head size, W value head size.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .boundaries import capability, longest, on_device, padded

# Head sizes between these are padded: the Hopper backward of release 4.0.0b36 gets dq wrong at 80.
SIZES = (64, 96, 128, 192, 256)
# The kernels have variants for calls of one tile. A short call takes the varlen kernels with this bound on its rows, so that
# the odd short tail of a sequence finds a kernel that is compiled already.
SHORT = 512


class FlashAttention4:
    """bf16 and fp16, GQA, windows, logit softcap; forward and backward on compute capability 9.x, 10.x and 11.x.

    Args:
        deterministic: whether dq, and dk, dv of grouped heads, are summed in a fixed order, so that two runs give the same bits.
            On an H200 that costs the backward 0 to 5% in the blocks that long contexts consist of (8K queries on earlier keys,
            windows), 8% in an 8K causal block and 18% in bundles of 1,280 tokens, where attention is a small part of the step.
    """

    name = "flash-attn-4"

    def __init__(self, deterministic: bool = True) -> None:
        self.deterministic = deterministic

    def unsupported(
        self, *, device, dtype, head_dim, value_dim, windowed=False, softcap=None, varlen=False
    ) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA GPUs, not on {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        major, minor = capability(device)
        if major not in (9, 10, 11):
            return f"needs compute capability 9, 10 or 11, this GPU has {major}.{minor}"
        if max(head_dim, value_dim) > SIZES[-1]:
            return f"takes head sizes to {SIZES[-1]}, not {max(head_dim, value_dim)}"
        D, W = _size(head_dim), _size(value_dim)
        if major > 9 and max(D, W) > 128 and (D, W) not in ((192, 128), (256, 256)):
            return f"takes head sizes to 128, (192, 128) and 256 on this GPU, not ({head_dim}, {value_dim})"
        if major > 9 and softcap is not None and D == 256:
            return "has no logit softcap at head size 256 on this GPU"
        return _kernels()[1]

    def forward(self, q_QHD, k_NKD, v_NKW, cu_q, cu_k, *, causal, window, softcap, scale) -> tuple[Tensor, Tensor]:
        q, k, v = _sized(q_QHD, k_NKD, v_NKW)
        batch, lengths = _layout(cu_q, cu_k, q.device)
        out, lse = _loaded().forward(
            batch(q), batch(k), batch(v), softmax_scale=scale, softcap=softcap, return_lse=True,
            **_mask(causal, window), **lengths,
        )[:2]  # fmt: skip
        if not lengths:
            out, lse = out[0], lse[0]
        return out[..., : v_NKW.shape[-1]], lse

    def backward(
        self, dout_QHW, q_QHD, k_NKD, v_NKW, out_QHW, lse_HQ, cu_q, cu_k, *, causal, window, softcap, scale
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _sized(q_QHD, k_NKD, v_NKW)
        dout, out = (padded(x, v.shape[-1]) for x in (dout_QHW, out_QHW))
        batch, lengths = _layout(cu_q, cu_k, q.device)
        grads = _loaded().backward(
            batch(q), batch(k), batch(v), batch(out), batch(dout), batch(lse_HQ.contiguous()),
            softmax_scale=scale, softcap=softcap or 0.0, deterministic=self.deterministic, **_mask(causal, window), **lengths,
        )  # fmt: skip
        dq, dk, dv = grads if lengths else (g[0] for g in grads)
        return dq[..., : q_QHD.shape[-1]], dk[..., : k_NKD.shape[-1]], dv[..., : v_NKW.shape[-1]]


def _mask(causal: bool, window: int | None) -> dict[str, Any]:
    """Both masks are aligned bottom-right; a window counts the keys left of a query's own."""
    if causal and window is not None:
        return {"causal": False, "window_size_left": window - 1, "window_size_right": 0}
    return {"causal": causal}


def _layout(cu_q: tuple[int, ...], cu_k: tuple[int, ...], device: torch.device):
    """(how tensors are handed over, keyword arguments): one long pair as a batch of one, otherwise packed."""
    if len(cu_q) == 2 and cu_q[1] >= SHORT and cu_k[1] >= SHORT:
        return (lambda x: x[None]), {}
    return (lambda x: x), {
        "cu_seqlens_q": on_device(cu_q, device),
        "cu_seqlens_k": on_device(cu_k, device),
        "max_seqlen_q": max(longest(cu_q), SHORT),
        "max_seqlen_k": max(longest(cu_k), SHORT),
    }


def _sized(q_QHD: Tensor, k_NKD: Tensor, v_NKW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Head sizes the kernels take: one for all of q, k, v but for (192, 128), and on Hopper there too if heads are grouped."""
    D, W = _size(q_QHD.shape[-1]), _size(v_NKW.shape[-1])
    grouped_on_hopper = q_QHD.shape[1] != k_NKD.shape[1] and capability(q_QHD.device)[0] == 9
    if (D, W) != (192, 128) or grouped_on_hopper:
        D = W = max(D, W)
    return padded(q_QHD, D), padded(k_NKD, D), padded(v_NKW, W)


def _size(head_dim: int) -> int:
    return next(size for size in SIZES if size >= head_dim)


class _Kernels:
    def __init__(self, interface: Any) -> None:
        self.forward = interface._flash_attn_fwd
        self.backward = interface._flash_attn_bwd


def _loaded() -> _Kernels:
    kernels, reason = _kernels()
    if kernels is None:
        raise ImportError(f"{FlashAttention4.name} {reason}")
    return kernels


@functools.lru_cache(maxsize=1)
def _kernels() -> tuple[_Kernels, None] | tuple[None, str]:
    """(the two functions, None), or (None, why they can't be had)."""
    # Its own switches, read when it is imported: compiled kernels stay on disk, so that only the first process on a machine
    # waits for the compiler (about 20 s for a training step's kernels).
    for name, value in (("ENABLED", "1"), ("DIR", str(Path.home() / ".cache" / "flash_attention_cute_dsl"))):
        os.environ.setdefault(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", value)
    try:
        from flash_attn.cute import interface
    except ModuleNotFoundError as error:
        if error.name not in ("flash_attn", "flash_attn.cute"):
            return None, f"is installed without what it needs: {error} (pip install 'longreach[gpu]')"
        return None, "is not installed (pip install 'longreach[gpu]')"
    except ImportError as error:
        return None, f"can't be imported: {error}"
    try:
        kernels = _Kernels(interface)
    except AttributeError as error:
        return None, f"has another interface than release 4.0.0b36: {error}"
    used = {"softmax_scale", "causal", "softcap", "window_size_left", "cu_seqlens_q", "max_seqlen_q"}
    for function, extra in ((kernels.forward, "return_lse"), (kernels.backward, "deterministic")):
        missing = (used | {extra}) - set(inspect.signature(function).parameters)
        if missing:
            return None, f"has another interface than release 4.0.0b36: {function.__name__} lacks {sorted(missing)}"
    return kernels, None
