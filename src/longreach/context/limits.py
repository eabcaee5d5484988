"""What a step may take: total memory of a card and of its host, never what is free at the moment.

The same config thus gets the same chunks, and the same bits, on every machine of a kind, whatever else runs there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from .speed import CARDS, GB, Card, card_named, card_of_size

CUDA_CONTEXT = 700 * 2**20  # what the driver takes of a card before the first tensor
SLACK = 1.03  # the allocator's blocks are larger than the tensors in them
HOST_PROCESS = 6 * GB  # Python, PyTorch, CUDA's libraries, data
HOST_SHARE = 0.9  # of a machine's memory that its processes may take
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of version 2 and 1


@dataclass(frozen=True)
class Limits:
    """A device and its host.

    Attributes:
        gpu_bytes: total memory of the card, the cap of `torch.cuda.set_per_process_memory_fraction` applied; None for no limit.
            On a machine without a card, the share of the host's memory that tensors may take.
        host_bytes: total memory of the host per process on it; None for no limit.
        card: whose rates are used; None if nothing is known.
        offload: whether the host's memory is another than the device's.
    """

    gpu_bytes: int | None
    host_bytes: int | None
    card: Card | None
    offload: bool = True

    def fit(self, gpu_needed: int, host_needed: int) -> bool:
        gpu = self.gpu_bytes is None or gpu_needed <= self.gpu_bytes
        return gpu and (self.host_bytes is None or host_needed <= HOST_SHARE * self.host_bytes)

    @property
    def rates(self) -> Card:
        """Those of the card, or of one of about its size."""
        if self.card is not None:
            return self.card
        return CARDS["H200"] if self.gpu_bytes is None else card_of_size(self.gpu_bytes)


def this_machine(device: str | None = None, processes: int = 1) -> Limits:
    """The limits here.

    Args:
        device: e.g. "cuda:1" or "cpu"; None for the current card, or the CPU where there is none.
        processes: that share this host, each with a card of its own.
    """
    import torch

    host = host_total() // max(1, processes)
    if (device is None and not torch.cuda.is_available()) or (device is not None and not device.startswith("cuda")):
        return Limits(int(HOST_SHARE * host), host, CARDS["CPU"], offload=False)
    index = torch.device(device or "cuda").index
    where = torch.cuda.current_device() if index is None else index
    facts = torch.cuda.get_device_properties(where)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(where)
    return Limits(int(facts.total_memory * min(1.0, fraction)), host, card_named(facts.name))


@functools.cache
def host_total() -> int:
    """Bytes of memory of this machine, or of the container that this process runs in."""
    import psutil

    found = [int(psutil.virtual_memory().total)]
    for path in map(Path, CGROUPS):
        text = path.read_text(encoding="ascii").strip() if path.is_file() else "max"
        if text.isdigit():
            found.append(int(text))
    return min(found)
