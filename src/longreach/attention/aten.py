"""The attention kernel that PyTorch ships for CPUs, behind the backend interface of `reference.py`.

It takes the merged lse back in its backward, which is what makes blocks exact. Its `is_causal` is aligned top-left, so only
square pairs (as many keys as queries) use it; where a window makes a pair longer, the mask is written out.

Shape suffixes: Q query rows, N key rows, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .boundaries import joined, padded

aten = torch.ops.aten


class FlashForCpu:
    """`_scaled_dot_product_flash_attention_for_cpu`: blocked CPU attention in fp64, fp32, bf16, fp16."""

    name = "aten-flash-cpu"

    def unsupported(
        self, *, device, dtype, head_dim, value_dim, windowed=False, softcap=None, varlen=False
    ) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        if softcap is not None:
            return "has no logit softcap"
        return None

    def forward(self, q_QHD, k_NKD, v_NKD, cu_q, cu_k, *, causal, window, softcap, scale) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for q, k, v, mask, square in self._pairs(q_QHD, k_NKD, v_NKD, cu_q, cu_k, causal, window):
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, square, attn_mask=mask, scale=scale
            )
            outs.append(out.flatten(0, 1).transpose(0, 1))
            lses.append(lse.flatten(0, 1))
        return joined(outs, 0)[..., : v_NKD.shape[-1]], joined(lses, 1)

    def backward(
        self, dout_QHD, q_QHD, k_NKD, v_NKD, out_QHD, lse_HQ, cu_q, cu_k, *, causal, window, softcap, scale
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = []
        D, W = q_QHD.shape[-1], v_NKD.shape[-1]
        pairs = self._pairs(q_QHD, k_NKD, v_NKD, cu_q, cu_k, causal, window)
        for i, (q, k, v, mask, square) in enumerate(pairs):
            rows = slice(cu_q[i], cu_q[i + 1])
            K = k_NKD.shape[1]
            dout, out = (_grouped(padded(x[rows], max(D, W)), K) for x in (dout_QHD, out_QHD))
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse_HQ[:, rows].unflatten(0, (K, -1)), 0.0, square, attn_mask=mask, scale=scale
            )
            grads.append((dq.flatten(0, 1).transpose(0, 1), *(g.sum(1).transpose(0, 1) for g in (dk, dv))))
        dq, dk, dv = (joined(parts, 0) for parts in zip(*grads))
        return dq[..., :D], dk[..., :D], dv[..., :W]

    def _pairs(self, q_QHD, k_NKD, v_NKD, cu_q, cu_k, causal, window):
        """Each pair as [K, G, rows, D] views: a key head is a batch row, so grouped queries share it without a copy."""
        size = max(q_QHD.shape[-1], v_NKD.shape[-1])
        for i in range(len(cu_q) - 1):
            n_q, n_k = cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]
            q = _grouped(padded(q_QHD[cu_q[i] : cu_q[i + 1]], size), k_NKD.shape[1])
            keys = slice(cu_k[i], cu_k[i + 1])
            k, v = (
                padded(x[keys], size).transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for x in (k_NKD, v_NKD)
            )
            square = causal and window is None and n_q == n_k
            mask = None
            if causal and not square:
                last = torch.arange(n_k - n_q, n_k, device=q.device)[:, None]
                key = torch.arange(n_k, device=q.device)[None]
                seen = key <= last if window is None else (key <= last) & (key > last - window)
                mask = torch.zeros(n_q, n_k, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
            yield q, k, v, mask, square


def _grouped(x_QHD: Tensor, kv_heads: int) -> Tensor:
    return x_QHD.transpose(0, 1).unflatten(0, (kv_heads, -1))
