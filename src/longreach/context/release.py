"""Full fine-tuning with the gradients of one layer at a time: each layer is updated inside the backward, once its own is done.

The backward of a chunked layer hands over all of its parameters' gradients at once. PyTorch's hooks for accumulated gradients
collect them; when a layer is complete, the optimizer takes its step for these parameters alone, and the gradients are
freed before the layer below begins. A parameter used in several places (a tied embedding) arrives when all have added to it.

The numbers are those of the plain loop, to the bit: the update of one parameter must not depend on another's, which is why only
optimizers of that kind are taken, and why the norm of all gradients can be reported but not clipped by.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import wide_dtype
from .host_states import HostStates
from .install import engine_of

STATES = ("device", "host")  # where optimizer states wait between updates
# Optimizers whose update of a parameter reads that parameter's gradient and state alone, by the package they come from.
KNOWN = {
    "torch": (
        "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "Adafactor", "RMSprop", "Rprop", "ASGD",
        "Muon",
    ),
    "transformers": ("Adafactor",),
    "torchao": ("AdamW8bit", "Adam8bit", "AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8"),
    "bitsandbytes": (
        "Adam", "Adam8bit", "Adam32bit", "PagedAdam", "PagedAdam8bit", "PagedAdam32bit", "AdamW", "AdamW8bit", "AdamW32bit",
        "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "Lion", "Lion8bit", "Lion32bit", "PagedLion", "PagedLion8bit",
        "PagedLion32bit", "RMSprop", "RMSprop8bit", "RMSprop32bit", "SGD", "SGD8bit", "SGD32bit", "Adagrad", "Adagrad8bit",
        "Adagrad32bit", "AdEMAMix", "AdEMAMix8bit", "AdEMAMix32bit", "PagedAdEMAMix", "PagedAdEMAMix8bit", "PagedAdEMAMix32bit",
    ),
}  # fmt: skip


def release_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, states: str = "device"
) -> ReleasingOptimizer:
    """Update every layer inside `loss.backward()`, so that the gradients of only one layer exist at a time.

    The loop stays what it was: `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`, with what is returned in place of
    the optimizer; learning-rate schedulers and `state_dict` work on it, and the latter has the plain optimizer's format.

    Args:
        model: after `longreach.enable`.
        optimizer: over the parameters of the model that train; of PyTorch, bitsandbytes, torchao or Transformers' Adafactor.
        states: "device", or "host": optimizer states wait in pinned host memory, and come to the device one layer ahead of
            their update.

    Raises:
        ValueError: an optimizer whose update may depend on several parameters, parameters that are not the model's, an unknown
            `states`, a model that is not enabled, or several processes.
        RuntimeError: in a backward, if a parameter gets a second gradient before `step`: gradients can't be accumulated.
    """
    _check_optimizer(optimizer, states)
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError(
            f"gradients are released on one process only, and there are {torch.distributed.get_world_size()}: an update inside "
            "the backward would not wait for the other processes' gradients"
        )
    engine = engine_of(model)
    if engine is None:
        raise ValueError("release_gradients: the model is not enabled; call longreach.enable(model) first")
    names = {p: name for name, p in model.named_parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    strangers = sum(p not in names for p in given)
    if strangers:
        raise ValueError(
            f"release_gradients: {strangers} of the optimizer's {len(given)} parameters are not the model's"
        )
    trained = set(given)
    layers = [[p for p in layer.parameters() if p in trained] for layer in engine.layers]
    inside = {p for layer in layers for p in layer}
    units = [layer for layer in layers if layer] + [[p] for p in given if p not in inside]
    return ReleasingOptimizer(optimizer, units, states=states)


def _check_optimizer(optimizer: Any, states: str) -> None:
    if states not in STATES:
        raise ValueError(f"states={states!r}: choose one of {', '.join(map(repr, STATES))}")
    kind = type(optimizer)
    package = kind.__module__.split(".")[0]
    if kind.__name__ not in KNOWN.get(package, ()):
        known = "; ".join(f"{package}: {', '.join(names)}" for package, names in KNOWN.items())
        raise ValueError(
            f"gradients can't be released into {package}'s {kind.__name__}: its update of one parameter may depend on others. "
            f"Known not to: {known}"
        )
    if states == "host" and package != "torch":
        raise ValueError(
            f"states='host' takes optimizers of torch.optim, not {package}'s {kind.__name__}; those of bitsandbytes have paged "
            "forms of their own (optim='paged_adamw_8bit')"
        )


class ReleasingOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps happen in the backward; made by `release_gradients`.

    Attributes:
        inner: the optimizer that does the arithmetic.
        grad_norm: L2 norm of all gradients of the last step, a 0-d tensor in at least fp32; None before the first.
    """

    # `Optimizer.__init__` is not called: groups and states are the inner optimizer's.
    def __init__(self, inner: torch.optim.Optimizer, units: list[list[nn.Parameter]], *, states: str) -> None:
        self.inner = inner
        self.grad_norm: Tensor | None = None
        self._units = units
        self._unit_of = {p: i for i, unit in enumerate(units) for p in unit}
        self._host = HostStates(inner, units) if states == "host" else None
        self._arrived: set[Tensor] = set()
        self._left = [len(unit) for unit in units]
        self._waiting: list[Tensor] = []
        self._squares: list[Tensor] = []
        # Hooks hold no reference to what holds the parameters: that ring could not be collected, and the model would stay.
        collect = weakref.WeakMethod(self._collect)
        self._hooks = [
            p.register_post_accumulate_grad_hook(functools.partial(_hand_over, collect)) for p in self._unit_of
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __repr__(self) -> str:
        return f"released: {self.inner!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an optimizer that updates in the backward is bound to its model and can't be copied; save its state_dict"
        )

    def remove(self) -> None:
        """Take the hooks off the parameters: gradients then stay where backward puts them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- in the backward

    def _collect(self, p: Tensor) -> None:
        if p in self._arrived:
            raise RuntimeError(
                "a parameter got a second gradient before optimizer.step(): its layer was updated with the first, so gradients "
                "can't be accumulated. Call step() after each backward, with more rows in it (gradient_accumulation_steps=1)"
            )
        self._arrived.add(p)
        self._waiting.append(p)
        unit = self._unit_of[p]  # type: ignore[index]
        self._left[unit] -= 1
        if self._left[unit] == 0:
            self._update(unit)

    def _update(self, unit: int | None) -> None:
        """The inner optimizer passes over parameters without a gradient, so that those of one layer are a step of their own."""
        grads = [p.grad for p in self._waiting if p.grad is not None]
        if grads:
            norms = [torch.linalg.vector_norm(g, dtype=wide_dtype(g.dtype)) for g in grads]
            self._squares.append(torch.stack(norms).square().sum())
        if self._host is not None:
            self._host.fetch(self._waiting, unit)
        self.inner.step()
        if self._host is not None:
            self._host.store(self._waiting)
        for p in self._waiting:
            p.grad = None
        self._waiting = []

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Ends a step: updates what has a gradient but whose layer is not complete, as where a part got none."""
        if closure is not None:
            raise ValueError("step(closure): updates happen in the backward, before a closure could be called")
        if self._waiting:
            self._update(None)
        self.grad_norm = torch.stack(self._squares).sum().sqrt() if self._squares else None
        self._squares, self._arrived = [], set()
        self._left = [len(unit) for unit in self._units]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self._unit_of:
            p.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("add_param_group: make the optimizer with all parameters before its gradients are released")

    def state_dict(self) -> dict[str, Any]:
        """In the inner optimizer's format, so that a run can go on with or without released gradients."""
        if self._host is not None:
            self._host.finish()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._host is None:
            self.inner.load_state_dict(state_dict)
        else:
            self._host.load(state_dict)


def _hand_over(collect: weakref.WeakMethod[Any], p: Tensor) -> None:
    """A parameter's hook; without its optimizer the gradient stays where it is."""
    method = collect()
    if method is not None:
        method(p)
