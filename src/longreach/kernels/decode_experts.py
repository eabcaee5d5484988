"""The experts of a layer for few tokens, from weights in MXFP4: each chosen expert's codes are read once.

Shape suffixes: B tokens, k choices of a token, E experts, F MLP width, M hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import decode_reference
from .decode_reference import ExpertWeight
from .dequant import MX_BLOCK
from .dispatch import check_rows, check_shape, implementation

FEW_TOKENS = 128


def decode_experts(
    x_BM: Tensor,
    expert_Bk: Tensor,
    weight_Bk: Tensor,
    *,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_up_low: tuple[Tensor, Tensor] | None = None,
    down_low: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sum over a token's choices of weight * expert(x), as gpt-oss's experts (its model card, arXiv 2508.10925).

    expert(x) = W_down ((clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)) + b_down, g = min(gate, limit), where gate and up
    are the even and the odd features of W_gate_up x + b_gate_up. Products and the sum over choices are in fp32, in a fixed order.

    Args:
        x_BM: [B, M], B at most FEW_TOKENS on a CUDA device; any stride along B.
        expert_Bk, weight_Bk: integers in [0, E) and any float dtype.
        gate_up_codes, gate_up_scales: uint8 [E, 2F, M / 32, 16] and [E, 2F, M / 32], as gpt-oss stores them.
        down_codes, down_scales: uint8 [E, M, F / 32, 16] and [E, M, F / 32].
        gate_up_bias, down_bias: [E, 2F] and [E, M], any float dtype.
        gate_up_low, down_low: adapters (a [E, r, I], b [E, r, O]) of the two products, in x's dtype, the scale folded into b;
            each product gains (x a') b, with x a' rounded to x's dtype. O features of gate and up are in the order of the codes.

    Returns:
        [B, M] in x's dtype.
    """
    op = "decode_experts"
    if x_BM.dim() != 2 or expert_Bk.dim() != 2 or gate_up_codes.dim() != 4:
        raise ValueError(
            f"{op}: x has shape {tuple(x_BM.shape)}, expert {tuple(expert_Bk.shape)}, gate_up_codes "
            f"{tuple(gate_up_codes.shape)}; expected [tokens, hidden], [tokens, choices], [experts, features, groups, 16]"
        )
    B, M = x_BM.shape
    E, features = gate_up_codes.shape[:2]
    width = features // 2
    if M % MX_BLOCK or width % MX_BLOCK or features % 2:
        raise ValueError(f"{op}: hidden size {M} and MLP width {features}/2 must be multiples of {MX_BLOCK}")
    check_shape(op, "expert", expert_Bk, (B, expert_Bk.shape[1]), "x")
    check_shape(op, "weight", weight_Bk, tuple(expert_Bk.shape), "expert")
    for name, x, shape in (
        ("gate_up_codes", gate_up_codes, (E, features, M // MX_BLOCK, MX_BLOCK // 2)),
        ("gate_up_scales", gate_up_scales, (E, features, M // MX_BLOCK)),
        ("down_codes", down_codes, (E, M, width // MX_BLOCK, MX_BLOCK // 2)),
        ("down_scales", down_scales, (E, M, width // MX_BLOCK)),
    ):
        check_shape(op, name, x, shape, "x and gate_up_codes")
        if x.dtype != torch.uint8 or not x.is_contiguous():
            raise ValueError(f"{op}: {name} is {x.dtype} with strides {x.stride()}; expected contiguous torch.uint8")
    for name, bias, columns in (("gate_up_bias", gate_up_bias, features), ("down_bias", down_bias, M)):
        if bias is not None:
            check_shape(op, name, bias, (E, columns), "the codes")
    for name, low, inputs, outputs in (("gate_up_low", gate_up_low, M, features), ("down_low", down_low, width, M)):
        if low is not None:
            a_ErI, b_ErO = low
            rank = a_ErI.shape[1]
            check_shape(op, f"{name} a", a_ErI, (E, rank, inputs), "the codes")
            check_shape(op, f"{name} b", b_ErO, (E, rank, outputs), "the codes and a")
            if not (a_ErI.is_contiguous() and b_ErO.is_contiguous() and a_ErI.dtype == b_ErO.dtype == x_BM.dtype):
                raise ValueError(
                    f"{op}: {name} is {a_ErI.dtype}, {b_ErO.dtype}, strides {a_ErI.stride()}, {b_ErO.stride()}; expected "
                    f"contiguous {x_BM.dtype}"
                )
    if x_BM.is_cuda and B > FEW_TOKENS:
        raise ValueError(f"{op}: x has {B} rows; expected at most {FEW_TOKENS}: beyond that use the experts' module")
    check_rows(op, x=x_BM, expert=expert_Bk, weight=weight_Bk, gate_up_bias=gate_up_bias, down_bias=down_bias)
    return implementation(x_BM, "decode_experts", decode_reference).decode_experts(
        x_BM, expert_Bk, weight_Bk, ExpertWeight(gate_up_codes, gate_up_scales, gate_up_bias, gate_up_low),
        ExpertWeight(down_codes, down_scales, down_bias, down_low), alpha, limit,
    )  # fmt: skip


def choose_experts(logits_BE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k experts with the largest logits, largest first (of equal ones the first), and the softmax over these.

    Args:
        logits_BE: any float dtype, any stride along B; no NaN.
        k: at most E.

    Returns:
        expert [B, k] int64; weight [B, k] in the logits' dtype.
    """
    if logits_BE.dim() != 2 or not 1 <= k <= logits_BE.shape[1]:
        raise ValueError(
            f"choose_experts: k={k}, logits of shape {tuple(logits_BE.shape)}; expected [tokens, experts] and k in [1, E]"
        )
    check_rows("choose_experts", logits=logits_BE)
    return implementation(logits_BE, "decode_experts", decode_reference).choose_experts(logits_BE, k)
