"""The draw of a step: options of the rows in use, token counts for penalties, constraints.

Shape suffixes: B rows of the step, S rows of the engine, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.decode_ops import decode_sample
from .constraint import Constraints
from .sampler import RowOptions, SamplingParams, sample
from .scheduler import Request
from .state import RowState


class SamplingStep:
    """Draws tokens for the rows of a step.

    Attributes:
        needs_host: whether the next step's distribution depends on tokens that the host must have read (constraints).
    """

    def __init__(self, state: RowState, vocabulary: int, tokenizer: Any, requests: Sequence[Request]) -> None:
        self.state, self.vocabulary = state, vocabulary
        self.shaped = any(not r.params.plain for r in requests)
        self.constraints = Constraints(tokenizer, vocabulary, requests)
        self.needs_host = self.constraints.any
        device, rows = state.device, state.limits.rows
        self.counts_SV = self.seen_SV = None
        if any(r.params.penalized for r in requests):
            self.counts_SV = torch.zeros(rows, vocabulary, dtype=torch.int32, device=device)
            self.seen_SV = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self._key: list[SamplingParams | None] | None = None
        self._options: RowOptions | None = None

    def start(self, requests: Sequence[Request]) -> None:
        """Requests begin in their rows."""
        for request in requests:
            if self.counts_SV is not None and self.seen_SV is not None:
                self.counts_SV[request.row] = 0
                self.seen_SV[request.row] = False
                ids = torch.tensor(sorted(set(request.prompt)), device=self.seen_SV.device)
                self.seen_SV[request.row, ids] = True
            self.constraints.start(request)
        self._key = None

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            for table in (self.counts_SV, self.seen_SV):
                if table is not None:
                    table[target] = table[source]
        self._key = None if moves else self._key

    def draw(self, logits_BV: Tensor, requests: Sequence[Request | None]) -> tuple[Tensor, Tensor]:
        """Token ids [B] int64 and log-probs [B] fp32."""
        rows, state = len(requests), self.state
        count_B = state.count_S[:rows]
        if not self.shaped:
            return decode_sample(logits_BV, state.temperature_S[:rows], state.seed_S[:rows], count_B)
        options = self._row_options(requests)
        if self.constraints.any:
            options.allowed_BV = self.constraints.allowed(requests, logits_BV.shape[1], state.device)
        ids_B, logprob_B = sample(logits_BV, options, count_B)
        if self.counts_SV is not None:
            ones_B = torch.ones_like(ids_B, dtype=torch.int32)
            self.counts_SV[:rows].scatter_add_(1, ids_B[:, None], ones_B[:, None])
        return ids_B, logprob_B

    def _row_options(self, requests: Sequence[Request | None]) -> RowOptions:
        params = [None if r is None else r.params for r in requests]
        if self._options is None or self._key != params:
            rows, state = len(requests), self.state
            self._key = params
            self._options = RowOptions(
                state.temperature_S[:rows],
                state.seed_S[:rows],
                params,
                [() if r is None else tuple(r.stops) for r in requests],
                None if self.counts_SV is None else self.counts_SV[:rows],
                None if self.seen_SV is None else self.seen_SV[:rows],
            )
        return self._options

    def complete(self, request: Request, token: int) -> bool:
        """Whether a constrained text is whole with this token. Tells the constraint of the token."""
        return self.constraints.complete(request, token)
