"""Workspace of one chunk in closed form: what `fused.py`, a module under autograd and `attention/op.py` hold at once.

M, Q, K, F: bytes of all rows of a chunk at the model's width, the width of all query heads, of all key heads, of the MLP.
For experts (`quant/mixture.py`) a row is copied for each expert that it visits, and so many at a time are in the middle of one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ..kernels.grouped import RANK_MULTIPLE
from ..quant.embedding import SLICE
from ..quant.mixture import ROWS_AT_ONCE
from .policy import Policy
from .shape import QK_NORM
from .tree import key_block
from .work import FLOAT, ChunkShape, Work

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class ChunkSizes:
    """Workspace of one chunk of one layer; widths are bytes of all its rows.

    M, Q, K, F: a tensor of that width in the compute dtype. `wide` is what a factor of fp32 costs beside it.
    """

    M: int
    Q: int
    K: int
    mlp: int  # the most that the MLP holds in the forward, without its input and output
    dmlp: int  # the same of the backward
    kept: int  # what autograd keeps of the MLP
    wide: float
    lse: int
    adapter: int
    calls: tuple[int, ...]  # keys (or values) of each attention call, bytes
    grouped: bool
    fused: bool
    sandwich: bool
    qk_norm: bool
    sinks: bool
    fetched: int
    saved: bool

    @classmethod
    def of(cls, work: Work, policy: Policy, windows: Windows, chunk: ChunkShape) -> ChunkSizes:
        """Of a chunk in the costliest of layers with these windows."""
        shape, b, rows = work.shape, work.itemsize, chunk.rows
        ranks = sum(rank for name, rank in work.ranks.items() if name not in shape.expert_linears)
        adapter = rows * ranks * b * 2 + work.layer_adapter * (2 * FLOAT + b)
        if not work.ranks:
            adapter = (shape.layer_matrices + shape.layer_vectors) * (FLOAT + b)
        mlp, dmlp, kept = _mlp(work, rows)
        row = rows * shape.hidden * work.format.residual
        fetched = 2 * row if policy.on_host else 0
        if policy.save_attention and policy.on_host:
            fetched += 2 * rows * (shape.query * b + shape.heads * FLOAT)
        if policy.rows_on_host:
            # A chunk of the gradient comes, and one of what is handed on goes, while the next is computed.
            fetched += 3 * row
        return cls(
            M=row, Q=rows * shape.query * b, K=rows * shape.keys * b,
            mlp=mlp, dmlp=dmlp, kept=kept, wide=FLOAT / b, lse=2 * rows * shape.heads * FLOAT,
            adapter=adapter, calls=tuple(n * shape.keys * b for n in key_counts(windows, chunk, policy.chunk)),
            grouped=shape.heads != shape.kv_heads, fused=shape.fused, sandwich=shape.sandwich,
            qk_norm=shape.kind in QK_NORM, sinks=shape.kind == "gpt_oss", fetched=fetched, saved=policy.save_attention,
        )  # fmt: skip

    def _attended(self) -> float:
        """Outputs of the attention calls while they merge: in fp32 where there is more than one merge, a sink's included."""
        merged = len(self.calls) + self.sinks
        if merged == 1:
            return self.Q
        return 2 * self.Q if merged == 2 else (self.wide + 2) * self.Q

    def forward(self) -> int:
        """The layer without gradients."""
        projected = self.M + 2 * self.Q + 3 * self.K
        attention = projected + self._attended()
        mlp: float = self.Q + 2 * self.M + self.mlp + (2 * self.M if self.sandwich else 0)
        if not self.fused:
            attention, mlp = attention + 2 * self.wide * (self.M + self.Q), mlp + 2 * self.wide * self.M
        return math.ceil(max(attention, mlp)) + self.lse + self.adapter // 2

    def keys_only(self) -> int:
        return math.ceil((self.M + 3 * self.K) * (1 if self.fused else 1 + self.wide))

    def backward(self) -> int:
        """Recompute and gradients of the chunk."""
        if not self.fused:
            return self._autograd()
        # Saved attention is handed in, and the MLP's part then comes before q, k and v are made.
        projected = self.M + (2 if self.saved else 3) * self.Q + 3 * self.K
        mlp = 2 * self.M + self.dmlp + (4 * self.M if self.sandwich else 0) + (0 if self.saved else projected)
        recompute = 0.0 if self.saved else projected - self.Q + self._attended()
        peak = max(mlp, recompute, projected + self._attention_backward())
        return math.ceil(peak) + self.fetched + self.lse + self.adapter

    def _attention_backward(self) -> float:
        """dout; dq in fp32 and of the last call; dk, dv of a call and of the one before it; a flash kernel's fp32 sums."""
        dq = self.Q + (self.wide * self.Q if len(self.calls) > 1 else 0)
        grouped = 2 * self.wide if self.grouped else 0
        running = max(2 * (a + b) + grouped * b for a, b in itertools.pairwise((0, *self.calls)))
        after = 2 * self.calls[-1] + self.Q + 2 * self.K
        return self.Q + dq + max(running + self.wide * self.Q, after)

    def _autograd(self) -> int:
        """A module run by autograd: what its forward keeps (norms and rotary in fp32, every projection's input and output)."""
        norms = (4 if self.sandwich else 2) * (1 + self.wide) * self.M
        heads = (3 + (2 * self.wide if self.qk_norm else 0)) * (self.Q + self.K)
        held = norms + heads + 2 * self.Q + 3 * self.M + self.kept + self.fetched
        return math.ceil(max(held + self.mlp, held + self._attention_backward())) + self.lse + self.adapter


