"""What the planner is asked, checked; each message names the argument, its value and what would be right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .limits import Limits, host_total, this_machine
from .offload import POLICIES
from .shape import ModelShape
from .speed import card_of_size
from .stored import check_plain_embedding, loadable
from .work import FORMATS, OPTIMIZERS, optimizer_kind


def check_counts(**counts: int) -> None:
    """Whole numbers from 1 up; a completion shorter than its context."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number from 1 up")
    completion, context = counts.get("completion", 0), counts.get("context", 1)
    if completion >= context:
        raise ValueError(
            f"completion={completion} with context={context}: the context is prompt and completion together, so it must be longer"
        )


def form_of_weights(weights: str | None, model_or_config: Any, shape: ModelShape) -> str:
    """The entry of `work.FORMATS` that a plan counts with.

    Raises:
        ValueError: there is none of that name, or `load` or the first step would refuse it.
    """
    from torch import nn

    from .auto import form_of

    if weights is not None and weights not in FORMATS:
        choice = ", ".join(map(repr, FORMATS))
        raise ValueError(f"weights={weights!r}: choose one of {choice}, or None for what the checkpoint stores")
    return loadable(shape, weights, stored=form_of(model_or_config) if isinstance(model_or_config, nn.Module) else None)


def in_eight_bits(name: str | None, shape: ModelShape) -> bool:
    """Whether embedding and head are.

    Raises:
        ValueError: another name, or a model whose embedding can't be.
    """
    if name not in (None, "int8"):
        raise ValueError(f"embedding={name!r}: choose 'int8', or None for the compute dtype")
    if name is not None:
        check_plain_embedding(shape.kind)
    return name == "int8"


def optimizer_of(name: str) -> str:
    """The entry of `work.OPTIMIZERS` that is meant."""
    if name in OPTIMIZERS:  # which spares the import below, the slowest part of a plan
        return name
    from transformers.training_args import OptimizerNames

    if name not in {kind.value for kind in OptimizerNames}:
        raise ValueError(f"optimizer={name!r}: choose one of {', '.join(map(repr, OPTIMIZERS))}, or a value of `optim`")
    return optimizer_kind(name)


def adapter_itemsize(lora_dtype: str, lora: Any) -> int:
    """Bytes of an adapter's number."""
    if lora_dtype != "bf16" or lora is None:
        raise ValueError(f"lora_dtype={lora_dtype!r}, lora={lora!r}: choose 'bf16' with lora, or None for fp32")
    return FORMATS[lora_dtype].itemsize


def limits_of(gpu_bytes: int | None, host_bytes: int | None) -> Limits:
    """Of a card and a host with so much memory; None for what this machine has."""
    import torch

    host = host_total() if host_bytes is None else host_bytes
    if gpu_bytes is not None:
        return Limits(gpu_bytes, host, card_of_size(gpu_bytes))
    if torch.cuda.is_available():
        return replace(this_machine(), host_bytes=host)
    return Limits(None, host, None)


def laid_down(
    chunk: int | str | None,
    offload: str | None,
    save_attention: bool | str | None,
    keep_every: int | str | None,
    *,
    free: str | None = None,
) -> dict[str, Any]:
    """What the caller fixed, checked, by the names of `Policy`'s fields; the value `free` leaves it to the planner.

    Raises:
        ValueError: a value that no policy has; the message names the argument.
    """
    for name, value, what in (
        ("chunk", chunk, "tokens per chunk"),
        ("keep_every", keep_every, "layers per kept input"),
    ):
        if value != free and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: give the {what}, a whole number from 1 up, or {free!r}")
    if offload != free and offload not in POLICIES:
        raise ValueError(f"offload={offload!r}: choose one of {', '.join(map(repr, POLICIES))}, or {free!r}")
    if save_attention not in (free, True, False):
        raise ValueError(f"save_attention={save_attention!r}: choose True, False or {free!r}")
    given = {"chunk": chunk, "offload": offload, "save_attention": save_attention, "keep_every": keep_every}
    return {name: value for name, value in given.items() if value != free}


def ranks_of(lora: Any, shape: ModelShape) -> dict[str, int]:
    """Adapter rank of each linear layer, from a peft.LoraConfig, a rank for all of them, or None."""
    if lora is None:
        return {}
    if isinstance(lora, int) and not isinstance(lora, bool) and lora > 0:
        return dict.fromkeys((*shape.linears, *shape.expert_linears), lora)
    rank, targets = getattr(lora, "r", None), getattr(lora, "target_modules", None)
    if not isinstance(rank, int):
        raise ValueError(f"lora={lora!r}: give a peft.LoraConfig, a rank from 1 up, or None")
    experts = getattr(lora, "target_parameters", None) or ()
    found = {name: rank for name in shape.expert_linears if any(t == name or t.endswith(f".{name}") for t in experts)}
    if targets is None or targets == "all-linear":
        return dict.fromkeys(shape.linears, rank) | found
    named = {targets} if isinstance(targets, str) else set(targets)
    found |= {name: rank for name in shape.linears if any(name == t or name == t.rsplit(".", 1)[-1] for t in named)}
    if not found:
        raise ValueError(f"lora.target_modules={targets!r} names none of {', '.join(shape.linears)}")
    return found
