"""The low-rank addition of sorted rows in Triton: a tile of rows never reaches into the next expert's.

Shape suffixes: R rows, E experts, O output features, r rank.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import launch, padded, parts

ROWS, COLUMNS = 64, 128


@triton.jit
def _add_kernel(
    y_ptr, t_ptr, b_ptr, offsets_ptr, y_stride, t_stride, b_expert, b_stride, scale,
    E: tl.constexpr, BLOCK_E: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Tiles are counted expert by expert; there are at most as many as whole tiles of all rows and one more for each expert.
    tile = tl.program_id(0) // tl.cdiv(WIDTH, COLUMNS)
    col = (tl.program_id(0) % tl.cdiv(WIDTH, COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    each = tl.arange(0, BLOCK_E)
    stop_E = tl.load(offsets_ptr + each, mask=each < E, other=0)
    start_E = tl.load(offsets_ptr + each - 1, mask=(each > 0) & (each < E), other=0)
    tiles_E = tl.where(each < E, (stop_E - start_E + ROWS - 1) // ROWS, 0)
    through_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum(tl.where((through_E <= tile) & (each < E), 1, 0), 0)
    if expert < E:
        mine = each == expert
        first = tile - tl.sum(tl.where(mine, through_E - tiles_E, 0), 0)
        row = tl.sum(tl.where(mine, start_E, 0), 0) + first * ROWS + tl.arange(0, ROWS)
        inside = row < tl.sum(tl.where(mine, stop_E, 0), 0)
        row = row.to(tl.int64)
        low = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in tl.static_range(0, RANK, STEP):
            rank = at + tl.arange(0, STEP)
            t = tl.load(t_ptr + row[:, None] * t_stride + rank[None, :], mask=inside[:, None], other=0.0)
            b_at = b_ptr + expert.to(tl.int64) * b_expert + rank[:, None] * b_stride + col[None, :]
            b = tl.load(b_at, mask=(col < WIDTH)[None, :], other=0.0)
            low += tl.dot(t, b, input_precision="ieee")
        mask = inside[:, None] & (col < WIDTH)[None, :]
        at = y_ptr + row[:, None] * y_stride + col[None, :]
        y = tl.load(at, mask=mask, other=0.0).to(tl.float32) + scale * low
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


def add_low_rank(y_RO: Tensor, t_Rr: Tensor, b_ErO: Tensor, offsets_E: Tensor, scale: float = 1.0) -> Tensor:
    (R, width), E, rank = y_RO.shape, len(offsets_E), t_Rr.shape[1]
    launch(
        _add_kernel, ((parts(R, ROWS) + E) * parts(width, COLUMNS),), y_RO, t_Rr, b_ErO, offsets_E,
        y_RO.stride(0), t_Rr.stride(0), b_ErO.stride(0), b_ErO.stride(1), float(scale),
        E=E, BLOCK_E=padded(E), WIDTH=width, RANK=rank, STEP=32 if rank % 32 == 0 else 16, ROWS=ROWS, COLUMNS=COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return y_RO
