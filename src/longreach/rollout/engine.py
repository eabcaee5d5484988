"""The rollout engine: completions from the model that trains, in the same process, on the same weights.

Continuous batching over rows; the keys of a prompt computed once and read once a step for all its completions; random numbers
that depend on a completion's seed and token alone.

Shape suffixes: B rows of a step, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..context.install import Engine, enable, engine_of
from ..context.reuse import Prefill
from ..quant.embedding import rows_dtype
from .cache import LayerCache, Limits, PagePool
from .fused_step import FusedStep
from .graphs import GraphLadder
from .module_step import ModuleStep, probe
from .plan import PREFILL, Demand, RolloutOptions, device_budget, limits_for
from .prefill import prefill
from .sampling_step import SamplingStep
from .scheduler import Request, Scheduler
from .state import RowState
from .stops import StopWatch
from .support import check_rollout

LAG = 1  # steps that a GPU is ahead of what the host has read


@dataclass
class _InFlight:
    """A step whose tokens are on their way to the host."""

    requests: list[Request | None]
    ids: Tensor
    logprobs: Tensor
    ready: Any


@dataclass
class Stats:
    """What a call of `run` did: tokens drawn, prompt tokens computed, steps, and the most rows in use."""

    tokens: int = 0
    prefilled: int = 0
    steps: int = 0
    rows: int = 0


class RolloutEngine:
    """Decodes requests on one model. Kept between calls: its memory, its joined weights and its graphs are used again.

    Args:
        model: a causal language model of Transformers, bare or in a PEFT wrapper.
        options: see `RolloutOptions`.
        tokenizer: for stop strings and constraints.

    Raises:
        UnsupportedModelError: the architecture can't be decoded here; the message says what to use instead.
    """

    def __init__(self, model: nn.Module, options: RolloutOptions | None = None, tokenizer: Any = None) -> None:
        self.model, self.options, self.tokenizer = model, options or RolloutOptions(), tokenizer
        if engine_of(model) is None:
            enable(model, parity_check=False)
        engine = engine_of(model)
        assert engine is not None
        self.engine: Engine = engine
        check_rollout(engine.config)
        self.device = engine.causal.get_input_embeddings().weight.device
        self.layers: list[LayerCache] | None = None
        self.setting: tuple[Any, ...] | None = None
        self.state: RowState | None = None
        self.step: FusedStep | ModuleStep | None = None
        self.graphs: GraphLadder | None = None
        self.stats = Stats()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model makes an engine of its own

    def release(self) -> None:
        """Give the memory of keys, values and graphs back; the next `run` makes them anew."""
        self.state = self.step = self.graphs = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(
        self,
        requests: Sequence[Request],
        on_token: Callable[[Request], bool | None] | None = None,
        keep: Prefill | None = None,
    ) -> None:
        """Decode requests to their ends.

        Args:
            requests: `ids`, `logprobs` and `finish_reason` are filled in.
            on_token: called after each token of each request; returning False cancels that request.
            keep: what a training step on these weights can use of the prompts' computation goes there.
        """
        if not requests:
            return
        with torch.no_grad(), _evaluating(self.model):
            self._prepare(requests)
            assert self.state is not None
            _Run(self, self.state, requests, on_token, keep).loop()

    def _prepare(self, requests: Sequence[Request]) -> None:
        """Memory for the requests, and the weights as they are now."""
        demand = Demand(
            len(requests),
            len({r.prompt for r in requests}),
            max(len(r.prompt) for r in requests),
            max(r.params.max_new_tokens for r in requests),
        )
        setting = self._setting()
        if setting != self.setting:  # moved, cast, or under another autocast
            self.state = self.step = self.graphs = None
            self.device, self.layers, self.setting = setting[0], probe(self.model, self.engine), setting
        assert self.layers is not None
        if self.state is None or not self._fits(self.state.limits, demand):
            self.state = self.step = self.graphs = None  # before the new one is made
            limits = self._limits(demand)
            pool = PagePool(self.layers, limits, self.device)
            self.state = RowState(pool, limits, self.device)
        if self.step is None or not self.step.current():
            self.step, self.graphs = self._make_step(self.state), None
        self.step.refresh()
        if (
            self.graphs is None
            and isinstance(self.step, FusedStep)
            and self.step.captures
            and self.device.type == "cuda"
            and self.options.graphs
        ):
            self.graphs = GraphLadder(self.step, self.state)

    def _setting(self) -> tuple[Any, ...]:
        """What the kinds of the tensors depend on."""
        embedding = self.engine.causal.get_input_embeddings()
        device = embedding.weight.device
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        return device, rows_dtype(embedding), autocast

    def _fits(self, limits: Limits, demand: Demand) -> bool:
        """Whether memory made for another call serves this one as well as memory of its own would."""
        if limits.prompt < demand.prompt or limits.new < demand.new:
            return False
        return limits.rows >= demand.requests or limits.rows >= self._limits(demand).rows

    def _limits(self, demand: Demand) -> Limits:
        assert self.layers is not None
        budget = self.options.kv_bytes or device_budget(self.model, self.device)
        return limits_for(demand, self.options, self.layers, budget, self.device.type == "cuda")

    def _make_step(self, state: RowState) -> FusedStep | ModuleStep:
        fused = FusedStep.of(self.engine, state) if self.options.fused else None
        return fused or ModuleStep(self.model, self.engine, state)


class _Run:
    """One call of `run`."""

    def __init__(
        self,
        owner: RolloutEngine,
        state: RowState,
        requests: Sequence[Request],
        on_token: Callable[[Request], bool | None] | None,
        keep: Prefill | None,
    ) -> None:
        self.owner, self.state, self.on_token, self.keep = owner, state, on_token, keep
        self.cuda = owner.device.type == "cuda"
        options = owner.options
        self.scheduler = Scheduler(
            state.limits,
            *state.pool.allocators(),
            share=options.share_prompts,
            prefill=1 if options.batch_invariant else PREFILL[self.cuda],
        )
        self.scheduler.add(requests)
        vocabulary = owner.engine.config.vocab_size
        self.sampling = SamplingStep(state, vocabulary, owner.tokenizer, requests)
        self.lag = LAG if self.cuda and not self.sampling.needs_host else 0
        self.watch = StopWatch(owner.tokenizer, requests)
        self.in_flight: deque[_InFlight] = deque()
        owner.stats = self.stats = Stats()

    def loop(self) -> None:
        state, scheduler = self.state, self.scheduler
        state.stop(range(state.limits.rows))
        try:
            while scheduler.busy:
                self._admit()
                if scheduler.active:
                    self._launch()
                while len(self.in_flight) > (self.lag if scheduler.active else 0):
                    self._absorb(self.in_flight.popleft())
        finally:
            self.in_flight.clear()
            if self.cuda:
                torch.cuda.synchronize(self.owner.device)

    def _admit(self) -> None:
        """Rows for waiting requests; their prompts' keys."""
        scheduler, state, owner = self.scheduler, self.state, self.owner
        while admission := scheduler.admit():
            batches = [[p] for p in admission.prompts] if owner.options.batch_invariant else [admission.prompts]
            for prompts in batches:
                self.stats.prefilled += prefill(owner.model, owner.engine, prompts, state.pool, self.keep)
            state.start(admission.requests)
            self.sampling.start(admission.requests)
        if not scheduler.order:
            moves = scheduler.compact()
            state.move(moves)
            self.sampling.move(moves)
        state.write_entries({i: scheduler.entries[i] for i in sorted(scheduler.changed_entries)})
        scheduler.changed_entries.clear()

    def _launch(self) -> None:
        scheduler, state, owner = self.scheduler, self.state, self.owner
        rows = state.limits.rows if owner.options.batch_invariant else scheduler.extent
        if owner.graphs is not None:
            rows, logits_BV = owner.graphs.logits(rows)
        else:
            assert owner.step is not None
            logits_BV = owner.step.logits(rows)
        ids_B, logprob_B = self.sampling.draw(logits_BV, scheduler.rows[:rows])
        state.take(rows, ids_B)
        self.stats.steps += 1
        self.stats.rows = max(self.stats.rows, len(scheduler.active))
        self.in_flight.append(self._send(scheduler.rows[:rows], ids_B, logprob_B))

    def _send(self, requests: list[Request | None], ids_B: Tensor, logprob_B: Tensor) -> _InFlight:
        if not self.cuda:
            return _InFlight(requests, ids_B, logprob_B, None)
        ids, logprobs = (torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in (ids_B, logprob_B))
        ids.copy_(ids_B, non_blocking=True)
        logprobs.copy_(logprob_B, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return _InFlight(requests, ids, logprobs, ready)

    def _absorb(self, step: _InFlight) -> None:
        """Tokens to their requests; ended ones leave."""
        if step.ready is not None:
            step.ready.synchronize()
        ended = []
        for request, token, logprob in zip(step.requests, step.ids.tolist(), step.logprobs.tolist()):
            if request is None or request.finish_reason is not None:
                continue  # an idle row, or one that ran on before the host knew
            request.ids.append(token)
            request.logprobs.append(logprob)
            self.stats.tokens += 1
            reason = self._ends(request, token)
            if self.on_token is not None and self.on_token(request) is False:
                reason = reason or "cancelled"
            if reason is not None:
                ended.append(self.scheduler.finish(request, reason))
        self.state.stop(ended)

    def _ends(self, request: Request, token: int) -> str | None:
        if token in request.stops or self.watch.stops(request) or self.sampling.complete(request, token):
            return "stop"
        return "length" if len(request.ids) >= request.params.max_new_tokens else None


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Modules in evaluation mode, and afterwards each as it was."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
