"""A rollout's prefill as part of the forward of the training step.

Where completions are trained on the weights that drew them, the forward over their prompts has been done: the rollout ran the
prompts through these same chunked layers. Of each layer it can leave the input and, where the plan saves it, the attention;
the training forward of a prompt is then its keys and values and nothing else. The backward is what it always is.

This is exact under conditions that are checked before the first layer runs, not assumed: the same weights, the same adapters, the
same dtypes, an embedding without hooks, and layers that run by their hand-written form (which has no dropout) in both passes.
Where one does not hold, the prompts are computed again.

Shape suffixes: T packed tokens, C tokens of a chunk; `...` whatever a token carries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .fused import unhooked
from .fused_moe import fused_layer
from .layer import Kept, LayerCall, Run
from .offload import DevicePieces, DeviceRow, HostRow, Lease, Row
from .tree import ROOT, Layout

if TYPE_CHECKING:
    from .install import Engine

logger = logging.getLogger(__name__)


class ReuseError(RuntimeError):
    """A prefill was to be reused by all means, and can't be exactly."""


def weights_version(decoder: nn.Module) -> tuple[tuple[int, int], ...]:
    """Changes with every write to a decoder's parameters, adapters included (writes through `.data` are not seen)."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in decoder.parameters())


class Batch:
    """Prompts that a rollout has computed together.

    Attributes:
        layers: what each layer left: its input (but the first, whose input is the embedding), attention output and lse.
        forms: the adapters that each layer's hand-written form read; None where its module ran.
    """

    def __init__(self, layout: Layout, lease: Lease | None) -> None:
        self.layout, self.lease = layout, lease
        self.layers: list[Kept] = []
        self.forms: list[Any] = []
        self.dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of hidden states, of products

    def kept(self, call: LayerCall, hidden: Tensor) -> Kept:
        """What collects a layer's values while it runs."""
        if call.index == 0:
            self.dtypes = (hidden.dtype, call.dtype)
        kept = Kept(call.run, call.index)
        kept.hidden = self._row() if call.index else None
        kept.out, kept.lse_T = self._row(), self._row()
        self.layers.append(kept)
        return kept

    def done(self, call: LayerCall) -> None:
        """A layer has run."""
        self.forms.append(call.adapters if call.form == "fused" else None)

    def _row(self) -> Row:
        tokens = self.layout.tokens
        return DeviceRow(tokens) if self.lease is None else HostRow(self.lease, tokens)


class Prefill:
    """What the prefill of one rollout leaves for training on the same weights. Drop it once they change.

    Args:
        on_host: it waits in the engine's host memory; else on the model's device.
        save_attention: attention outputs are kept too.
        required: raise `ReuseError` in a training step that can't use it, rather than compute the prompts again; prompts that
            it does not hold are computed, and it is said.
        said: reasons that were logged already; hand the same set to every prefill of a trainer.
    """

    def __init__(
        self, *, on_host: bool, save_attention: bool, required: bool = False, said: set[str] | None = None
    ) -> None:
        self.on_host, self.save_attention, self.required = on_host, save_attention, required
        self.said = set() if said is None else said
        self.places: dict[bytes, tuple[Batch, int]] = {}
        self.version: tuple[tuple[int, int], ...] | None = None

    def collect(self, engine: Engine, run: Run) -> None:
        """Keep what a run over prompts is about to compute."""
        version = weights_version(engine.decoder)
        if version != self.version:
            self.places, self.version = {}, version
        run.collecting = Batch(run.layout, None)
        if self.on_host:
            run.collecting.lease = engine.pool.lease(run.collecting)
        run.save_attention = self.save_attention

    def add(self, run: Run) -> None:
        """The run is through."""
        batch, run.collecting = run.collecting, None
        assert batch is not None
        for i in range(len(batch.layout.length)):
            self.places.setdefault(_key(batch.layout, i), (batch, batch.layout.start[i]))

    def offer(self, engine: Engine, run: Run) -> None:
        """Let a training run use what it can: whole chunks at its beginning, where the prompts are."""
        spans, end = self._spans(run.layout)
        tokens = max((chunk.stop for chunk in run.layout.chunks(run.chunk) if chunk.stop <= end), default=0)
        if tokens:
            run.reused = Reused(self, engine, run, spans, tokens)
        elif self.required:
            self.say("a step's first prompts are not those that the rollout has computed")

    def say(self, reason: str) -> None:
        """Log, once, why prompts are computed again."""
        if reason not in self.said:
            self.said.add(reason)
            logger.warning("the rollout's prefill is not reused, prompts are computed again: %s", reason)

    def _spans(self, layout: Layout) -> tuple[list[Span], int]:
        """Where the first segments' tokens are, neighbours joined; and the end of them."""
        spans: list[Span] = []
        end = 0
        for i in layout.order:
            found = self.places.get(_key(layout, i)) if layout.parent[i] == ROOT else None
            stop = end + layout.length[i]
            if found is None or not torch.equal(layout.positions[end:stop], torch.arange(stop - end)):
                break
            batch, at = found
            last = spans[-1] if spans else None
            if last is not None and last.batch is batch and last.at + last.stop - last.start == at:
                spans[-1] = Span(last.start, stop, batch, last.at)
            else:
                spans.append(Span(end, stop, batch, at))
            end = stop
        return spans, end


