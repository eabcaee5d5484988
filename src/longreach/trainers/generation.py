"""Generation with Transformers' own `generate`, the prompt's keys and values computed once for all its completions.

Shapes: G completions of one prompt, P prompt tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

PREFILL_CHUNK = 8192  # tokens per forward while the prompt's keys and values are computed


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
