"""Where layer inputs and attention outputs wait between the forward and the backward: on the model's device, or in host memory.

Nothing changes dtype on the way. On a GPU, host memory is pinned once and used again by every step; copies run on streams of
their own, out while the layer computes, back one chunk ahead of where the backward needs them.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

SLAB_BYTES = 512 * 2**20  # of a slab that holds several tensors
SLAB_TENSORS = 16  # at most, so that a small model takes little
ALIGNMENT = 256  # bytes
POLICIES = ("none", "host")  # where layer inputs may wait


class Rows(Protocol):
    """One tensor of a layer, kept chunk by chunk; a chunk comes back in the shape in which it went."""

    held: dict[int, Any]

    def save(self, start: int, stop: int, x: Tensor) -> None:
        """Keep the tensor of packed tokens [start, stop)."""

    def wait_saved(self, start: int) -> None:
        """After this, what was saved at `start` may be overwritten by work on the current stream."""

    def prefetch(self, start: int) -> None:
        """Begin to bring a chunk back."""

    def fetch(self, start: int) -> Tensor:
        """A chunk on the model's device."""


class DeviceRows:
    """Kept as it is."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}

    def save(self, start: int, stop: int, x: Tensor) -> None:
        self.held[start] = x.detach()

    def wait_saved(self, start: int) -> None: ...

    def prefetch(self, start: int) -> None: ...

    def fetch(self, start: int) -> Tensor:
        return self.held[start]


class HostRows:
    """Copied to the host, and back chunk by chunk."""

    def __init__(self, lease: Lease, tokens: int) -> None:
        self.lease, self.tokens = lease, tokens
        self.host: Tensor | None = None
        self.held: dict[int, Any] = {}
        self.saved: dict[int, torch.cuda.Event] = {}
        self.coming: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def save(self, start: int, stop: int, x: Tensor) -> None:
        width = x.numel() // (stop - start)
        if self.host is None:
            self.host = self.lease.take(self.tokens * width, x.dtype, x.device)
        place = self.host[start * width : stop * width].view(x.shape)
        self.held[start] = (place, x.device)
        if not x.is_cuda:
            place.copy_(x.detach())
            return
        stream = copy_streams(x.device)[0]
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            place.copy_(x.detach(), non_blocking=True)
            x.record_stream(stream)
            self.saved[start] = stream.record_event()

    def wait_saved(self, start: int) -> None:
        if start in self.saved:
            torch.cuda.current_stream(self.held[start][1]).wait_event(self.saved[start])

    def prefetch(self, start: int) -> None:
        place, device = self.held[start]
        if device.type != "cuda" or start in self.coming:
            return
        x = torch.empty(place.shape, dtype=place.dtype, device=device)
        back = copy_streams(device)[1]
        back.wait_stream(torch.cuda.current_stream(device))
        back.wait_event(self.saved[start])
        with torch.cuda.stream(back):
            x.copy_(place, non_blocking=True)
            self.coming[start] = (x, back.record_event())

    def fetch(self, start: int) -> Tensor:
        place, device = self.held[start]
        if device.type != "cuda":
            return place
        self.prefetch(start)
        x, event = self.coming.pop(start)
        torch.cuda.current_stream(device).wait_event(event)
        return x


_streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


def copy_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """(device to host, host to device) of a GPU."""
    if device not in _streams:
        _streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
    return _streams[device]


class HostPool:
    """Slabs of host memory that live as long as the engine; a step leases them and gives them back."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def __reduce__(self) -> tuple[type[HostPool], tuple[()]]:
        """A copy of the engine's model gets a pool of its own."""
        return HostPool, ()

    def lease(self, owner: Any) -> Lease:
        """A lease that ends with its owner."""
        lease = Lease(self)
        weakref.finalize(owner, self.free.extend, lease.slabs)
        return lease


def slab_bytes(size: int) -> int:
    """Bytes of a new slab, made for a tensor of `size` bytes."""
    return max(size, min(SLAB_BYTES, SLAB_TENSORS * aligned(size)))


def aligned(size: int) -> int:
    """Where the next tensor of a slab may begin."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class Lease:
    """The slabs of one run, filled one tensor after the other."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.slabs: list[Tensor] = []
        self.used = 0

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[elements] of host memory, pinned if `device` is a GPU."""
        size = elements * dtype.itemsize
        room = len(self.slabs[-1]) - self.used if self.slabs else 0
        if size > room:
            fits = [s for s in self.pool.free if len(s) >= size and (device.type != "cuda" or s.is_pinned())]
            slab = min(fits, key=len) if fits else _new_slab(slab_bytes(size), device.type == "cuda")
            self.pool.free[:] = [s for s in self.pool.free if s is not slab]
            self.slabs.append(slab)
            self.used = 0
        start = self.used
        self.used = aligned(start + size)
        return self.slabs[-1][start : start + size].view(dtype)


def _new_slab(size: int, pinned: bool) -> Tensor:
    slab = torch.empty(size, dtype=torch.uint8)
    if pinned:  # registered in place: PyTorch's own pinned allocator would round up to a power of two
        cudart: Any = torch.cuda.cudart()
        status = int(cudart.cudaHostRegister(slab.data_ptr(), size, 0))
        if status != 0:
            raise MemoryError(
                f"could not pin {size / 2**30:.1f} GiB of host memory (CUDA error {status}) to keep layer inputs in; shorten the "
                "context, free host memory, or pass offload='none' to keep them on the GPU"
            )
        weakref.finalize(slab, cudart.cudaHostUnregister, slab.data_ptr())
    return slab
