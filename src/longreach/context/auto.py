"""Plans of a model that is loaded: what a run of the engine or a step of a trainer takes, from the parameters as they are.

The bytes of the weights are read from the model, so that every form of weights is counted as it is stored.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .limits import Limits, this_machine
from .plan import Plan, made, refusal
from .shape import ModelShape
from .stored import DTYPES
from .work import Work

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model as it stands on its device.

    Attributes:
        shape: its dimensions; an upper estimate where there is no exact formula.
        weights: the entry of `work.FORMATS` with its compute dtype and packing.
        model_bytes: of all parameters and buffers but an adapter's.
        trained_bytes, trained_count: of the parameters that train.
        ranks: adapter rank by name of a linear layer; empty where the model itself trains.
        limits: of its device and host.
    """

    shape: ModelShape
    weights: str
    model_bytes: int
    trained_bytes: int
    trained_count: int
    ranks: tuple[tuple[str, int], ...]
    limits: Limits

    @classmethod
    def of(cls, model: nn.Module, processes: int = 1) -> Loaded:
        """Read from the parameters of a Transformers model, bare or under PEFT's, DDP's or accelerate's wrapper.

        Args:
            processes: that share this host, each with a card of its own.
        """
        adapted = {name: p for name, p in model.named_parameters() if "lora_" in name}
        trained = [p for p in model.parameters() if p.requires_grad]
        adapter = {id(p) for p in (*adapted.values(), *trained)}
        own = [t for t in (*model.parameters(), *model.buffers()) if not adapted or id(t) not in adapter]
        # Tied and joined tensors share their storage, and count once.
        storages = {t.untyped_storage().data_ptr() or id(t): t.untyped_storage().nbytes() for t in own}
        config = getattr(model, "config", None) or model.module.config  # type: ignore[union-attr]
        shape = ModelShape.of(config, estimate=True)
        ranks = _ranks(adapted, shape)
        if not ranks and (adapted or not trained):
            ranks = {"": 0}
        device = next(model.parameters()).device
        return cls(
            shape=shape,
            weights=form_of(model),
            model_bytes=sum(storages.values()),
            trained_bytes=sum(p.numel() * p.element_size() for p in trained),
            trained_count=sum(p.numel() for p in trained),
            ranks=tuple(sorted(ranks.items())),
            limits=this_machine(str(device), processes),
        )

    def work(self, **step: Any) -> Work:
        """A step of this model; arguments are those of `Work` that describe its rows."""
        return Work(
            self.shape, weights=self.weights, ranks=dict(self.ranks), loaded=self.model_bytes,
            trained_bytes=self.trained_bytes, trained_count=self.trained_count, **step,
        )  # fmt: skip


def _ranks(adapted: Mapping[str, Tensor], shape: ModelShape) -> dict[str, int]:
    """Adapter rank by name; those of experts, one under the other in PEFT's matrices, by what their product gives."""
    found = {}
    for name, a in adapted.items():
        owner, _, rest = name.partition(".lora_A")
        if not rest:
            continue
        module = owner.rsplit(".", 1)[-1]
        if shape.experts and ".experts" in owner:
            outputs = adapted[name.replace(".lora_A", ".lora_B")].shape[0]
            fitting = [key for key, (_, out) in shape.expert_linears.items() if out == outputs]
            found[fitting[0] if fitting else module] = len(a) // shape.experts
        else:
            found[module] = len(a)
    return found


def _layers(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of decoder layers."""
    yield from (p for name, p in model.named_parameters() if ".layers." in f".{name}")


def form_of(model: nn.Module) -> str:
    """The entry of `work.FORMATS` with a model's compute dtype and packing."""
    layer = next((p for p in model.parameters() if p.ndim == 1 and p.is_floating_point()), next(model.parameters()))
    forms = {getattr(getattr(module, "format", None), "name", None) for module in model.modules()}
    if "mxfp4" in forms:
        return "mxfp4"
    if any(not p.is_floating_point() and p.ndim > 1 for p in _layers(model)):
        return "nf4"  # or another form of 4 bits: its bytes are read, and it is dequantized likewise
    return DTYPES.get(str(layer.dtype).removeprefix("torch."), "bf16")


@functools.lru_cache(maxsize=4096)
def _automatic(loaded: Loaded, tokens: int, labelled: int, compact: bool, fixed: tuple[tuple[str, Any], ...]) -> Plan:
    completion = max(1, min(labelled, tokens - 1))
    work = loaded.work(context=max(2, tokens), completion=completion, group=1, compact=compact)
    return made(work, loaded.limits, dict(fixed), refuse=False)


def automatic(loaded: Loaded, tokens: int, labelled: int, compact: bool, fixed: Mapping[str, Any]) -> Plan:
    """How a run of so many packed tokens goes, as though they were one sequence: no tree of them takes more.

    Args:
        labelled: tokens with a loss.
        compact: the last layer returns labelled rows only.
        fixed: what the user has laid down, by the names of `Policy`'s fields.

    Returns:
        A plan that fits, or the leanest one, with a warning that says what would fit.
    """
    found = _automatic(loaded, tokens, labelled, compact, tuple(sorted(fixed.items())))
    if not found.fits:
        _warn_once(refusal(found))
    return found


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("by plan this step does not fit and may run out of memory: %s", text)


def processes_here() -> int:
    """Processes of this run that share the host, each with a card of its own."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    world = torch.distributed.get_world_size()
    return min(world, torch.cuda.device_count()) if torch.cuda.is_available() else world


class PlannedOutOfMemory(torch.OutOfMemoryError):
    """Out of GPU memory, with the plan beside the fact."""


@contextlib.contextmanager
def explained(planned: Callable[[], Plan | None]) -> Iterator[None]:
    """Give an out-of-memory error inside the block the plan's text: what was planned, and what would fit.

    Args:
        planned: gives the plan of what runs; asked only when memory has run out. The plan of the outermost block counts.

    Raises:
        PlannedOutOfMemory: from the error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        plan = planned()
        if plan is None:
            raise
        used = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        first = error.__cause__ if isinstance(error, PlannedOutOfMemory) else error
        # accelerate's search for a batch size that fits knows the error by these words
        raise PlannedOutOfMemory(f"CUDA out of memory. {plan.out_of_memory(used)}") from first
