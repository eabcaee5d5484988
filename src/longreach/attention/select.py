"""Which attention kernel runs: chosen once per (device, dtype, head size, features), shown by `longreach doctor`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from .aten import FlashForCpu
from .reference import Reference

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A varlen attention kernel; `reference.Reference` documents the two calls."""

    name: str

    def unsupported(self, *, device, dtype, head_dim, value_dim, windowed, softcap) -> str | None:
        """Why this kernel can't take such a call, or None."""

    def forward(self, q, k, v, cu_q, cu_k, *, causal, window, softcap, scale) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, *, causal, window, softcap, scale
    ) -> tuple[Tensor, Tensor, Tensor]: ...


# In order of preference; the reference takes everything and stands last.
BACKENDS: tuple[Backend, ...] = (FlashForCpu(), Reference())

_chosen: dict[tuple, Backend] = {}
_forced: list[Backend] = []


def select(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    windowed: bool = False,
    softcap: float | None = None,
) -> Backend:
    """The first backend that supports the call; says once why faster ones were passed over for the reference."""
    if _forced:
        return _forced[-1]
    key = (device.type, dtype, head_dim, value_dim, windowed, softcap is not None)
    if key not in _chosen:
        call = {
            "device": device,
            "dtype": dtype,
            "head_dim": head_dim,
            "value_dim": value_dim or head_dim,
            "windowed": windowed,
            "softcap": softcap,
        }
        reasons = []
        for backend in BACKENDS:
            reason = backend.unsupported(**call)
            if reason is None:
                break
            reasons.append(f"{backend.name} {reason}")
        _chosen[key] = backend
        if backend.name == "reference":
            logger.warning("attention runs on the plain-torch reference (exact, slow): %s", "; ".join(reasons))
    return _chosen[key]


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[Backend]:
    """Force one backend inside a `with` block (tests, benchmarks)."""
    _forced.append(backend)
    try:
        yield backend
    finally:
        _forced.remove(backend)
