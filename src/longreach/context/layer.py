"""One decoder layer, chunk by chunk, with the gradients of the whole sequence.

Forward (no grad): each chunk goes through the unmodified layer; its attention sees the keys and values of earlier chunks, which
live only while this layer runs; the layer's input is kept. The backward, and how both hang in autograd's graph: `autograd.py`.

Shape suffixes: T packed tokens, C tokens of a chunk, R rows that are read, E experts. Hidden states are [1, T, hidden].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention import KeyValues
from ..quant.linear import FEW_TOKENS, shared_weights
from .fused import FusedLayer
from .fused_moe import fused_layer
from .kv import ChunkContext, KeyValueMemory, StateMemory, StopForward
from .offload import DevicePieces, DeviceRow, HostRow, Lease, Row, arrived
from .replay import rng_state, set_rng_state
from .stream import HostKeyValues
from .tree import Chunk, Layout

if TYPE_CHECKING:
    from .reuse import Batch, Reused


@dataclass
class Run:
    """One pass of the model over one layout.

    Attributes:
        chunk: tokens per chunk.
        layers: of the model.
        compact: the last layer returns only the rows that carry a label.
        backward: False for scoring; nothing is then kept.
        save_attention: keep attention outputs too, so that the backward does not compute them again.
        fuse: run layers of known families by their hand-written form.
        replay_random: restore each chunk's random state in the backward (dropout, router jitter).
        resumed: puts the model's attention back to chunks while a backward recomputes.
        offload: what waits in host memory, one of `offload.POLICIES`.
        keep_every: only the inputs of every so-many-th layer are kept; the backward computes the others again.
        lowest: the first layer with a gradient; below it nothing is kept.
        routers: layer index -> router module whose logits are wanted for the load-balancing loss.
        router_logits: [T, E] of each MoE layer, differentiable.
        captured: router module -> logits of the chunk just computed.
        kept: layer index -> what its backward needs.
        calls: layer index -> its call, for as long as the graph lives.
        hidden: the decoder's output, until `score` takes it.
        gradient_row: address of the gradient that the layer above has just returned. Only the next layer's backward reads
            that tensor (a hidden state has one consumer), so it is written over; a hook that keeps it would see that.
        inputs: layer index -> its input, where it does not travel from layer to layer as a tensor.
        gradient: of the layer input last visited by the backward, likewise.
        collecting: what keeps a prefill's values for the training step.
        reused: the first tokens, whose forward such a prefill has done.
    """

    layout: Layout
    chunk: int
    layers: int
    compact: bool
    backward: bool
    save_attention: bool
    fuse: bool
    replay_random: bool
    resumed: Callable[[Run], contextlib.AbstractContextManager[None]]
    offload: str = "none"
    keep_every: int = 1
    lowest: int = 0
    routers: dict[int, nn.Module] = field(default_factory=dict)
    router_logits: list[Tensor] = field(default_factory=list)
    captured: dict[nn.Module, Tensor] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    calls: dict[int, Callable[[], LayerCall | None]] = field(default_factory=dict)
    hidden: Tensor | None = None
    gradient_row: int = 0
    inputs: dict[int, Row] = field(default_factory=dict)
    gradient: Row | None = None
    collecting: Batch | None = None
    reused: Reused | None = None

    def __post_init__(self) -> None:
        self.lease: Lease | None = None
        self.kv = KeyValues(self.layout.tokens)
        self.spare: list[HostRow] = []
        self.streams = self.offload in ("rows", "keys")

    def use(self, lease: Lease) -> None:
        """Give the run its host memory."""
        self.lease = lease
        if self.offload == "keys":
            self.kv = HostKeyValues(lease, self.layout.tokens)

    def row(self) -> Row:
        """A new place for one value per token."""
        if self.lease is None:
            return DeviceRow(self.layout.tokens)
        return self.spare.pop() if self.spare else HostRow(self.lease, self.layout.tokens)

    def pieces(self) -> Row:
        """The same for what is fetched chunk by chunk, as it was saved."""
        return DevicePieces() if self.lease is None else self.row()

    def input_row(self, index: int) -> Row:
        """A new place for a layer's input."""
        return self.row() if self.reused is None or not index else self.reused.inputs(index)

    @property
    def places(self) -> bool:
        """Whether layers find their inputs in `inputs`, not in the tensor that the model hands on."""
        return self.streams or (self.reused is not None and self.lease is None)

    def keeps(self, index: int) -> bool:
        """Whether the layer's input is kept for the backward."""
        return self.backward and (index % self.keep_every == 0 or index == self.lowest)

    def kept_below(self, index: int) -> int:
        """The nearest layer at or below this one whose input is kept."""
        first = index - index % self.keep_every
        return max(first, self.lowest) if index >= self.lowest else first

    def source(self, index: int, hidden: Tensor) -> Row:
        """The layer's input."""
        if index in self.inputs:
            return self.inputs[index]
        if self.reused is None or not index:
            return DeviceRow(self.layout.tokens, hidden[0])
        return self.reused.inputs(index, DeviceRow(self.reused.rest, hidden[0, self.reused.tokens :]))

    def place_output(self, index: int) -> Row:
        """Where the layer's output waits as the next one's input, in host memory; what is not kept shares one place."""
        old = self.inputs.get(index)
        reused = isinstance(old, HostRow) and not self.keeps(index) and not self.keeps(index + 1)
        self.inputs[index + 1] = old if reused and old is not None else self.input_row(index + 1)
        return self.inputs[index + 1]

    def stand_in(self, like_M: Tensor) -> Tensor:
        """[1, T, M] that takes no memory: what the model hands from layer to layer while the real rows are elsewhere."""
        return alias(like_M.new_zeros(1).expand(1, self.layout.tokens, len(like_M)))


