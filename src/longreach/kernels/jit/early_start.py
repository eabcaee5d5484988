"""Kernels that start while the one before them still runs (programmatic dependent launch, Hopper and later).

A decoding step is a chain of kernels that take microseconds each; a good part of that is the way from one's end to the next one's
start. With an early start the next kernel's programs are on the card already and wait there. Whatever the kernel before has
written may be read, and anything be written, only behind `wait_for_inputs`, which every program must pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import launch as plain_launch

PIECE = 4096  # bytes of one request
AHEAD_BYTES = 24 * 2**20  # at most, about half of an L2 cache
_PIECE = tl.constexpr(PIECE)
_LANES = tl.constexpr(32)


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """The kernels before this one are done; the next one may come and wait."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(ahead_ptr, pieces, EARLY: tl.constexpr):
    """Ask for the first pieces of what a later kernel reads to be brought into the L2 cache; nothing waits for them.

    What decoding reads are weights, and between the products the memory would idle. `pieces` is 0 where nothing is wanted.
    """
    if EARLY:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        programs = tl.num_programs(0) * tl.num_programs(1)
        for first in range(program * _LANES, pieces, programs * _LANES):
            piece = first + tl.arange(0, _LANES)
            at = ahead_ptr.to(tl.int64) + piece.to(tl.int64) * _PIECE
            tl.inline_asm_elementwise(  # by the first warp alone: the others hold the same pieces
                "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; setp.ne.and.s32 p, $2, 0, p; "
                "@p cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0; }",
                "=r,l,r", [at, (piece < pieces).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


def ahead_of(ahead: Tensor | None, x: Tensor) -> tuple[Tensor, int]:
    """What `fetch_ahead` takes: a tensor, x where there is none, and how many pieces of it are wanted."""
    return (x, 0) if ahead is None else (ahead, min(ahead.nbytes, AHEAD_BYTES) // PIECE)


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **meta: Any) -> None:
    """`jit.launch` of a kernel that waits for its inputs: early where the card can."""
    if x.is_cuda and _known(x.get_device()):
        meta["launch_pdl"] = True
    plain_launch(kernel, grid, x, *args, EARLY="launch_pdl" in meta, **meta)


@functools.cache
def _known(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
