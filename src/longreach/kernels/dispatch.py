"""Which implementation of an op runs: the Triton kernel for CUDA tensors, else the plain-torch reference of the same name."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import reference

_forced: list[str] = []
_loaded: dict[str, ModuleType] = {}


def implementation(x: Tensor, module: str, twin: ModuleType = reference) -> Any:
    """`kernels.jit.<module>` for a CUDA tensor of 16 or 32 bits, else its plain-torch twin: functions of the same names.

    fp64 always runs on the reference: it is there to check the others.
    """
    choice = _forced[-1] if _forced else ("jit" if x.is_cuda and x.dtype != torch.float64 else "reference")
    if choice == "reference":
        return twin
    if module not in _loaded:
        # The import is put off because triton need not be installed where no CUDA device is.
        _loaded[module] = importlib.import_module(f".jit.{module}", __package__)
    return _loaded[module]


@contextlib.contextmanager
def use(choice: str) -> Iterator[None]:
    """Force "jit" or "reference" inside a `with` block (tests, benchmarks; "jit" on a CPU needs Triton's interpreter)."""
    if choice not in ("jit", "reference"):
        raise ValueError(f"use: choice={choice!r}: expected 'jit' or 'reference'")
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


# The two checks run before every kernel, some of which take 20 microseconds: they do no more than compare.


def check_rows(op: str, **tensors: Tensor | None) -> None:
    """Every tensor's last axis must be dense: kernels take any stride along the other axes only."""
    for name, x in tensors.items():
        if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{op}: {name} has stride {x.stride(-1)} along its last axis; call .contiguous() on it")


def check_shape(op: str, name: str, x: Tensor, expected: tuple[int, ...], of: str) -> None:
    if x.shape != expected:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; {of} asks for {tuple(expected)}")
