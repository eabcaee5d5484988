"""From logits to tokens: sampling options, the exact distribution they define, and a draw from it.

The order is Transformers': penalties, forbidden tokens, temperature, top-k, top-p, min-p. A draw is argmax(z + Gumbel noise), the
noise a function of (seed, number of the token) alone.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.philox import gumbel
from ..spelling import check_names
from .grammar import grammar_of

LOGPROBS = ("sampled", "model")


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn; checked when made.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: only the k most likely tokens; 0 for all.
        top_p: only the fewest most likely tokens that hold this share of the probability; 1 for all.
        min_p: only tokens at least this fraction as likely as the most likely one; 0 for all.
        repetition_penalty: logits of tokens seen in prompt or completion are divided by it if positive, else multiplied.
        presence_penalty: subtracted from the logits of tokens that the completion holds.
        frequency_penalty: subtracted once per occurrence in the completion.
        stop_ids: token ids that end a completion (kept as its last token); None for the model's end-of-sequence ids.
        stop: strings that end a completion, across token boundaries too; the tokens that complete one are kept, `text` ends
            before it. Needs a tokenizer.
        max_new_tokens: the longest completion.
        min_new_tokens: no stop id before so many tokens; strings end it all the same.
        seed: of these completions; None for the one given to `generate`.
        regex, json_schema: the completion's text must match; at most one. Needs a tokenizer, and the package llguidance, which
            checks them here.
        logprobs: "sampled" gives log-probs of the distribution drawn from, after all options (what TRL asks of vLLM);
            "model" those of softmax(logits / temperature), as `token_logprobs(temperature=)` has them. Equal where
            only the temperature is set.

    Raises:
        ValueError: a value that cannot be used; the message names the field, the value and what would be right.
        TypeError: a name that is no field, with the one that was probably meant.
        ImportError: a constraint without llguidance.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 512
    min_new_tokens: int = 0
    seed: int | None = None
    regex: str | None = None
    json_schema: Any = None
    logprobs: str = "sampled"

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        if "__dataclass_fields__" in cls.__dict__:  # a subclass with a constructor of its own knows its arguments
            check_names(cls.__name__, kwargs, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("stop_ids", "stop"):
            value = getattr(self, name)
            if isinstance(value, (str, int)):
                value = (value,)
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        self._number("temperature", 0.0, math.inf)
        self._whole("top_k", 0)
        self._number("top_p", 0.0, 1.0, above=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, above=True)
        self._number("presence_penalty", -math.inf, math.inf)
        self._number("frequency_penalty", -math.inf, math.inf)
        self._whole("max_new_tokens", 1)
        self._whole("min_new_tokens", 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; lower it"
            )
        if self.seed is not None:
            self._whole("seed", None)
        for token in self.stop_ids or ():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"stop_ids={self.stop_ids!r}: {token!r} is no token id; give whole numbers from 0 up")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop={self.stop!r}: {text!r} is no string to stop at; give non-empty strings")
        if self.regex is not None and self.json_schema is not None:
            raise ValueError("regex and json_schema are both given; a completion can follow one of them")
        if self.regex is not None and not isinstance(self.regex, str):
            raise ValueError(f"regex={self.regex!r}: give a pattern, a string")
        if self.json_schema is not None and not isinstance(self.json_schema, (str, dict)):
            raise ValueError(f"json_schema={self.json_schema!r}: give a schema, a dict or its JSON text")
        if self.constrained:
            grammar_of(self.regex, self.json_schema)
        if self.logprobs not in LOGPROBS:
            raise ValueError(f"logprobs={self.logprobs!r}: choose one of {', '.join(map(repr, LOGPROBS))}")

    @property
    def plain(self) -> bool:
        """Whether temperature is all that shapes the distribution."""
        return (
            self.top_k == 0
            and self.top_p == 1.0
            and self.min_p == 0.0
            and self.min_new_tokens == 0
            and not self.penalized
            and not self.constrained
        )

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def constrained(self) -> bool:
        return self.regex is not None or self.json_schema is not None

    def _number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        right = f"a number {'greater than' if above else 'from'} {low:g}" if low > -math.inf else "a finite number"
        right += f" up to {high:g}" if high < math.inf else ""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: give {right}")
        if value < low or value > high or (above and value == low):
            raise ValueError(f"{name}={value!r} is out of range: give {right}")

    def _whole(self, name: str, low: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
            raise ValueError(f"{name}={value!r}: give a whole number{'' if low is None else f' from {low} up'}")


@dataclass
class RowOptions:
    """The sampling options of the rows of a step, as tensors [B]; `shaped` tells that some row needs more than a temperature.

    Attributes:
        temperature: fp32; seed: int64.
        stop_ids: per row, for `min_new_tokens`.
        counts_BV: int32, tokens of the completions so far; seen_BV: bool, tokens of the prompts. None without penalties.
        allowed_BV: bool, tokens that a constraint allows; None without one.
    """

    temperature_B: Tensor
    seed_B: Tensor
    params: list[SamplingParams | None]
    stop_ids: list[tuple[int, ...]]
    counts_BV: Tensor | None = None
    seen_BV: Tensor | None = None
    allowed_BV: Tensor | None = None
    shaped: bool = field(init=False)

    def __post_init__(self) -> None:
        device = self.temperature_B.device
        given = [p or SamplingParams() for p in self.params]
        self.shaped = any(not p.plain for p in given)
        if not self.shaped:
            return

        def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([getattr(p, name) for p in given], dtype=dtype, device=device)[:, None]

        self.top_k, self.top_p, self.min_p = column("top_k", torch.int64), column("top_p"), column("min_p")
        self.largest_k = max(p.top_k for p in given) if all(p.top_k > 0 or p.temperature == 0 for p in given) else 0
        self.truncates = any(p.top_k > 0 or p.top_p < 1.0 for p in given)
        self.repetition, self.presence = column("repetition_penalty"), column("presence_penalty")
        self.frequency, self.minimum = column("frequency_penalty"), column("min_new_tokens", torch.int64)
        self.penalized = any(p.penalized for p in given)
        self.waits = any(p.min_new_tokens for p in given)
        self.from_model = torch.tensor([p.logprobs == "model" for p in given], device=device)
        pairs = [(b, t) for b, (p, ids) in enumerate(zip(given, self.stop_ids)) if p.min_new_tokens for t in ids]
        self.stops = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)


def shape_logits(logits_BV: Tensor, options: RowOptions, count_B: Tensor) -> Tensor:
    """Logits [B, V] fp32 whose softmax is the distribution to draw from; forbidden tokens are -inf.

    Rows of temperature 0 are left undivided and untruncated: their argmax is the draw.
    """
    z_BV = logits_BV.float()
    if options.shaped:
        z_BV = _penalized(z_BV, options, count_B)
    z_BV = z_BV / _divisor(options)
    return _truncated(z_BV, options) if options.shaped else z_BV


def sample(logits_BV: Tensor, options: RowOptions, count_B: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [B] int64 and their log-probs [B] fp32.

    Args:
        logits_BV: of the model; any float dtype.
        count_B: int64, tokens that each completion has already: the number of this draw.
    """
    z_BV = shape_logits(logits_BV, options, count_B)
    greedy_B = options.temperature_B == 0
    noisy_BV = z_BV + gumbel(options.seed_B, count_B, z_BV.shape[1])
    ids_B = torch.where(greedy_B[:, None], z_BV, noisy_BV).argmax(-1)
    logprob_B = _logprob(z_BV, ids_B)
    if options.shaped and bool(options.from_model.any()):
        model_B = _logprob(logits_BV.float() / _divisor(options), ids_B)
        logprob_B = torch.where(options.from_model, model_B, logprob_B)
    return ids_B, logprob_B


