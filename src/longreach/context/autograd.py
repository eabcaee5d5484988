"""A chunked layer in autograd's graph, and its backward.

Keys and values are rebuilt (a call stops as soon as they exist), then chunks are visited last to first, recomputed with grad and
backpropagated; what earlier keys and values are owed collects in fp32 and joins a chunk's own gradient when its turn comes.

Shape suffixes: T packed tokens, C tokens of a chunk, E experts, M hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..kernels import wide_dtype
from .fused import FusedLayer
from .layer import Kept, LayerCall, alias, compute
from .offload import DeviceRow, HostRow, Row, arrived
from .replay import autocast_as, autocast_state, rng_state, set_rng_state
from .tree import Chunk


def run_layer(call: LayerCall, hidden: Tensor) -> Tensor:
    """Output of a layer: [1, T, hidden], or [1, R, hidden] of the last layer of a compact run; a stand-in where rows stream."""
    if not call.run.backward:
        collecting = call.run.collecting
        kept = None if collecting is None else collecting.kept(call, hidden)
        with torch.no_grad(), call.sharing():
            out, _ = forward(call, hidden, kept)
        if collecting is not None:
            collecting.done(call)
        return out
    if call.index == 0 and call.run.reused is not None and not call.run.reused.holds(call, hidden):
        call.run.reused = None
    params = [p for p in call.layer.parameters() if p.requires_grad]
    with call.sharing():
        out, router_logits = ChunkedLayer.apply(call, params, hidden, *params)
    if call.router is not None:
        call.run.router_logits.append(router_logits)
    return out


def forward(call: LayerCall, hidden: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor | None]:
    """Output of a layer and its router's logits; `kept` collects what the backward needs."""
    run = call.run
    source = run.source(call.index, hidden)
    if kept is not None and run.keeps(call.index):
        streamed = call.index in run.inputs
        kept.hidden = source if streamed or run.lease is None else run.input_row(call.index)
    if run.places and not call.last:
        router_TE = compute(call, source, run.place_output(call.index), kept)
        return run.stand_in(hidden[0, 0]), router_TE
    # Where the input is not needed any more, or has gone to the host, the output is written over it.
    in_place = not call.trims and call.index not in run.inputs and (kept is None or kept.hidden is not source)
    rows = len(run.layout.read_index) if call.trims else run.layout.tokens
    sink = DeviceRow(rows, alias(hidden[0]) if in_place else hidden.new_empty(rows, hidden.shape[-1]))
    router_TE = compute(call, source, sink, kept)
    assert sink.x_T is not None
    return alias(sink.x_T[None]), router_TE


class ChunkedLayer(torch.autograd.Function):
    """hidden, trainable parameters -> output, router logits. Parameters are inputs so that DDP and hooks stay stock."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, params: list[nn.Parameter], hidden: Tensor, *_params: Tensor):
        ctx.set_materialize_grads(False)
        ctx.call, ctx.params = call, params
        ctx.autocast = autocast_state(hidden.device)
        kept = Kept(call.run, call.index) if any(ctx.needs_input_grad) else None
        if kept is not None:
            call.run.kept[call.index] = kept
        call.run.calls[call.index] = weakref.ref(call)
        ctx.like_M = hidden.new_empty(hidden.shape[-1])
        return forward(call, hidden, kept)

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
        rng_now = rng_state(ctx.like_M.device) if run.replay_random else None
        dhidden, gradient = input_gradient(ctx, dout) if ctx.needs_input_grad[2] else (None, None)
        step = Step(call, kept, dout, drouter_TE, gradient, ctx.like_M, ParamGrads(ctx.params))
        with autocast_as(ctx.autocast), run.resumed(run):
            if kept.hidden is None:
                restore_input(call, kept)
            with call.sharing():
                step.run()
        if not run.keeps(call.index) and isinstance(kept.hidden, HostRow):
            run.spare.append(kept.hidden)
        run.inputs.pop(call.index, None)
        below = run.kept.get(call.index - 1)
        if below is not None:
            below.prefetch(memory.chunks[0], attention=False)
        if not run.kept and run.lease is not None:
            run.lease.end()  # that was the lowest layer; a loss that is kept keeps no host memory from the next step
        set_rng_state(rng_now)
        return None, None, dhidden, *step.dparams.done()


def input_gradient(ctx: Any, dout: Tensor | None) -> tuple[Tensor, Row]:
    """The tensor that autograd gets as the gradient of the layer's input, and the row that the real one is written to."""
    call: LayerCall = ctx.call
    run = call.run
    if run.streams and call.index > 0:
        if run.gradient is None:
            run.gradient = run.row()
        return run.stand_in(ctx.like_M), run.gradient
    if dout is not None and dout.data_ptr() == run.gradient_row and dout.shape[1] == run.layout.tokens:
        dhidden = alias(dout)
    else:
        dhidden = ctx.like_M.new_empty(1, run.layout.tokens, len(ctx.like_M))
    run.gradient_row = dhidden.data_ptr()
    return dhidden, DeviceRow(run.layout.tokens, dhidden[0])


