"""Rotary position embedding of queries and keys, with Qwen3's and Gemma 3's per-head RMS norm before it fused in.

Shape suffixes: T tokens, H query heads, K key heads, D head size, R rotary width (R <= D).
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import check_rows, check_shape, implementation


def qk_norm_rope(
    q_THD: Tensor,
    k_TKD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    *,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """RMS norm of each head (if weights are given), then x * cos + rotate_half(x) * sin, in one pass over q and k.

    Transformers' half-split layout (RoFormer, arXiv 2104.09864): rotate_half(x) = [-x2, x1] for the halves x1, x2 of the
    first R columns; columns R..D pass through. All in fp32 with one rounding at the end.

    Args:
        q_THD, k_TKD: views with any stride along tokens and heads, e.g. columns of a fused qkv projection.
        cos_TR, sin_TR: any float dtype, any stride along T.
        q_weight_D, k_weight_D: both or neither.
        eps: of the norm.
        unit_offset: the norm multiplies by 1 + weight (Gemma).
        q_out, k_out: where results go (views too, e.g. rows of a key cache; q and k themselves); None for new tensors.

    Returns:
        q, k rotated, in their dtypes; stats (rstd_TH, rstd_TK) in fp32 for the backward, None without a norm.
    """
    _check("qk_norm_rope", q_THD, k_TKD, cos_TR, sin_TR, q_weight_D, k_weight_D, q_out=q_out, k_out=k_out)
    return implementation(q_THD, "rope").qk_norm_rope(
        q_THD, k_TKD, cos_TR, sin_TR, q_weight_D, k_weight_D, eps, unit_offset, q_out=q_out, k_out=k_out
    )


def qk_norm_rope_backward(
    dq_THD: Tensor,
    dk_TKD: Tensor,
    q_THD: Tensor | None,
    k_TKD: Tensor | None,
    cos_TR: Tensor,
    sin_TR: Tensor,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    stats: tuple[Tensor, Tensor] | None = None,
    unit_offset: bool = False,
    *,
    need_dweight: bool = False,
    dq_out: Tensor | None = None,
    dk_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `qk_norm_rope`.

    Args:
        dq_THD, dk_TKD: gradients of the rotated q, k; any float dtype (fp32 sums too), any stride along tokens and heads.
        q_THD, k_TKD: the forward's inputs, before norm and rotation; None when there are no weights.
        stats: what the forward returned.
        need_dweight: also return the weights' gradients, summed in a fixed order.
        dq_out, dk_out: where results go (e.g. columns of a fused dqkv buffer) and in which dtype; by default they
            overwrite dq and dk.

    Returns:
        dq, dk with respect to the inputs; dq_weight [D], dk_weight [D] in the weights' dtypes, or None.
    """
    op = "qk_norm_rope_backward"
    _check(op, dq_THD, dk_TKD, cos_TR, sin_TR, q_weight_D, k_weight_D, q_out=dq_out, k_out=dk_out)
    if q_weight_D is not None:
        if q_THD is None or k_TKD is None or stats is None:
            raise ValueError(
                f"{op}: with norm weights, q, k and stats of the forward are needed, but one of them is None"
            )
        check_shape(op, "q", q_THD, dq_THD.shape, "dq")
        check_shape(op, "k", k_TKD, dk_TKD.shape, "dk")
        check_rows(op, q=q_THD, k=k_TKD)
    return implementation(dq_THD, "rope").qk_norm_rope_backward(
        dq_THD, dk_TKD, q_THD, k_TKD, cos_TR, sin_TR, q_weight_D, k_weight_D, stats, unit_offset,
        need_dweight=need_dweight, dq_out=dq_out, dk_out=dk_out,
    )  # fmt: skip


def _check(op, q, k, cos, sin, q_weight, k_weight, *, q_out, k_out) -> None:
    if q.dim() != 3 or k.dim() != 3:
        name, x = ("q", q) if q.dim() != 3 else ("k", k)
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; expected three axes [tokens, heads, head size]")
    T, H, D = q.shape
    K = k.shape[1]
    check_shape(op, "k", k, (T, K, D), "q")
    width = cos.shape[-1]
    if width % 2 or not 0 < width <= D:
        raise ValueError(f"{op}: cos is {width} wide; the rotary width must be even and at most the head size, {D}")
    check_shape(op, "cos", cos, (T, width), "q")
    check_shape(op, "sin", sin, (T, width), "cos")
    if (q_weight is None) != (k_weight is None):
        raise ValueError(f"{op}: {'q' if q_weight is None else 'k'}_weight is None; give both weights or neither")
    for name, x, shape in (
        ("q_weight", q_weight, (D,)), ("k_weight", k_weight, (D,)), ("q_out", q_out, (T, H, D)), ("k_out", k_out, (T, K, D))
    ):  # fmt: skip
        if x is not None:
            check_shape(op, name, x, shape, "q and k")
    check_rows(op, q=q, k=k, cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight, q_out=q_out, k_out=k_out)
