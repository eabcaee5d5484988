"""y = x W' for few rows of x, where reading the weight is the whole cost.

Shape suffixes: B rows, I input features, O output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import decode_reference
from .dispatch import check_rows, check_shape, implementation

FEW_ROWS = 64


def few_row_matmul(x_BI: Tensor, weight_OI: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x W', summed in fp32 in an order that depends on the shapes alone.

    Args:
        x_BI: [B, I], B at most FEW_ROWS on a CUDA device; any stride along B.
        weight_OI: in x's dtype, contiguous.
        out: [B, O] in x's dtype, any stride along B; None for a new tensor.

    Returns:
        out.
    """
    op = "few_row_matmul"
    B, width = x_BI.shape
    check_shape(op, "weight", weight_OI, (len(weight_OI), width), "x")
    if weight_OI.dtype != x_BI.dtype or not weight_OI.is_contiguous():
        raise ValueError(
            f"{op}: weight is {weight_OI.dtype} with strides {weight_OI.stride()}; expected contiguous {x_BI.dtype}"
        )
    out = torch.empty(B, len(weight_OI), dtype=x_BI.dtype, device=x_BI.device) if out is None else out
    check_shape(op, "out", out, (B, len(weight_OI)), "x and weight")
    if x_BI.is_cuda and B > FEW_ROWS:
        raise ValueError(
            f"{op}: x has {B} rows; expected at most {FEW_ROWS}: beyond that use torch.nn.functional.linear"
        )
    check_rows(op, x=x_BI, out=out)
    implementation(x_BI, "few_row_matmul", decode_reference).few_row_matmul(x_BI, weight_OI, out)
    return out
