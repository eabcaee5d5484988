"""How the engine hooks into an unmodified Transformers model: the only file that knows its internals.

Used: `AttentionInterface.register` for the attention function; forward hooks of torch on the decoder, which switch the engine
on for one pass and off again; each layer's `_gradient_checkpointing_func` (documented in `GradientCheckpointingLayer`), which
hands us the layer call; keyword arguments that flow layer -> attention function; for linear attention a `Cache` subclass.
Outside such a pass (generation, for one) the model is what Transformers made it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..attention import AttentionSpec, attention
from .arguments import laid_down
from .auto import Loaded, automatic, explained, processes_here
from .autograd import run_layer
from .fused import unhooked
from .kv import CHUNK_KWARG, ChunkContext
from .layer import LayerCall, Run, lowest_trained
from .offload import EmbeddingRow, HostPool
from .plan import Plan
from .precision import WideResidual, compute_dtype
from .rows import check_holes, rows_layout, to_rows
from .support import PLAIN_EMBEDDING, TESTED, UnsupportedModelError, check_supported, check_window, take_over_adapters
from .tree import Layout

logger = logging.getLogger(__name__)

ATTENTION = "longreach"
ENGINE = "_longreach_engine"  # attribute of the Transformers model: copied and freed with it


def chunk_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers' attention modules call: [1, H, C, D] in, [1, C, H, W] out."""
    context: ChunkContext | None = kwargs.get(CHUNK_KWARG)
    if context is None:
        raise RuntimeError(
            f"{type(module).__name__} dropped the keyword argument {CHUNK_KWARG!r}: it can't run in chunks"
        )
    if kwargs.get("indices") is not None:
        raise UnsupportedModelError(f"{type(module).__name__} picks keys by index; sparse indexers can't run in chunks")
    check_window(module, sliding_window)
    if torch.is_autocast_enabled(query.device.type):  # as for PyTorch's own attention
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    q_CHD, k_CKD, v_CKW = (x[0].transpose(0, 1) for x in (query, key, value))
    if context.stop:
        context.stop_at(k_CKD, v_CKW)
    spec = AttentionSpec(
        kv=context.kv,
        start=context.chunk.start,
        calls=context.chunk.calls(sliding_window),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        saved=context.saved,
    )
    out_CHW, lse_HC = attention(q_CHD, k_CKD, v_CKW, spec, s_aux)
    context.attended = (out_CHW.detach(), lse_HC)
    return out_CHW[None], None


AttentionInterface.register(ATTENTION, chunk_attention)


@dataclass(frozen=True)
class Options:
    """How `enable` was asked to run a model; None leaves the choice to each run's size."""

    chunk: int | None = None
    offload: str | None = None
    save_attention: bool | None = None
    keep_every: int | None = None
    fuse: bool = True  # hand-written layers where there is one; tests compare with the module itself