def _mlp(work: Work, rows: int) -> tuple[int, int, int]:
    """Bytes that an MLP holds in its forward, in its backward, and that autograd keeps of it."""
    shape, b = work.shape, work.itemsize
    M, F = shape.hidden * b, shape.mlp * b
    if not shape.experts:
        return 3 * rows * F, 3 * rows * F, 5 * rows * F
    slots = rows * shape.active
    if not shape.fused:
        return 3 * slots * F, 3 * slots * F, 5 * slots * F + 2 * slots * M
    inside = min(slots, ROWS_AT_ONCE)
    forward = slots * M + inside * max(M + 2 * F, 3 * F, F + M)
    backward = slots * M + inside * (3 * M + 3 * F) + rows * M
    ranks = [
        -(-work.ranks[name] // RANK_MULTIPLE) * RANK_MULTIPLE for name in shape.expert_linears if name in work.ranks
    ]
    if ranks:  # copies in the compute dtype, and sums of their gradients over the runs of rows
        numbers = shape.experts * max(ranks) * (3 * shape.hidden + 3 * shape.mlp)
        forward += numbers * b
        backward += numbers * (b + (FLOAT if slots > ROWS_AT_ONCE else b))
    return forward, backward, forward


def key_counts(windows: Windows, chunk: ChunkShape, size: int) -> list[int]:
    """Keys of each attention call of a chunk: its own, then blocks of those before it; a window takes one call. Chunks hold at
    most `size` tokens."""
    rows, reach = chunk.rows, chunk.reach
    if None not in windows:
        return [rows + min(reach * chunk.pieces, chunk.pieces * max(window or 0 for window in windows))]
    block = key_block(size)
    blocks, rest = divmod(reach, block)
    # Of more than two whole blocks, two tell as much.
    return [rows, *[block] * min(blocks, 2), *([rest] if rest else [])]


def head_bytes(work: Work) -> int:
    """Workspace of the head: one slice of logits, and the head's own gradient where it trains."""
    from .logprob import LOGITS_AT_ONCE  # here, because it brings Transformers along

    rows = min(work.labelled, max(1, LOGITS_AT_ONCE[True] // work.shape.vocab))
    logits = rows * work.shape.vocab * work.itemsize  # their gradient is written over them
    if work.eight_bit_tables:  # dequantized by ranges of the vocabulary, by way of fp32
        return logits + min(work.shape.vocab, SLICE) * work.shape.hidden * (FLOAT + work.itemsize)
    if work.ranks:
        return logits
    # The head's own gradient: one slice's in the model's dtype, and while the second joins it, both sums in fp32.
    slices = work.labelled > rows
    return logits + work.shape.table * (2 * (FLOAT + work.itemsize) if slices else work.itemsize)
