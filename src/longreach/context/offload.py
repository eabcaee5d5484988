"""Where a layer's values wait between passes: on the model's device, or in host memory.

Nothing changes dtype on the way. On a GPU, host memory is pinned once and used again by every step; copies run on streams of
their own, out while the layer computes, back one chunk ahead of where they are needed.

Shape suffixes: T packed tokens, C tokens of a chunk; `...` whatever a token carries.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor, nn

SLAB_BYTES = 512 * 2**20  # of a slab that holds several tensors
SLAB_TENSORS = 16  # at most, so that a small model takes little
ALIGNMENT = 256  # bytes
# What waits in host memory, each with what stands before it: nothing; layer inputs (and saved attention); the hidden row and its
# gradient between the layers; keys, values and what they are owed.
POLICIES = ("none", "host", "rows", "keys")


class Row(Protocol):
    """One value per packed token, [T, ...], written and read by ranges of tokens."""

    def save(self, start: int, stop: int, x: Tensor) -> None:
        """Keep x [C, ...] as the values of tokens [start, stop)."""

    def wait_saved(self) -> None:
        """After this, what was saved last may be overwritten by work on the current stream."""

    def prefetch(self, start: int, stop: int) -> None:
        """Begin to bring a range back."""

    def fetch(self, start: int, stop: int) -> Tensor:
        """A range on the model's device."""


class DeviceRow:
    """A tensor on the model's device; made when the first values come, unless it is given."""

    def __init__(self, tokens: int, x_T: Tensor | None = None) -> None:
        self.tokens, self.x_T = tokens, x_T

    def save(self, start: int, stop: int, x: Tensor) -> None:
        x = x.detach()
        if self.x_T is None:
            self.x_T = x.new_empty(self.tokens, *x.shape[1:])
        elif self.x_T.dtype != x.dtype:  # under autocast a layer may answer in another dtype
            self.x_T = self.x_T.to(x.dtype)
        self.x_T[start:stop] = x

    def wait_saved(self) -> None: ...

    def prefetch(self, start: int, stop: int) -> None: ...

    def fetch(self, start: int, stop: int) -> Tensor:
        assert self.x_T is not None
        return self.x_T[start:stop]


class DevicePieces:
    """Chunks on the model's device, each given back as it was saved."""

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}

    def save(self, start: int, stop: int, x: Tensor) -> None:
        self.held[start] = x.detach()

    def wait_saved(self) -> None: ...

    def prefetch(self, start: int, stop: int) -> None: ...

    def fetch(self, start: int, stop: int) -> Tensor:
        return self.held[start]


class EmbeddingRow:
    """The first layer's input, computed where it is needed."""

    def __init__(self, embedding: nn.Module, ids_T: Tensor, dtype: torch.dtype) -> None:
        self.embedding, self.ids_T, self.dtype = embedding, ids_T, dtype

    def save(self, start: int, stop: int, x: Tensor) -> None:
        raise RuntimeError("the embedding's rows are computed, not stored")

    def wait_saved(self) -> None: ...

    def prefetch(self, start: int, stop: int) -> None: ...

    def fetch(self, start: int, stop: int) -> Tensor:
        with torch.no_grad():
            return self.embedding(self.ids_T[None, start:stop])[0].to(self.dtype)


class HostRow:
    """A tensor in host memory; on a CPU `fetch` gives a view of it."""

    def __init__(self, lease: Lease, tokens: int) -> None:
        self.lease, self.tokens = lease, tokens
        self.host_T: Tensor | None = None
        self.device: torch.device | None = None
        self.saved: torch.cuda.Event | None = None
        self.coming: dict[tuple[int, int], tuple[Tensor, torch.cuda.Event]] = {}

    def save(self, start: int, stop: int, x: Tensor) -> None:
        x = x.detach()
        if self.host_T is None:
            tail = x.shape[1:]
            self.host_T = self.lease.take(self.tokens * tail.numel(), x.dtype, x.device).view(self.tokens, *tail)
            self.device = x.device
        if not x.is_cuda:
            self.host_T[start:stop] = x
            return
        now, stream = torch.cuda.current_stream(x.device), copy_streams(x.device)[0]
        for a, b in [key for key in self.coming if key[0] < stop and start < key[1]]:
            now.wait_event(self.coming.pop((a, b))[1])  # brought back too early
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            self.host_T[start:stop].copy_(x, non_blocking=True)
            self.saved = stream.record_event()
        _leaving.setdefault(x.device, deque()).append((x, self.saved))
        arrived(x.device, *LEAVING)

    def wait_saved(self) -> None:
        if self.saved is not None:
            torch.cuda.current_stream(self.device).wait_event(self.saved)

    def prefetch(self, start: int, stop: int) -> None:
        if self.saved is None or (start, stop) in self.coming:
            return
        assert self.host_T is not None and self.device is not None
        x = torch.empty((stop - start, *self.host_T.shape[1:]), dtype=self.host_T.dtype, device=self.device)
        back = copy_streams(self.device)[1]
        back.wait_stream(torch.cuda.current_stream(self.device))
        back.wait_event(self.saved)
        with torch.cuda.stream(back):
            x.copy_(self.host_T[start:stop], non_blocking=True)
            self.coming[start, stop] = (x, back.record_event())

    def fetch(self, start: int, stop: int) -> Tensor:
        assert self.host_T is not None
        if self.saved is None:
            return self.host_T[start:stop]
        self.prefetch(start, stop)
        x, event = self.coming.pop((start, stop))
        torch.cuda.current_stream(self.device).wait_event(event)
        return x


# Tensors on their way to the host, and when they are there. Bounded, so that how far the CPU runs ahead of the GPU does not
# decide how much memory waits (as it would if the allocator watched the copies).
_leaving: dict[torch.device, deque[tuple[Tensor, torch.cuda.Event]]] = {}
LEAVING = (2, 256 * 2**20)  # tensors, or bytes if that is more


def arrived(device: torch.device, tensors: int = 0, size: int = 0) -> None:
    """Let the current stream wait for the oldest copies to the host until only so many are under way, and free their memory."""
    leaving = _leaving.get(device)
    while leaving and len(leaving) > tensors and sum(x.nbytes for x, _ in leaving) > size:
        torch.cuda.current_stream(device).wait_event(leaving.popleft()[1])


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

    def end(self) -> None:
        """Give the slabs back before the owner is gone; what was taken must not be used any more."""
        self.pool.free.extend(self.slabs)
        self.slabs.clear()
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
        # Not a view of the slab: a write to one tensor is none to its neighbours, for autograd too.
        whole = self.slabs[-1].untyped_storage()
        return torch.empty(0, dtype=dtype).set_(whole, start // dtype.itemsize, (elements,), (1,))


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
