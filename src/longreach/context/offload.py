"""Where layer inputs wait between the forward and the backward: on the model's device, or in host memory."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class LayerInputs(Protocol):
    """Keeps the [1, T, hidden] input of each layer until its backward; dtype and bits are never changed."""

    name: str

    def put(self, hidden: Tensor) -> Any:
        """Keep a layer's input; returns the handle for `rows`."""

    def rows(self, handle: Any, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) on the model's device."""


class OnDevice:
    """Policy "none": inputs stay where they are."""

    name = "none"

    def put(self, hidden: Tensor) -> Tensor:
        return hidden.detach()

    def rows(self, handle: Tensor, start: int, stop: int) -> Tensor:
        return handle[:, start:stop]


class OnHost:
    """Policy "host": inputs are copied to host memory and come back chunk by chunk."""

    name = "host"

    def put(self, hidden: Tensor) -> tuple[Tensor, Any]:
        host = hidden.new_empty(hidden.shape, device="cpu", pin_memory=hidden.is_cuda)
        host.copy_(hidden.detach(), non_blocking=hidden.is_cuda)
        return host, hidden.device

    def rows(self, handle: tuple[Tensor, Any], start: int, stop: int) -> Tensor:
        host, device = handle
        return host[:, start:stop].to(device, non_blocking=host.is_pinned())


POLICIES: dict[str, type[OnDevice] | type[OnHost]] = {"none": OnDevice, "host": OnHost}