class Kept:
    """What a layer's backward needs: its input, each chunk's random state, and on request attention outputs."""

    def __init__(self, run: Run, index: int) -> None:
        self.hidden: Row | None = None
        self.out, self.lse_T = run.pieces(), run.pieces()
        if run.reused is not None and run.reused.attended and index < run.layers - 1:
            self.out, self.lse_T = run.reused.attention(index)
        self.attended: set[int] = set()
        self.rng: list[Any] = []

    def save_attention(self, chunk: Chunk, out_CHD: Tensor, lse_HC: Tensor) -> None:
        self.out.save(chunk.start, chunk.stop, out_CHD)
        self.lse_T.save(chunk.start, chunk.stop, lse_HC.t().contiguous())
        self.attended.add(chunk.start)

    def attention(self, chunk: Chunk) -> tuple[Tensor, Tensor] | None:
        if chunk.start not in self.attended:
            return None
        lse_CH = self.lse_T.fetch(chunk.start, chunk.stop)
        return self.out.fetch(chunk.start, chunk.stop), lse_CH.t().contiguous()

    def prefetch(self, chunk: Chunk, attention: bool) -> None:
        if self.hidden is not None:
            self.hidden.prefetch(chunk.start, chunk.stop)
        if attention and chunk.start in self.attended:
            self.out.prefetch(chunk.start, chunk.stop)
            self.lse_T.prefetch(chunk.start, chunk.stop)


