"""CUDA graphs of the decode step, one per batch size of a ladder, captured when first needed, from one memory pool.

Lengths, page tables and weights are read on the device at each replay: nothing is captured again when they change.

Shape suffixes: B rows of the step, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fused_step import FusedStep
from .state import RowState


def ladder(rows: int) -> list[int]:
    """Batch sizes that are captured, ascending: 1, 2, 4, then in steps of a quarter to a half."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < rows:
        top = sizes[-1]
        sizes.append(top + max(8, top // 2 // 8 * 8))
    return sorted({min(size, rows) for size in sizes if size < rows} | {rows})


class GraphLadder:
    """Replays of a step for any number of rows."""

    def __init__(self, step: FusedStep, state: RowState) -> None:
        self.step, self.state = step, state
        self.sizes = ladder(state.limits.rows)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def logits(self, rows: int) -> tuple[int, Tensor]:
        """(B, logits [B, V]) of the smallest size that holds `rows` rows; the next replay writes over the logits."""
        size = next(s for s in self.sizes if s >= rows)
        if size not in self.graphs:
            self._capture(size)
        graph, logits_BV = self.graphs[size]
        graph.replay()
        return size, logits_BV

    def _capture(self, size: int) -> None:
        """Capture, leaving lengths and positions as they were (the warm-up's step over idle rows changes nothing)."""
        state = self.state
        kept = state.active_S.clone(), state.own_length_S.clone()
        state.active_S.zero_()
        state.own_length_S.zero_()  # idle rows: the warm-up reads and writes no page
        self.step.prepare(size)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step.logits(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits_BV = self.step.logits(size)
        self.graphs[size] = (graph, logits_BV)
        state.active_S.copy_(kept[0])
        state.own_length_S.copy_(kept[1])
