"""`longreach.generate`: prompts in, completions with their log-probs out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..context.install import causal_lm
from .engine import RolloutEngine
from .plan import RolloutOptions
from .sampler import SamplingParams, stop_ids_of
from .scheduler import Request
from .seeds import mix
from .stops import cut_at_stop

PromptIds = Sequence[int] | Tensor
ENGINE = "_longreach_rollout"  # attribute of the Transformers model: lives as long as it does


@dataclass(frozen=True)
class Completion:
    """What was drawn for one prompt.

    Attributes:
        ids: token ids, the stop id among them if one ended it.
        logprobs: natural log of each token's probability; see `SamplingParams.logprobs`.
        finish_reason: "stop" (a stop id, a stop string or a constraint fulfilled), "length" or "cancelled".
        text: of the completion, special tokens left out, up to a stop string; None without a tokenizer.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str | None = None


def generate(
    model: nn.Module,
    prompts: Sequence[PromptIds | str],
    *,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    group: int = 1,
    seed: int = 0,
    tokenizer: Any = None,
    options: RolloutOptions | None = None,
    on_token: Callable[[int, list[int]], bool | None] | None = None,
) -> list[Completion]:
    """Draw completions with the rollout engine: on the model's own weights, adapters included.

    The first call on a model prepares it (chunked execution is enabled, weights that share an input are laid side by side);
    memory for keys and values stays allocated until the model is gone or `release_rollout(model)` is called.

    Args:
        model: a causal language model of Transformers, bare or in a PEFT wrapper.
        prompts: token ids each, or texts if a tokenizer is given. Equal prompts are computed once.
        sampling: for all prompts, or one for each; None for `SamplingParams()`.
        group: completions per prompt.
        seed: completion g of prompt i is drawn with numbers that depend on (seed, i, g) alone; with `SamplingParams.seed`, on
            that and g alone.
        tokenizer: fills `text`; needed for texts, stop strings and constraints.
        options: see `RolloutOptions`.
        on_token: called with a completion's number and ids so far after each token; False cancels it.

    Returns:
        len(prompts) × group completions, those of a prompt side by side.

    Raises:
        ValueError: bad arguments; the message names them.
        UnsupportedModelError: an architecture that can't be decoded here.
    """
    engine = rollout_engine(model, options, tokenizer)
    requests = requests_of(model, prompts, sampling, group, seed, tokenizer)

    def tell(request: Request) -> bool | None:
        assert on_token is not None
        return on_token(request.number, request.ids)

    engine.run(requests, None if on_token is None else tell)
    return [completion_of(r, tokenizer) for r in requests]


def rollout_engine(model: nn.Module, options: RolloutOptions | None = None, tokenizer: Any = None) -> RolloutEngine:
    """The engine of a model; other options make a new one."""
    causal = causal_lm(model)
    engine: RolloutEngine | None = causal.__dict__.get(ENGINE)
    if engine is None or engine.model is not model or (options is not None and options != engine.options):
        release_rollout(model)
        engine = causal.__dict__[ENGINE] = RolloutEngine(model, options)
    engine.tokenizer = tokenizer
    return engine


def release_rollout(model: nn.Module) -> None:
    """Give back the memory that rollouts of a model hold: keys, values, graphs."""
    engine = causal_lm(model).__dict__.pop(ENGINE, None)
    if engine is not None:
        engine.release()


def requests_of(
    model: nn.Module,
    prompts: Sequence[PromptIds | str],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    group: int,
    seed: int,
    tokenizer: Any,
) -> list[Request]:
    """The requests of a call, checked."""
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise ValueError(f"group={group!r}: give the completions per prompt, a whole number from 1 up")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}: give a whole number")
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; give a list of prompts")
    if any(isinstance(prompt, int) for prompt in prompts):
        raise ValueError("prompts holds token ids; give a list of prompts, each a list of ids")
    params = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
    if len(params) != len(prompts):
        raise ValueError(
            f"sampling has {len(params)} entries for {len(prompts)} prompts; give one for each, or one for all"
        )
    config = causal_lm(model).config.get_text_config()
    ends = end_ids(model)
    out = []
    for i, (prompt, param) in enumerate(zip(prompts, params)):
        if not isinstance(param, SamplingParams):
            raise ValueError(f"sampling for prompt {i} is a {type(param).__name__}; give SamplingParams")
        ids = _ids(prompt, i, tokenizer, config.vocab_size)
        beyond = [token for token in param.stop_ids or () if token >= config.vocab_size]
        if beyond:
            raise ValueError(
                f"stop_ids={param.stop_ids!r}: the model's vocabulary has {config.vocab_size}, so {beyond[0]} never comes"
            )
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and len(ids) + param.max_new_tokens > limit:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens; with max_new_tokens={param.max_new_tokens} it goes beyond the {limit} "
                "positions of the model (max_position_embeddings): shorten one of them"
            )
        stops = frozenset(stop_ids_of(param, ends))
        for g in range(group):
            stream = mix(seed, i, g) if param.seed is None else mix(param.seed, g)
            out.append(Request(i * group + g, ids, param, stream, stops))
    return out


def _ids(prompt: PromptIds | str, number: int, tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {number} is a text; pass tokenizer=, or give token ids")
        prompt = tokenizer(prompt)["input_ids"]
    try:
        ids = tuple(map(operator.index, prompt.tolist() if isinstance(prompt, Tensor) else prompt))
    except TypeError:
        shown = repr(prompt) if len(repr(prompt)) <= 60 else f"{repr(prompt)[:57]}..."
        raise ValueError(
            f"prompt {number} is {shown}: give token ids, whole numbers, or a text with tokenizer="
        ) from None
    if not ids:
        raise ValueError(f"prompt {number} is empty; it needs one token")
    wrong = next((t for t in ids if not 0 <= t < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"prompt {number} holds token id {wrong}; the model's vocabulary has {vocabulary}")
    return ids


def end_ids(model: nn.Module) -> tuple[int, ...]:
    """The model's end-of-sequence ids: of its generation config, else of its config."""
    causal = causal_lm(model)
    for config in (getattr(causal, "generation_config", None), causal.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()


def completion_of(request: Request, tokenizer: Any) -> Completion:
    text = None
    if tokenizer is not None:
        text = tokenizer.decode(request.ids, skip_special_tokens=True)
        text = cut_at_stop(text, request.params.stop)
    assert request.finish_reason is not None
    return Completion(request.ids, request.logprobs, request.finish_reason, text)