class Engine:
    """Exact chunked execution of one decoder; made by `enable`."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.causal = causal_lm(model)
        self.decoder = self.causal.get_decoder()
        self.config = self.decoder.config
        check_supported(self.config)
        kind = self.config.model_type
        if kind not in TESTED:
            logger.warning("model_type %r is not in the exactness tests; the parity check decides", kind)
        if not hasattr(self.decoder, "layers"):
            raise UnsupportedModelError(
                f"{type(self.decoder).__name__} keeps its layers elsewhere than in `.layers`; models of this form can't run in "
                "chunks. Train it with stock TRL."
            )
        self.layers: list[nn.Module] = list(self.decoder.layers[: self.config.num_hidden_layers])
        missing = [type(m).__name__ for m in self.layers if not hasattr(m, "gradient_checkpointing")]
        if missing:
            raise UnsupportedModelError(
                f"{type(self.decoder).__name__}: {missing[0]} is no GradientCheckpointingLayer, so it can't run in chunks"
            )
        self.index = {layer: i for i, layer in enumerate(self.layers)}
        self.options = options
        self.pool = HostPool()
        self.paused = False
        self.checked: frozenset[str] | None = None  # trainable parameters that the parity check has seen
        self.pending: Run | None = None
        self.run: Run | None = None
        self._restore: list[Any] = []
        self._loaded: tuple[list[Any], Loaded] | None = None
        self._scatter: tuple[Tensor, int, int] | None = None
        self.routers = self._find_routers()
        self.precision = WideResidual(self.decoder, self.layers, kind)  # its hooks come before ours
        self.decoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.decoder.register_forward_hook(self._leave, always_call=True)
        for router in self.routers.values():
            router.register_forward_hook(self._capture_router)

    def _find_routers(self) -> dict[int, nn.Module]:
        recorder = (getattr(type(self.decoder), "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", recorder)
        if kind is None:
            return {}
        found = {i: [m for m in layer.modules() if isinstance(m, kind)] for i, layer in enumerate(self.layers)}
        return {i: modules[0] for i, modules in found.items() if modules}

    def make_run(self, layout: Layout, *, compact: bool, backward: bool, router_logits: bool = False) -> Run:
        policy = (plan := self.settle(layout.tokens, len(layout.read_index), compact)).policy
        run = Run(
            layout=layout,
            chunk=policy.chunk,
            layers=len(self.layers),
            compact=compact,
            backward=backward,
            save_attention=policy.save_attention,
            fuse=self.options.fuse,
            replay_random=any(m.training for m in self.causal.modules()),
            resumed=functools.partial(self._resumed, plan=plan),
            routers=self.routers if router_logits else {},
            offload=policy.offload,
            keep_every=policy.keep_every,
            lowest=lowest_trained(self.decoder, self.layers) if policy.keep_every > 1 else 0,
        )
        if run.streams or (backward and policy.on_host):
            run.use(self.pool.lease(run))
        return run

    def settle(self, tokens: int, labelled: int | None = None, compact: bool = True) -> Plan:
        """How a run goes: from sizes and the total memory of card and host, never from what is free."""
        fixed = {k: v for k, v in asdict(self.options).items() if v is not None and k != "fuse"}
        # Reading a model takes as long as some layers: again only when other parameters train or modules have come or gone.
        trained = [
            (p.requires_grad, p.device, p.dtype)
            for layer in self.layers[:1] + self.layers[-1:]
            for p in layer.parameters()
        ]
        if self._loaded is None or self._loaded[0] != trained:
            self._loaded = trained, Loaded.of(self.causal, processes_here())
        return automatic(self._loaded[1], tokens, labelled or tokens, compact, fixed)

    @contextlib.contextmanager
    def _resumed(self, run: Run, plan: Plan) -> Iterator[None]:
        kept = self.run, self.config._attn_implementation
        self.run, self.config._attn_implementation = run, ATTENTION
        try:
            with explained(lambda: plan):
                yield
        finally:
            self.run, self.config._attn_implementation = kept

    @contextlib.contextmanager
    def expecting(self, run: Run) -> Iterator[None]:
        """The next forward of the decoder computes this run."""
        self.pending = run
        try:
            yield
        finally:
            self.pending = None

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Run the model as Transformers made it (the parity check's other side)."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    # ---- hooks on the decoder

    def _enter(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        if self.paused:
            return None
        if self.run is not None:
            # An interrupt ended the last pass before the closing hook; grad mode has been the caller's since.
            self._switch_off(torch.is_grad_enabled())
        run, self.pending = self.pending, None
        cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
        if run is None:
            if cached or kwargs.get("use_cache"):
                return None
            args, kwargs, run = self._plain(args, dict(kwargs))
        else:
            given = kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]
            if cached or given is None or given.shape[1] != run.layout.tokens:
                raise UnsupportedModelError(
                    "something between the caller and the decoder changes its input (prompt or prefix tuning?): chunked "
                    f"execution was asked for {run.layout.tokens} tokens. Use an adapter inside the layers, such as LoRA."
                )
        kwargs["use_cache"] = False
        kwargs["return_dict"] = True
        embedding = self.decoder.get_input_embeddings()
        if run.streams and kwargs.get("input_ids") is not None and self._embeds_plainly(embedding):
            ids_T = kwargs.pop("input_ids")[0]
            like_M = self.precision.widened(embedding(ids_T[:1]).detach()[0])
            run.inputs[0] = EmbeddingRow(embedding, ids_T, like_M.dtype)
            kwargs["inputs_embeds"] = run.stand_in(like_M)
        self._switch_on(run)
        return args, kwargs

    def _embeds_plainly(self, embedding: nn.Module) -> bool:
        """Whether the first layer's input is the frozen embedding's output and nothing else."""
        trained = any(p.requires_grad for p in embedding.parameters())
        return self.config.model_type in PLAIN_EMBEDDING and not trained and unhooked(embedding)

    def _switch_on(self, run: Run) -> None:
        self.run = run
        grad = torch.is_grad_enabled()
        old = [
            (m, m.gradient_checkpointing, m.training, m.__dict__.get("_gradient_checkpointing_func"))
            for m in self.layers
        ]
        self._restore = [self.config._attn_implementation, grad, old]
        self.config._attn_implementation = ATTENTION
        # Transformers takes the checkpointing path only for a training layer with gradients on; scoring goes the same way and
        # records nothing. Only the layer object's own flag is set: dropout and everything below keep theirs.
        torch.set_grad_enabled(True)
        for layer in self.layers:
            layer.gradient_checkpointing = True  # type: ignore[assignment]
            layer._gradient_checkpointing_func = self._layer  # type: ignore[assignment]
            layer.training = True

    def _switch_off(self, grad: bool) -> None:
        """The model as it was before the pass, and the grad mode given."""
        self.run = None
        implementation, _, layers = self._restore
        self.config._attn_implementation = implementation
        torch.set_grad_enabled(grad)
        for layer, checkpointing, training, func in layers:
            layer.gradient_checkpointing, layer.training = checkpointing, training
            if func is None:
                layer.__dict__.pop("_gradient_checkpointing_func", None)
            else:
                layer._gradient_checkpointing_func = func

    def _leave(self, decoder: nn.Module, args: tuple[Any, ...], output: Any):
        run = self.run
        if run is None:
            return None
        self._switch_off(self._restore[1])
        scatter, self._scatter = self._scatter, None
        if output is None:  # the forward raised
            return None
        hidden = output.last_hidden_state if run.backward else output.last_hidden_state.detach()
        if scatter is None:
            run.hidden = hidden
        else:
            hidden = to_rows(hidden[0], *scatter)
            if run.router_logits:
                output.router_logits = tuple(to_rows(x, *scatter).flatten(0, 1) for x in run.router_logits)
                run.router_logits = []
        output.last_hidden_state = hidden
        return output

    def _capture_router(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.run is not None and self.run.routers:
            self.run.captured[router] = output[0] if isinstance(output, tuple) else output

    def _layer(self, fn: functools.partial[Any], *args: Any) -> Tensor:
        """Called by `GradientCheckpointingLayer` in place of torch's checkpoint function."""
        assert self.run is not None
        kwargs = dict(fn.keywords)
        if hasattr(fn.func, "__self__"):  # Transformers before 5.23: a bound method
            layer, call = fn.func.__self__, fn.func
        else:
            layer, call = fn.args[0], functools.partial(fn.func, fn.args[0])
        index = self.index[layer]
        if index in self.run.inputs and args[0].stride(1) != 0:
            raise UnsupportedModelError(
                f"{self.config.model_type!r} changes hidden states between its layers, so they can't stream from host memory; "
                "pass offload='host'"
            )
        if any(isinstance(m, Tensor) for m in _leaves(kwargs.pop("attention_mask", None))):
            raise UnsupportedModelError(
                f"{self.config.model_type!r} hands its layers a prepared attention mask; what a mask alone expresses can't "
                "run in chunks. Train it with stock TRL."
            )
        kwargs["attention_mask"] = None
        cache_name = "cache" if "cache" in kwargs else "past_key_values"
        layer_types = getattr(self.config, "layer_types", None)
        linear = layer_types is not None and layer_types[index] == "linear_attention"
        hidden, kwargs = self.precision.widened(args[0]), self.precision.narrowed(kwargs)
        return run_layer(
            LayerCall(self.run, index, layer, call, kwargs, linear, cache_name, compute_dtype(hidden)), hidden
        )

    # ---- a plain call of the user's: padded rows in, padded rows out, no padding in between

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Run]:
        ids, embeds = kwargs.pop("input_ids", None), kwargs.pop("inputs_embeds", None)
        if args:
            ids, args = args[0], args[1:]
        if args:
            raise ValueError("chunked execution: call the decoder with keyword arguments beyond input_ids")
        for name in ("output_hidden_states", "output_attentions"):
            wanted = kwargs.get(name)
            if getattr(self.config, name, False) if wanted is None else wanted:
                raise ValueError(f"{name}=True can't be had from chunked layers: they keep neither; pass {name}=False")
        given = ids if ids is not None else embeds
        B, S = given.shape[:2]
        mask = kwargs.pop("attention_mask", None)
        if isinstance(mask, dict) or (mask is not None and mask.ndim != 2):
            raise ValueError("attention_mask must be two-dimensional (1 for tokens, 0 for padding) or None")
        positions = kwargs.get("position_ids")
        if positions is not None and positions.ndim == 3:
            raise ValueError("position_ids of three dimensions (image or video positions) can't run in chunks")
        valid = torch.ones(B, S, dtype=torch.bool) if mask is None else mask.bool().cpu()
        check_holes(self.config, valid)
        layout = rows_layout(valid, None if positions is None else positions.expand(B, S).cpu(), mask is None)
        self._scatter = (valid.flatten().nonzero().squeeze(1).to(given.device), B, S)
        take = self._scatter[0]
        if ids is not None:
            kwargs["input_ids"] = ids.reshape(-1)[take][None]
        else:
            kwargs["inputs_embeds"] = embeds.reshape(B * S, -1)[take][None]
        kwargs["position_ids"] = layout.positions[None].to(given.device)
        kwargs["attention_mask"] = None
        wants_router = kwargs.pop("output_router_logits", None)
        wants_router = getattr(self.config, "output_router_logits", False) if wants_router is None else wants_router
        run = self.make_run(layout, compact=False, backward=torch.is_grad_enabled(), router_logits=bool(wants_router))
        if self.routers:
            kwargs["output_router_logits"] = False
        return args, kwargs, run


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [leaf for v in x.values() for leaf in _leaves(v)]
    if isinstance(x, (tuple, list)):
        return [leaf for v in x for leaf in _leaves(v)]
    return [x]


