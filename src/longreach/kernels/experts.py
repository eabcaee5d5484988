"""A mixture of experts between its matrix products: tokens ordered by expert, the gated activation, the weighted sum back.

Every token goes to k experts. A slot is one (token, choice) pair; slots are sorted by expert, so that each expert's rows lie
together and one grouped product serves all of them.

Shape suffixes: T tokens, k choices of a token, S slots (T * k, sorted by expert), R rows (some of the slots), E experts,
M hidden size, F width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import check_rows, check_shape, implementation


@dataclass(frozen=True)
class Routing:
    """Slots in the order of their experts; ties in the order of tokens, so that the same choices give the same order.

    Attributes:
        expert_Tk: chosen experts, int64.
        expert_S, row_S: expert and token of each slot, int64.
        place_Tk: slot of each (token, choice), int64.
        offsets_E: end of each expert's slots, int32; an expert without a token ends where the one before it does.
    """

    expert_Tk: Tensor
    expert_S: Tensor
    row_S: Tensor
    place_Tk: Tensor
    offsets_E: Tensor

    @property
    def slots(self) -> int:
        return len(self.row_S)

    @property
    def experts(self) -> int:
        return len(self.offsets_E)


def route(expert_Tk: Tensor, experts: int) -> Routing:
    """The order of slots for the chosen experts [T, k]; neither a loop over experts nor a wait for the device."""
    if expert_Tk.dim() != 2 or experts > 2**15:
        raise ValueError(
            f"route: expert has shape {tuple(expert_Tk.shape)} for {experts} experts; expected two axes [tokens, choices] and at "
            "most 32,768 experts"
        )
    # A radix sort takes a pass for so many bits of a key.
    key_S, order_S = torch.sort(expert_Tk.reshape(-1).to(torch.int16), stable=True)
    chosen_S = key_S.long()
    place = torch.empty_like(order_S)
    place[order_S] = torch.arange(len(order_S), device=order_S.device)
    ends_E = torch.searchsorted(chosen_S, torch.arange(experts, device=chosen_S.device), right=True, out_int32=True)
    return Routing(expert_Tk, chosen_S, order_S // expert_Tk.shape[1], place.view_as(expert_Tk), ends_E)


def gather_rows(x_TM: Tensor, row_R: Tensor) -> Tensor:
    """x[row], [R, M].

    Args:
        x_TM: any stride along T.
        row_R: whole numbers below T.
    """
    if row_R.dim() != 1 or x_TM.dim() != 2:
        raise ValueError(
            f"gather_rows: x has shape {tuple(x_TM.shape)}, row {tuple(row_R.shape)}; expected two axes and one"
        )
    check_rows("gather_rows", x=x_TM, row=row_R)
    return implementation(x_TM, "experts").gather_rows(x_TM, row_R)


def combine_rows(
    y_SM: Tensor,
    place_Tk: Tensor,
    weight_Tk: Tensor | None = None,
    *,
    expert_Tk: Tensor | None = None,
    bias_EM: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Each token's sum over its slots: add + sum_j weight_j * (y[place_j] + bias[expert_j]), in the order of j.

    In fp32 with one rounding; a token gathers its own rows, so no two programs write to one place and the same call gives
    the same bits.

    Args:
        y_SM: a row per slot; any stride along S.
        place_Tk: slot of each choice.
        weight_Tk: any float dtype; None counts every slot once (the gradient of gathering rows).
        expert_Tk, bias_EM: both or neither.
        add: [T, M] that joins before the rounding (the residual); any float dtype.
        out: where the sum goes; it may be `add`.

    Returns:
        [T, M] in the dtype of `add`, or in y's without it.
    """
    op, (T, k) = "combine_rows", place_Tk.shape
    check_rows(op, y=y_SM, place=place_Tk, weight=weight_Tk, expert=expert_Tk, bias=bias_EM, add=add, out=out)
    for name, x in (("weight", weight_Tk), ("expert", expert_Tk)):
        if x is not None:
            check_shape(op, name, x, (T, k), "place")
    if (bias_EM is None) != (expert_Tk is None):
        raise ValueError(f"{op}: {'bias' if bias_EM is None else 'expert'} is None; give both or neither")
    if bias_EM is not None:
        check_shape(op, "bias", bias_EM, (len(bias_EM), y_SM.shape[1]), "y")
    for name, x in (("add", add), ("out", out)):
        if x is not None:
            check_shape(op, name, x, (T, y_SM.shape[1]), "place and y")
    return implementation(y_SM, "experts").combine_rows(
        y_SM, place_Tk, weight_Tk, expert_Tk=expert_Tk, bias_EM=bias_EM, add=add, out=out
    )


