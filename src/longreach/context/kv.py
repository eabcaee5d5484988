"""What a layer remembers of earlier chunks while it runs: keys and values, or the boundary states of linear attention.

Both memories answer the same questions of `layer.py`: which chunks, what a chunk's call is handed, and which tensors tie chunks
together in the backward.

Shape suffixes: C tokens of a chunk, K key/value heads, D and W head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..attention import KeyValues
from .tree import ROOT, Chunk

if TYPE_CHECKING:
    from .layer import Run

CHUNK_KWARG = "longreach_chunk"


class StopForward(Exception):
    """Ends a layer call as soon as its keys and values exist."""


class ChunkContext:
    """Travels as a keyword argument through one call of an attention layer on one chunk, to the attention function.

    With `stop` the attention function only stores the keys and values, and ends the call. `saved` is what it gave before, so
    that it need not compute it again; `attended` what it gave now: (out, lse).
    """

    def __init__(self, kv: KeyValues, chunk: Chunk, stop: bool, saved: tuple[Tensor, Tensor] | None) -> None:
        self.kv, self.chunk, self.stop, self.saved = kv, chunk, stop, saved
        self.attended: tuple[Tensor, Tensor] | None = None
        self.k_CKD: Tensor | None = None
        self.v_CKW: Tensor | None = None

    def stop_at(self, k_CKD: Tensor, v_CKW: Tensor) -> None:
        self.k_CKD, self.v_CKW = k_CKD, v_CKW
        with torch.no_grad():
            self.kv.write(self.chunk.start, k_CKD, v_CKW)
        raise StopForward


class KeyValueMemory:
    """Full and sliding attention: the attention op itself reads earlier keys and adds what they are owed."""

    stops_early = True

    def __init__(self, run: Run, last: bool) -> None:
        self.kv = run.kv
        self.chunks = run.layout.chunks(run.chunk, cut_at_reads=last and run.compact)

    def begin_forward(self) -> None:
        self.kv.begin_forward()

    def begin_backward(self) -> None:
        self.kv.begin_backward()

    def open(self, i: int, stop: bool = False, track: bool = False, saved: Any = None) -> ChunkContext:
        """What the call of chunk i is handed."""
        return ChunkContext(self.kv, self.chunks[i], stop, saved)

    def arguments(self, handed: ChunkContext, cache_name: str) -> dict[str, Any]:
        return {cache_name: None, CHUNK_KWARG: handed}

    def keep(self, i: int, handed: ChunkContext) -> None:
        """Nothing to keep: the attention op has written the chunk's keys and values."""

    def leaves(self, handed: ChunkContext) -> list[Tensor]:
        return []

    def absorb(self, i: int, grads: Sequence[Tensor | None]) -> None:
        """Nothing to pass on: the attention op has added to the earlier tokens' gradients."""

    def loose_ends(self, i: int, handed: ChunkContext) -> list[tuple[Tensor, Tensor]]:
        """(tensor, its gradient) beside the layer's output: the keys and values where the call stopped at them."""
        if handed.k_CKD is None or handed.v_CKW is None:
            return []
        dk, dv = self.kv.owed(self.chunks[i].start, self.chunks[i].stop)
        return [(handed.k_CKD, dk), (handed.v_CKW, dv)]


class StateCache(Cache):
    """Handed to one call of a linear-attention layer: starts from the given states, keeps the final ones."""

    def __init__(self, conv: Tensor | None, recurrent: Tensor | None, layers: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.conv, self.recurrent = conv, recurrent
        self.final: tuple[Tensor, Tensor | None] | None = None
        # Transformers before 5.23 reads the states from `layers[i]`, later ones through the get_ methods below.
        view = SimpleNamespace(conv_states=[conv], recurrent_states=[recurrent], record_past=True)
        self.layers = [view] * layers  # type: ignore[list-item]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.recurrent is not None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: Any
    ) -> Tensor:
        before = self.conv
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size)
        joined = torch.cat([before, conv_states], -1)
        self.final = (joined[..., -conv_kernel_size:], None)
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any):
        assert self.final is not None
        self.final = (self.final[0], recurrent_states)
        return recurrent_states


class StateMemory:
    """Linear attention (gated delta net): a chunk starts from the final states of what precedes it on its path."""

    stops_early = False

    def __init__(self, run: Run, last: bool) -> None:
        self.chunks = run.layout.chunks(run.chunk, bundle=False)
        self.layers = run.layers
        ends = {c.pieces[0].segment: i for i, c in enumerate(self.chunks)}
        self.previous: list[int | None] = []
        for i, chunk in enumerate(self.chunks):
            segment = chunk.pieces[0].segment
            parent = run.layout.parent[segment]
            if chunk.start > run.layout.start[segment]:
                self.previous.append(i - 1)
            else:
                self.previous.append(None if parent == ROOT else ends[parent])
        self.states: list[tuple[Tensor, ...]] = [()] * len(self.chunks)
        self.dstates: list[list[Tensor | None]] = [[] for _ in self.chunks]

    def begin_forward(self) -> None:
        """Nothing to forget: states are kept from the forward to the backward."""

    def begin_backward(self) -> None:
        self.dstates = [[] for _ in self.chunks]

    def open(self, i: int, stop: bool = False, track: bool = False, saved: Any = None) -> StateCache:
        before = self.previous[i]
        conv = recurrent = None
        if before is not None:
            conv, recurrent = (t.detach().requires_grad_(track) for t in self.states[before])
        return StateCache(conv, recurrent, self.layers)

    def arguments(self, handed: StateCache, cache_name: str) -> dict[str, Any]:
        return {cache_name: handed}

    def keep(self, i: int, handed: StateCache) -> None:
        assert handed.final is not None and handed.final[1] is not None
        self.states[i] = tuple(t.detach().clone() for t in handed.final if t is not None)

    def leaves(self, handed: StateCache) -> list[Tensor]:
        return [t for t in (handed.conv, handed.recurrent) if t is not None]

    def absorb(self, i: int, grads: Sequence[Tensor | None]) -> None:
        before = self.previous[i]
        if before is None:
            return
        held = self.dstates[before] or [None] * len(grads)
        self.dstates[before] = [b if a is None else a if b is None else a + b for a, b in zip(held, grads)]

    def loose_ends(self, i: int, handed: StateCache) -> list[tuple[Tensor, Tensor]]:
        assert handed.final is not None
        return [(t, d) for t, d in zip(handed.final, self.dstates[i]) if t is not None and d is not None]
