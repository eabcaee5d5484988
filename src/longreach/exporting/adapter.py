"""What an adapter adds to which weight: every tensor of it is assigned to a weight of the base model, or refused.

PEFT's own wrappers, built around the base model (without weights if need be), say which module and parameter a tensor belongs to,
with which scale: rank and alpha patterns, rank-stabilised scaling and nesting of expert parameters are PEFT's business.

Shape suffixes: E experts (1 for a plain linear layer), M rows and N columns of the weight as stored, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ExportError

PREFIX = "base_model.model."


@dataclass(frozen=True)
class LowRank:
    """scale · left @ right, what one adapter adds to one weight of shape [M, N] or [E, M, N]."""

    left_EMr: Tensor
    right_ErN: Tensor
    scale: float
    by_expert: bool

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, _ = self.left_EMr.shape
        return (experts, rows, self.right_ErN.shape[2]) if self.by_expert else (rows, self.right_ErN.shape[2])

    def add_to(self, weight: Tensor, rows: slice) -> None:
        """Add to `weight`, fp32, in place: the given experts or rows of the whole weight."""
        if self.by_expert:
            weight.baddbmm_(self.left_EMr[rows].float(), self.right_ErN[rows].float(), alpha=self.scale)
        else:
            weight.addmm_(self.left_EMr[0, rows].float(), self.right_ErN[0].float(), alpha=self.scale)


@dataclass(frozen=True)
class Changes:
    """What adapters change, by the name of the base model's parameter; and the adapter tensors that were assigned."""

    added: dict[str, list[LowRank]] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()

    def touches(self, name: str) -> bool:
        return name in self.added or name in self.replaced


def changes_of(structure: nn.Module, adapters: Mapping[str, Mapping[str, Tensor]]) -> Changes:
    """Assign every tensor of the given adapters.

    Args:
        structure: the PeftModel; its own tensors are not read.
        adapters: by adapter name, the tensors of its file (names as PEFT saves them).

    Raises:
        ExportError: a tensor that no weight was found for, shapes that don't fit, or a kind of adapter that is no plain LoRA.
    """
    modules = dict(structure.named_modules())
    shapes = _shapes(structure)
    changes = Changes()
    assigned: list[str] = []
    for adapter, tensors in adapters.items():
        _check_kind(structure, adapter)
        rest = dict(tensors)
        for name, a, b in _pairs(rest):
            module: Any = modules.get(name)
            target, change = _low_rank(module, name, adapter, a, b)
            _check_shape(name, change, shapes.get(target), target)
            changes.added.setdefault(target, []).append(change)
        for name in list(rest):
            target = bare_name(name)
            if shapes.get(target) != tuple(rest[name].shape):
                raise ExportError(
                    f"adapter tensor {name!r} belongs to no weight of the base model; the export would lose it"
                )
            changes.replaced[target] = rest.pop(name)
        assigned += tensors
    return Changes(changes.added, changes.replaced, tuple(assigned))


def _pairs(rest: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Take the A and B of each module out of `rest`."""
    for key in list(rest):
        for a_name, b_name in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
            if not key.endswith("." + a_name):
                continue
            module = key[: -len(a_name) - 1]
            other = f"{module}.{b_name}"
            if other not in rest:
                raise ExportError(f"adapter tensor {key!r} has no {b_name} beside it; the adapter's file is damaged")
            yield module, rest.pop(key), rest.pop(other)
    for key in rest:
        if ".lora_" in key:
            raise ExportError(
                f"adapter tensor {key!r} is of a kind that can't be merged here; merge with PEFT's merge_and_unload"
            )


def _low_rank(module: Any, name: str, adapter: str, a: Tensor, b: Tensor) -> tuple[str, LowRank]:
    """The parameter that a module's pair belongs to, and what it adds to it as stored."""
    if module is None or not hasattr(module, "scaling"):
        raise ExportError(f"adapter tensor {name + '.lora_A'!r}: no such module; is it another model's adapter?")
    scale = float(module.scaling[adapter])
    parameter = getattr(module, "parameter_name", "weight")
    target = f"{bare_name(name)}.{parameter}"
    experts = getattr(module, "num_experts", 1)
    if experts > 1:
        a_ErI = a.reshape(experts, -1, a.shape[-1])
        b_EOr = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
        if getattr(module, "_did_swap_in_out_features", False):
            return target, LowRank(b_EOr, a_ErI, scale, by_expert=True)
        return target, LowRank(a_ErI.mT, b_EOr.mT, scale, by_expert=True)
    transposed = getattr(module, "fan_in_fan_out", False) or isinstance(module.get_base_layer(), nn.Embedding)
    if transposed:
        return target, LowRank(a.t()[None], b.t()[None], scale, by_expert=False)
    return target, LowRank(b[None], a[None], scale, by_expert=False)


def _check_kind(structure: Any, adapter: str) -> None:
    config = structure.peft_config[adapter]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise ExportError(f"the adapter is of PEFT type {kind}; only LORA adapters can be merged")
    if getattr(config, "use_dora", False):
        raise ExportError(
            "the adapter uses DoRA, whose magnitudes can't be merged here; use PEFT's merge_and_unload first"
        )


def _shapes(structure: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the base model's parameters, of packed ones as they are unpacked."""
    found = {}
    for name, module in structure.named_modules(remove_duplicate=False):
        if is_adapter_tensor(f".{name}."):
            continue
        # Without recursion, experts in four bits list their weights too.
        for own, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            if own == "weight" and parameter.dtype == torch.uint8:
                shape = (module.out_features, module.in_features)
            found[bare_name(f"{name}.{own}" if name else own)] = shape
    return found


def _check_shape(name: str, change: LowRank, stored: tuple[int, ...] | None, target: str) -> None:
    if stored is None:
        raise ExportError(f"adapter of {name!r}: the base model has no parameter {target!r}")
    if stored != change.shape:
        raise ExportError(
            f"adapter of {name!r} has shape {change.shape}, but {target!r} has {stored}; is it another model's adapter?"
        )


def is_adapter_tensor(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def bare_name(name: str) -> str:
    """The base model's name of a module or parameter inside PEFT's wrappers."""
    parts = name.removeprefix(PREFIX).split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))
