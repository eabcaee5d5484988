"""One decoder layer, chunk by chunk, with the gradients of the whole sequence.

Forward (no grad): each chunk goes through the unmodified layer; its attention sees the keys and values of earlier chunks, which
live only while this layer runs; the layer's input is kept. Backward: keys and values are rebuilt (the call stops as soon as they
exist), then chunks are visited last to first, recomputed with grad and backpropagated; what earlier keys and values are owed
collects in fp32 and joins a chunk's own gradient when its turn comes.

Shape suffixes: T packed tokens, C tokens of a chunk, R rows that are read, E experts. Hidden states are [1, T, hidden].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..attention import KeyValues
from ..attention.op import wide_dtype
from .fused import FusedLayer
from .kv import ChunkContext, KeyValueMemory, StateMemory, StopForward
from .offload import DeviceRows, HostRows, Lease, Rows
from .tree import Chunk, Layout


@dataclass
class Run:
    """One pass of the model over one layout.

    Attributes:
        chunk: tokens per chunk.
        layers: of the model.
        compact: the last layer returns only the rows that carry a label.
        backward: False for scoring; nothing is then kept.
        lease: host memory for what is kept; None keeps it on the device.
        save_attention: keep attention outputs too, so that the backward does not compute them again.
        fuse: run layers of known families by their hand-written form.
        replay_random: restore each chunk's random state in the backward (dropout, router jitter).
        routers: layer index -> router module whose logits are wanted for the load-balancing loss.
        router_logits: [T, E] of each MoE layer, differentiable.
        resumed: puts the model's attention back to chunks while a backward recomputes.
        captured: router module -> logits of the chunk just computed.
        kept: layer index -> what its backward needs.
        hidden: the decoder's output, until `score` takes it.
        gradient_row: address of the gradient that the layer above has just returned. Only the next layer's backward reads
            that tensor (a hidden state has one consumer), so it is written over; a hook that keeps it would see that.
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
    routers: dict[int, nn.Module] = field(default_factory=dict)
    lease: Lease | None = None
    router_logits: list[Tensor] = field(default_factory=list)
    captured: dict[nn.Module, Tensor] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    hidden: Tensor | None = None
    gradient_row: int = 0

    def __post_init__(self) -> None:
        self.kv = KeyValues(self.layout.tokens)

    def rows(self) -> Rows:
        return DeviceRows() if self.lease is None else HostRows(self.lease, self.layout.tokens)