def restore_input(call: LayerCall, kept: Kept) -> None:
    """Compute again, from the nearest kept input below, the inputs of the layers up to this one."""
    run = call.run
    first = run.kept_below(call.index)
    source = run.kept[first].hidden
    for index in range(first, call.index):
        found = run.calls[index]()
        above = kept if index + 1 == call.index else run.kept[index + 1]
        assert found is not None and source is not None
        sink = run.row()
        with torch.no_grad(), found.sharing():
            compute(found, source, sink, None, run.kept[index].rng)
        source = above.hidden = sink


@dataclass
class Step:
    """The backward of one layer: gradients of its parameters, and of its input into `gradient` if given."""

    call: LayerCall
    kept: Kept
    dout: Tensor | None
    drouter_TE: Tensor | None
    gradient: Row | None
    like_M: Tensor
    dparams: ParamGrads

    def run(self) -> None:
        memory = self.call.memory
        self.fused: FusedLayer | None = self.call.fused()
        self.rebuild()
        memory.begin_backward()
        for i in reversed(range(len(memory.chunks))):
            self.chunk(i)
        arrived(self.call.device)

    def rebuild(self) -> None:
        """Keys and values of every chunk that a later one sees. Linear-attention states were kept by the forward."""
        call, memory = self.call, self.call.memory
        memory.begin_forward()
        context = [i for i, c in enumerate(memory.chunks) if c.is_context] if memory.stops_early else []
        for at, i in enumerate(context):
            chunk = memory.chunks[i]
            hidden_CM = self.hidden(chunk)
            if at + 1 < len(context):
                self.kept.prefetch(memory.chunks[context[at + 1]], attention=False)
            else:
                self._prefetch_before(len(memory.chunks))
            if self.fused is not None:
                self.fused.store_keys(hidden_CM, call.cos_sin(chunk), call.run.kv, chunk)
                continue
            set_rng_state(self.kept.rng[i])
            with torch.no_grad():
                call.on(i, hidden_CM, memory.open(i, stop=True))

    def hidden(self, chunk: Chunk) -> Tensor:
        """The layer's input [C, M] of a chunk."""
        assert self.kept.hidden is not None
        return self.kept.hidden.fetch(chunk.start, chunk.stop)

    @property
    def upper(self) -> Row | None:
        """Where the gradient of the layer's output is, if it does not come as a tensor."""
        return self.call.run.gradient if self.call.run.streams and not self.call.last else None

    def output_gradient(self, chunk: Chunk) -> Tensor | None:
        """Gradient [C, M] of a chunk's whole output, None if nothing reached it."""
        if self.dout is None:
            return None
        if self.upper is not None:
            return self.upper.fetch(chunk.start, chunk.stop)
        if not self.call.trims:
            return self.dout[0, chunk.start : chunk.stop]
        first = self.call.run.layout.reads(0, chunk.start)
        part_RM = self.dout[0, first : first + chunk.reads]
        rows = chunk.stop - chunk.start
        if chunk.reads == rows:
            return part_RM
        whole_CM = part_RM.new_zeros(rows, part_RM.shape[-1])
        return whole_CM.index_copy(0, chunk.read_rows.to(whole_CM.device), part_RM)

    def _prefetch_before(self, i: int) -> None:
        """Bring back the chunk that is visited after chunk i."""
        for j in range(i - 1, -1, -1):
            chunk = self.call.memory.chunks[j]
            if self.call.visits(chunk):
                wanted = self.call.needs_output(chunk)
                self.kept.prefetch(chunk, attention=wanted)
                if wanted and self.dout is not None and self.upper is not None:
                    self.upper.prefetch(chunk.start, chunk.stop)
                return

    def chunk(self, i: int) -> None:
        """Recompute chunk i, backpropagate, and hand on what its predecessors are owed."""
        call, chunk = self.call, self.call.memory.chunks[i]
        wanted = call.needs_output(chunk)
        dhidden_CM = None
        if call.visits(chunk):
            hidden_CM = self.hidden(chunk)
            saved = self.kept.attention(chunk) if wanted else None
            dout_CM = self.output_gradient(chunk) if wanted else None
            self._prefetch_before(i)
            visit = self._fused if self.fused is not None else self._autograd
            dhidden_CM = visit(i, hidden_CM, saved, wanted, dout_CM)
        if self.gradient is None:
            return
        if dhidden_CM is None:
            dhidden_CM = self.like_M.new_zeros(chunk.stop - chunk.start, len(self.like_M))
        self.gradient.save(chunk.start, chunk.stop, dhidden_CM)

    def _fused(self, i: int, hidden_CM: Tensor, saved: Any, wanted: bool, dout_CM: Tensor | None) -> Tensor | None:
        call, chunk, fused = self.call, self.call.memory.chunks[i], self.fused
        assert fused is not None
        place = (hidden_CM, call.cos_sin(chunk), call.run.kv, chunk)
        need_dx = self.gradient is not None
        if not wanted:
            dx_CM, grads = fused.keys_backward(*place, need_dx)
        elif dout_CM is None:
            return None
        else:  # the gradient's row may be written over: the layer's backward adds into its copy
            dx_CM, grads = fused.backward(dout_CM, *place, saved, need_dx)
        self.dparams.add([grads.get(p) for p in self.dparams.params])
        return dx_CM

    def _autograd(self, i: int, hidden_CM: Tensor, saved: Any, wanted: bool, dout_CM: Tensor | None) -> Tensor | None:
        call, memory, chunk = self.call, self.call.memory, self.call.memory.chunks[i]
        set_rng_state(self.kept.rng[i])
        hidden_CM = hidden_CM.detach().requires_grad_(self.gradient is not None)
        handed = memory.open(i, stop=not wanted and memory.stops_early, track=True, saved=saved)
        with torch.enable_grad():
            out_CM = call.on(i, hidden_CM, handed)
            pairs = memory.loose_ends(i, handed)  # type: ignore[arg-type]
            if wanted and out_CM is not None and dout_CM is not None and (not call.trims or chunk.reads):
                pairs.append((out_CM, dout_CM))
            if wanted and call.router is not None:
                logits_CE = call.run.captured.pop(call.router)
                if self.drouter_TE is not None:
                    pairs.append((logits_CE, self.drouter_TE[chunk.start : chunk.stop].reshape(logits_CE.shape)))
        pairs = [(t, d) for t, d in pairs if t.requires_grad]
        if not pairs:
            return None
        leaves = memory.leaves(handed)  # type: ignore[arg-type]
        inputs = [hidden_CM] if self.gradient is not None else []
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
