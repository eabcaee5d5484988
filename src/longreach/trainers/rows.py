"""Between TRL's padded rows and the engine's token trees.

Shapes: B rows, P padded prompt length, C padded completion length.
Lengths come from the masks that TRL made from its lists of ids, never from the ids: a padding token may be any token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..context.tree import TokenTree


@dataclass(frozen=True)
class RowTree:
    """A token tree of some rows of a batch; branch i is the completion of row `rows[i]`."""

    tree: TokenTree
    rows: tuple[int, ...]


def tree_of_rows(ids_BS: Tensor, mask_BS: Tensor, width: int, keep: Sequence[bool] | None = None) -> RowTree | None:
    """Rows with the same prompt become one group, whose prompt is computed once.

    Args:
        ids_BS: [B, P + C] token ids: prompt, then completion.
        mask_BS: [B, P + C] 1 for tokens, 0 for padding; the completion's ones come first.
        width: C.
        keep: rows to take; None for all. A row without completion tokens is never taken.

    Returns:
        None if no row is taken.
    """
    ids_BS, mask_BS = ids_BS.cpu(), mask_BS.cpu().bool()
    split = ids_BS.shape[1] - width
    lengths = mask_BS[:, split:].sum(1).tolist()
    groups: dict[bytes, tuple[Tensor, list[int]]] = {}
    for row, length in enumerate(lengths):
        if length == 0 or (keep is not None and not keep[row]):
            continue
        prompt = ids_BS[row, :split][mask_BS[row, :split]]
        groups.setdefault(prompt.numpy().tobytes(), (prompt, []))[1].append(row)
    if not groups:
        return None
    tree = TokenTree.from_groups(
        [(prompt, [ids_BS[r, split : split + lengths[r]] for r in rows]) for prompt, rows in groups.values()]
    )
    return RowTree(tree, tuple(r for _, rows in groups.values() for r in rows))


def padded_rows(values: Sequence[Tensor], rows: Sequence[int], batch: int, width: int) -> Tensor:
    """Per-branch values back in their rows: [B, C] float32, 0 where there is no token. Differentiable."""
    empty = values[0].new_zeros(0)
    by_row = dict(zip(rows, values))
    filled = [by_row.get(row, empty) for row in range(batch)]
    out = torch.nn.utils.rnn.pad_sequence(filled, batch_first=True)
    return torch.nn.functional.pad(out, (0, width - out.shape[1]))


class ZeroGradient(torch.autograd.Function):
    """A value whose gradient with respect to a parameter is zero (and not missing).

    A batch without any gradient must still leave zeros in `.grad`: the optimizer's momentum and weight decay act on a
    parameter with a zero gradient, and pass over one without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


def without_gradient(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`value`, as something to backpropagate from that gives every parameter a gradient of zeros."""
    if not torch.is_grad_enabled():
        return value
    for p in parameters:  # one after the other: where gradients are released, no two zeros need be there at a time
        if p.requires_grad:
            value = ZeroGradient.apply(value, p)
    return value
