"""The one rule by which a policy is chosen: the order of `policy.py`, the bytes of `memory.py`, the total memory of `limits.py`.

`longreach.enable`, the trainers and `longreach plan` all choose by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .limits import CUDA_CONTEXT, HOST_PROCESS, SLACK, Limits
from .memory import Memory, step_memory
from .policy import Policy, first_chunk, tiers
from .speed import step_seconds
from .work import Work


def card_bytes(memory: Memory) -> int:
    """Bytes a card must have in all: tensors, the allocator's slack, the driver's own."""
    return int(memory.gpu * SLACK) + CUDA_CONTEXT


@dataclass(frozen=True)
class Choice:
    """One policy and what a step under it takes."""

    policy: Policy
    memory: Memory
    seconds: float

    @property
    def gpu_needed(self) -> int:
        """Bytes a card must have in all."""
        return card_bytes(self.memory)

    @property
    def host_needed(self) -> int:
        return self.memory.host + HOST_PROCESS if self.memory.host else 0

    def fits(self, limits: Limits) -> bool:
        return limits.fit(self.gpu_needed, self.host_needed)


def choices(work: Work, limits: Limits, fixed: Mapping[str, Any]) -> Iterator[tuple[Choice, ...]]:
    """Every policy, tier by tier in the order of preference."""
    first = first_chunk(work.tokens, experts=work.shape.experts > 0)
    for tier in tiers(first, fixed, offload=limits.offload):
        yield tuple(Choice(p, step_memory(work, p), step_seconds(work, p, limits.rates)) for p in tier)


def choose(
    work: Work,
    limits: Limits,
    fixed: Mapping[str, Any],
    *,
    below: int | None = None,
    too_large: set[Policy] | None = None,
) -> Choice | None:
    """The fastest of the first tier in which one fits; None if nothing does.

    Args:
        below: only what takes less than so many bytes of the GPU.
        too_large: policies that are known not to fit; those found not to are added.
    """
    first = first_chunk(work.tokens, experts=work.shape.experts > 0)
    too_large = set() if too_large is None else too_large
    for tier in tiers(first, fixed, offload=limits.offload):
        found = [Choice(p, step_memory(work, p), 0.0) for p in tier if p not in too_large]
        fitting = [c for c in found if c.fits(limits) and (below is None or c.memory.gpu < below)]
        too_large |= {c.policy for c in found} - {c.policy for c in fitting}
        if fitting:  # seconds are needed only now
            timed = [replace(c, seconds=step_seconds(work, c.policy, limits.rates)) for c in fitting]
            return min(timed, key=lambda choice: choice.seconds)
    return None


def leanest(work: Work, limits: Limits, fixed: Mapping[str, Any]) -> Choice:
    """What needs least of the GPU, for where nothing fits."""
    return min((c for tier in choices(work, limits, fixed) for c in tier), key=lambda c: (c.gpu_needed, c.host_needed))
