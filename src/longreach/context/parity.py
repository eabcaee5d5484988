"""The check at start: a small tree on the real model, chunked against stock eager attention, loss and gradients."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernels import wide_dtype
from .install import Engine
from .logprob import score
from .tree import TokenTree

logger = logging.getLogger(__name__)

# Largest accepted difference: mean |log-prob| in nats and relative gradient norm. For half precision it is the larger of this
# floor and a multiple of what two chunk sizes of the engine differ by, which is the dtype's own noise on this model.
FLOOR = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# In half precision a token near a tie may change its expert between any two correct implementations.
MOE_HALF_FLOOR = 0.2
NOISE_MULTIPLE = 4.0
CHUNKS = (16, 24)
HALF_TRIES = 6


Grads = tuple[Tensor | None, ...]  # of the compared parameters; None where the loss does not reach one


class ParityError(ValueError):
    """Chunked execution does not give this model's stock numbers."""


@dataclass(frozen=True)
class Parity:
    """Differences to stock: mean absolute log-prob in nats, relative norm of all compared gradients; and what was allowed."""

    logprob: float
    gradient: float
    allowed_logprob: float
    allowed_gradient: float


def check_parity(model: nn.Module, engine: Engine) -> Parity:
    """Compare 64 tokens (a prompt with three ragged completions) and raise `ParityError` beyond the dtype's rounding, and for a
    parameter that gets a gradient in one of the two only.

    In half precision a single unlucky token can differ between two correct implementations; a fault differs on every
    token. So there other tokens are tried before the model is refused.
    """
    # Of the model itself: adapters have a dtype of their own, and weights in 4 bits none to compute in.
    dtype = next(p for n, p in engine.layers[0].named_parameters() if p.is_floating_point() and "lora_" not in n).dtype
    half = dtype in (torch.float16, torch.bfloat16)
    named = _sample(engine)
    with _evaluating(model):
        for seed in range(HALF_TRIES if half else 1):
            parity = _compare(engine, named, seed, dtype, half)
            if parity.logprob <= parity.allowed_logprob and parity.gradient <= parity.allowed_gradient:
                logger.info(
                    "parity with stock eager attention: %.1e nats, %.1e of the gradient norm",
                    parity.logprob,
                    parity.gradient,
                )
                return parity
    raise ParityError(
        f"parity check failed for {engine.config.model_type!r} in {str(dtype)[6:]}: chunked and stock eager attention differ "
        f"by {parity.logprob:.2e} nats per token (allowed {parity.allowed_logprob:.0e}) and {parity.gradient:.2e} of the "
        f"gradient norm (allowed {parity.allowed_gradient:.0e}). Training would not be exact, so it does not start; train "
        "this model with stock TRL, and please report it."
    )


def _compare(engine: Engine, named: dict[str, nn.Parameter], seed: int, dtype: torch.dtype, half: bool) -> Parity:
    params = list(named.values())
    groups = _groups(engine, seed)
    weights = [torch.randn(len(c), generator=torch.Generator().manual_seed(7)) for c in groups[0][1]]
    with _eager(engine), engine.stock():
        stock, stock_grads = _grads(_stock_logprobs(engine, groups), weights, params)
    ours, grads = _chunked(engine, groups, weights, params, CHUNKS[0])
    for name, mine, theirs in zip(named, grads, stock_grads):
        only = [g for g in (mine, theirs) if g is not None]
        if len(only) == 1 and bool(only[0].any()):
            has, lacks = ("stock eager attention", "chunked execution")[:: 1 if mine is None else -1]
            raise ParityError(
                f"parity check failed for {engine.config.model_type!r}: {name} has a gradient in {has} and none in {lacks}. "
                "Training would not be exact, so it does not start; freeze this parameter or train this model with stock TRL, "
                "and please report it."
            )
    logprob, gradient = _differ(ours, grads, stock, stock_grads)
    floor = FLOOR.get(dtype, FLOOR[torch.bfloat16])
    noise = (0.0, 0.0)
    if half:
        floor = MOE_HALF_FLOOR if engine.routers else floor
        noise = _differ(ours, grads, *_chunked(engine, groups, weights, params, CHUNKS[1]))
    # Gradients of adapters that are stored in half precision are rounded to it, whatever the model computes in.
    rounded = max((FLOOR.get(p.dtype, floor) for p in params), default=floor)
    allowed = (max(x, NOISE_MULTIPLE * n) for x, n in zip((floor, max(floor, rounded)), noise))
    return Parity(logprob, gradient, *allowed)


