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


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """The kernels before this one are done; the next one may come and wait."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **meta: Any) -> None:
    """`jit.launch` of a kernel that waits for its inputs: early where the card can."""
    if x.is_cuda and _known(x.get_device()):
        meta["launch_pdl"] = True
    plain_launch(kernel, grid, x, *args, EARLY="launch_pdl" in meta, **meta)


@functools.cache
def _known(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
