"""Keys and values of prompts, computed by the trainer's own chunked layers and put into pages as they come.

Every prompt runs without its last token: that one is the first that each of its completions reads. Layer by layer, so that beside
the pages only one layer's keys and one row of hidden states are held, however long the prompt.

Shape suffixes: T packed tokens, C tokens of a chunk, K key/value heads, D and W head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import KeyValues
from ..context.install import Engine
from ..context.reuse import Prefill
from ..context.tree import IGNORE, Layout, Segment, TokenTree
from .cache import Kind, PagePool
from .scheduler import Prompt


class PromptLayout(Layout):
    """Prompts packed without padding, of which nothing but keys and values is wanted."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        segments = []
        for prompt in prompts:
            ids = torch.tensor(prompt.ids[:-1], dtype=torch.int64)
            segments.append(Segment(ids, torch.full_like(ids, IGNORE)))
        super().__init__(TokenTree(segments, branches=()))
        self.is_parent = [True] * len(segments)  # the completions, which come later, see them


class PagedKeys(KeyValues):
    """The running layer's keys, which go on into the pages of the prompts they belong to."""

    def __init__(self, layout: Layout, prompts: Sequence[Prompt], pool: PagePool, device: torch.device) -> None:
        super().__init__(layout.tokens)
        self.pool, self.layer = pool, -1
        self.places = {kind: _places(layout, prompts, pool, kind, device) for kind in pool.kinds}

    def write(self, start: int, k_CKD: Tensor, v_CKW: Tensor) -> None:
        super().write(start, k_CKD, v_CKW)
        if start == 0:  # chunks come first to last: a new layer
            self.layer += 1
        tokens, pages, offsets = self.places[self.pool.layers[self.layer].window]
        first, last = (int(i) for i in torch.searchsorted(tokens, torch.tensor([start, start + len(k_CKD)])))
        if first == last:
            return
        at = (pages[first:last], offsets[first:last])
        whole = last - first == len(k_CKD)
        rows = slice(None) if whole else (tokens[first:last] - start).to(k_CKD.device)
        self.pool.write_prompt(self.layer, at, k_CKD[rows], v_CKW[rows])


def _places(
    layout: Layout, prompts: Sequence[Prompt], pool: PagePool, kind: Kind, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed tokens whose keys this kind of layer stores (on the host, ascending), their pages and offsets (on the device)."""
    tokens, pages, offsets = [], [], []
    size = pool.limits.page
    for i, prompt in enumerate(prompts):
        assert prompt.pages is not None
        kept = pool.limits.prefix_pages(kind, len(prompt.ids))
        inside = torch.arange(kept.start * size, len(prompt.ids) - 1)
        table = torch.tensor(prompt.pages[kind], dtype=torch.int64)
        tokens.append(inside + layout.start[i])
        pages.append(table[inside // size - kept.start])
        offsets.append(inside % size)
    return torch.cat(tokens), torch.cat(pages).to(device), torch.cat(offsets).to(device)


def prefill(
    model: nn.Module, engine: Engine, prompts: Sequence[Prompt], pool: PagePool, keep: Prefill | None = None
) -> int:
    """Compute prompts' keys and values into their pages. Returns the number of tokens computed.

    With `keep`, what a training step on the same weights needs of the prompts goes there.
    """
    prompts = [p for p in prompts if len(p.ids) > 1]
    if not prompts:
        return 0
    layout = PromptLayout(prompts)
    device = engine.causal.get_input_embeddings().weight.device
    run = engine.make_run(layout, compact=True, backward=False)
    run.kv = PagedKeys(layout, prompts, pool, device)
    if keep is not None:
        keep.collect(engine, run)
    kwargs: dict[str, Any] = {"output_router_logits": False} if engine.routers else {}
    with engine.expecting(run):
        model(
            input_ids=layout.input_ids[None].to(device),
            position_ids=layout.positions[None].to(device),
            use_cache=False,
            logits_to_keep=torch.empty(0, dtype=torch.int64, device=device),
            **kwargs,
        )
    run.hidden = None
    if keep is not None:
        keep.add(run)
    return layout.tokens
