"""The token tree: what is computed once and who sees whom; and its cut into chunks.

A segment sees its ancestors whole and itself causally; positions go on from the parent. Packed order is breadth first, so the
children of a parent, and cousins, are neighbours: every attention block is then a run of queries against a run of keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import BlockCall

IGNORE = -100  # a label nobody asks for (PyTorch's cross-entropy convention)
ROOT = -1
CUT_ABOVE = 64  # segments up to this long are not cut at their first and last label: more calls would cost more
KEY_BLOCK = 32768  # keys of one unmasked kernel call: bounds the temporary dk, dv of a long context
SMALL_KEY_BLOCK = 8192  # the fewest that a small chunk's calls are cut to

Ids = Sequence[int] | Tensor


@dataclass(frozen=True)
class Segment:
    """A run of tokens.

    Attributes:
        ids: [n] int64 token ids, n >= 1.
        labels: [n] int64; labels[i] is the token that position i predicts, or -100.
        parent: index of the parent segment, or -1.
        positions: [n] int64 position ids, or None to go on from the parent.
    """

    ids: Tensor
    labels: Tensor
    parent: int = ROOT
    positions: Tensor | None = None


@dataclass(frozen=True)
class Piece:
    """The part of a segment that lies in a chunk: packed tokens [start, stop)."""

    segment: int
    start: int
    stop: int


class TokenTree:
    """A forest of segments; the input of training and scoring.

    `branches` are the segments whose log-probs are given back, in the caller's order; -1 stands for an empty completion.
    """

    def __init__(self, segments: Iterable[Segment], branches: Sequence[int] | None = None) -> None:
        self.segments = tuple(segments)
        if not self.segments:
            raise ValueError("TokenTree: no segments; give at least one sequence with tokens")
        for i, segment in enumerate(self.segments):
            if len(segment.ids) == 0:
                raise ValueError(f"TokenTree: segment {i} is empty; leave it out")
            if len(segment.labels) != len(segment.ids):
                raise ValueError(f"TokenTree: segment {i} has {len(segment.ids)} ids but {len(segment.labels)} labels")
            if not ROOT <= segment.parent < i:
                raise ValueError(f"TokenTree: segment {i} has parent {segment.parent}; a parent comes before its child")
        labelled = [i for i, s in enumerate(self.segments) if bool((s.labels != IGNORE).any())]
        self.branches = tuple(labelled if branches is None else branches)

    @classmethod
    def from_groups(cls, groups: Sequence[tuple[Ids, Sequence[Ids]]]) -> TokenTree:
        """GRPO groups: each prompt is computed once for all its completions.

        The root is the prompt without its last token; each leaf starts with that token, so that every label lies in the
        segment that predicts it. Equal prompts share one root. One branch per completion, in the order given; that of an
        empty completion is -1, and has no log-probs.

        Raises:
            ValueError: what is no list of ids, or an empty prompt; the message names the group.
        """
        segments: list[Segment] = []
        branches: list[int] = []
        roots: dict[tuple[int, ...], int] = {}
        for number, (prompt_ids, completions) in enumerate(_pairs(groups)):
            prompt = as_ids(prompt_ids, f"TokenTree.from_groups: the prompt of group {number}")
            if len(prompt) == 0:
                raise ValueError(f"TokenTree.from_groups: the prompt of group {number} is empty; it needs one token")
            _check_completions(completions, number)
            key = tuple(prompt.tolist())
            if key not in roots and len(prompt) > 1:
                roots[key] = len(segments)
                segments.append(Segment(prompt[:-1], torch.full((len(prompt) - 1,), IGNORE)))
            for index, completion_ids in enumerate(completions):
                completion = as_ids(completion_ids, f"TokenTree.from_groups: completion {index} of group {number}")
                if len(completion) == 0:
                    branches.append(ROOT)
                    continue
                branches.append(len(segments))
                labels = torch.cat([completion, torch.tensor([IGNORE])])
                segments.append(Segment(torch.cat([prompt[-1:], completion]), labels, roots.get(key, ROOT)))
        if not segments and branches:  # prompts of one token and nothing after them: a tree has one segment
            segments.append(Segment(prompt, torch.full((1,), IGNORE)))
        return cls(segments, branches)

    @classmethod
    def from_sequences(cls, sequences: Sequence[Ids], loss_masks: Sequence[Ids] | None = None) -> TokenTree:
        """Independent sequences packed without padding; branch i gives the log-probs of tokens 1, 2, … of sequence i.

        With `loss_masks` (1 where the token is trained on, same lengths), only of those tokens.

        Raises:
            ValueError: what is no list of ids, an empty sequence, or a mask of another length; the message names it.
        """
        segments = []
        for number, sequence in enumerate(sequences):
            ids = as_ids(sequence, f"TokenTree.from_sequences: sequence {number}")
            labels = torch.cat([ids[1:], torch.tensor([IGNORE])])
            if loss_masks is not None:
                mask = torch.as_tensor(loss_masks[number]).bool()
                if len(mask) != len(ids):
                    raise ValueError(
                        f"TokenTree.from_sequences: loss_masks[{number}] has {len(mask)} entries for {len(ids)} tokens"
                    )
                labels = torch.where(torch.cat([mask[1:], torch.tensor([False])]), labels, IGNORE)
            segments.append(Segment(ids, labels))
        return cls(segments, range(len(segments)))

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout(self)

    @property
    def tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments)

    def __repr__(self) -> str:
        return f"TokenTree({len(self.segments)} segments, {self.tokens} tokens, {len(self.branches)} branches)"


def as_ids(ids: Ids, what: str = "token ids") -> Tensor:
    """[n] int64 on the CPU.

    Raises:
        ValueError: no token ids; the message begins with `what`.
    """
    if isinstance(ids, str):
        raise ValueError(f"{what} is a text, {ids[:40]!r}: give token ids, tokenizer(text)['input_ids']")
    try:
        out = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} is {_shown(ids)}: give token ids, a list of whole numbers or a tensor") from None
    if out.ndim != 1:
        raise ValueError(f"{what} has the shape {tuple(out.shape)}: token ids must be one-dimensional")
    if len(out) and (out.is_floating_point() or out.is_complex() or out.dtype == torch.bool):
        raise ValueError(f"{what} is of {out.dtype}: token ids are whole numbers")
    out = out.to(torch.int64)
    if len(out) and int(out.min()) < 0:
        raise ValueError(f"{what} holds {int(out.min())}: token ids are 0 or more; leave padding and masked tokens out")
    return out


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _pairs(groups: Sequence[tuple[Ids, Sequence[Ids]]]) -> Iterable[tuple[Ids, Sequence[Ids]]]:
    for number, group in enumerate(groups):
        try:
            prompt, completions = group
        except (TypeError, ValueError):
            prompt = completions = 0  # type: ignore[assignment]
        if isinstance(group, str) or isinstance(prompt, int):
            raise ValueError(
                f"TokenTree.from_groups: group {number} is {_shown(group)}: give pairs (prompt_ids, [completion_ids, ...])"
            )
        yield prompt, completions


def _check_completions(completions: Sequence[Ids], number: int) -> None:
    what = f"TokenTree.from_groups: the completions of group {number}"
    single = isinstance(completions, Tensor) and completions.ndim != 2
    if single or isinstance(completions, (str, int)) or any(isinstance(item, int) for item in completions):
        raise ValueError(f"{what} are {_shown(completions)}: give a list of completions, each a list of token ids")
    if len(completions) == 0:
        raise ValueError(f"{what}: there are none; give at least one, or leave the group out")


class Layout:
    """The packed order of a tree, and the queries × keys of each chunk.

    Attributes:
        input_ids, positions, labels: [T] int64 in packed order.
        start: packed index of each segment's first token.
        rows: [T] int64, how many root-to-leaf rows run through a token (what padded rows would have counted).
    """

    def __init__(self, tree: TokenTree) -> None:
        segments = tree.segments
        self.parent = [s.parent for s in segments]
        self.depth: list[int] = []
        for s in segments:
            self.depth.append(0 if s.parent == ROOT else self.depth[s.parent] + 1)
        rank: dict[int, int] = {ROOT: 0}
        self.order: list[int] = []
        for depth in range(max(self.depth) + 1):
            level = [i for i in range(len(segments)) if self.depth[i] == depth]
            level.sort(key=lambda i: (rank[self.parent[i]], i))
            for i in level:
                rank[i] = len(self.order)
                self.order.append(i)
        self.length = [len(s.ids) for s in segments]
        self.start = [0] * len(segments)
        self.first_position = [0] * len(segments)
        at = 0
        for i in self.order:
            self.start[i] = at
            at += self.length[i]
            if self.parent[i] != ROOT:
                self.first_position[i] = self.first_position[self.parent[i]] + self.length[self.parent[i]]
        self.tokens = at
        parents = set(self.parent)
        self.is_parent = [i in parents for i in range(len(segments))]
        leaves = [0 if p else 1 for p in self.is_parent]
        for i in reversed(self.order):
            if self.parent[i] != ROOT:
                leaves[self.parent[i]] += leaves[i]
        self.input_ids = torch.cat([segments[i].ids for i in self.order])
        self.labels = torch.cat([segments[i].labels for i in self.order])
        self.positions = torch.cat([self._positions(i, segments[i]) for i in self.order])
        self.rows = torch.cat([torch.full((self.length[i],), leaves[i]) for i in self.order])
        read = self.labels != IGNORE
        self.read_index = read.nonzero().squeeze(1)
        self._reads_before = torch.cat([torch.zeros(1, dtype=torch.int64), read.cumsum(0)])
        self._chunks: dict[tuple[int, bool, bool], tuple[Chunk, ...]] = {}

    def _positions(self, i: int, segment: Segment) -> Tensor:
        if segment.positions is not None:
            return segment.positions
        return torch.arange(self.first_position[i], self.first_position[i] + self.length[i])

    def reads(self, start: int, stop: int) -> int:
        """How many labels lie in packed tokens [start, stop)."""
        return int(self._reads_before[stop] - self._reads_before[start])

    def chunks(self, size: int, bundle: bool = True, cut_at_reads: bool = False) -> tuple[Chunk, ...]:
        """Cut the packed tokens into chunks of at most `size`.

        A chunk never holds a segment and its ancestor. Short neighbours share a chunk if `bundle`. With `cut_at_reads`
        a chunk also ends before the first and after the last label of a segment, so that tokens nobody reads stay apart.
        """
        key = (size, bundle, cut_at_reads)
        if key in self._chunks:
            return self._chunks[key]
        pieces: list[Piece] = []
        for i in self.order:
            first, end = self.start[i], self.start[i] + self.length[i]
            edges = {first, end}
            if cut_at_reads and self.reads(first, end) and self.length[i] > CUT_ABOVE:
                inside = self.read_index[(self.read_index >= first) & (self.read_index < end)]
                edges |= {int(inside[0]), int(inside[-1]) + 1}
            marks = sorted(edges)
            for a, b in itertools.pairwise(marks):
                pieces += [Piece(i, p, min(p + size, b)) for p in range(a, b, size)]
        groups: list[list[Piece]] = []
        for piece in pieces:
            if groups and bundle and self._fits(groups[-1], piece, size, cut_at_reads):
                groups[-1].append(piece)
            else:
                groups.append([piece])
        self._chunks[key] = tuple(Chunk(self, tuple(g), size) for g in groups)
        return self._chunks[key]

    def _fits(self, group: list[Piece], piece: Piece, size: int, cut_at_reads: bool) -> bool:
        held = group[-1].stop - group[0].start
        if held + piece.stop - piece.start > size or group[-1].segment == piece.segment:
            return False
        if self.is_parent[group[-1].segment] != self.is_parent[piece.segment]:
            return False  # a prompt's chunk, whose forward a rollout may have done, holds nothing else
        if cut_at_reads and bool(self.reads(group[0].start, group[-1].stop)) != bool(
            self.reads(piece.start, piece.stop)
        ):
            return False
        inside = {p.segment for p in group}
        return not any(a in inside for a in self.ancestors(piece.segment))

    def ancestors(self, segment: int) -> list[int]:
        """Nearest first."""
        out = []
        while self.parent[segment] != ROOT:
            segment = self.parent[segment]
            out.append(segment)
        return out

    def before(self, piece: Piece, reach: int | None) -> list[tuple[int, int]]:
        """Ranges of packed tokens that precede the piece on its path, oldest first; only the last `reach` if given."""
        path = [(self.start[piece.segment], piece.start)]
        path += [(self.start[a], self.start[a] + self.length[a]) for a in self.ancestors(piece.segment)]
        out = []
        left = self.tokens if reach is None else reach
        for start, stop in path:
            start = max(start, stop - left)
            if start < stop:
                out.append((start, stop))
                left -= stop - start
        return out[::-1]


def key_block(chunk: int) -> int:
    """Most keys of one kernel call, by the tokens of a chunk: who makes chunks small wants memory, and a call's dk, dv would
    outweigh the rest of a small chunk's workspace."""
    return min(KEY_BLOCK, max(SMALL_KEY_BLOCK, 4 * chunk))


