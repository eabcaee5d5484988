"""The experts of a mixture, forward and hand-written backward: sorted rows, grouped products, a low-rank term for each product.

y_t = sum_j w_tj (W2_e' f(W1_e' x_t + b1_e) + b2_e),  e = expert_tj;  with adapters W' x becomes W' x + s B (A x)

What a chunk's rows go through is bounded: at most `ROWS_AT_ONCE` of them are in the middle of an expert at a time, and weights
that are stored in 4 bits come a few experts at a time, so that the memory taken does not depend on how the router loads the
experts. Nothing is kept for the backward: it computes the first product again, and never the second (the routing weight's
gradient, dy . (W2' h + b2), is (W2 dy) . h + dy . b2).

Shape suffixes: T tokens, k choices of a token, S slots (sorted by expert), R rows of one part, E experts, e experts of one part,
M hidden size, F width of an expert, G gate and up columns (2F), r rank, I and O a product's input and output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import (
    Gating,
    Routing,
    add_low_rank,
    combine_rows,
    expert_swiglu,
    expert_swiglu_backward,
    gather_rows,
    grouped_mm,
    grouped_outer,
    wide_dtype,
)
from ..kernels.grouped import RANK_MULTIPLE, empty_groups

BiasGrads = tuple[Tensor | None, Tensor | None]

ROWS_AT_ONCE = 12288  # rows that are in the middle of an expert at the same time


@dataclass(frozen=True)
class Part:
    """Some experts and some of their rows.

    Attributes:
        experts: which ones.
        rows: slots [start, stop).
        offsets_e: end of each expert's rows, counted from `rows.start`, int32.
        gate_up_eMG, down_eFM: their weights in the compute dtype; either of the last two axes may be the dense one.
    """

    experts: slice
    rows: slice
    offsets_e: Tensor
    gate_up_eMG: Tensor
    down_eFM: Tensor


class ExpertWeights(Protocol):
    """Weights of all experts, however they are stored; biases [E, G] and [E, M] or None."""

    @property
    def gating(self) -> Gating: ...

    @property
    def gate_up_bias(self) -> Tensor | None: ...

    @property
    def down_bias(self) -> Tensor | None: ...

    def parts(self, routing: Routing) -> Iterator[Part]:
        """Every row once, in order."""


@dataclass(frozen=True)
class DenseWeights:
    """Weights as they are, [E, M, G] and [E, F, M] (views of a transposed storage too)."""

    gate_up_EMG: Tensor
    down_EFM: Tensor
    gating: Gating
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def parts(self, routing: Routing) -> Iterator[Part]:
        everyone = slice(0, routing.experts)
        for rows in pieces(slice(0, routing.slots)):
            yield Part(everyone, rows, local_offsets(routing, everyone, rows), self.gate_up_EMG, self.down_EFM)


def pieces(rows: slice) -> list[slice]:
    """`rows` in runs of at most ROWS_AT_ONCE."""
    return [slice(at, min(at + ROWS_AT_ONCE, rows.stop)) for at in range(rows.start, rows.stop, ROWS_AT_ONCE)]


def local_offsets(routing: Routing, experts: slice, rows: slice) -> Tensor:
    """Where each expert's rows end within a run of slots; computed on the device."""
    if rows == slice(0, routing.slots) and experts == slice(0, routing.experts):
        return routing.offsets_E
    return (routing.offsets_E[experts] - rows.start).clamp_(0, rows.stop - rows.start)


@dataclass(frozen=True)
class LowRank:
    """An adapter of all experts for one product: y += (x a') b, rank padded with zeros to `RANK_MULTIPLE`.

    Attributes:
        a_ErI, b_ErO: in the compute dtype; b with the adapter's scale in it.
        scale: that is in b, for the gradient of b without it.
        rank: before padding.
        trained: whether each of the two wants a gradient.
    """

    a_ErI: Tensor
    b_ErO: Tensor
    scale: float
    rank: int
    trained: tuple[bool, bool] = (True, True)

    @classmethod
    def of(cls, a_ErI: Tensor, b_ErO: Tensor, scale: float, dtype: torch.dtype, trained: tuple[bool, bool]) -> LowRank:
        rank = a_ErI.shape[1]
        missing = (0, 0, 0, -rank % RANK_MULTIPLE)
        scaled = b_ErO.detach() if scale == 1.0 else b_ErO.detach() * scale
        a, b = (functional.pad(x.to(dtype), missing).contiguous() for x in (a_ErI.detach(), scaled))
        return cls(a, b, scale, rank, trained)


