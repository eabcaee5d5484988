"""Gated activation of the MLP: act(gate) * up, act one of silu and GELU's tanh form.

Shape suffixes: T tokens, F MLP width.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import check_rows, check_shape, implementation

ACTIVATIONS = ("silu", "gelu_tanh")


def swiglu(gate_TF: Tensor, up_TF: Tensor, *, activation: str = "silu", out: Tensor | None = None) -> Tensor:
    """act(gate) * up (SwiGLU and GEGLU, arXiv 2002.05202), in fp32 with one rounding.

    Args:
        gate_TF, up_TF: any stride along T, e.g. the two halves of a fused projection.
        activation: "silu" or "gelu_tanh".
        out: where h goes; it may be gate or up. None for a new tensor.

    Returns:
        h [T, F] in gate's dtype.
    """
    _check("swiglu", gate_TF, activation, up=up_TF, out=out)
    return implementation(gate_TF, "swiglu").swiglu(gate_TF, up_TF, activation=activation, out=out)


def swiglu_backward(
    dh_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, *, activation: str = "silu", return_h: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of `swiglu`, written over its inputs: dgate over gate, dup over up.

    With `return_h`, h itself is computed again on the way and written over dh: the forward then has to keep nothing, and a
    weight gradient of the projection after it costs no pass of its own.

    Returns:
        (dgate, dup) or (dgate, dup, h): the tensors that were given, now holding these.
    """
    _check("swiglu_backward", gate_TF, activation, up=up_TF, dh=dh_TF)
    return implementation(gate_TF, "swiglu").swiglu_backward(
        dh_TF, gate_TF, up_TF, activation=activation, return_h=return_h
    )


def _check(op: str, gate_TF: Tensor, activation: str, **others: Tensor | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if gate_TF.dim() != 2:
        raise ValueError(f"{op}: gate has shape {tuple(gate_TF.shape)}; expected two axes [tokens, width]")
    for name, x in others.items():
        if x is not None:
            check_shape(op, name, x, gate_TF.shape, "gate")
    check_rows(op, gate=gate_TF, **others)
