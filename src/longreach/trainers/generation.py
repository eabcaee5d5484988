"""How a trainer's completions are drawn: by the rollout engine, or by `generate` with a prompt's keys computed once.

Shapes: G completions of one prompt, P prompt tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..context.install import causal_lm
from ..context.reuse import Prefill
from ..rollout import RolloutOptions, SamplingParams
from ..rollout.completion import requests_of, rollout_engine
from ..rollout.support import obstacle

PREFILL_CHUNK = 8192  # tokens per forward while the prompt's keys and values are computed


# What the engine understands of a generation config, and what has no bearing on it
SAMPLED = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "min_new_tokens",
    "stop_strings",
}
IGNORED = {
    "do_sample", "eos_token_id", "pad_token_id", "bos_token_id", "disable_compile", "use_cache", "transformers_version",
    "num_beams", "num_return_sequences", "max_length",
}  # fmt: skip


def engine_obstacle(model: nn.Module, config: GenerationConfig) -> str | None:
    """Why the rollout engine cannot draw what this configuration asks for; None if it can."""
    reason = obstacle(causal_lm(model).get_decoder().config)
    if reason is not None:
        return reason
    given = {k: v for k, v in config.to_diff_dict().items() if v is not None and not k.startswith("_")}
    other = sorted(set(given) - SAMPLED - IGNORED)
    if other:
        return f"it does not know {', '.join(f'{name}={given[name]!r}' for name in other)}"
    for name in ("num_beams", "num_return_sequences"):
        if given.get(name, 1) != 1:
            return f"it does not know {name}={given[name]!r}"
    return None


def sampling_of(config: GenerationConfig) -> SamplingParams:
    """The sampling options of a generation config. Raises ValueError for values that cannot be."""
    ends = config.eos_token_id
    ids = tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,)
    stop = config.stop_strings or ()
    return SamplingParams(
        temperature=float(config.temperature or 1.0) if config.do_sample else 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens or 0,
        stop_ids=ids,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def generate_by_engine(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    seed: int,
    tokenizer: Any,
    rows: int | None = None,
    keep: Prefill | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """One completion per prompt and the log-probs of its tokens.

    A prompt close to the last position of the model gets a completion that ends there.

    Args:
        model: a causal language model (or a PEFT model around one), unwrapped.
        prompt_ids: token ids; equal prompts are computed once.
        config: sampling options, `max_new_tokens`, the ids that end a completion.
        seed: of this call; row i is drawn with numbers that depend on (seed, i) alone.
        tokenizer: for stop strings.
        rows: completions decoded at a time, or None for the plan's choice.
        keep: what a training step on the same weights can use of the prompts' computation goes there.
    """
    params = sampling_of(config)
    limit = getattr(causal_lm(model).config.get_text_config(), "max_position_embeddings", None)
    each = [_up_to(params, limit, len(ids)) for ids in prompt_ids]
    engine = rollout_engine(model, RolloutOptions(rows=rows), tokenizer)
    requests = requests_of(model, prompt_ids, each, 1, seed, tokenizer)
    engine.run(requests, keep=keep)
    return [r.ids for r in requests], [r.logprobs for r in requests]


def _up_to(params: SamplingParams, limit: int | None, prompt: int) -> SamplingParams:
    if limit is None or prompt + params.max_new_tokens <= limit:
        return params
    new = max(1, limit - prompt)
    return dataclasses.replace(params, max_new_tokens=new, min_new_tokens=min(new, params.min_new_tokens))


def sharing_obstacle(model: PreTrainedModel, config: GenerationConfig) -> str | None:
    """Why a prompt's cache cannot be handed to `generate` for this model and configuration; None if it can."""
    if config.cache_implementation is not None:
        return f"cache_implementation={config.cache_implementation!r} makes its own cache"
    if config.num_beams not in (None, 1):
        return f"num_beams={config.num_beams} rearranges the cache"
    if config.num_return_sequences not in (None, 1):
        return f"num_return_sequences={config.num_return_sequences} repeats the prompts itself"
    if config.use_cache is False:
        return "use_cache=False"
    if getattr(config, "prompt_lookup_num_tokens", None) or getattr(config, "assistant_early_exit", None):
        return "assisted generation crops the cache"
    if not getattr(model, "_supports_default_dynamic_cache", lambda: False)():
        return f"{type(model).__name__} has a cache of its own kind"
    return None


def generate_shared(
    model: Any, prompt_ids: Sequence[Sequence[int]], config: GenerationConfig, device: torch.device
) -> list[list[int]]:
    """One completion per prompt; a run of equal prompts is prefilled once and decoded as one batch.

    Prompts of different lengths are never padded against each other.

    Args:
        model: a causal language model (or a PEFT model around one), unwrapped.
        prompt_ids: token ids; the completions of a group have equal, neighbouring prompts.
        config: sampling options, `max_new_tokens`, the ids that end a completion.

    Returns:
        Completion ids up to and including the first end-of-sequence token.
    """
    ends = config.eos_token_id
    stop = set(ends) if isinstance(ends, list | tuple) else {ends}
    completions: list[list[int]] = []
    for prompt, copies in groupby(map(list, prompt_ids)):
        ids_GP = torch.tensor([prompt] * len(list(copies)), device=device)
        new_GC = _continue(model, ids_GP, config)
        completions += [_until(row, stop) for row in new_GC.tolist()]
    return completions


def _continue(model: Any, ids_GP: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    inputs: dict[str, Any] = {"input_ids": ids_GP, "attention_mask": torch.ones_like(ids_GP)}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if ids_GP.shape[0] > 1 and ids_GP.shape[1] > 1:
        # the last prompt token stays out: `generate` needs one token to continue from
        cache = _prefill(model, base, ids_GP[:1, :-1])
        cache.reorder_cache(ids_GP.new_zeros(ids_GP.shape[0]))  # type: ignore[arg-type]
        inputs[cache_name(base)] = cache
    # `generate` writes into the configuration it is given
    out_GS = model.generate(**inputs, generation_config=copy.deepcopy(config))
    return out_GS[:, ids_GP.shape[1] :]


def _prefill(model: Any, base: Any, ids_1P: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    forward: Callable[..., Any] = model
    for start in range(0, ids_1P.shape[1], PREFILL_CHUNK):
        piece = ids_1P[:, start : start + PREFILL_CHUNK]
        seen = torch.ones_like(ids_1P[:, : start + piece.shape[1]])
        forward(input_ids=piece, attention_mask=seen, use_cache=True, logits_to_keep=1, **{cache_name(base): cache})
    return cache


def cache_name(model: Any) -> str:
    """`cache` since Transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _until(ids: list[int], stop: set[int | None]) -> list[int]:
    for i, token in enumerate(ids):
        if token in stop:
            return ids[: i + 1]
    return ids
