"""What a backward needs to compute as the forward did: random state and autocast."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def autocast_state(device: torch.device) -> tuple[str, torch.dtype] | None:
    """What `autocast_as` needs to compute as now."""
    return (device.type, torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else None


def autocast_as(state: tuple[str, torch.dtype] | None) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(state[0], dtype=state[1]) if state is not None else contextlib.nullcontext()


def rng_state(device: torch.device) -> tuple[torch.device, Tensor]:
    return device, torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: tuple[torch.device, Tensor] | None) -> None:
    if state is None:
        return
    device, bits = state
    if device.type == "cuda":
        torch.cuda.set_rng_state(bits, device)
    else:
        torch.set_rng_state(bits)
