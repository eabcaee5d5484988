"""Keys and values of long prompts in host memory, brought to the device layer by layer in every step.

Two layers' worth lies on the device: while one layer's attention reads its keys, the next one's are on their way on a stream of
their own. For prompts whose keys don't fit the device; a step then takes as long as the copies.

Shape suffixes: N pages, P tokens of a page, K key/value heads, D and W head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import LayerCache, Limits


class HostPrompts:
    """The prompts' pages of the layers with full attention.

    Attributes:
        k, v: by layer, on the host, pinned where there is a CUDA device; None for layers with a window.
    """

    def __init__(self, layers: Sequence[LayerCache], limits: Limits, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.order = [i for i, layer in enumerate(layers) if layer.window is None]
        self.place = {layer: at for at, layer in enumerate(self.order)}
        pages = limits.prompt_pages(None)

        def hold(layer: LayerCache, width: int, where: torch.device, pin: bool = False) -> Tensor:
            return torch.zeros(
                pages, layer.kv_heads, limits.page, width, dtype=layer.dtype, device=where, pin_memory=pin
            )

        host = torch.device("cpu")
        self.k: list[Tensor | None] = [None] * len(layers)
        self.v: list[Tensor | None] = [None] * len(layers)
        for i in self.order:
            self.k[i] = hold(layers[i], layers[i].key_dim, host, self.cuda).permute(0, 2, 1, 3)
            self.v[i] = hold(layers[i], layers[i].value_dim, host, self.cuda).permute(0, 2, 1, 3)
        first = layers[self.order[0]]
        self.staged: list[tuple[Tensor, Tensor]] = []
        if self.cuda:
            self.staged = [
                (
                    hold(first, first.key_dim, device).permute(0, 2, 1, 3),
                    hold(first, first.value_dim, device).permute(0, 2, 1, 3),
                )
                for _ in range(2)
            ]
            self.stream = torch.cuda.Stream(device)
            self.ready: list[Any] = [torch.cuda.Event(), torch.cuda.Event()]

    def write(self, layer: int, at: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Put tokens' keys and values to their pages and offsets."""
        at = (at[0].cpu(), at[1].cpu())
        for held, new in ((self.k[layer], k), (self.v[layer], v)):
            assert held is not None
            held[at] = new.cpu()

    def open(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pages of a layer on the device. Layers are opened in order; `close` each before the next."""
        k, v, place = self.k[layer], self.v[layer], self.place[layer]
        assert k is not None and v is not None
        if not self.cuda:
            return k, v
        if place == 0:
            for ahead in self.order[:2]:
                self._bring(ahead)
        torch.cuda.current_stream().wait_event(self.ready[place % 2])
        return self.staged[place % 2]

    def close(self, layer: int) -> None:
        """A layer's attention has been launched: its place is the next but one's."""
        place = self.place[layer] + 2
        if self.cuda and place < len(self.order):
            self._bring(self.order[place])

    def _bring(self, layer: int) -> None:
        place = self.place[layer] % 2
        self.stream.wait_stream(torch.cuda.current_stream())  # whoever reads this place has been launched before
        with torch.cuda.stream(self.stream):
            for target, source in zip(self.staged[place], (self.k[layer], self.v[layer])):
                assert source is not None
                target.copy_(source, non_blocking=True)
            self.ready[place].record(self.stream)
