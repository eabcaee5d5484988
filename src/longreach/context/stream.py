"""Keys, values and what they are owed in host memory: GPU memory then does not grow with the context.

A chunk's own keys and values stay on the device; those of earlier chunks come back in the ranges that the attention calls read,
one call ahead. Gradient sums come back with them, are added to in fp32 and go out again; in the same order as on the device, so
the policy changes no bit.

Shape suffixes: T packed tokens, C tokens of the chunk, N tokens of a range, K key/value heads, D and W head sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..attention.op import KeyValues, Ranges
from ..kernels import wide_dtype
from .offload import HostRow, Lease

NAMES = ("k", "v")


class HostKeyValues(KeyValues):
    """`KeyValues` of one layer in host memory."""

    def __init__(self, lease: Lease, tokens: int) -> None:
        super().__init__(tokens)
        self.lease = lease
        self.rows: dict[tuple[str, torch.Size, torch.dtype], HostRow] = {}
        self.now: list[HostRow] = []  # of the layer that runs: keys, values
        self.sums: list[HostRow] = []
        self.touched_T = torch.zeros(tokens, dtype=torch.bool)  # where the sums hold something
        self.backward = False
        self.own = (0, 0)
        self.own_kv: list[Tensor] = []
        self.own_sums: list[Tensor] = []

    def begin_forward(self) -> None:
        self.backward = False
        self.own, self.own_kv, self.own_sums = (0, 0), [], []

    def begin_backward(self) -> None:
        self.backward = True
        self.touched_T.zero_()

    def write(self, start: int, k_CKD: Tensor, v_CKW: Tensor) -> None:
        stop = start + len(k_CKD)
        self.own, self.own_kv = (start, stop), [k_CKD.detach(), v_CKW.detach()]
        self.now = [self._row(name, x, x.dtype) for name, x in zip(NAMES, self.own_kv)]
        self.sums = [self._row("d" + name, x, wide_dtype(x.dtype)) for name, x in zip(NAMES, self.own_kv)]
        if not self.backward:  # else the host has had them since the keys were rebuilt
            for row, x in zip(self.now, self.own_kv):
                row.save(start, stop, x)

    def read(self, ranges: Ranges) -> tuple[Tensor, Tensor]:
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for start, stop, inside in self._split(ranges):
            for found, row, x in zip(parts, self.now, self.own_kv):
                found.append(x[self._own(start, stop)] if inside else row.fetch(start, stop))
        k_NKD, v_NKW = (found[0] if len(found) == 1 else torch.cat(found) for found in parts)
        return k_NKD, v_NKW

    def prefetch(self, ranges: Ranges, owed: bool = False) -> None:
        for start, stop, inside in self._split(ranges):
            if inside:
                continue
            for row in self.now:
                row.prefetch(start, stop)
            if owed and self.touched_T[start:stop].any():
                for row in self.sums:
                    row.prefetch(start, stop)

    def begin_chunk(self, start: int, stop: int) -> None:
        assert self.own == (start, stop)
        self.own_sums = self._owed(start, stop)

    def add(self, ranges: Ranges, dk_NKD: Tensor, dv_NKW: Tensor) -> None:
        at = 0
        for start, stop, inside in self._split(ranges):
            part = slice(at, at + stop - start)
            at += stop - start
            touched = bool(self.touched_T[start:stop].any())
            for i, new in enumerate((dk_NKD[part], dv_NKW[part])):
                if inside:
                    self.own_sums[i][self._own(start, stop)] += new
                elif touched:
                    sum_N = self._sum(self.sums[i], start, stop)
                    sum_N += new
                    self.sums[i].save(start, stop, sum_N)
                else:
                    self.sums[i].save(start, stop, new.to(wide_dtype(new.dtype)))
            if not inside:
                self.touched_T[start:stop] = True

    def owed(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        sums = self.own_sums if self.own_sums and self.own == (start, stop) else self._owed(start, stop)
        self.own_sums = []
        dtypes = [row.host_T.dtype for row in self.now if row.host_T is not None]
        dk_CKD, dv_CKW = (x.to(dtype) for x, dtype in zip(sums, dtypes))
        return dk_CKD, dv_CKW

    def _owed(self, start: int, stop: int) -> list[Tensor]:
        """Fresh sums of a range, on the device."""
        if bool(self.touched_T[start:stop].any()):
            return [self._sum(row, start, stop).clone() for row in self.sums]
        shapes = [(stop - start, *row.host_T.shape[1:]) for row in self.now if row.host_T is not None]
        like = self.own_kv[0]
        return [torch.zeros(shape, dtype=wide_dtype(like.dtype), device=like.device) for shape in shapes]

    def _sum(self, row: HostRow, start: int, stop: int) -> Tensor:
        """The sums of a range; where nothing was added yet, what the layer before left there counts as zero."""
        sum_N = row.fetch(start, stop)
        touched_N = self.touched_T[start:stop]
        if not touched_N.all():
            sum_N[~touched_N.to(sum_N.device)] = 0
        return sum_N

    def _split(self, ranges: Ranges) -> Iterator[tuple[int, int, bool]]:
        """Ranges cut at the chunk's own tokens: (start, stop, whether they are the chunk's own)."""
        first, last = self.own
        for start, stop in ranges:
            if start < first:
                yield start, min(stop, first), False
            if stop > first and start < last:
                yield max(start, first), min(stop, last), True
            if stop > last:
                yield max(start, last), stop, False

    def _own(self, start: int, stop: int) -> slice:
        return slice(start - self.own[0], stop - self.own[0])

    def _row(self, name: str, x: Tensor, dtype: torch.dtype) -> HostRow:
        key = (name, x.shape[1:], dtype)
        if key not in self.rows:
            self.rows[key] = HostRow(self.lease, self.tokens)
        return self.rows[key]
