"""Triton kernels and their launchers, one module per module of public ops; imported when the first CUDA tensor comes.

Sizes that belong to a model (hidden size, heads, vocabulary) are compile-time constants; sizes that change from call to
call (tokens, rows) never take part in specialization, so a new length compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "CUDA tensors need the package triton, which isn't installed: pip install 'longreach[gpu]'"
    ) from error


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **meta: Any) -> None:
    """Start `kernel` with x and args on x's device; an empty grid starts nothing."""
    if 0 in grid:
        return
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            kernel[grid](x, *args, **meta)
    else:
        kernel[grid](x, *args, **meta)


def padded(size: int) -> int:
    """Smallest power of two that holds `size`: what a Triton block can be."""
    return 1 << (size - 1).bit_length()


def parts(size: int, block: int) -> int:
    """How many blocks hold `size`."""
    return -(-size // block)


def warps(elements: int, each: int) -> int:
    """Warps for a block of `elements`, about `each` elements a thread; a power of two from 1 to 32."""
    return max(1, min(32, padded(elements) // (32 * each)))
