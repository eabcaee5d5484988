"""Plain-torch attention: the specification that every backend is compared with.

Shape suffixes: Q query rows, N key rows, H query heads, K key/value heads,
D query/key head size, W value head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import wide_dtype

ROWS = 512  # query rows whose scores live at once; bounds memory at H * ROWS * N


class Reference:
    """Dense softmax attention in at least fp32, any head size, window, softcap, GQA; CPU or GPU."""

    name = "reference"

    def unsupported(
        self, *, device, dtype, head_dim, value_dim, windowed=False, softcap=None, varlen=False
    ) -> str | None:
        return None

    def forward(self, q_QHD, k_NKD, v_NKW, cu_q, cu_k, *, causal, window, softcap, scale) -> tuple[Tensor, Tensor]:
        """One varlen batch of independent (queries, keys) pairs.

        Args:
            cu_q, cu_k: boundaries of the pairs, tuples of `pairs + 1` ints starting at 0.
            causal: bottom-right aligned: query i of n_q sees keys j <= i + n_k - n_q.
            window: with causal, a query sees only its last `window` keys, itself included; None for all.
            softcap: scores become `softcap * tanh(scores / softcap)`; None for none.
            scale: multiplies q @ k.

        Returns:
            out [Q, H, W] in q's dtype, lse [H, Q] natural log-sum-exp in at least fp32.
        """
        Q, H, _ = q_QHD.shape
        out_QHW = q_QHD.new_empty(Q, H, v_NKW.shape[-1])
        lse_HQ = q_QHD.new_empty(H, Q, dtype=wide_dtype(q_QHD.dtype))
        for q0, q1, k0, k1, first in _rows(cu_q, cu_k):
            s_HQN, _ = _scores(q_QHD[q0:q1], k_NKD[k0:k1], first, causal, window, softcap, scale)
            lse_HQ[:, q0:q1] = torch.logsumexp(s_HQN, -1)
            p_HQN = torch.exp(s_HQN - lse_HQ[:, q0:q1, None])
            out_QHW[q0:q1] = torch.matmul(p_HQN, _per_head(v_NKW[k0:k1], H)).transpose(0, 1).to(out_QHW.dtype)
        return out_QHW, lse_HQ

    def backward(
        self, dout_QHW, q_QHD, k_NKD, v_NKW, out_QHW, lse_HQ, cu_q, cu_k, *, causal, window, softcap, scale
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this block's q, k, v, given `out` and `lse` of the whole (merged) attention.

        With P = exp(S - lse) and delta = sum_W(dout * out): dV = P' dout, dS = P * (dout V' - delta), dQ = dS K, dK = dS' Q
        (FlashAttention, arXiv 2205.14135, appendix B.2; with a merged lse, ring attention, arXiv 2310.01889).
        """
        H, K = q_QHD.shape[1], k_NKD.shape[1]
        wide = wide_dtype(q_QHD.dtype)
        dq_QHD = torch.zeros(q_QHD.shape, dtype=wide, device=q_QHD.device)
        dk_NKD = torch.zeros(k_NKD.shape, dtype=wide, device=q_QHD.device)
        dv_NKW = torch.zeros(v_NKW.shape, dtype=wide, device=q_QHD.device)
        for q0, q1, k0, k1, first in _rows(cu_q, cu_k):
            q_HQD = q_QHD[q0:q1].transpose(0, 1).to(wide)
            do_HQW = dout_QHW[q0:q1].transpose(0, 1).to(wide)
            k_HND, v_HNW = _per_head(k_NKD[k0:k1], H), _per_head(v_NKW[k0:k1], H)
            s_HQN, slope = _scores(q_QHD[q0:q1], k_NKD[k0:k1], first, causal, window, softcap, scale)
            p_HQN = torch.exp(s_HQN - lse_HQ[:, q0:q1, None].to(wide))
            delta_HQ = (do_HQW * out_QHW[q0:q1].transpose(0, 1).to(wide)).sum(-1)
            ds_HQN = p_HQN * (do_HQW @ v_HNW.transpose(1, 2) - delta_HQ[..., None])
            if slope is not None:
                ds_HQN = ds_HQN * slope
            ds_HQN = ds_HQN * scale
            dq_QHD[q0:q1] += (ds_HQN @ k_HND).transpose(0, 1)
            dk_NKD[k0:k1] += _to_groups(ds_HQN.transpose(1, 2) @ q_HQD, K)
            dv_NKW[k0:k1] += _to_groups(p_HQN.transpose(1, 2) @ do_HQW, K)
        return dq_QHD, dk_NKD, dv_NKW


def _per_head(x_NKD: Tensor, heads: int) -> Tensor:
    return x_NKD.transpose(0, 1).to(wide_dtype(x_NKD.dtype)).repeat_interleave(heads // x_NKD.shape[1], 0)


def _to_groups(x_HND: Tensor, kv_heads: int) -> Tensor:
    return x_HND.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)


def _rows(cu_q, cu_k):
    """(q0, q1, k0, k1, first): row ranges of at most ROWS queries; `first` is the last key of row q0 if causal."""
    for i in range(len(cu_q) - 1):
        n_q, n_k = cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]
        for r in range(0, n_q, ROWS):
            yield cu_q[i] + r, cu_q[i] + min(r + ROWS, n_q), cu_k[i], cu_k[i + 1], r + n_k - n_q


def _scores(q_QHD, k_NKD, first, causal, window, softcap, scale):
    """Scores [H, Q, N] with -inf where unseen, and the softcap's slope (None without softcap)."""
    wide = wide_dtype(q_QHD.dtype)
    s_HQN = q_QHD.transpose(0, 1).to(wide) @ _per_head(k_NKD, q_QHD.shape[1]).transpose(1, 2) * scale
    slope = None
    if softcap is not None:
        t_HQN = torch.tanh(s_HQN / softcap)
        s_HQN, slope = softcap * t_HQN, 1 - t_HQN * t_HQN
    if causal:
        last_Q = torch.arange(first, first + s_HQN.shape[1], device=s_HQN.device)[:, None]
        key_N = torch.arange(s_HQN.shape[2], device=s_HQN.device)[None]
        hidden = key_N > last_Q
        if window is not None:
            hidden = hidden | (key_N <= last_Q - window)
        s_HQN = s_HQN.masked_fill(hidden, float("-inf"))
    return s_HQN, slope
