"""Which attention kernel runs: chosen once per (device, dtype, head sizes, features), shown by `longreach doctor`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from .aten import FlashForCpu
from .aten_cuda import CudnnAttention, EfficientAttention, FlashAttention2
from .flash4 import FlashAttention4
from .reference import Reference

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A varlen attention kernel; `reference.Reference` documents the two calls."""

    name: str

    def unsupported(
        self, *, device, dtype, head_dim, value_dim, windowed=False, softcap=None, varlen=False
    ) -> str | None:
        """Why this kernel can't take such a call, or None."""

    def forward(self, q, k, v, cu_q, cu_k, *, causal, window, softcap, scale) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, *, causal, window, softcap, scale
    ) -> tuple[Tensor, Tensor, Tensor]: ...


# In order of preference for each kind of device; the reference takes everything and stands last.
BY_DEVICE: dict[str, tuple[Backend, ...]] = {
    "cpu": (FlashForCpu(), Reference()),
    "cuda": (FlashAttention4(), CudnnAttention(), FlashAttention2(), EfficientAttention(), Reference()),
}
BACKENDS: tuple[Backend, ...] = (*BY_DEVICE["cpu"][:-1], *BY_DEVICE["cuda"])

_chosen: dict[tuple, Backend] = {}
_forced: list[Backend] = []


def candidates(device: torch.device) -> tuple[Backend, ...]:
    """The backends of a kind of device, the preferred one first."""
    return BY_DEVICE.get(device.type, BACKENDS[-1:])


def explain(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    windowed: bool = False,
    softcap: float | None = None,
    varlen: bool = False,
) -> list[tuple[str, str | None]]:
    """(name, why it can't take such a call or None) of each backend of this device; `select` takes the first None.

    Args:
        head_dim, value_dim: head sizes of queries and keys, and of values (None: the same).
        windowed: whether a query sees only the last keys.
        softcap: of the scores, or None.
        varlen: whether one call holds several pairs of queries and keys.
    """
    call = {
        "device": device,
        "dtype": dtype,
        "head_dim": head_dim,
        "value_dim": value_dim or head_dim,
        "windowed": windowed,
        "softcap": softcap,
        "varlen": varlen,
    }
    return [(backend.name, backend.unsupported(**call)) for backend in candidates(device)]


def select(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    windowed: bool = False,
    softcap: float | None = None,
    varlen: bool = False,
) -> Backend:
    """The first backend that supports the call; says once why faster ones were passed over for the reference."""
    if _forced:
        return _forced[-1]
    fixed = torch.are_deterministic_algorithms_enabled()
    key = (device, dtype, head_dim, value_dim, windowed, softcap is not None, varlen, fixed)
    if key not in _chosen:
        reasons = explain(
            device, dtype, head_dim, value_dim=value_dim, windowed=windowed, softcap=softcap, varlen=varlen
        )
        place = next(i for i, (_, reason) in enumerate(reasons) if reason is None)
        backend = _chosen[key] = candidates(device)[place]
        if backend.name == "reference":
            passed = "; ".join(f"{name} {reason}" for name, reason in reasons[:place])
            logger.warning("attention runs on the plain-torch reference (exact, slow): %s", passed)
    return _chosen[key]


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[Backend]:
    """Force one backend inside a `with` block (tests, benchmarks)."""
    _forced.append(backend)
    try:
        yield backend
    finally:
        _forced.remove(backend)
