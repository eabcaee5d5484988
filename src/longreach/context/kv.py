"""What a layer remembers of earlier chunks while it runs: keys and values, or the boundary states of linear attention.

Both memories answer the same questions of `layer.py`: which chunks, which `Cache` a chunk's call is handed, and which tensors
tie chunks together in the backward.

Shape suffixes: C tokens of a chunk, K key/value heads, D and W head sizes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..attention import KeyValues
from .tree import ROOT, Chunk

if TYPE_CHECKING:
    from .layer import Run


class StopForward(Exception):
    """Ends a layer call as soon as its keys and values exist."""


class ChunkCache(Cache):
    """Handed to one call of one attention layer on one chunk; keeps the chunk's keys and values."""

    def __init__(self, kv: KeyValues, chunk: Chunk, stop: bool) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.kv, self.chunk, self.stop = kv, chunk, stop
        self.k_CKD: Tensor | None = None
        self.v_CKW: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if self.k_CKD is not None:
            raise RuntimeError(f"layer {layer_idx} wrote its cache twice in one call; such a layer can't run in chunks")
        self.k_CKD, self.v_CKW = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        if self.stop:
            with torch.no_grad():
                self.kv.write(self.chunk.start, self.k_CKD, self.v_CKW)
            raise StopForward
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class KeyValueMemory:
    """Full and sliding attention: the attention op itself reads earlier keys and adds what they are owed."""

    stops_early = True

    def __init__(self, run: Run, last: bool) -> None:
        self.kv = run.kv
        self.chunks = run.layout.chunks(run.chunk, cut_at_reads=last and run.compact)

    def begin_backward(self) -> None:
        self.kv.begin_backward()

    def cache(self, i: int, stop: bool = False, track: bool = False) -> ChunkCache:
        return ChunkCache(self.kv, self.chunks[i], stop)

    def keep(self, i: int, cache: ChunkCache) -> None:
        """Nothing to keep: the attention op has written the chunk's keys and values."""

    def leaves(self, cache: ChunkCache) -> list[Tensor]:
        return []

    def absorb(self, i: int, grads: tuple[Tensor | None, ...]) -> None:
        """Nothing to pass on: the attention op has added to the earlier tokens' gradients."""

    def loose_ends(self, i: int, cache: ChunkCache) -> list[tuple[Tensor, Tensor]]:
        """(tensor, its gradient) beside the layer's output: the keys and values where the call stopped at them."""
        if not cache.stop:
            return []
        assert cache.k_CKD is not None and cache.v_CKW is not None
        dk, dv = self.kv.owed(self.chunks[i].start, self.chunks[i].stop)
        return [(cache.k_CKD, dk), (cache.v_CKW, dv)]


class StateCache(Cache):
    """Handed to one call of a linear-attention layer: starts from the given states, keeps the final ones."""

    def __init__(self, conv: Tensor | None, recurrent: Tensor | None, layers: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.conv, self.recurrent = conv, recurrent
        self.final: tuple[Tensor, Tensor | None] | None = None
        # Transformers before 5.23 reads the states from `layers[i]`, later ones through the get_ methods below.
        view = SimpleNamespace(conv_states=[conv], recurrent_states=[recurrent], record_past=True)
        self.layers = [view] * layers

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

    def begin_backward(self) -> None:
        self.dstates = [[] for _ in self.chunks]

    def cache(self, i: int, stop: bool = False, track: bool = False) -> StateCache:
        before = self.previous[i]
        conv = recurrent = None
        if before is not None:
            conv, recurrent = (t.detach().requires_grad_(track) for t in self.states[before])
        return StateCache(conv, recurrent, self.layers)

    def keep(self, i: int, cache: StateCache) -> None:
        assert cache.final is not None and cache.final[1] is not None
        self.states[i] = tuple(t.detach().clone() for t in cache.final if t is not None)

    def leaves(self, cache: StateCache) -> list[Tensor]:
        return [t for t in (cache.conv, cache.recurrent) if t is not None]

    def absorb(self, i: int, grads: tuple[Tensor | None, ...]) -> None:
        before = self.previous[i]
        if before is None:
            return
        held = self.dstates[before] or [None] * len(grads)
        self.dstates[before] = [b if a is None else a if b is None else a + b for a, b in zip(held, grads)]

    def loose_ends(self, i: int, cache: StateCache) -> list[tuple[Tensor, Tensor]]:
        assert cache.final is not None
        return [(t, d) for t, d in zip(cache.final, self.dstates[i]) if t is not None and d is not None]
