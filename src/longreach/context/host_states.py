"""Optimizer states that wait in host memory and come to the device for the update of their layer.

Copies run on streams of their own: a layer's states come while the layer above it is computed, and go back while the one below
is. On the device there are those of two layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .offload import HostPool, copy_streams

SMALL = 4096  # elements up to which a state stays on the device (step counts, norms): a copy would take longer than it saves
Key = tuple[Tensor, str]


class HostStates:
    """The large state tensors of an optimizer of `torch.optim`, by (parameter, name of the state)."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Sequence[nn.Parameter]]) -> None:
        self.optimizer = optimizer
        self.units = units
        self.lease = HostPool().lease(self)
        self.host: dict[Key, Tensor] = {}
        self.gone: dict[Key, torch.cuda.Event] = {}  # recorded behind the copy to the host
        self.coming: dict[Key, tuple[Tensor, torch.cuda.Event | None]] = {}
        self.order: list[int] = []  # in which units were updated in the last step
        self.now: list[int] = []

    def fetch(self, params: Sequence[Tensor], unit: int | None) -> None:
        """Put the states of these parameters on their device; begin to bring those of the unit that will be next."""
        for p in params:
            for key in self._held(p):
                x, event = self._copy_back(key)
                del self.coming[key]
                if event is not None:
                    torch.cuda.current_stream(x.device).wait_event(event)
                self.optimizer.state[p][key[1]] = x
        self._foresee(unit)

    def _foresee(self, unit: int | None) -> None:
        if unit is None:
            return
        place = len(self.now)
        self.now.append(unit)
        if place + 1 < len(self.order):
            for p in self.units[self.order[place + 1]]:
                for key in self._held(p):
                    self._copy_back(key)
        if len(self.now) == len(self.units):
            self.order, self.now = self.now, []

    def _held(self, p: Tensor) -> list[Key]:
        return [(p, name) for name in self.optimizer.state.get(p, ()) if (p, name) in self.host]

    def _copy_back(self, key: Key) -> tuple[Tensor, torch.cuda.Event | None]:
        if key not in self.coming:
            p, place = key[0], self.host[key]
            x = torch.empty(place.shape, dtype=place.dtype, device=p.device)
            if p.is_cuda:
                stream = copy_streams(p.device)[1]
                stream.wait_stream(torch.cuda.current_stream(p.device))
                if key in self.gone:
                    stream.wait_event(self.gone[key])
                with torch.cuda.stream(stream):
                    x.copy_(place, non_blocking=True)
                    x.record_stream(stream)
                    self.coming[key] = (x, stream.record_event())
            else:
                self.coming[key] = (x.copy_(place), None)
        return self.coming[key]

    def store(self, params: Sequence[Tensor]) -> None:
        """Send the states of these parameters to the host."""
        for p in params:
            states = self.optimizer.state.get(p, {})
            for name, x in states.items():
                if _is_large(x):
                    states[name] = self._send((p, name), x)

    def _send(self, key: Key, x: Tensor) -> Tensor:
        place = self._place(key, x)
        if x.is_cuda:
            stream = copy_streams(x.device)[0]
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                place.copy_(x, non_blocking=True)
                x.record_stream(stream)
                self.gone[key] = stream.record_event()
        else:
            place.copy_(x)
        return place

    def _place(self, key: Key, like: Tensor) -> Tensor:
        held = self.host.get(key)
        if held is None or held.shape != like.shape or held.dtype != like.dtype:
            held = self.host[key] = self.lease.take(like.numel(), like.dtype, key[0].device).view(like.shape)
        return held

    def finish(self) -> None:
        """After this, the host's copies can be read."""
        for event in self.gone.values():
            event.synchronize()

    def load(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's `load_state_dict`, with the large states put on the host."""
        small, large = {}, {}
        for number, states in state_dict["state"].items():
            small[number] = {k: v for k, v in states.items() if not _is_large(v)}
            large[number] = {k: v for k, v in states.items() if _is_large(v)}
        self.finish()
        self.coming.clear()
        self.optimizer.load_state_dict({**state_dict, "state": small})
        numbers, params = (
            itertools.chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.optimizer.param_groups)
        )
        for number, p in zip(numbers, params):
            for name, x in large.get(number, {}).items():
                dtype = p.dtype if x.is_floating_point() else x.dtype  # as PyTorch's own loading does
                self.gone.pop((p, name), None)
                self.optimizer.state[p][name] = self._place((p, name), x.to(dtype)).copy_(x)


def _is_large(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() > SMALL
