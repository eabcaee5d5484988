"""Attention of a decoding step on a CPU: the reference's function in few large products.

A prefix is gathered once for all of its rows; own keys of all rows run as one padded batch; the two parts are merged through
their log-sum-exp. Suffixes and arguments as in `decode_attention`; S and T keys of a prefix and of the longest row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .decode_reference import AttentionCall
from .reference import wide

if TYPE_CHECKING:
    from .decode_attention import DecodePlan

Part = tuple[Tensor, Tensor]  # out [..., rows, W], normalized; lse [..., rows]


def decode_attention(call: AttentionCall) -> None:
    """As `decode_reference.decode_attention`."""
    q_BHD, k_NPKD, v_NPKW, prefix_k, prefix_v, plan, out, scale, softcap, sinks_H = call
    own_B, P = plan.own_length_B.long(), plan.page
    active = own_B.nonzero().flatten()
    out[own_B == 0] = 0
    if not len(active):
        return
    K = k_NPKD.shape[2]
    q_BKRD = (wide(q_BHD[active]) * scale).unflatten(1, (K, -1))
    n_B = own_B[active]
    first_B = torch.zeros_like(n_B) if plan.window is None else (n_B - plan.window).clamp_min(0)
    begin = int(first_B.min()) // P
    # Entries beyond a row's keys, or before its window, may hold anything: what they name is read and masked.
    pages = plan.own_pages_BN[active, begin : -(-int(n_B.max()) // P)].long().clamp(0, len(k_NPKD) - 1)
    k_BKTD, v_BKTW = (wide(x[pages].flatten(1, 2)).transpose(1, 2) for x in (k_NPKD, v_NPKW))
    place_T = torch.arange(k_BKTD.shape[2]) + begin * P
    seen_BT = (place_T < n_B[:, None]) & (place_T >= first_B[:, None])
    found = _attend(q_BKRD, k_BKTD, v_BKTW, seen_BT[:, None, None], softcap)
    prefix_B = plan.prefix_of_B.long()[active]
    for g in prefix_B.unique().tolist():
        if g >= 0:
            rows = (prefix_B == g).nonzero().flatten()
            _add_prefix(found, rows, q_BKRD[rows], n_B[rows], g, prefix_k, prefix_v, plan, softcap)
    o_BKRW, lse_BKR = found
    if sinks_H is not None:
        o_BKRW = o_BKRW * torch.sigmoid(lse_BKR - wide(sinks_H).view(K, -1))[..., None]
    out[active] = o_BKRW.flatten(1, 2).to(out.dtype)


def _add_prefix(
    found: Part,
    rows: Tensor,
    q_MKRD: Tensor,
    n_M: Tensor,
    g: int,
    prefix_k: Tensor,
    prefix_v: Tensor,
    plan: DecodePlan,
    softcap: float | None,
) -> None:
    """Merge what the rows of a prefix see of it into what they found of their own."""
    p, P = int(plan.prefix_length_G[g]), plan.page
    first_M = torch.zeros_like(n_M) if plan.window is None else (p + n_M - plan.window).clamp(0, p)
    begin = int(first_M.min()) // P
    if int(first_M.min()) >= p:
        return
    pages = plan.prefix_pages_GN[g, begin : -(-p // P)].long()  # all of them hold keys that some row sees
    count = p - begin * P
    k_KSD, v_KSW = (wide(x[pages].flatten(0, 1)[:count]).transpose(0, 1) for x in (prefix_k, prefix_v))
    M, R = q_MKRD.shape[0], q_MKRD.shape[2]
    q_KQD = q_MKRD.transpose(0, 1).flatten(1, 2)  # the rows' heads folded into one long query
    seen_QS = None
    if plan.window is not None:
        seen_MS = torch.arange(begin * P, p) >= first_M[:, None]
        seen_QS = seen_MS.repeat_interleave(R, 0)[None]
    o_KQW, lse_KQ = _attend(q_KQD, k_KSD, v_KSW, seen_QS, softcap)
    o_MKRW, lse_MKR = (x.unflatten(1, (M, R)).transpose(0, 1) for x in (o_KQW, lse_KQ))
    o_BKRW, lse_BKR = found
    before = lse_BKR[rows]
    both = torch.logaddexp(before, lse_MKR)
    o_BKRW[rows] = o_BKRW[rows] * (before - both).exp()[..., None] + o_MKRW * (lse_MKR - both).exp()[..., None]
    lse_BKR[rows] = both


def _attend(q_QD: Tensor, k_SD: Tensor, v_SW: Tensor, seen_QS: Tensor | None, softcap: float | None) -> Part:
    """Batched over the leading axes; a query that sees nothing gives 0 and -inf."""
    score = q_QD @ k_SD.transpose(-1, -2)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if seen_QS is not None:
        score = score.masked_fill(~seen_QS, -torch.inf)
    lse = score.logsumexp(-1)
    weight = (score - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp_()
    return weight @ v_SW, lse
