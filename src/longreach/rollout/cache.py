"""Paged keys and values of a rollout: what one layer needs, how many pages that is, and the pool they lie in.

A page holds P tokens of every layer of one kind. Layers with full attention are one kind; layers with a window of w are another,
with pages of their own, because they need only the last w keys. A prompt's keys are stored once; each of its completions has
pages for its own tokens.

Shape suffixes: N pages, P tokens of a page, K key/value heads, D and W head sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..context.sampling import OVERRUN

if TYPE_CHECKING:
    from .host_prompts import HostPrompts

Kind = int | None  # the window of a layer, None for full attention


@dataclass(frozen=True)
class LayerCache:
    """What one layer stores per token.

    Attributes:
        kv_heads, key_dim, value_dim: heads and their sizes.
        dtype: of keys and values.
        window: of its attention, or None.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: Kind

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class Limits:
    """How large a rollout may be; everything on the device is sized by it.

    Attributes:
        rows: completions decoded at a time.
        prompt: longest prompt, tokens.
        new: longest completion, tokens.
        prompts: distinct prompts held at a time.
        page: tokens of a page.
        members: completions of one prompt that share one read of its keys.
        host_prompts: prompts' keys of layers with full attention lie in host memory.
    """

    rows: int
    prompt: int
    new: int
    prompts: int
    page: int = 64
    members: int = 16
    host_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "prompt", "new", "prompts", "page", "members"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number from 1 up")

    @property
    def own_table(self) -> int:
        """Entries of a row's page table."""
        return pages_of(self.new + OVERRUN, self.page)

    @property
    def prefix_table(self) -> int:
        """Entries of a prompt's page table (its last token belongs to each completion)."""
        return max(1, pages_of(self.prompt - 1, self.page))

    def own_pages(self, kind: Kind, new: int) -> int:
        """Pages of one completion of up to `new` tokens: a ring where the layer has a window."""
        pages = pages_of(new + OVERRUN, self.page)
        return pages if kind is None else min(pages, pages_of(kind, self.page) + 1)

    def prefix_pages(self, kind: Kind, prompt: int) -> range:
        """Numbers of the pages of a prompt's keys that a layer of this kind keeps."""
        return range(max(0, prompt - kind) // self.page if kind is not None else 0, pages_of(prompt - 1, self.page))

    def apart(self, kind: Kind) -> bool:
        """Whether prompts of this kind of layer have a pool of their own, on the host."""
        return self.host_prompts and kind is None

    def prompt_pages(self, kind: Kind) -> int:
        """Pages of all prompts at their longest."""
        most = max(len(self.prefix_pages(kind, n)) for n in (self.prompt, max(1, self.prompt - self.page)))
        return self.prompts * (most + (kind is not None))

    def pages(self, kind: Kind) -> int:
        """Size of the device's pool: every row at its longest, and every prompt that is not on the host."""
        return self.rows * self.own_pages(kind, self.new) + (0 if self.apart(kind) else self.prompt_pages(kind))

    def pool_bytes(self, layers: Sequence[LayerCache]) -> int:
        """Bytes of keys and values on the device."""
        total = sum(self.pages(layer.window) * self.page * layer.token_bytes for layer in layers)
        staged = [layer.token_bytes for layer in layers if self.apart(layer.window)][:2]  # two layers' prompts
        return total + self.prompt_pages(None) * self.page * sum(staged)

    def host_bytes(self, layers: Sequence[LayerCache]) -> int:
        """Bytes of keys and values on the host."""
        each = sum(layer.token_bytes for layer in layers if self.apart(layer.window))
        return self.prompt_pages(None) * self.page * each


def pages_of(tokens: int, page: int) -> int:
    return -(-tokens // page)


class PageAllocator:
    """Numbers of free pages; the lowest are given first, so that the same run takes the same pages."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None if there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._taken.update(taken)
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back. Raises RuntimeError for one that was not out."""
        for page in pages:
            if page not in self._taken:
                raise RuntimeError(f"page {page} is given back but was not taken")
            self._taken.remove(page)
            self._free.append(page)


class PagePool:
    """The keys and values themselves, `k[layer]` and `v[layer]` [N, P, K, D], one page more than the plan's for idle rows.

    In memory a page lies head by head, so that a kernel reads one head's keys of a page in one run.
    """

    def __init__(self, layers: Sequence[LayerCache], limits: Limits, device: torch.device) -> None:
        self.layers, self.limits = tuple(layers), limits
        self.kinds: tuple[Kind, ...] = tuple(dict.fromkeys(layer.window for layer in layers))
        self.pages = {kind: limits.pages(kind) for kind in self.kinds}

        def pages(layer: LayerCache, width: int) -> Tensor:
            shape = (self.pages[layer.window] + 1, layer.kv_heads, limits.page, width)
            return torch.zeros(shape, dtype=layer.dtype, device=device).permute(0, 2, 1, 3)

        self.k = [pages(layer, layer.key_dim) for layer in self.layers]
        self.v = [pages(layer, layer.value_dim) for layer in self.layers]
        self.host: HostPrompts | None = None
        if limits.host_prompts and None in self.kinds:
            from .host_prompts import HostPrompts

            self.host = HostPrompts(self.layers, limits, device)

    def allocators(self) -> tuple[dict[Kind, PageAllocator], dict[Kind, PageAllocator]]:
        """Free pages by kind of layer, for rows and for prompts: the same ones unless prompts lie apart."""
        own = {kind: PageAllocator(count) for kind, count in self.pages.items()}
        apart = self.limits.apart
        return own, {k: PageAllocator(self.limits.prompt_pages(k)) if apart(k) else pool for k, pool in own.items()}

    def write_prompt(self, layer: int, at: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """A prompt's keys [C, K, D] and values to pages and offsets [C] of a layer."""
        if self.host is not None and self.host.k[layer] is not None:
            self.host.write(layer, at, k, v)
        else:
            self.k[layer][at] = k
            self.v[layer][at] = v

    @contextlib.contextmanager
    def prompts_of(self, layer: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Around a layer's attention: the prompts' pages where they are not among the layer's own."""
        if self.host is None or self.host.k[layer] is None:
            yield None, None
            return
        yield self.host.open(layer)
        self.host.close(layer)

    def idle_page(self, kind: Kind) -> int:
        """Where rows without a completion write."""
        return self.pages[kind]
