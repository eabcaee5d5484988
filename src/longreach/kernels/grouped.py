"""Matrix products of rows that are sorted by expert, each group of rows with its own expert's matrix.

PyTorch's grouped product where it runs (bf16 on Ampere and later); else one product per expert that has rows, which asks the
device where the groups end. Shape suffixes: R rows, E experts, I input features, O output features, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import check_rows, check_shape, implementation

RANK_MULTIPLE = 16  # what tensor cores take at once, and enough for the 16-byte rows of the grouped product
_ALIGNED = 8  # elements of 16 bits in the 16 bytes at which grouped rows must begin


def grouped_mm(x_RI: Tensor, w_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    """y [R, O]: rows [offsets[e - 1], offsets[e]) times w[e].

    Args:
        x_RI: rows sorted by expert.
        w_EIO: x's dtype; either of its last two axes may be the dense one.
        offsets_E: end of each group, int32, on x's device; the last is R.
    """
    if _native(x_RI, *x_RI.shape[1:], *w_EIO.shape[1:]):
        return torch._grouped_mm(x_RI, w_EIO, offs=offsets_E)
    y_RO = x_RI.new_empty(len(x_RI), w_EIO.shape[-1])
    for e, start, stop in _groups(offsets_E):
        torch.mm(x_RI[start:stop], w_EIO[e], out=y_RO[start:stop])
    return y_RO


def grouped_outer(a_RI: Tensor, b_RO: Tensor, offsets_E: Tensor, empty_E: Tensor | None = None) -> Tensor:
    """[E, I, O] in a's dtype: a[rows of e]' b[rows of e], zero for an expert without rows (the weight's gradient).

    `empty_E`: `empty_groups(offsets_E)`, where several products share it.
    """
    if _native(a_RI, a_RI.shape[1], b_RO.shape[1]):
        found_EIO = torch._grouped_mm(a_RI.t(), b_RO, offs=offsets_E)
        # Nothing promises that the result of an empty group is written.
        empty_E = empty_groups(offsets_E) if empty_E is None else empty_E
        return found_EIO.masked_fill_(empty_E[:, None, None], 0)
    found_EIO = a_RI.new_zeros(len(offsets_E), a_RI.shape[1], b_RO.shape[1])
    for e, start, stop in _groups(offsets_E):
        torch.mm(a_RI[start:stop].t(), b_RO[start:stop], out=found_EIO[e])
    return found_EIO


def empty_groups(offsets_E: Tensor) -> Tensor:
    """Which experts have no row, bool [E]."""
    return torch.diff(offsets_E, prepend=offsets_E.new_zeros(1)) == 0


def add_low_rank(y_RO: Tensor, t_Rr: Tensor, b_ErO: Tensor, offsets_E: Tensor, scale: float = 1.0) -> Tensor:
    """y += scale * t[rows of e] b[e], in place: the sum in fp32, rounded once; no second [R, O] tensor.

    Args:
        y_RO, t_Rr, b_ErO: of one dtype; r a multiple of 16.
    """
    op = "add_low_rank"
    check_shape(op, "t", t_Rr, (len(y_RO), b_ErO.shape[1]), "y and b")
    check_shape(op, "b", b_ErO, (len(offsets_E), t_Rr.shape[1], y_RO.shape[1]), "offsets, t and y")
    if t_Rr.shape[1] % RANK_MULTIPLE:
        raise ValueError(f"{op}: rank {t_Rr.shape[1]}: pad t and b with zeros to a multiple of {RANK_MULTIPLE}")
    check_rows(op, y=y_RO, t=t_Rr, b=b_ErO)
    return implementation(y_RO, "grouped").add_low_rank(y_RO, t_Rr, b_ErO, offsets_E, scale)


def _native(x: Tensor, *sizes: int) -> bool:
    """Whether PyTorch's grouped product takes these operands."""
    if x.dtype != torch.bfloat16 or any(size % _ALIGNED for size in sizes) or not hasattr(torch, "_grouped_mm"):
        return False
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _groups(offsets_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, start, stop) of the experts that have rows."""
    stops = offsets_E.tolist()
    return [(e, start, stop) for e, (start, stop) in enumerate(zip([0, *stops], stops)) if stop > start]