def causal_lm(model: nn.Module) -> Any:
    """The Transformers model inside DDP, accelerate and PEFT wrappers."""
    while hasattr(model, "module") and isinstance(model.module, nn.Module):
        model = model.module
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no Transformers causal language model (it has no get_decoder)"
        )
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; give the causal language model that it belongs to"
        )
    return model


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that `enable` installed, or None."""
    return causal_lm(model).__dict__.get(ENGINE)


def enable(
    model: nn.Module,
    *,
    chunk: int | str = "auto",
    offload: str = "auto",
    save_attention: bool | str = "auto",
    keep_every: int | str = "auto",
    parity_check: bool = True,
) -> None:
    """Run a Transformers model's layers in exact chunks from now on.

    After this, `model(...)` without a KV cache goes layer by layer and chunk by chunk, in training and in evaluation, with the
    gradients of the whole sequence; padding is left out; `generate` is untouched. Calling it again changes the options.

    Args:
        model: a causal language model of Transformers, bare or in a PEFT, DDP or accelerate wrapper.
        chunk: tokens per chunk, or "auto".
        offload: what waits in host memory: "none"; "host": layer inputs and saved attention; "rows": the hidden row and its
            gradient between the layers too; "keys": keys, values and their gradients too, so that GPU memory hardly grows
            with the context; or "auto". No choice changes a bit of the result.
        save_attention: keep each chunk's attention output so that the backward does not compute it again; "auto" or a bool.
        keep_every: keep the inputs of every so-many-th layer only; the backward computes the others again (less host or GPU
            memory for one more forward of them); "auto" or a whole number.
        parity_check: compare a small tree with stock eager attention now, and raise `ParityError` on a mismatch; done once
            for a set of trainable parameters.

    Raises:
        ValueError: an option is off; the message names it.
        UnsupportedModelError: the architecture can't run in chunks.
        ParityError: loss or gradients differ from stock by more than the dtype's rounding.
    """
    options = Options(**laid_down(chunk, offload, save_attention, keep_every, free="auto"))
    take_over_adapters(model)
    engine = engine_of(model)
    if engine is None:
        engine = Engine(model, options)
        engine.causal.__dict__[ENGINE] = engine
    engine.options = options
    trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    if parity_check and engine.checked != trained:
        from .parity import check_parity

        check_parity(model, engine)
        engine.checked = trained