@dataclass
class LayerCall:
    """One layer of one run: how to call it on a chunk."""

    run: Run
    index: int
    layer: nn.Module
    call: Callable[..., Any]
    kwargs: dict[str, Any]
    linear: bool
    cache_name: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.last = self.index == self.run.layers - 1
        self.memory: KeyValueMemory | StateMemory = (StateMemory if self.linear else KeyValueMemory)(
            self.run, self.last
        )
        self.router = self.run.routers.get(self.index)
        self.adapters: Any = None
        self.form = "unknown"  # then "fused" or "module", found once for forward and backward

    def fused(self) -> FusedLayer | None:
        """The layer's hand-written form for one pass, if it has one and computes in the dtype of the hidden state."""
        if not self.run.fuse or self.linear or self.router is not None:
            return None
        if self.form == "module":
            self.same_adapters(adapter_state(self.layer))
            return None
        several, few = len(self.memory.chunks) > 1, self.run.layout.tokens <= FEW_TOKENS
        made = fused_layer(
            self.layer, self.dtype, keep=several, keep_linears=several and not few, checked=self.form == "fused"
        )
        self.form = "module" if made is None else "fused"
        self.same_adapters(adapter_state(self.layer) if made is None else made.adapters)
        return made

    def same_adapters(self, now: Any) -> None:
        """Refuse a backward that would go through other adapters than the forward."""
        if self.adapters is None:
            self.adapters = now
        elif self.adapters != now:
            raise RuntimeError(
                f"layer {self.index}: its adapters were switched, merged or disabled between the forward and its backward, which "
                "computes the layer again; call backward with the adapters of the forward"
            )

    def sharing(self) -> contextlib.AbstractContextManager[None]:
        """Around a pass: weights in 4 bits are made once for all of its chunks."""
        return shared_weights(len(self.memory.chunks) > 1)

    def needs_output(self, chunk: Chunk) -> bool:
        """In a compact run nobody reads the last layer's unlabelled rows (but a router loss counts every token)."""
        return not self.trims or chunk.reads > 0 or self.router is not None

    def reuses(self, chunk: Chunk) -> bool:
        """Whether a prefill has done the chunk's forward, but for its keys and values."""
        return self.run.reused is not None and not self.last and chunk.stop <= self.run.reused.tokens

    def visits(self, chunk: Chunk) -> bool:
        """Whether the chunk is computed at all."""
        return chunk.is_context or self.needs_output(chunk)

    def on(self, i: int, hidden_CM: Tensor, handed: Any) -> Tensor | None:
        """Layer output [C, hidden] of chunk i, or None where the call stopped at the keys and values."""
        chunk = self.memory.chunks[i]
        total = self.run.layout.tokens
        kwargs = {k: _slice(v, chunk.start, chunk.stop, total) for k, v in self.kwargs.items()}
        kwargs |= self.memory.arguments(handed, self.cache_name)
        try:
            out = self.call(hidden_CM[None], **kwargs)
        except StopForward:
            return None
        return out[0][0] if isinstance(out, tuple) else out[0]

    def cos_sin(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Rotary tables [C, D] of a chunk."""
        cos, sin = self.kwargs["position_embeddings"]
        return cos[0, chunk.start : chunk.stop], sin[0, chunk.start : chunk.stop]

    @property
    def device(self) -> torch.device:
        return next(self.layer.parameters()).device

    @property
    def trims(self) -> bool:
        """Whether only the rows that somebody reads leave this layer."""
        return self.last and self.run.compact

    def read(self, chunk: Chunk, out_CM: Tensor) -> tuple[Tensor, int, int]:
        """The rows of a chunk's output that the next layer gets, and their place there."""
        if not self.trims:
            return out_CM, chunk.start, chunk.stop
        first = self.run.layout.reads(0, chunk.start)
        rows = out_CM if chunk.reads == len(out_CM) else out_CM[chunk.read_rows.to(out_CM.device)]
        return rows, first, first + chunk.reads


def compute(
    call: LayerCall, source: Row, sink: Row, kept: Kept | None, replay: list[Any] | None = None
) -> Tensor | None:
    """A layer's forward from one row to another. With `replay`, each chunk's random state is the one given.

    Returns:
        The router's logits [T, E] where they are wanted.
    """
    run, memory = call.run, call.memory
    fused, router_TE = call.fused(), None
    visited = [i for i, chunk in enumerate(memory.chunks) if call.visits(chunk)]
    if kept is not None:
        kept.rng = [None] * len(memory.chunks)
    memory.begin_forward()
    for i, following in zip(visited, [*visited[1:], None]):
        chunk = memory.chunks[i]
        hidden_CM = source.fetch(chunk.start, chunk.stop)
        if following is not None:
            source.prefetch(memory.chunks[following].start, memory.chunks[following].stop)
        if kept is not None:
            kept.rng[i] = rng_state(hidden_CM.device) if run.replay_random else None
            if kept.hidden is not None and kept.hidden is not source:
                kept.hidden.save(chunk.start, chunk.stop, hidden_CM)
        if replay is not None:
            set_rng_state(replay[i])
        out_CM = _chunk_forward(call, i, hidden_CM, fused, kept)
        if out_CM is None:
            continue
        if kept is not None and kept.hidden is not None:
            kept.hidden.wait_saved()
        rows, start, stop = call.read(chunk, out_CM)
        sink.save(start, stop, rows)
        if call.router is not None:
            logits_CE = run.captured.pop(call.router)
            if router_TE is None:
                router_TE = logits_CE.new_empty(run.layout.tokens, logits_CE.shape[-1])
            router_TE[chunk.start : chunk.stop] = logits_CE.reshape(-1, logits_CE.shape[-1])
    arrived(call.device)
    return router_TE


def _chunk_forward(
    call: LayerCall, i: int, hidden_CM: Tensor, fused: FusedLayer | None, kept: Kept | None
) -> Tensor | None:
    memory, chunk, run = call.memory, call.memory.chunks[i], call.run
    wanted = call.needs_output(chunk) and not call.reuses(chunk)
    attended = None
    out_CM: Tensor | None
    if kept is not None and run.reused is not None and run.reused.attended and call.reuses(chunk):
        kept.attended.add(chunk.start)
    if fused is not None:
        if not wanted:
            fused.store_keys(hidden_CM, call.cos_sin(chunk), run.kv, chunk)
            return None
        out_CM, attended = fused.forward(hidden_CM, call.cos_sin(chunk), run.kv, chunk)
    else:
        handed = memory.open(i, stop=not wanted and memory.stops_early)
        out_CM = call.on(i, hidden_CM, handed)
        memory.keep(i, handed)  # type: ignore[arg-type]
        if isinstance(handed, ChunkContext):
            attended = handed.attended
    if kept is not None and run.save_attention and attended is not None:
        kept.save_attention(chunk, *attended)
    return out_CM if wanted else None


def lowest_trained(decoder: Any, layers: list[nn.Module]) -> int:
    """Index of the first layer through which a gradient goes."""
    if any(p.requires_grad for p in decoder.get_input_embeddings().parameters()):
        return 0
    return next((i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())), 0)


def adapter_state(layer: nn.Module) -> list[Any]:
    """What PEFT's layers in it do now: disabled or not, which adapters are active, which are merged."""
    found: list[Any] = [m for m in layer.modules() if "lora_A" in m._modules]
    return [(m.disable_adapters, tuple(m.active_adapters), tuple(m.merged_adapters)) for m in found]


def _slice(x: Any, start: int, stop: int, total: int) -> Any:
    """The chunk's part of everything that carries the sequence on dimension 1 (position ids, cos, sin, …)."""
    if isinstance(x, Tensor):
        return x[:, start:stop] if x.ndim >= 2 and x.shape[1] == total else x
    if isinstance(x, (tuple, list)):
        return type(x)(_slice(t, start, stop, total) for t in x)
    if isinstance(x, dict):
        return {k: _slice(v, start, stop, total) for k, v in x.items()}
    return x


def alias(x: Tensor) -> Tensor:
    """The same memory as a tensor that autograd knows nothing of."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
