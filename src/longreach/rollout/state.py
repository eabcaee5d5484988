"""The rollout's tensors on the device: what each row is at, and who reads which pages. Their addresses never change.

Shape suffixes: S rows of the engine, M members of an entry, N entries of a page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import Kind, Limits, PagePool
from .scheduler import Entry, Request


class RowState:
    """One line per row, one line per entry (rows that share a prompt).

    Attributes:
        token_S: int64, the token that the next step reads.
        position_S: int32, where the last token read stands; a step adds 1 first.
        own_length_S: int32, tokens of the row whose keys are stored (of the step's own token too, once it has added 1).
        active_S: int32, 1 for rows that decode, 0 for idle ones.
        count_S: int64, tokens drawn.
        seed_S: int64; temperature_S: fp32.
        prefix_of_S: int32, entry of a row, -1 for none.
        own_pages, prefix_pages: by kind of layer, int32 page tables [S, N].
        prefix_length_S: int32; members_SM: int32, rows of an entry, -1 for none.
    """

    def __init__(self, pool: PagePool, limits: Limits, device: torch.device) -> None:
        self.limits, self.pool, self.device = limits, pool, device
        S = limits.rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_S, self.count_S, self.seed_S = (zeros(S, dtype=torch.int64) for _ in range(3))
        self.position_S, self.own_length_S, self.active_S = zeros(S), zeros(S), zeros(S)
        self.temperature_S = zeros(S, dtype=torch.float32) + 1
        self.prefix_of_S = zeros(S) - 1
        self.prefix_length_S, self.members_SM = zeros(S), zeros(S, limits.members) - 1
        self.own_pages = {kind: zeros(S, limits.own_table) for kind in pool.kinds}
        self.prefix_pages = {kind: zeros(S, limits.prefix_table) for kind in pool.kinds}

    def advance(self, rows: int) -> None:
        """One more token in every active row."""
        self.own_length_S[:rows] += self.active_S[:rows]
        self.position_S[:rows] += self.active_S[:rows]

    def take(self, rows: int, ids_B: Tensor) -> None:
        """The drawn tokens are the next step's input."""
        self.token_S[:rows] = ids_B
        self.count_S[:rows] += self.active_S[:rows]

    def start(self, requests: Sequence[Request]) -> None:
        """Put requests into their rows: the first step reads the prompt's last token."""
        if not requests:
            return
        index = self._upload([r.row for r in requests], torch.int64)
        columns: tuple[tuple[Tensor, list[float]], ...] = (
            (self.token_S, [r.prompt[-1] for r in requests]),
            (self.position_S, [len(r.prompt) - 2 for r in requests]),
            (self.own_length_S, [0] * len(requests)),
            (self.active_S, [1] * len(requests)),
            (self.count_S, [0] * len(requests)),
            (self.seed_S, [r.seed for r in requests]),
            (self.temperature_S, [r.params.temperature for r in requests]),
        )
        for column, values in columns:
            column[index] = self._upload(values, column.dtype)
        for kind, table in self.own_pages.items():
            lines = [_ring(r.pages[kind], self.limits.own_table) for r in requests]
            table[index] = self._upload(lines, torch.int32)

    def stop(self, rows: Sequence[int]) -> None:
        """Rows that decode no more: they read and write nothing."""
        if rows:
            index = self._upload(list(rows), torch.int64)
            for column, value in (
                (self.active_S, 0),
                (self.own_length_S, 0),
                (self.prefix_of_S, -1),
                (self.token_S, 0),
                (self.position_S, 0),
            ):
                column[index] = value

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Rows change places; `stop` the rows they leave."""
        for source, target in moves:
            for column in (
                self.token_S, self.position_S, self.own_length_S, self.active_S, self.count_S, self.seed_S, self.temperature_S,
                *self.own_pages.values(),
            ):  # fmt: skip
                column[target] = column[source]
        self.stop([source for source, _ in moves])

    def write_entries(self, entries: dict[int, Entry | None]) -> None:
        """Lines of the entry tables, and each row's pointer to its entry."""
        if not entries:
            return
        index = self._upload(list(entries), torch.int64)
        lengths = [0 if e is None else len(e.prompt.ids) - 1 for e in entries.values()]
        self.prefix_length_S[index] = self._upload(lengths, torch.int32)
        members = [_padded([] if e is None else e.rows, self.limits.members) for e in entries.values()]
        self.members_SM[index] = self._upload(members, torch.int32)
        for kind, table in self.prefix_pages.items():
            table[index] = self._upload([self._prefix_line(e, kind) for e in entries.values()], torch.int32)
        pairs = [(row, i) for i, e in entries.items() if e is not None for row in e.rows]
        if pairs:
            rows, numbers = zip(*pairs)
            self.prefix_of_S[self._upload(list(rows), torch.int64)] = self._upload(list(numbers), torch.int32)

    def _prefix_line(self, entry: Entry | None, kind: Kind) -> list[int]:
        line = [0] * self.limits.prefix_table
        if entry is not None and entry.prompt.pages is not None:
            places = self.limits.prefix_pages(kind, len(entry.prompt.ids))
            line[places.start : places.stop] = entry.prompt.pages[kind]
        return line

    def _upload(self, values: list, dtype: torch.dtype) -> Tensor:
        made = torch.tensor(values, dtype=dtype)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made


def _ring(pages: list[int], length: int) -> list[int]:
    """A page table that goes round its pages: what a window has left behind is written over."""
    return [pages[i % len(pages)] for i in range(length)]


def _padded(rows: list[int], length: int) -> list[int]:
    return rows + [-1] * (length - len(rows))
