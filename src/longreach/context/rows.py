"""Padded rows of a user's plain call: packed into a layout on the way in, and laid out again on the way out.

Shape suffixes: B rows, S padded length, T packed tokens, E further sizes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .tree import Layout, Segment, TokenTree


def check_holes(config: Any, valid_BS: Tensor) -> None:
    """Padding inside a row: fine where only positions count, not where distance in the row does."""
    first, last = valid_BS.int().argmax(1), valid_BS.shape[1] - valid_BS.flip(1).int().argmax(1)
    holes = bool((valid_BS.any(1) & (last - first != valid_BS.sum(1))).any())
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if holes and (kinds or getattr(config, "sliding_window", None)):
        raise ValueError(
            "attention_mask has zeros between the tokens of a row; with sliding windows or linear attention that can't be "
            "run in chunks: move the padding to one side"
        )


def rows_layout(valid_BS: Tensor, positions_BS: Tensor | None, packed: bool) -> Layout:
    """Layout of padded rows: one segment per row, or per packed document where position ids restart."""
    segments = []
    for row, valid in enumerate(valid_BS):
        count = int(valid.sum())
        if count == 0:
            continue
        index = valid.nonzero().squeeze(1)
        positions = index - index[0] if positions_BS is None else positions_BS[row][valid]
        cuts = [0, count]
        if packed and positions_BS is not None:
            cuts = [0, *((torch.diff(positions) != 1).nonzero().squeeze(1) + 1).tolist(), count]
        for a, b in itertools.pairwise(cuts):
            nobody = torch.zeros(b - a, dtype=torch.int64)
            segments.append(Segment(nobody, nobody, positions=positions[a:b]))
    return TokenTree(segments).layout


def to_rows(x_TE: Tensor, take: Tensor, B: int, S: int) -> Tensor:
    """[T, …] packed -> [B, S, …], zeros at padding."""
    return x_TE.new_zeros(B * S, *x_TE.shape[1:]).index_copy(0, take, x_TE).unflatten(0, (B, S))