class Kept:
    """What a layer's backward needs: its input, each chunk's random state, and on request attention outputs."""

    def __init__(self, run: Run) -> None:
        self.hidden = run.rows()
        self.out: Rows | None = run.rows() if run.save_attention else None
        self.lse: Rows | None = run.rows() if run.save_attention else None
        self.rng: list[Any] = []

    def save_attention(self, start: int, stop: int, out_CHD: Tensor, lse_HC: Tensor) -> None:
        if self.out is not None and self.lse is not None:
            self.out.save(start, stop, out_CHD)
            self.lse.save(start, stop, lse_HC)

    def attention(self, start: int) -> tuple[Tensor, Tensor] | None:
        if self.out is None or self.lse is None or start not in self.out.held:
            return None
        return self.out.fetch(start), self.lse.fetch(start)

    def prefetch(self, start: int, attention: bool) -> None:
        self.hidden.prefetch(start)
        if attention and self.out is not None and self.lse is not None and start in self.out.held:
            self.out.prefetch(start)
            self.lse.prefetch(start)


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

    def fused(self) -> FusedLayer | None:
        """The layer's hand-written form for one pass, if it has one and computes in the dtype of the hidden state."""
        if not self.run.fuse or self.linear or self.router is not None:
            return None
        return FusedLayer.of(self.layer, self.dtype)

    def needs_output(self, chunk: Chunk) -> bool:
        """In a compact run nobody reads the last layer's unlabelled rows (but a router loss counts every token)."""
        return not (self.last and self.run.compact) or chunk.reads > 0 or self.router is not None

    def on(self, i: int, hidden: Tensor, handed: Any) -> Tensor | None:
        """Layer output [1, C, hidden] of chunk i, or None where the call stopped at the keys and values."""
        chunk = self.memory.chunks[i]
        total = self.run.layout.tokens
        kwargs = {k: _slice(v, chunk.start, chunk.stop, total) for k, v in self.kwargs.items()}
        kwargs |= self.memory.arguments(handed, self.cache_name)
        try:
            out = self.call(hidden, **kwargs)
        except StopForward:
            return None
        return out[0] if isinstance(out, tuple) else out

    def cos_sin(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Rotary tables [C, D] of a chunk."""
        cos, sin = self.kwargs["position_embeddings"]
        return cos[0, chunk.start : chunk.stop], sin[0, chunk.start : chunk.stop]

    def read(self, chunk: Chunk, out: Tensor) -> tuple[Tensor, slice]:
        """The rows of a chunk's output that the next layer gets, and their place there."""
        if not (self.last and self.run.compact):
            return out, slice(chunk.start, chunk.stop)
        first = self.run.layout.reads(0, chunk.start)
        place = slice(first, first + chunk.reads)
        return out if chunk.reads == out.shape[1] else out[:, chunk.read_rows.to(out.device)], place

    def unread(self, chunk: Chunk, dout: Tensor) -> Tensor:
        """The gradient of a chunk's whole output from that of the rows that were read."""
        if not (self.last and self.run.compact):
            return dout[:, chunk.start : chunk.stop]
        first = self.run.layout.reads(0, chunk.start)
        part = dout[:, first : first + chunk.reads]
        rows = chunk.stop - chunk.start
        if chunk.reads == rows:
            return part
        return dout.new_zeros(1, rows, dout.shape[-1]).index_copy(1, chunk.read_rows.to(dout.device), part)


def run_layer(call: LayerCall, hidden: Tensor) -> Tensor:
    """Output of a layer: [1, T, hidden], or [1, R, hidden] of the last layer of a compact run."""
    if not call.run.backward:
        with torch.no_grad():
            out, _ = _forward(call, hidden, None)
        return out
    params = [p for p in call.layer.parameters() if p.requires_grad]
    out, router_logits = _ChunkedLayer.apply(call, params, hidden, *params)
    if call.router is not None:
        call.run.router_logits.append(router_logits)
    return out


def _forward(call: LayerCall, hidden: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor | None]:
    run, memory = call.run, call.memory
    layout, fused = run.layout, call.fused()
    if kept is not None:
        for chunk in memory.chunks:
            if call.needs_output(chunk) or chunk.is_context:
                kept.hidden.save(chunk.start, chunk.stop, hidden[:, chunk.start : chunk.stop])
    # Where the input is not needed any more, or has gone to the host, the output is written over it.
    in_place = not (call.last and run.compact) and (kept is None or run.lease is not None)
    rows = len(layout.read_index) if call.last and run.compact else layout.tokens
    out = _alias(hidden) if in_place else hidden.new_empty(1, rows, hidden.shape[-1])
    router_TE = None
    for i, chunk in enumerate(memory.chunks):
        wanted = call.needs_output(chunk)
        if kept is not None:
            kept.rng.append(rng_state(hidden.device) if run.replay_random else None)
        if not wanted and not chunk.is_context:
            continue
        chunk_out = _chunk_forward(call, i, hidden[:, chunk.start : chunk.stop], fused, kept, wanted)
        if not wanted or chunk_out is None:
            continue
        read, place = call.read(chunk, chunk_out)
        if out.dtype != read.dtype:
            out = out.to(read.dtype)
        elif in_place and kept is not None:
            kept.hidden.wait_saved(chunk.start)
        out[:, place] = read
        if call.router is not None:
            logits_CE = run.captured.pop(call.router)
            if router_TE is None:
                router_TE = logits_CE.new_empty(layout.tokens, logits_CE.shape[-1])
            router_TE[chunk.start : chunk.stop] = logits_CE.reshape(-1, logits_CE.shape[-1])
    return out, router_TE


def _chunk_forward(
    call: LayerCall, i: int, hidden: Tensor, fused: FusedLayer | None, kept: Kept | None, wanted: bool
) -> Tensor | None:
    memory, chunk, run = call.memory, call.memory.chunks[i], call.run
    if fused is not None:
        if not wanted:
            fused.store_keys(hidden[0], call.cos_sin(chunk), run.kv, chunk)
            return None
        out_CM, attended = fused.forward(hidden[0], call.cos_sin(chunk), run.kv, chunk)
        if kept is not None:
            kept.save_attention(chunk.start, chunk.stop, *attended)
        return out_CM[None]
    handed = memory.open(i, stop=not wanted and memory.stops_early)
    out = call.on(i, hidden, handed)
    memory.keep(i, handed)  # type: ignore[arg-type]
    if kept is not None and isinstance(handed, ChunkContext) and handed.attended is not None:
        kept.save_attention(chunk.start, chunk.stop, *handed.attended)
    return out


class _ChunkedLayer(torch.autograd.Function):
    """hidden, trainable parameters -> output, router logits. Parameters are inputs so that DDP and hooks stay stock."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, params: list[nn.Parameter], hidden: Tensor, *_params: Tensor):
        ctx.set_materialize_grads(False)
        ctx.call, ctx.params = call, params
        ctx.autocast = autocast_state(hidden.device)
        kept = Kept(call.run) if any(ctx.needs_input_grad) else None
        if kept is not None:
            call.run.kept[call.index] = kept
        ctx.like = hidden.new_empty(0)
        ctx.width = hidden.shape[-1]
        return _forward(call, hidden, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, drouter_TE: Tensor | None):
        call: LayerCall = ctx.call
        run, memory = call.run, call.memory
        kept = run.kept.pop(call.index, None)
        if kept is None:
            raise RuntimeError(
                "a second backward through the same chunked forward: what it kept is gone. Add the losses and call backward "
                "once, or compute the log-probs again"
            )
        rng_now = rng_state(ctx.like.device) if run.replay_random else None
        dhidden = None
        if ctx.needs_input_grad[2]:
            if dout is not None and dout.data_ptr() == run.gradient_row and dout.shape[1] == run.layout.tokens:
                dhidden = _alias(dout)
            else:
                dhidden = ctx.like.new_empty(1, run.layout.tokens, ctx.width)
            run.gradient_row = dhidden.data_ptr()
        step = _Step(call, call.fused(), kept, dout, drouter_TE, dhidden, ParamGrads(ctx.params))
        with autocast_as(ctx.autocast), run.resumed(run):
            step.rebuild()
            memory.begin_backward()
            for i in reversed(range(len(memory.chunks))):
                step.chunk(i)
        below = run.kept.get(call.index - 1)
        if below is not None:
            below.prefetch(0, attention=False)
        set_rng_state(rng_now)
        return None, None, dhidden, *step.dparams.done()


@dataclass
class _Step:
    """The backward of one layer."""

    call: LayerCall
    fused: FusedLayer | None
    kept: Kept
    dout: Tensor | None
    drouter_TE: Tensor | None
    dhidden: Tensor | None
    dparams: ParamGrads

    def rebuild(self) -> None:
        """Keys and values of every chunk that a later one sees. Linear-attention states were kept by the forward."""
        call, memory = self.call, self.call.memory
        context = [i for i, c in enumerate(memory.chunks) if c.is_context] if memory.stops_early else []
        for at, i in enumerate(context):
            chunk = memory.chunks[i]
            hidden = self.kept.hidden.fetch(chunk.start)
            if at + 1 < len(context):
                self.kept.prefetch(memory.chunks[context[at + 1]].start, attention=False)
            else:
                self._prefetch_before(len(memory.chunks))
            if self.fused is not None:
                self.fused.store_keys(hidden[0], call.cos_sin(chunk), call.run.kv, chunk)
                continue
            set_rng_state(self.kept.rng[i])
            with torch.no_grad():
                call.on(i, hidden, memory.open(i, stop=True))

    def _prefetch_before(self, i: int) -> None:
        """Bring back the chunk that is visited after chunk i."""
        for j in range(i - 1, -1, -1):
            chunk = self.call.memory.chunks[j]
            if self.call.needs_output(chunk) or chunk.is_context:
                self.kept.prefetch(chunk.start, attention=self.call.needs_output(chunk))
                return

    def chunk(self, i: int) -> None:
        """Recompute chunk i, backpropagate, and hand on what its predecessors are owed."""
        call, chunk = self.call, self.call.memory.chunks[i]
        wanted = call.needs_output(chunk)
        grad = None
        if wanted or chunk.is_context:
            hidden = self.kept.hidden.fetch(chunk.start)
            saved = self.kept.attention(chunk.start) if wanted else None
            self._prefetch_before(i)
            grad = (self._fused if self.fused is not None else self._autograd)(i, hidden, saved, wanted)
        if self.dhidden is not None:
            if grad is None:
                self.dhidden[:, chunk.start : chunk.stop] = 0
            else:
                self.dhidden[:, chunk.start : chunk.stop] = grad

    def _fused(self, i: int, hidden: Tensor, saved: Any, wanted: bool) -> Tensor | None:
        call, chunk, fused = self.call, self.call.memory.chunks[i], self.fused
        assert fused is not None
        place = (hidden[0], call.cos_sin(chunk), call.run.kv, chunk)
        need_dx = self.dhidden is not None
        if not wanted:
            dx_CM, grads = fused.keys_backward(*place, need_dx)
        elif self.dout is None:
            return None
        else:
            # The gradient's row may be written over: the layer's backward adds into its copy.
            dy_CM = call.unread(chunk, self.dout)[0]
            dx_CM, grads = fused.backward(dy_CM, *place, saved, need_dx)
        self.dparams.add([grads.get(p) for p in self.dparams.params])
        return None if dx_CM is None else dx_CM[None]

    def _autograd(self, i: int, hidden: Tensor, saved: Any, wanted: bool) -> Tensor | None:
        call, memory, chunk = self.call, self.call.memory, self.call.memory.chunks[i]
        set_rng_state(self.kept.rng[i])
        hidden = hidden.detach().requires_grad_(self.dhidden is not None)
        handed = memory.open(i, stop=not wanted and memory.stops_early, track=True, saved=saved)
        with torch.enable_grad():
            out = call.on(i, hidden, handed)
            pairs = memory.loose_ends(i, handed)  # type: ignore[arg-type]
            if wanted and out is not None and self.dout is not None:
                read, place = call.read(chunk, out)
                if place.start < place.stop:
                    pairs.append((read, self.dout[:, place]))
            if wanted and call.router is not None:
                logits_CE = call.run.captured.pop(call.router)
                if self.drouter_TE is not None:
                    pairs.append((logits_CE, self.drouter_TE[chunk.start : chunk.stop].reshape(logits_CE.shape)))
        pairs = [(t, d) for t, d in pairs if t.requires_grad]
        if not pairs:
            return None
        leaves = memory.leaves(handed)  # type: ignore[arg-type]
        inputs = [hidden] if self.dhidden is not None else []
        outs, douts = zip(*pairs)
        grads = torch.autograd.grad(outs, [*inputs, *leaves, *self.dparams.params], douts, allow_unused=True)
        memory.absorb(i, grads[len(inputs) : len(inputs) + len(leaves)])
        self.dparams.add(grads[len(inputs) + len(leaves) :])
        return grads[0] if inputs else None


class ParamGrads:
    """Sums of parameter gradients over chunks, in at least fp32 where there is more than one."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.sums: list[Tensor | None] = [None] * len(params)
        self.owned = [False] * len(params)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            held = self.sums[i]
            if grad is None:
                continue
            if held is None:
                self.sums[i] = grad
            elif self.owned[i]:
                held.add_(grad)
            else:
                # Autograd may hand the same tensor to two parameters: the first sum makes a tensor of our own.
                self.sums[i] = held.to(wide_dtype(held.dtype)) + grad
                self.owned[i] = True

    def done(self) -> list[Tensor | None]:
        return [None if s is None else s.to(p.dtype) for s, p in zip(self.sums, self.params)]


def _slice(x: Any, start: int, stop: int, total: int) -> Any:
    """The chunk's part of everything that carries the sequence on dimension 1 (position ids, cos, sin, …)."""
    if isinstance(x, Tensor):
        return x[:, start:stop] if x.ndim >= 2 and x.shape[1] == total else x
    if isinstance(x, (tuple, list)):
        return type(x)(_slice(t, start, stop, total) for t in x)
    if isinstance(x, dict):
        return {k: _slice(v, start, stop, total) for k, v in x.items()}
    return x


def _alias(x: Tensor) -> Tensor:
    """The same memory as a tensor that autograd knows nothing of."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


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