class Chunk:
    """A run of packed tokens [start, stop): computed together token by token, attention piece by piece.

    `size` is the most tokens that a chunk may hold in this run.
    """

    def __init__(self, layout: Layout, pieces: tuple[Piece, ...], size: int) -> None:
        self.layout = layout
        self.key_block = key_block(size)
        self.pieces = pieces
        self.start, self.stop = pieces[0].start, pieces[-1].stop
        self.reads = layout.reads(self.start, self.stop)
        self._calls: dict[int | None, tuple[BlockCall, ...]] = {}

    @functools.cached_property
    def read_rows(self) -> Tensor:
        """[reads] rows of the chunk whose output somebody reads."""
        index = self.layout.read_index
        return index[(index >= self.start) & (index < self.stop)] - self.start

    @functools.cached_property
    def is_context(self) -> bool:
        """Whether a later chunk may see this chunk's keys."""
        ends = {p.segment: self.layout.start[p.segment] + self.layout.length[p.segment] for p in self.pieces}
        return any(self.layout.is_parent[p.segment] or p.stop < ends[p.segment] for p in self.pieces)

    def calls(self, window: int | None = None) -> tuple[BlockCall, ...]:
        """The kernel calls of this chunk; the first covers every query."""
        if window in self._calls:
            return self._calls[window]
        rows = [(p.start - self.start, p.stop - self.start) for p in self.pieces]
        cu_q = (0, *(b for _, b in rows))
        before = [self.layout.before(p, None if window is None else window - 1) for p in self.pieces]
        longest = max(sum(b - a for a, b in path) + p.stop - p.start for path, p in zip(before, self.pieces))
        if window is not None and longest > window:
            self._calls[window] = (self._windowed(window, cu_q, before),)
        else:
            own = BlockCall(0, rows[-1][1], ((self.start, self.stop),), cu_q, cu_q, causal=True)
            self._calls[window] = (own, *self._unmasked(rows, before))
        return self._calls[window]

    def _windowed(self, window: int, cu_q: tuple[int, ...], before: list[list[tuple[int, int]]]) -> BlockCall:
        """Own keys and the window's reach in front of each piece, gathered per piece."""
        keys: list[tuple[int, int]] = []
        cu_k = [0]
        for path, piece in zip(before, self.pieces):
            for start, stop in [*path, (piece.start, piece.stop)]:
                if keys and keys[-1][1] == start:
                    keys[-1] = (keys[-1][0], stop)
                else:
                    keys.append((start, stop))
            cu_k.append(cu_k[-1] + sum(b - a for a, b in path) + piece.stop - piece.start)
        return BlockCall(0, cu_q[-1], tuple(keys), cu_q, tuple(cu_k), causal=True, window=window)

    def _unmasked(self, rows: list[tuple[int, int]], before: list[list[tuple[int, int]]]) -> list[BlockCall]:
        """What precedes the pieces: neighbours that see the same range fold into one long query."""
        calls: list[BlockCall] = []
        for level in range(max((len(path) for path in before), default=0)):
            runs: list[list[int]] = []  # q0, q1, k0, k1
            for path, (q0, q1) in zip(before, rows):
                if level >= len(path):
                    continue
                k0, k1 = path[len(path) - 1 - level]
                if runs and runs[-1][1] == q0 and runs[-1][2:] == [k0, k1]:
                    runs[-1][1] = q1
                else:
                    runs.append([q0, q1, k0, k1])
            calls += _varlen(runs, self.key_block)
        return calls


def _varlen(runs: list[list[int]], most: int) -> list[BlockCall]:
    """One call per stretch of neighbouring queries and keys; key ranges longer than `most` alone, cut into blocks."""
    calls: list[BlockCall] = []
    batch: list[list[int]] = []

    def flush() -> None:
        if batch:
            q0, k0 = batch[0][0], batch[0][2]
            cu_q = (0, *(r[1] - q0 for r in batch))
            cu_k = (0, *(r[3] - k0 for r in batch))
            calls.append(BlockCall(q0, batch[-1][1], ((k0, batch[-1][3]),), cu_q, cu_k, causal=False))
            batch.clear()

    for q0, q1, k0, k1 in runs:
        if k1 - k0 > most:
            flush()
            for k in range(k0, k1, most):
                end = min(k + most, k1)
                calls.append(BlockCall(q0, q1, ((k, end),), (0, q1 - q0), (0, end - k), causal=False))
            continue
        if batch and (batch[-1][1] != q0 or batch[-1][3] != k0 or k1 - batch[0][2] > most):
            flush()
        batch.append([q0, q1, k0, k1])
    flush()
    return calls