@dataclass
class LowRankGrads:
    """Sums of an adapter's gradients over parts, [E, r, I] and [E, r, O], in at least fp32 where there is more than one part."""

    low: LowRank
    sums: list[Tensor | None] = field(default_factory=lambda: [None, None])

    def add(self, which: int, part: Part, grad_erX: Tensor) -> None:
        like = (self.low.a_ErI, self.low.b_ErO)[which]
        held = self.sums[which]
        if held is None and len(grad_erX) == len(like):
            self.sums[which] = grad_erX
            return
        if held is None or held.dtype != wide_dtype(like.dtype):
            wide = torch.zeros(like.shape, dtype=wide_dtype(like.dtype), device=like.device)
            self.sums[which] = held = wide if held is None else wide.copy_(held)
        held[part.experts] += grad_erX

    def done(self) -> tuple[Tensor | None, Tensor | None]:
        """Without the padding; None for what is not trained or had no rows."""
        a, b = (None if s is None else s[:, : self.low.rank] for s in self.sums)
        return a, b if b is None or self.low.scale == 1.0 else b * self.low.scale


def mixture_forward(
    x_TM: Tensor,
    routing: Routing,
    weight_Tk: Tensor,
    weights: ExpertWeights,
    lows: tuple[LowRank | None, LowRank | None] = (None, None),
    add: Tensor | None = None,
) -> Tensor:
    """Output [T, M] of the experts in x's dtype; with `add`, plus that and in its dtype.

    Args:
        x_TM: bf16, fp16, fp32 or fp64, the dtype of the weights that `weights` hands out.
        routing: of these tokens (`kernels.route`).
        weight_Tk: routing weights.
        lows: adapters of the two products.
        add: [T, M] that joins before the one rounding (the residual).
    """
    y_SM = None
    for part in weights.parts(routing):
        x_RM = gather_rows(x_TM, routing.row_S[part.rows])
        hidden_RG, _ = _product(x_RM, part.gate_up_eMG, part, lows[0])
        del x_RM
        h_RF = expert_swiglu(hidden_RG, weights.gating, *_bias(weights.gate_up_bias, routing, part))
        del hidden_RG
        y_RM, _ = _product(h_RF, part.down_eFM, part, lows[1])
        del h_RF
        y_SM = _join(y_SM, y_RM, part, routing)
        del part  # its weights must go before the next ones are made
    assert y_SM is not None
    bias = {} if weights.down_bias is None else {"expert_Tk": routing.expert_Tk, "bias_EM": weights.down_bias}
    return combine_rows(y_SM, routing.place_Tk, weight_Tk, add=add, **bias)


def mixture_backward(
    dy_TM: Tensor,
    x_TM: Tensor,
    routing: Routing,
    weight_Tk: Tensor,
    weights: ExpertWeights,
    lows: tuple[LowRank | None, LowRank | None] = (None, None),
    dbiases: BiasGrads = (None, None),
) -> tuple[Tensor, Tensor, tuple[LowRankGrads | None, LowRankGrads | None]]:
    """Gradients of `mixture_forward` without `add`: dx [T, M], dweight [T, k] in at least fp32, and those of the adapters.

    Sums run in a fixed order: the same call gives the same bits.

    Args:
        dbiases: what the gradients of the biases are added to, [E, G] and [E, M]; None for a bias that isn't trained.
    """
    dx_SM = None
    grads = tuple(None if low is None else LowRankGrads(low) for low in lows)
    wide = wide_dtype(x_TM.dtype)
    dweight_S = torch.empty(routing.slots, dtype=wide, device=x_TM.device)
    weight_S = torch.empty_like(weight_Tk.reshape(-1))
    weight_S[routing.place_Tk.reshape(-1)] = weight_Tk.reshape(-1)
    for part in weights.parts(routing):
        dx_RM = _part_backward(dy_TM, x_TM, routing, weight_S, dweight_S, weights, part, lows, grads, dbiases)
        dx_SM = _join(dx_SM, dx_RM, part, routing)
        del part
    assert dx_SM is not None
    dweight_Tk = dweight_S[routing.place_Tk]
    if weights.down_bias is not None:
        dweight_Tk += (dy_TM @ weights.down_bias.to(dy_TM.dtype).t()).gather(1, routing.expert_Tk)
    return combine_rows(dx_SM, routing.place_Tk), dweight_Tk, grads  # type: ignore[return-value]