@dataclass(frozen=True)
class Span:
    """Packed tokens [start, stop) of a training run are tokens of a batch from `at` on."""

    start: int
    stop: int
    batch: Batch
    at: int


class Reused:
    """The first tokens of a training run, whose forward a prefill has done.

    Attributes:
        tokens: how many.
    """

    def __init__(self, prefill: Prefill, engine: Engine, run: Run, spans: list[Span], tokens: int) -> None:
        self.prefill, self.layers, self.decoder = prefill, engine.layers, engine.decoder
        self.embedding = engine.causal.get_input_embeddings()
        self.rest, self.lease = run.layout.tokens - tokens, run.lease
        self.spans, self.tokens = spans, tokens
        self.attended = prefill.save_attention and run.save_attention

    def holds(self, call: LayerCall, hidden: Tensor) -> bool:
        """Whether the training run of which this is the first layer may use it. Says once why not.

        Raises:
            ReuseError: if not, and it was required.
        """
        reason = self._obstacle(call, hidden)
        if reason is None:
            return True
        if self.prefill.required:
            raise ReuseError(f"the prefill can't be reused by this training step: {reason}")
        self.prefill.say(reason)
        return False

    def _obstacle(self, call: LayerCall, hidden: Tensor) -> str | None:
        if weights_version(self.decoder) != self.prefill.version:
            return "the weights have changed since the rollout"
        if call.run.keep_every > 1:
            return "only the inputs of some layers are kept (keep_every)"
        if call.run.routers:
            return "the router loss needs the router's logits of every token"
        if not unhooked(self.embedding):
            return "the embedding has hooks, which may act in training alone (neftune_noise_alpha?)"
        batches = list({id(span.batch): span.batch for span in self.spans}.values())
        if any(batch.dtypes != (hidden.dtype, call.dtype) for batch in batches):
            return "training computes in another dtype than the rollout (autocast?)"
        for i, layer in enumerate(self.layers):
            form = None
            if call.run.fuse and unhooked(layer):  # what else is to be checked, the layer does in its turn
                form = fused_layer(layer, call.dtype, keep=False, keep_linears=False, checked=True)
            if form is None:
                return f"layer {i} ({type(layer).__name__}) is not run by a hand-written form: it may have dropout or hooks"
            if any(batch.forms[i] != form.adapters for batch in batches):
                return f"layer {i} has other adapters than in the rollout"
        return None

    def inputs(self, index: int, rest: Row | None = None) -> Row:
        """The input of a layer other than the first; `rest` holds the tokens that were not reused, None for a new place."""
        if rest is None:
            rest = DeviceRow(self.rest) if self.lease is None else HostRow(self.lease, self.rest)
        return PrefixedRow(self.spans, self.tokens, lambda batch: batch.layers[index].hidden, rest)

    def attention(self, index: int) -> tuple[Row, Row]:
        """A layer's attention output and lse, likewise."""
        return (
            PrefixedRow(self.spans, self.tokens, lambda batch: batch.layers[index].out, self._pieces()),
            PrefixedRow(self.spans, self.tokens, lambda batch: batch.layers[index].lse_T, self._pieces()),
        )

    def _pieces(self) -> Row:
        return DevicePieces() if self.lease is None else HostRow(self.lease, self.rest)


class PrefixedRow:
    """One value per packed token: of the first tokens from a prefill, of the others from a row of their own."""

    def __init__(self, spans: list[Span], tokens: int, row_of: Callable[[Batch], Row | None], rest: Row) -> None:
        self.tokens, self.rest = tokens, rest
        found = [(span, row_of(span.batch)) for span in spans]
        self.parts = [(span, row) for span, row in found if row is not None]

    def save(self, start: int, stop: int, x: Tensor) -> None:
        """What the prefill has given stays."""
        first = max(start, self.tokens)
        if first < stop:
            self.rest.save(first - self.tokens, stop - self.tokens, x[first - start :])

    def wait_saved(self) -> None:
        self.rest.wait_saved()

    def prefetch(self, start: int, stop: int) -> None:
        for row, a, b in self._split(start, stop):
            row.prefetch(a, b)

    def fetch(self, start: int, stop: int) -> Tensor:
        found = [row.fetch(a, b) for row, a, b in self._split(start, stop)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _split(self, start: int, stop: int) -> Iterator[tuple[Row, int, int]]:
        """(row, start, stop there) of the pieces of a range."""
        end = min(stop, self.tokens)
        for span, row in self.parts:
            a, b = max(start, span.start), min(end, span.stop)
            if a < b:
                yield row, span.at + a - span.start, span.at + b - span.start
        if stop > self.tokens:
            yield self.rest, max(start, self.tokens) - self.tokens, stop - self.tokens


def _key(layout: Layout, segment: int) -> bytes:
    start = layout.start[segment]
    return layout.input_ids[start : start + layout.length[segment]].numpy().tobytes()
