"""Pair boundaries of varlen calls, where the kernels want them, and what else the backends share.

Shape suffixes as in `aten_cuda.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@functools.lru_cache(maxsize=4096)
def on_device(cu: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 boundaries on a device: copied once per (boundaries, device), from pinned memory, without a synchronization."""
    host = torch.tensor(cu, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@functools.lru_cache(maxsize=4096)
def longest(cu: tuple[int, ...]) -> int:
    """Rows of the longest pair."""
    return max(stop - start for start, stop in itertools.pairwise(cu))


def padded(x: Tensor, size: int) -> Tensor:
    """Zero-pads the last dimension to `size`: zeros there change neither scores nor outputs."""
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The pairs' parts in one tensor; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability of a device."""
    return torch.cuda.get_device_capability(device)


@contextlib.contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Ask PyTorch's kernels for their deterministic variant, which they take from the process-wide flag alone.

    The flag's side effect of filling fresh memory is left off: every kernel here writes all of its outputs.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (before and not warn_only):
        yield
        return
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