def _part_backward(
    dy_TM: Tensor,
    x_TM: Tensor,
    routing: Routing,
    weight_S: Tensor,
    dweight_S: Tensor,
    weights: ExpertWeights,
    part: Part,
    lows: tuple[LowRank | None, LowRank | None],
    grads: tuple[LowRankGrads | None, ...],
    dbiases: BiasGrads,
) -> Tensor:
    """Gradient of the part's gathered rows [R, M]."""
    row_R, weight_R = routing.row_S[part.rows], weight_S[part.rows]
    x_RM, dy_RM = gather_rows(x_TM, row_R), gather_rows(dy_TM, row_R)
    hidden_RG, t_in = _product(x_RM, part.gate_up_eMG, part, lows[0])
    # Without the routing weight: that is put on inside the activation's backward.
    dh_RF, dt_out = _product_backward(dy_RM, part.down_eFM, part, lows[1])
    dhidden_RG, h_RF, dweight_S[part.rows] = expert_swiglu_backward(
        dh_RF, hidden_RG, weight_R, weights.gating, *_bias(weights.gate_up_bias, routing, part)
    )
    del dh_RF, hidden_RG
    for dbias_EX, rows_RX, weight in ((dbiases[0], dhidden_RG, None), (dbiases[1], dy_RM, weight_R)):
        if dbias_EX is not None:
            dbias_EX += _by_expert(rows_RX, weight, routing, part)
    idle_e = empty_groups(part.offsets_e) if any(lows) else None
    if lows[1] is not None and grads[1] is not None:
        weight = weight_R[:, None]
        if lows[1].trained[0]:
            grads[1].add(0, part, grouped_outer(dt_out * weight, h_RF, part.offsets_e, idle_e))
        if lows[1].trained[1]:
            t_out = grouped_mm(h_RF, lows[1].a_ErI[part.experts].transpose(1, 2), part.offsets_e)
            grads[1].add(1, part, grouped_outer(t_out * weight, dy_RM, part.offsets_e, idle_e))
    del h_RF, dy_RM
    dx_RM, dt_in = _product_backward(dhidden_RG, part.gate_up_eMG, part, lows[0])
    if lows[0] is not None and grads[0] is not None:
        if lows[0].trained[0]:
            grads[0].add(0, part, grouped_outer(dt_in, x_RM, part.offsets_e, idle_e))
        if lows[0].trained[1]:
            grads[0].add(1, part, grouped_outer(t_in, dhidden_RG, part.offsets_e, idle_e))
    return dx_RM


def _product(x_RI: Tensor, w_eIO: Tensor, part: Part, low: LowRank | None) -> tuple[Tensor, Tensor]:
    """x w + (x a') b [R, O], and x a' [R, r]."""
    y_RO = grouped_mm(x_RI, w_eIO, part.offsets_e)
    if low is None:
        return y_RO, y_RO
    t_Rr = grouped_mm(x_RI, low.a_ErI[part.experts].transpose(1, 2), part.offsets_e)
    return add_low_rank(y_RO, t_Rr, low.b_ErO[part.experts], part.offsets_e), t_Rr


def _product_backward(dy_RO: Tensor, w_eIO: Tensor, part: Part, low: LowRank | None) -> tuple[Tensor, Tensor]:
    """Gradient of x [R, I] and of x a' [R, r]."""
    dx_RI = grouped_mm(dy_RO, w_eIO.transpose(1, 2), part.offsets_e)
    if low is None:
        return dx_RI, dx_RI
    dt_Rr = grouped_mm(dy_RO, low.b_ErO[part.experts].transpose(1, 2), part.offsets_e)
    return add_low_rank(dx_RI, dt_Rr, low.a_ErI[part.experts], part.offsets_e), dt_Rr


def _bias(bias_EX: Tensor | None, routing: Routing, part: Part) -> tuple[Tensor | None, Tensor | None]:
    """(expert of each row, biases), or two times None."""
    return (None, None) if bias_EX is None else (routing.expert_S[part.rows], bias_EX)


def _by_expert(x_RX: Tensor, weight_R: Tensor | None, routing: Routing, part: Part) -> Tensor:
    """Sum of each expert's rows, times their weights, [E, X]. A product, because sums by index come in any order on a GPU."""
    chosen_ER = torch.arange(routing.experts, device=x_RX.device)[:, None] == routing.expert_S[part.rows]
    return (chosen_ER.to(x_RX.dtype) if weight_R is None else chosen_ER * weight_R.to(x_RX.dtype)) @ x_RX


def _join(all_SM: Tensor | None, rows_RM: Tensor, part: Part, routing: Routing) -> Tensor:
    """All slots' rows; the part's own tensor where it is all of them."""
    if all_SM is None:
        if len(rows_RM) == routing.slots:
            return rows_RM
        all_SM = rows_RM.new_empty(routing.slots, rows_RM.shape[1])
    all_SM[part.rows] = rows_RM
    return all_SM
