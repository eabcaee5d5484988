"""How large a rollout's cache and batch are: from the model, the machine and what is asked for, never from what is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..context.limits import host_total, this_machine
from .cache import LayerCache, Limits

KV_SHARE = (0.25, 0.5)  # of what a CPU's memory, or a card beside the weights, holds: bytes for keys and values
ROWS = (64, 256)  # most completions decoded at a time, on a CPU and on a GPU
PAGE = (16, 64)
PREFILL = (8192, 32768)  # tokens of prompts computed together
MEMBERS = 16


@dataclass(frozen=True)
class RolloutOptions:
    """How the rollout engine runs; every choice can be left to the plan.

    Attributes:
        rows: completions decoded at a time, or None.
        kv_bytes: most bytes of keys and values on the device, or None.
        page: tokens of a page, a power of two from 16 up, or None.
        share_prompts: store equal prompts once and read their keys once a step; False for comparison.
        prompt_keys: where long prompts' keys wait: "device", "host" (fetched layer by layer in every step), or "auto": on the
            host only if a single prompt would not fit `kv_bytes`.
        fused: decode known families by their hand-written step; False runs the model's modules.
        graphs: capture the hand-written step in CUDA graphs (on a CUDA device).
        batch_invariant: run every step with all rows, and every prompt alone, so that a completion's bits don't depend on
            what else is generated. Slower where few rows are in use.
    """

    rows: int | None = None
    kv_bytes: int | None = None
    page: int | None = None
    share_prompts: bool = True
    prompt_keys: str = "auto"
    fused: bool = True
    graphs: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "kv_bytes", "page"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}: give a whole number from 1 up, or None")
        if self.page is not None and (self.page < 16 or self.page & (self.page - 1)):
            raise ValueError(f"page={self.page}: give a power of two from 16 up, or None")
        for name in ("share_prompts", "fused", "graphs", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: give True or False")
        if self.prompt_keys not in ("auto", "device", "host"):
            raise ValueError(f"prompt_keys={self.prompt_keys!r}: choose 'auto', 'device' or 'host'")


@dataclass(frozen=True)
class Demand:
    """What a call of `generate` asks for: completions, distinct prompts, and the longest of each."""

    requests: int
    prompts: int
    prompt: int
    new: int

    @property
    def group(self) -> int:
        return -(-self.requests // self.prompts)


def device_budget(model: nn.Module, device: torch.device) -> int:
    """Bytes that keys and values may take: a fixed share of the machine."""
    if device.type != "cuda":
        return int(KV_SHARE[0] * host_total())
    card = this_machine(str(device)).gpu_bytes
    assert card is not None
    return int(KV_SHARE[1] * (card - sum(p.numel() * p.element_size() for p in model.parameters())))


def limits_for(
    demand: Demand, options: RolloutOptions, layers: Sequence[LayerCache], budget: int, cuda: bool
) -> Limits:
    """The largest batch whose keys and values fit.

    Raises:
        ValueError: not even one completion fits.
    """
    rows = min(demand.requests, options.rows or ROWS[cuda])
    page = options.page or PAGE[cuda]
    host = options.prompt_keys == "host"
    roomy = _limits(
        replace(demand, prompt=_rounded(demand.prompt), new=_rounded(demand.new)), options, rows, page, host
    )
    if roomy.pool_bytes(layers) <= budget and roomy.host_bytes(layers) <= _host_budget():
        return roomy  # the next call's slightly longer prompts will fit too
    places = {"auto": (False, True), "device": (False,), "host": (True,)}[options.prompt_keys]
    tried = [_largest(demand, options, layers, budget, rows, page, place) for place in places]
    for limits in tried:
        if limits.pool_bytes(layers) <= budget and limits.host_bytes(layers) <= _host_budget():
            return limits
    need, host_need = tried[-1].pool_bytes(layers), tried[-1].host_bytes(layers)
    raise ValueError(
        f"one completion of {demand.new:,} tokens on a prompt of {demand.prompt:,} needs {need / 2**30:.2f} GiB of keys and "
        f"values on the device and {host_need / 2**30:.2f} GiB on the host (prompt_keys={options.prompt_keys!r}), more than "
        f"kv_bytes={budget:,} ({budget / 2**30:.2f} GiB) or half of the host's memory; shorten them or raise kv_bytes"
    )


def _largest(
    demand: Demand, options: RolloutOptions, layers: Sequence[LayerCache], budget: int, rows: int, page: int, host: bool
) -> Limits:
    """Rows halved until keys and values fit, or one row."""
    while (limits := _limits(demand, options, rows, page, host)).pool_bytes(layers) > budget and rows > 1:
        rows = (rows + 1) // 2
    return limits


def _host_budget() -> int:
    return host_total() // 2


def _rounded(tokens: int) -> int:
    """The next of the lengths 64, 80, 96, 112, 128, 160, ...: at most a quarter more."""
    step = max(16, 1 << max(0, tokens.bit_length() - 3))
    return -(-max(tokens, 64) // step) * step


def _limits(demand: Demand, options: RolloutOptions, rows: int, page: int, host: bool) -> Limits:
    group = demand.group if options.share_prompts else 1
    # One prompt more than rows / group: groups that end and begin overlap.
    prompts = min(
        rows, demand.prompts * (1 if options.share_prompts else demand.group), -(-rows // group) + (group > 1)
    )
    members = 1
    while members < min(group, MEMBERS):
        members *= 2
    return Limits(rows, demand.prompt, demand.new, max(1, prompts), page, members, host)
