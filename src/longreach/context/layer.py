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

from ..attention import KeyValues
from ..attention.op import wide_dtype
from .kv import KeyValueMemory, StateMemory, StopForward
from .offload import LayerInputs
from .tree import Chunk, Layout


@dataclass
class Run:
    """One pass of the model over one layout.

    Attributes:
        chunk: tokens per chunk.
        compact: the last layer returns only the rows that carry a label.
        backward: False for scoring; nothing is then kept.
        routers: layer index -> router module whose logits are wanted for the load-balancing loss.
        router_logits: [T, E] of each MoE layer, differentiable.
        resumed: puts the model's attention back to chunks while a backward recomputes.
    """

    layout: Layout
    chunk: int
    inputs: LayerInputs
    layers: int
    compact: bool
    backward: bool
    replay_dropout: bool
    resumed: Callable[[Run], contextlib.AbstractContextManager[None]]
    routers: dict[int, nn.Module] = field(default_factory=dict)
    router_logits: list[Tensor] = field(default_factory=list)
    captured: dict[nn.Module, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        self.kv = KeyValues(self.layout.tokens)


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

    def __post_init__(self) -> None:
        self.last = self.index == self.run.layers - 1
        self.memory: KeyValueMemory | StateMemory = (StateMemory if self.linear else KeyValueMemory)(
            self.run, self.last
        )
        self.router = self.run.routers.get(self.index)

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

    def read(self, chunk: Chunk, out: Tensor) -> tuple[Tensor, slice]:
        """The rows of a chunk's output that the next layer gets, and their place there."""
        if not (self.last and self.run.compact):
            return out, slice(chunk.start, chunk.stop)
        first = self.run.layout.reads(0, chunk.start)
        return out[:, chunk.read_rows.to(out.device)], slice(first, first + chunk.reads)


def run_layer(call: LayerCall, hidden: Tensor) -> Tensor:
    """Output of a layer: [1, T, hidden], or [1, R, hidden] of the last layer of a compact run."""
    if not call.run.backward:
        with torch.no_grad():
            out, _, _ = _forward(call, hidden)
        return out
    params = [p for p in call.layer.parameters() if p.requires_grad]
    out, router_logits = _ChunkedLayer.apply(call, params, hidden, *params)
    if call.router is not None:
        call.run.router_logits.append(router_logits)
    return out


def _forward(call: LayerCall, hidden: Tensor) -> tuple[Tensor, Tensor | None, list[Any]]:
    layout, memory = call.run.layout, call.memory
    rows = len(layout.read_index) if call.last and call.run.compact else layout.tokens
    out = hidden.new_empty(1, rows, hidden.shape[-1])
    router_TE, rng = None, []
    for i, chunk in enumerate(memory.chunks):
        wanted = call.needs_output(chunk)
        rng.append(_rng_state(hidden.device) if call.run.replay_dropout else None)
        if not wanted and not chunk.is_context:
            continue
        handed = memory.open(i, stop=not wanted and memory.stops_early)
        chunk_out = call.on(i, hidden[:, chunk.start : chunk.stop], handed)
        memory.keep(i, handed)  # type: ignore[arg-type]
        if not wanted or chunk_out is None:
            continue
        read, place = call.read(chunk, chunk_out)
        if out.dtype != read.dtype:
            out = out.to(read.dtype)
        out[:, place] = read
        if call.router is not None:
            logits_CE = call.run.captured.pop(call.router)
            if router_TE is None:
                router_TE = logits_CE.new_empty(layout.tokens, logits_CE.shape[-1])
            router_TE[chunk.start : chunk.stop] = logits_CE.reshape(-1, logits_CE.shape[-1])
    return out, router_TE, rng


class _ChunkedLayer(torch.autograd.Function):
    """hidden, trainable parameters -> output, router logits. Parameters are inputs so that DDP and hooks stay stock."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, params: list[nn.Parameter], hidden: Tensor, *_params: Tensor):
        ctx.set_materialize_grads(False)
        ctx.call, ctx.params = call, params
        device = hidden.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        out, router_TE, ctx.rng = _forward(call, hidden)
        if any(ctx.needs_input_grad):
            ctx.kept = call.run.inputs.put(hidden)
            ctx.hidden_like = hidden.new_empty(0)
        return out, router_TE

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, drouter_TE: Tensor | None):
        call: LayerCall = ctx.call
        device = ctx.hidden_like.device
        autocast = torch.autocast(ctx.autocast[0], dtype=ctx.autocast[1]) if ctx.autocast else contextlib.nullcontext()
        rng_now = _rng_state(device) if call.run.replay_dropout else None
        dhidden = None
        if ctx.needs_input_grad[2]:
            # Chunks that nobody owes anything are skipped below and keep a zero gradient.
            dhidden = ctx.hidden_like.new_zeros(1, call.run.layout.tokens, _width(call, ctx.kept))
        dparams = ParamGrads(ctx.params)
        with autocast, call.run.resumed(call.run):
            _rebuild(call, ctx.kept, ctx.rng)
            call.memory.begin_backward()
            for i in reversed(range(len(call.memory.chunks))):
                _set_rng_state(ctx.rng[i])
                _chunk_backward(call, i, ctx.kept, dout, drouter_TE, dhidden, dparams)
        _set_rng_state(rng_now)
        ctx.kept = None
        return None, None, dhidden, *dparams.done()


def _rebuild(call: LayerCall, kept: Any, rng: list[Any]) -> None:
    """Keys and values of every chunk that a later one sees. Linear-attention states were kept by the forward."""
    memory, run = call.memory, call.run
    if not memory.stops_early:
        return
    for i, chunk in enumerate(memory.chunks):
        if chunk.is_context:
            _set_rng_state(rng[i])
            with torch.no_grad():
                call.on(i, run.inputs.rows(kept, chunk.start, chunk.stop), memory.open(i, stop=True))


def _chunk_backward(
    call: LayerCall,
    i: int,
    kept: Any,
    dout: Tensor | None,
    drouter_TE: Tensor | None,
    dhidden: Tensor | None,
    dparams: ParamGrads,
) -> None:
    """Recompute chunk i with grad, backpropagate, and hand on what its predecessors are owed."""
    memory, chunk = call.memory, call.memory.chunks[i]
    wanted = call.needs_output(chunk)
    if not wanted and not chunk.is_context:
        return
    hidden = call.run.inputs.rows(kept, chunk.start, chunk.stop).detach().requires_grad_(dhidden is not None)
    handed = memory.open(i, stop=not wanted and memory.stops_early, track=True)
    with torch.enable_grad():
        out = call.on(i, hidden, handed)
        pairs = memory.loose_ends(i, handed)  # type: ignore[arg-type]
        if wanted and out is not None and dout is not None:
            read, place = call.read(chunk, out)
            if place.start < place.stop:
                pairs.append((read, dout[:, place]))
        if wanted and call.router is not None:
            logits_CE = call.run.captured.pop(call.router)
            if drouter_TE is not None:
                pairs.append((logits_CE, drouter_TE[chunk.start : chunk.stop].reshape(logits_CE.shape)))
    pairs = [(t, d) for t, d in pairs if t.requires_grad]
    if not pairs:
        return
    leaves = memory.leaves(handed)  # type: ignore[arg-type]
    inputs = [hidden] if dhidden is not None else []
    outs, douts = zip(*pairs)
    grads = torch.autograd.grad(outs, [*inputs, *leaves, *dparams.params], douts, allow_unused=True)
    if dhidden is not None and grads[0] is not None:
        dhidden[:, chunk.start : chunk.stop] = grads[0]
    memory.absorb(i, grads[len(inputs) : len(inputs) + len(leaves)])
    dparams.add(grads[len(inputs) + len(leaves) :])


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


def _width(call: LayerCall, kept: Any) -> int:
    return call.run.inputs.rows(kept, 0, 1).shape[-1]


def _rng_state(device: torch.device) -> tuple[torch.device, Tensor]:
    return device, torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_rng_state(state: tuple[torch.device, Tensor] | None) -> None:
    if state is None:
        return
    device, bits = state
    if device.type == "cuda":
        torch.cuda.set_rng_state(bits, device)
    else:
        torch.set_rng_state(bits)
