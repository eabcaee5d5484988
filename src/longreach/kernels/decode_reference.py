"""The decoding ops in plain torch: their specification, and what CPU tensors run. Suffixes and arguments as in the public ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import reference
from .philox import gumbel
from .reference import wide

if TYPE_CHECKING:
    from .decode_attention import DecodePlan
    from .fourbit_matmul import FourBitRows


# --- attention ----------------------------------------------------------------------------------------------------


def update_plan(plan: DecodePlan) -> None:
    """Nothing is cut here."""


class AttentionCall(NamedTuple):
    """What an implementation of `decode_attention` is given; the public op says what each is."""

    q_BHD: Tensor
    k_NPKD: Tensor
    v_NPKW: Tensor
    prefix_k: Tensor
    prefix_v: Tensor
    plan: DecodePlan
    out: Tensor
    scale: float
    softcap: float | None
    sinks_H: Tensor | None


def decode_attention(call: AttentionCall) -> None:
    q_BHD, k_NPKD, v_NPKW, prefix_k, prefix_v, plan, out, scale, softcap, sinks_H = call
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


# --- products -----------------------------------------------------------------------------------------------------


def few_row_matmul(x_BI: Tensor, weight_OI: Tensor, out: Tensor) -> None:
    torch.matmul(x_BI, weight_OI.t(), out=out)


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


# --- between the products -----------------------------------------------------------------------------------------


def _complete(y_BN: Tensor, widths: Sequence[int], lora_b_Or: Tensor | None, bias_O: Tensor | None) -> Tensor:
    """y of layers `widths` wide with their adapters and biases, [B, O], rounded once."""
    features = sum(widths)
    y = wide(y_BN[:, :features])
    if bias_O is not None:
        y = y + wide(bias_O)
    if lora_b_Or is not None:
        rank, at, low = lora_b_Or.shape[1], 0, []
        for i, width in enumerate(widths):
            t = y_BN[:, features + i * rank : features + (i + 1) * rank]
            low.append(wide(t) @ wide(lora_b_Or[at : at + width]).t())
            at += width
        y = y + torch.cat(low, 1)
    return y.to(y_BN.dtype)


def decode_qkv(
    y_BN: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos_SR: Tensor,
    sin_SR: Tensor,
    position_B: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    own_pages_BN: Tensor,
    own_length_B: Tensor,
    lora_b_Or: Tensor | None,
    bias_O: Tensor | None,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> Tensor:
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    x_BHD = _complete(y_BN, widths, lora_b_Or, bias_O).unflatten(1, (-1, head_dim))
    q_BHD, k_BKD, v_BKD = x_BHD.split([heads, kv_heads, kv_heads], 1)
    position = position_B.long()
    q_BHD, k_BKD, _ = reference.qk_norm_rope(
        q_BHD, k_BKD, cos_SR[position], sin_SR[position], q_norm_D, k_norm_D, eps, unit_offset
    )
    rows = (own_length_B > 0).nonzero()[:, 0]
    last = own_length_B[rows].long() - 1
    page, token = own_pages_BN[rows, last // k_pages.shape[1]].long(), last % k_pages.shape[1]
    k_pages[page, token] = k_BKD[rows]
    v_pages[page, token] = v_BKD[rows]
    return q_BHD


def decode_swiglu(
    y_BN: Tensor, features: int, lora_b_Or: Tensor | None, bias_O: Tensor | None, activation: str
) -> Tensor:
    gate_BF, up_BF = _complete(y_BN, [features, features], lora_b_Or, bias_O).chunk(2, 1)
    return reference.swiglu(gate_BF, up_BF, activation=activation)


def decode_add_norm(
    h_BM: Tensor,
    y_BN: Tensor,
    weight_M: Tensor,
    eps: float,
    lora_b_Or: Tensor | None,
    bias_M: Tensor | None,
    post_weight_M: Tensor | None,
    unit_offset: bool,
) -> Tensor:
    y_BM = _complete(y_BN, [h_BM.shape[1]], lora_b_Or, bias_M)
    if lora_b_Or is not None:
        y_BN[:, : h_BM.shape[1]] = y_BM
    if post_weight_M is not None:
        y_BM, _ = reference.rms_norm(y_BM, post_weight_M, eps, unit_offset=unit_offset)
    h_BM.copy_(wide(h_BM) + wide(y_BM))
    out_BM = torch.empty_like(y_BM)
    return reference.rms_norm(h_BM, weight_M, eps, unit_offset=unit_offset, out=out_BM)[0]


def decode_sample(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
    greedy_B1 = (temperature_B == 0)[:, None]
    z_BV = wide(logits_BV) / torch.where(greedy_B1, 1.0, temperature_B[:, None])
    noisy_BV = z_BV + gumbel(seed_B, count_B, logits_BV.shape[1])
    id_B = torch.where(greedy_B1, z_BV, noisy_BV).argmax(-1)
    return id_B, torch.log_softmax(z_BV, -1).gather(1, id_B[:, None])[:, 0]


# --- experts ------------------------------------------------------------------------------------------------------


class ExpertWeight(NamedTuple):
    """A weight of all experts in MXFP4, and its adapter (a, b)."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    low: tuple[Tensor, Tensor] | None


def decode_experts(
    x_BM: Tensor,
    expert_Bk: Tensor,
    weight_Bk: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    alpha: float,
    limit: float,
) -> Tensor:
    sum_BM = torch.zeros_like(wide(x_BM))
    for e in expert_Bk.unique().tolist():
        row, choice = (expert_Bk == e).nonzero(as_tuple=True)
        both = _expert_product(x_BM[row], e, gate_up)
        gate, up = wide(both[:, ::2]).clamp(max=limit), wide(both[:, 1::2]).clamp(-limit, limit)
        h = ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(x_BM.dtype)
        y = wide(_expert_product(h, e, down)) * wide(weight_Bk)[row, choice, None]
        sum_BM.index_add_(0, row, y)
    return sum_BM.to(x_BM.dtype)


def _expert_product(x: Tensor, e: int, weight: ExpertWeight) -> Tensor:
    codes, scales, bias, low = weight
    out = torch.empty(codes.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    y = x @ reference.dequantize_mxfp4(codes[e], scales[e], out).t()
    if bias is not None:
        y = y + bias[e].to(y.dtype)
    return y if low is None else y + (x @ low[0][e].t()) @ low[1][e]


def choose_experts(logits_BE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    sorted_BE, order_BE = torch.sort(logits_BE, dim=-1, descending=True, stable=True)
    return order_BE[:, :k].contiguous(), torch.softmax(wide(sorted_BE[:, :k]), -1).to(logits_BE.dtype)