def _logprob(z_BV: Tensor, ids_B: Tensor) -> Tensor:
    return z_BV.gather(1, ids_B[:, None])[:, 0] - z_BV.logsumexp(-1)


def _divisor(options: RowOptions) -> Tensor:
    temperature_B = options.temperature_B
    return torch.where(temperature_B == 0, torch.ones_like(temperature_B), temperature_B)[:, None]


def _penalized(z_BV: Tensor, options: RowOptions, count_B: Tensor) -> Tensor:
    if options.penalized:
        assert options.counts_BV is not None and options.seen_BV is not None
        held_BV = options.counts_BV > 0
        stretched_BV = torch.where(z_BV > 0, z_BV / options.repetition, z_BV * options.repetition)
        z_BV = torch.where(held_BV | options.seen_BV, stretched_BV, z_BV)
        z_BV = z_BV - options.presence * held_BV - options.frequency * options.counts_BV
    if options.allowed_BV is not None:
        z_BV = z_BV.masked_fill(~options.allowed_BV, -torch.inf)
    if options.waits:
        rows, tokens = options.stops
        early = count_B[rows] < options.minimum[rows, 0]
        z_BV = z_BV.clone()
        z_BV[rows[early], tokens[early]] = -torch.inf
    return z_BV


def _truncated(z_BV: Tensor, options: RowOptions) -> Tensor:
    """Top-k, then top-p of what is left, then min-p; ties with the last token kept stay as well."""
    vocabulary = z_BV.shape[1]
    greedy_B1 = (options.temperature_B == 0)[:, None]
    floor_B1 = torch.full_like(z_BV[:, :1], -torch.inf)
    if options.truncates:
        if 0 < options.largest_k < vocabulary:
            sorted_BS = z_BV.topk(options.largest_k, dim=-1).values
        else:
            sorted_BS = z_BV.sort(dim=-1, descending=True).values
        width = sorted_BS.shape[1]
        rank_S = torch.arange(width, device=z_BV.device)[None]
        k_B1 = torch.where(options.top_k > 0, options.top_k, vocabulary)
        sorted_BS = sorted_BS.masked_fill(rank_S >= k_B1, -torch.inf)
        probs_BS = sorted_BS.softmax(-1)
        before_BS = probs_BS.cumsum(-1) - probs_BS
        kept_BS = (rank_S < k_B1) & ((before_BS < options.top_p) | (options.top_p == 1.0)) & ~sorted_BS.isneginf()
        kept_BS[:, 0] = True
        last_B1 = kept_BS.sum(-1, keepdim=True) - 1
        floor_B1 = sorted_BS.gather(1, last_B1)
    least_B1 = z_BV.amax(-1, keepdim=True) + options.min_p.log()  # log 0 = -inf: no bound
    floor_B1 = torch.where(greedy_B1, -torch.inf, torch.maximum(floor_B1, least_B1))
    return z_BV.masked_fill(z_BV < floor_B1, -torch.inf)


def stop_ids_of(params: SamplingParams, default: Sequence[int]) -> tuple[int, ...]:
    """The ids that end a completion."""
    return tuple(default) if params.stop_ids is None else params.stop_ids
