"""Completions that must match a regular expression or a JSON schema, by way of llguidance.

Shape suffixes: B rows of the step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .grammar import grammar_of, library
from .sampler import SamplingParams
from .scheduler import Request


class Constraints:
    """The grammars of the requests that have one; which tokens each allows next.

    Raises:
        ValueError: a request is constrained but there is no tokenizer, or the pattern or schema can't be understood.
        ImportError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, requests: Sequence[Request]) -> None:
        constrained = [r for r in requests if r.params.constrained]
        self.any = bool(constrained)
        self._matchers: dict[int, Any] = {}
        if not constrained:
            return
        if tokenizer is None:
            raise ValueError("regex and json_schema need the tokenizer; pass tokenizer=")
        self._tokens = library("llguidance.hf").from_tokenizer(tokenizer, n_vocab=vocabulary)
        for params in {id(r.params): r.params for r in constrained}.values():
            self._matcher(params)  # what these tokens can't write is found before anything is generated

    def _matcher(self, params: SamplingParams) -> Any:
        made = library().LLMatcher(self._tokens, grammar_of(params.regex, params.json_schema))
        if made.is_error():
            raise ValueError(
                f"regex={params.regex!r}, json_schema={params.json_schema!r} can't be followed: {made.get_error()}"
            )
        return made

    def start(self, request: Request) -> None:
        if request.params.constrained:
            self._matchers[request.number] = self._matcher(request.params)

    def allowed(self, requests: Sequence[Request | None], width: int, device: torch.device) -> Tensor:
        """[B, V] bool: tokens that each row may take."""
        allowed_BV = torch.ones(len(requests), width, dtype=torch.bool)
        shifts = torch.arange(32, dtype=torch.int32)
        for row, request in enumerate(requests):
            matcher = None if request is None else self._matchers.get(request.number)
            if matcher is None:
                continue
            words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
            bits = (words[:, None] >> shifts & 1).bool().flatten()
            allowed_BV[row] = False
            allowed_BV[row, : len(bits)] = bits[:width]
        return allowed_BV.to(device)

    def complete(self, request: Request, token: int) -> bool:
        """Take a token; whether the text is whole. Raises RuntimeError for a token that the grammar refuses."""
        matcher = self._matchers.get(request.number)
        if matcher is None:
            return False
        if not matcher.consume_token(token):
            raise RuntimeError(f"request {request.number}: token {token} does not follow its constraint")
        whole = bool(matcher.is_stopped())
        if whole:
            del self._matchers[request.number]
        return whole
