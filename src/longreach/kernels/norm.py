"""RMS norm, with the residual gradient after it fused in.

Shape suffixes: T tokens, H hidden size.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import check_rows, check_shape, implementation


def rms_norm(
    x_TH: Tensor, weight_H: Tensor, eps: float, *, unit_offset: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RMS norm (arXiv 1910.07467) with the rounding order of Transformers' modules.

    x is normalized in fp32, rounded to its dtype, then multiplied by the weight (Llama, Qwen3); with `unit_offset` it is
    multiplied by 1 + weight in fp32 and then rounded (Gemma).

    Args:
        x_TH: [T, H]; any stride along T.
        weight_H: any float dtype.
        eps: added to the mean square.
        out: where y goes, e.g. x itself; it may have another dtype than x. None for a new tensor.

    Returns:
        y [T, H] in x's dtype, or out's; rstd [T], fp32 (fp64 for fp64), which `rms_norm_backward` takes.
    """
    _check("rms_norm", x_TH, weight_H, out=out)
    return implementation(x_TH, "norm").rms_norm(x_TH, weight_H, eps, unit_offset=unit_offset, out=out)


def rms_norm_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor,
    rstd_T: Tensor,
    *,
    unit_offset: bool = False,
    add: Tensor | None = None,
    need_dweight: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `rms_norm`: dx = rstd * (g - xhat * mean(g * xhat)), g = dy * weight, xhat = x * rstd.

    Args:
        dy_TH: gradient of y.
        x_TH, weight_H, rstd_T: what the forward took and returned.
        add: gradient [T, H] that reaches x past the norm (the residual branch); it joins in fp32 before the one rounding.
        need_dweight: also return the weight's gradient, summed in a fixed order.
        out: where dx goes; by default over `add`, or into a new tensor when there is no `add`. May be dy or x.

    Returns:
        dx [T, H] in x's dtype; dweight [H] in the weight's dtype, or None.
    """
    _check("rms_norm_backward", x_TH, weight_H, dy=dy_TH, add=add, out=out)
    check_shape("rms_norm_backward", "rstd", rstd_T, x_TH.shape[:1], "x")
    return implementation(x_TH, "norm").rms_norm_backward(
        dy_TH, x_TH, weight_H, rstd_T, unit_offset=unit_offset, add=add, need_dweight=need_dweight, out=out
    )


def _check(op: str, x_TH: Tensor, weight_H: Tensor, **others: Tensor | None) -> None:
    if x_TH.dim() != 2:
        raise ValueError(f"{op}: x has shape {tuple(x_TH.shape)}; expected two axes [tokens, hidden]")
    check_shape(op, "weight", weight_H, x_TH.shape[1:], "x")
    for name, y in others.items():
        if y is not None:
            check_shape(op, name, y, x_TH.shape, "x")
    check_rows(op, x=x_TH, weight=weight_H, **others)
