"""The decoding ops in plain torch: their specification, and what CPU tensors run. Suffixes and arguments as in the public ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import reference
from .reference import wide

if TYPE_CHECKING:
    from .decode_attention import DecodePlan
    from .fourbit_matmul import FourBitRows


# --- attention ----------------------------------------------------------------------------------------------------


def update_plan(plan: DecodePlan) -> None:
    """Nothing is cut here."""


def decode_attention(
    q_BHD: Tensor,
    k_NPKD: Tensor,
    v_NPKW: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    plan: DecodePlan,
    out: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> None:
    own, prefix_of, prefix = (x.tolist() for x in (plan.own_length_B, plan.prefix_of_B, plan.prefix_length_G))
    for b, (n, g) in enumerate(zip(own, prefix_of)):
        if n == 0:
            out[b] = 0
            continue
        p = 0 if g < 0 else prefix[g]
        first = 0 if plan.window is None else max(0, p + n - plan.window)
        pages = plan.own_pages_BN[b]
        k = [_gather(k_NPKD, pages, max(first - p, 0), n)]
        v = [_gather(v_NPKW, pages, max(first - p, 0), n)]
        if first < p:
            pages = plan.prefix_pages_GN[g]
            k.insert(0, _gather(prefix_k, pages, first, p))
            v.insert(0, _gather(prefix_v, pages, first, p))
        _attend(q_BHD[b], torch.cat(k), torch.cat(v), out[b], scale, softcap, sinks_H)


def _gather(x_NPKD: Tensor, pages_N: Tensor, first: int, end: int) -> Tensor:
    """Keys or values [first, end) of a row of the page table: [end - first, K, D]."""
    P = x_NPKD.shape[1]
    start = first // P
    found = x_NPKD[pages_N[start : -(-end // P)].long()].flatten(0, 1)
    return found[first - start * P : end - start * P]


def _attend(
    q_HD: Tensor,
    k_SKD: Tensor,
    v_SKW: Tensor,
    out_HW: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> None:
    K = k_SKD.shape[1]
    q_KRD = wide(q_HD).unflatten(0, (K, -1))
    score_KRS = torch.einsum("krd,skd->krs", q_KRD, wide(k_SKD)) * scale
    if softcap is not None:
        score_KRS = softcap * torch.tanh(score_KRS / softcap)
    if sinks_H is not None:
        score_KRS = torch.cat([score_KRS, wide(sinks_H).to(score_KRS.dtype).view(K, -1, 1)], -1)
    p_KRS = torch.softmax(score_KRS, -1)[..., : len(k_SKD)]
    out_HW.copy_(torch.einsum("krs,skw->krw", p_KRS, wide(v_SKW)).flatten(0, 1))


# --- 4-bit products -----------------------------------------------------------------------------------------------


def dense(part: FourBitRows, dtype: torch.dtype) -> Tensor:
    """The weight [rows, columns] in a dtype."""
    out = torch.empty(part.rows, part.columns, dtype=dtype, device=part.codes.device)
    if part.kind == "nf4":
        return reference.dequantize_nf4(part.codes, part.scales, out, block=part.block, nested=part.nested)
    groups = part.columns // part.block
    codes, scales = part.codes.view(part.rows, groups, -1), part.scales.view(part.rows, groups)
    return reference.dequantize_mxfp4(codes, scales, out)


def fourbit_matmul(x_BI: Tensor, parts: Sequence[FourBitRows], out_BN: Tensor, a_RI: Tensor | None) -> None:
    at = 0
    for part in parts:
        torch.matmul(x_BI, dense(part, x_BI.dtype).t(), out=out_BN[:, at : at + part.rows])
        at += part.rows
    if a_RI is not None:
        torch.matmul(x_BI, a_RI.t(), out=out_BN[:, at : at + len(a_RI)])
