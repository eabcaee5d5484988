"""How the engine may run a step, and in which order the planner tries it.

The order is that of the time it costs: everything on the GPU; layer inputs on the host; smaller chunks; hidden and gradient rows
on the host; keys, values and their gradients there too. Where the host is short, only every k-th layer's input is kept, for one
more forward of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .offload import POLICIES

LARGEST, SMALLEST = 8192, 1024  # tokens of an automatic chunk
SLOW_BELOW = 2048  # tokens; smaller chunks cost time at every context, and come after every other saving
KEEP_EVERY = (1, 2, 3, 4, 6, 8, 12)
PLACES = {
    "none": "kept on GPU",
    "host": "inputs on host",
    "rows": "inputs and rows on host",
    "keys": "inputs, rows and keys on host",
}  # the offload policies in words, the preferred one first


@dataclass(frozen=True)
class Policy:
    """How the engine is asked to run; the arguments of `longreach.enable`.

    Attributes:
        chunk: tokens of a chunk.
        offload: "none"; "host": layer inputs wait in host memory; "rows": the hidden and the gradient row are there too;
            "keys": keys, values and their gradients as well.
        save_attention: attention outputs are kept beside the layer inputs.
        keep_every: only every k-th layer's input is kept.
    """

    chunk: int
    offload: str
    save_attention: bool = False
    keep_every: int = 1

    @property
    def on_host(self) -> bool:
        """Whether layer inputs wait on the host."""
        return self.offload != "none"

    @property
    def rows_on_host(self) -> bool:
        return self.offload in ("rows", "keys")

    @property
    def keys_on_host(self) -> bool:
        return self.offload == "keys"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for `longreach.enable`."""
        found = {"chunk": self.chunk, "offload": self.offload, "save_attention": self.save_attention}
        return found if self.keep_every == 1 else found | {"keep_every": self.keep_every}

    def __str__(self) -> str:
        kept = "" if self.keep_every == 1 else f", every {ordinal(self.keep_every)} layer's"
        return f"{PLACES[self.offload]}, chunk {self.chunk}{kept}" + (
            ", attention saved" if self.save_attention else ""
        )


def ordinal(number: int) -> str:
    return f"{number}{ {2: 'nd', 3: 'rd'}.get(number, 'th') }"


def first_chunk(tokens: int, experts: bool = False) -> int:
    """The chunk tried first: a quarter of the tokens, since at short context a whole chunk's workspace is most of the memory.

    With experts all tokens, up to the largest: each expert sees only a few of a chunk's.
    """
    wanted = tokens if experts else tokens // 4
    return min(max(wanted // 1024 * 1024, SLOW_BELOW), LARGEST)


def tiers(first: int, fixed: Mapping[str, Any], *, offload: bool = True) -> Iterator[tuple[Policy, ...]]:
    """Policies in the order in which they are tried; those of one tier are equally good, and the fastest that fits is taken.

    Args:
        first: tokens of the chunk tried first (`first_chunk`).
        fixed: what the caller has laid down, by the names of `Policy`'s fields.
        offload: False where host memory is the device's own.
    """
    saves = (fixed["save_attention"],) if "save_attention" in fixed else (True, False)
    for keep in (fixed["keep_every"],) if "keep_every" in fixed else KEEP_EVERY if offload else (1,):
        for place, chunk in _placed(first, fixed, offload):
            if keep > 1 and place == "none" and "keep_every" not in fixed:
                continue
            # Of a layer that is computed again, attention would be saved for nothing.
            kept = saves if keep == 1 or "save_attention" in fixed else (False,)
            yield tuple(Policy(chunk, place, save, keep) for save in kept)


def _placed(first: int, fixed: Mapping[str, Any], offload: bool) -> list[tuple[str, int]]:
    """(place, chunk) by preference."""
    places = (fixed["offload"],) if "offload" in fixed else POLICIES if offload else ("none",)
    if "chunk" in fixed:
        return [(place, fixed["chunk"]) for place in places]
    sizes = [first >> i for i in range(first.bit_length()) if first >> i >= SMALLEST]
    first_only = len(places) > 1  # a smaller chunk comes after the offload, not instead of it
    found = [
        (place, size)
        for place in places
        for size in sizes
        if size >= SLOW_BELOW and not (place == "none" and first_only and size != first)
    ]
    slow = [size for size in sizes if size < SLOW_BELOW]
    return found + [(place, size) for place in places if place != "none" or not first_only for size in slow]