def _groups(engine: Engine, seed: int) -> list[tuple[Tensor, list[Tensor]]]:
    g = torch.Generator().manual_seed(3 + seed)
    high = min(engine.config.vocab_size, 32000)
    prompt, *completions = (torch.randint(0, high, (n,), generator=g) for n in (25, 17, 1, 21))
    return [(prompt, completions)]


def _sample(engine: Engine) -> dict[str, nn.Parameter]:
    """Trainable parameters of the first, middle and last layer: enough to see a fault, little memory on a large model."""
    picked = {0, len(engine.layers) // 2, len(engine.layers) - 1}
    every = ((f"layers.{i}.{n}", p) for i in sorted(picked) for n, p in engine.layers[i].named_parameters())
    return {name: p for name, p in every if p.requires_grad}


def _stock_logprobs(engine: Engine, groups: list[tuple[Tensor, list[Tensor]]]) -> list[Tensor]:
    device = engine.causal.get_input_embeddings().weight.device
    out = []
    for prompt, completions in groups:
        for completion in completions:
            ids = torch.cat([prompt, completion])[None].to(device)
            logits = engine.causal(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            logp = torch.log_softmax(logits.to(wide_dtype(logits.dtype)), -1)
            out.append(logp.gather(-1, completion.to(device)[:, None]).squeeze(-1))
    return out


def _chunked(engine: Engine, groups, weights, params, chunk: int) -> tuple[Tensor, Grads]:
    kept = engine.options
    engine.options = replace(kept, chunk=chunk)
    try:
        return _grads(score(engine.causal, TokenTree.from_groups(groups)).logprobs, weights, params)
    finally:
        engine.options = kept


def _grads(logprobs: list[Tensor], weights: list[Tensor], params: list[nn.Parameter]) -> tuple[Tensor, Grads]:
    flat = torch.cat(logprobs)
    grads: Grads = ()
    if params:
        loss = (flat * torch.cat(weights).to(flat)).sum()
        grads = torch.autograd.grad(loss, params, allow_unused=True)
    return flat.detach(), grads


def _differ(a: Tensor, a_grads: Grads, b: Tensor, b_grads: Grads) -> tuple[float, float]:
    logprob = float((a - b).abs().mean())
    pairs = [(x.double(), y.double()) for x, y in zip(a_grads, b_grads) if x is not None and y is not None]
    top = sum(float((x - y).square().sum()) for x, y in pairs)
    bottom = sum(float(y.square().sum()) for _, y in pairs)
    return logprob, (top / bottom) ** 0.5 if bottom > 0 else top**0.5


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off and gradients on for the comparison; every module's mode and the RNG come back as they were."""
    modes = [(m, m.training) for m in model.modules()]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextlib.contextmanager
def _eager(engine: Engine) -> Iterator[None]:
    """Stock eager attention and experts. Each layer is computed again in the backward: PEFT adds an expert adapter to the whole
    weight, and the sums of all layers at once would be a second model."""
    config = engine.config
    names = [name for name in ("_attn_implementation", "_experts_implementation") if getattr(config, name, None)]
    kept = {name: getattr(config, name) for name in names}
    layers = [(m, dict(vars(m))) for m in engine.layers]
    flags = ("gradient_checkpointing", "training", "_gradient_checkpointing_func")
    try:
        for name in names:
            setattr(config, name, "eager")
        for layer in engine.layers:
            layer.gradient_checkpointing, layer.training = True, True  # type: ignore[assignment]
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
        yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)
        for layer, old in layers:
            for flag in flags:
                vars(layer).pop(flag, None)
                if flag in old:
                    vars(layer)[flag] = old[flag]