@dataclass(frozen=True)
class Gating:
    """How an expert combines its gate and up columns.

    Attributes:
        interleaved: columns are gate 0, up 0, gate 1, ... (gpt-oss); else all gates, then all ups.
        limit: gpt-oss's clamp: gate at most `limit`, up within ±`limit`, and up + 1 multiplies; None for silu(gate) * up.
        alpha: of gate * sigmoid(alpha * gate), with `limit`.
    """

    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0


def expert_swiglu(
    x_RG: Tensor, gating: Gating, expert_R: Tensor | None = None, bias_EG: Tensor | None = None
) -> Tensor:
    """h [R, F] from the first product's rows [R, 2F] and its bias, in fp32 with one rounding.

    silu(gate) * up (arXiv 2002.05202), or with `gating.limit` gpt-oss's form (its model card, arXiv 2508.10925):
    (clamp(up) + 1) * g * sigmoid(alpha * g), g = min(gate, limit).

    Args:
        x_RG: any stride along R.
        expert_R, bias_EG: each row's expert and the biases [E, 2F]; both or neither.
    """
    _check("expert_swiglu", x_RG, expert_R, bias_EG)
    return implementation(x_RG, "experts").expert_swiglu(x_RG, gating, expert_R, bias_EG)


def expert_swiglu_backward(
    dh_RF: Tensor,
    x_RG: Tensor,
    weight_R: Tensor,
    gating: Gating,
    expert_R: Tensor | None = None,
    bias_EG: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weight * f(expert_swiglu(x)), in one pass.

    Args:
        dh_RF: gradient of h for weight one: the routing weight is put on here, so that its own gradient,
            sum_f dh * h, costs no second product.
        x_RG, expert_R, bias_EG: what the forward took.
        weight_R: routing weight of each row.

    Returns:
        dx [R, 2F], written over x; h [R, F], written over dh; dweight [R] in fp32 (fp64 for fp64), without what a bias of the
        product after h adds to it.
    """
    op = "expert_swiglu_backward"
    _check(op, x_RG, expert_R, bias_EG)
    check_shape(op, "dh", dh_RF, (len(x_RG), x_RG.shape[1] // 2), "x")
    check_shape(op, "weight", weight_R, (len(x_RG),), "x")
    check_rows(op, dh=dh_RF, weight=weight_R)
    return implementation(x_RG, "experts").expert_swiglu_backward(dh_RF, x_RG, weight_R, gating, expert_R, bias_EG)


def _check(op: str, x_RG: Tensor, expert_R: Tensor | None, bias_EG: Tensor | None) -> None:
    if x_RG.dim() != 2 or x_RG.shape[1] % 2:
        raise ValueError(
            f"{op}: x has shape {tuple(x_RG.shape)}; expected [rows, 2 * width]: a gate and an up column each"
        )
    if (expert_R is None) != (bias_EG is None):
        raise ValueError(f"{op}: {'expert' if expert_R is None else 'bias'} is None; give both or neither")
    if expert_R is not None and bias_EG is not None:
        check_shape(op, "expert", expert_R, (len(x_RG),), "x")
        check_shape(op, "bias", bias_EG, (len(bias_EG), x_RG.shape[1]), "x")
    check_rows(op, x=x_RG, expert=expert_R, bias=bias_EG)
