"""Matrix products of few rows whose sums are cut into parts, so that a narrow weight fills the card as well, in Triton.

The last program of a tile to arrive adds the parts, first to last: a counter decides who adds, never in which order.

Shape suffixes: B rows, O output features of a tile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # tiles from which on nothing more is cut
MOST_SPLITS = 8


@triton.jit
def share(number, splits, width, BLOCK_I: tl.constexpr):
    """The input features of one part of a split sum, [start, end), in whole steps."""
    steps = (width + BLOCK_I - 1) // BLOCK_I
    each = (steps + splits - 1) // splits
    return number * each * BLOCK_I, tl.minimum((number + 1) * each * BLOCK_I, width)


@triton.jit
def finish(acc_OB, out_ptr, out_row, o_O, inside_O, B, partial_ptr, arrived_ptr, tile, part, splits,
            BLOCK_O: tl.constexpr, BLOCK_B: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Store y, or a part of it; the last part to come adds all, first to last."""
    b_B = tl.arange(0, BLOCK_B)
    last = True
    if SPLIT:
        at_OB = tl.arange(0, BLOCK_O)[:, None] * BLOCK_B + b_B[None, :]
        partial_ptr += tile.to(tl.int64) * splits * (BLOCK_O * BLOCK_B)
        tl.store(partial_ptr + part * (BLOCK_O * BLOCK_B) + at_OB, acc_OB)
        tl.debug_barrier()  # all threads' parts are written before the arrival is counted
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1
        tl.debug_barrier()
        if last:
            acc_OB = tl.zeros([BLOCK_O, BLOCK_B], tl.float32)
            for s in range(splits):
                acc_OB += tl.load(partial_ptr + s * (BLOCK_O * BLOCK_B) + at_OB, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if last:
        mask = inside_O[:, None] & (b_B < B)[None, :]
        at = out_ptr + b_B.to(tl.int64)[None, :] * out_row + o_O[:, None]
        tl.store(at, acc_OB.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """Counters of split sums, zero between launches: kernels that use them must run one after the other."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def splits_of(tiles: int, steps: int) -> int:
    """Into how many parts the sums are cut: from the shapes alone, so that the bits don't depend on the card."""
    splits = 1
    while splits < MOST_SPLITS and tiles * splits * 2 <= PROGRAMS and steps >= splits * 4:
        splits *= 2
    return splits
