"""Joining attention partials through their log-sum-exp.

Shape suffixes: C query rows, H heads, D head size.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import check_rows, check_shape, implementation
from .reference import wide_dtype


def merge_blocks(out_a_CHD: Tensor, lse_a_HC: Tensor, out_b_CHD: Tensor, lse_b_HC: Tensor) -> None:
    """Merge block b into block a, in place, as if one attention call had seen the keys of both.

    lse = logaddexp(lse_a, lse_b); out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse) (FlashAttention, arXiv
    2205.14135). A row that saw no key has lse -inf: its output counts as zero, whatever stands there.

    Args:
        out_a_CHD, out_b_CHD: fp32 or half, not necessarily the same; any stride along C and H. a is rounded to its own
            dtype at every merge, so keep it in fp32 where many blocks are to be merged.
        lse_a_HC, lse_b_HC: fp32 (fp64 with fp64 outputs), any strides.
    """
    _check("merge_blocks", out_a_CHD, lse_a_HC)
    check_shape("merge_blocks", "out_b", out_b_CHD, out_a_CHD.shape, "out_a")
    check_shape("merge_blocks", "lse_b", lse_b_HC, lse_a_HC.shape, "lse_a")
    check_rows("merge_blocks", out_a=out_a_CHD, out_b=out_b_CHD)
    implementation(out_a_CHD, "merge").merge_blocks(out_a_CHD, lse_a_HC, out_b_CHD, lse_b_HC)


def apply_sink(out_CHD: Tensor, lse_HC: Tensor, sinks_H: Tensor) -> None:
    """Add, in place, one more key per head with logit `sinks` and value zero (gpt-oss).

    lse' = logaddexp(lse, sink); out' = out * exp(lse - lse').
    """
    _check("apply_sink", out_CHD, lse_HC)
    check_shape("apply_sink", "sinks", sinks_H, out_CHD.shape[1:2], "out")
    check_rows("apply_sink", out=out_CHD, sinks=sinks_H)
    implementation(out_CHD, "merge").apply_sink(out_CHD, lse_HC, sinks_H)


def _check(op: str, out_CHD: Tensor, lse_HC: Tensor) -> None:
    if out_CHD.dim() != 3:
        raise ValueError(f"{op}: out has shape {tuple(out_CHD.shape)}; expected three axes [rows, heads, head size]")
    check_shape(op, "lse", lse_HC, (out_CHD.shape[1], out_CHD.shape[0]), "out")
    if lse_HC.dtype != (expected := wide_dtype(out_CHD.dtype)):
        raise ValueError(f"{op}: lse is {lse_HC.dtype}; expected {expected} beside outputs in {out_CHD.dtype}")
