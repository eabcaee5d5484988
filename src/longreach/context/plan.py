"""The planner: how a training step will run on a given card, what it takes, and the longest context that fits.

Everything follows from the model's dimensions, the step's shape and the total memory of card and host, never from what is free at
run time: the same step gets the same plan on every machine like this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .memory import FORMATS, PLACES, Memory, Policy, Work, step_memory
from .shape import ModelShape
from .speed import CARDS, GB, Card, card_named, card_of_size, step_seconds

CHUNKS = (8192, 4096, 2048, 1024)  # tokens; smaller ones cost time at every context
SIZES = tuple(size * GB for size in (16, 24, 40, 48, 80, 141))  # of cards that `Plan.table` has a line for
CUDA_CONTEXT = 700 * 2**20  # what the driver takes of a card before the first tensor
SLACK = 1.03  # the allocator's blocks are larger than the tensors in them
HOST_PROCESS = 6 * GB  # Python, PyTorch, CUDA's libraries, data
HOST_SHARE = 0.9  # of a machine's memory that one process may take
COLUMNS = ("inputs", "chunk", "attention", "GPU", "over model", "host", "step")  # of a choice in a table
LONGEST = 1 << 24  # where the search for the longest context ends


class PlanError(ValueError):
    """No policy fits; the message says what would."""


@dataclass(frozen=True)
class Choice:
    """One policy and what a step under it takes."""

    policy: Policy
    memory: Memory
    seconds: float | None

    @property
    def gpu_needed(self) -> int:
        """Bytes a card must have in all: tensors, the allocator's slack, the driver's own."""
        return int(self.memory.gpu * SLACK) + CUDA_CONTEXT

    @property
    def host_needed(self) -> int:
        return self.memory.host + HOST_PROCESS if self.memory.host else 0

    def fits(self, gpu_bytes: int | None, host_bytes: int | None) -> bool:
        gpu = gpu_bytes is None or self.gpu_needed <= gpu_bytes
        return gpu and (host_bytes is None or self.host_needed <= HOST_SHARE * host_bytes)


@dataclass(frozen=True)
class Plan:
    """A training step that fits: the policy chosen, its memory and time.

    Attributes:
        work: the step.
        choice: the policy, its bytes by purpose, seconds on `card`.
        card: whose rates were used; None if the card is not in the table of `speed.py`.
        gpu_bytes, host_bytes: the limits it was made for, None for no limit.
        fixed: what the caller laid down instead of leaving it to the planner.
    """

    work: Work
    choice: Choice
    card: Card | None
    gpu_bytes: int | None
    host_bytes: int | None
    fixed: Mapping[str, Any]

    @property
    def policy(self) -> Policy:
        return self.choice.policy

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for `longreach.enable`."""
        policy = self.policy
        return {"chunk": policy.chunk, "offload": policy.offload, "save_attention": policy.save_attention}

    @property
    def gpu(self) -> int:
        """Predicted `torch.cuda.max_memory_allocated` of the step, bytes."""
        return self.choice.memory.gpu

    @property
    def host(self) -> int:
        """Host memory that the step pins, bytes."""
        return self.choice.memory.host

    @property
    def seconds(self) -> float | None:
        """Estimated time of one step."""
        return self.choice.seconds

    def choices(self, context: int | None = None) -> list[Choice]:
        """Every policy in the order of preference, at another context if given."""
        work = self.work if context is None else replace(self.work, context=context)
        return [_choice(work, policy, self.card) for policy in _policies(self.fixed)]

    def at(self, context: int) -> Choice | None:
        """What the planner picks at another context; None where nothing fits."""
        found = (choice for choice in self.choices(context) if choice.fits(self.gpu_bytes, self.host_bytes))
        return next(found, None)

    def longest(self, gpu_bytes: int | None = None, host_bytes: int | None = None) -> int:
        """Longest context in tokens that fits (the completion stays as it is), 0 if not even a short one does.

        Args:
            gpu_bytes, host_bytes: another card or machine; None for the plan's own limits.
        """
        limited = replace(self, gpu_bytes=gpu_bytes or self.gpu_bytes, host_bytes=host_bytes or self.host_bytes)
        low, high = self.work.completion + 1, LONGEST
        if limited.at(low) is None:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if limited.at(middle) is not None else (low, middle)
        return low

    def out_of_memory(self, allocated: int) -> str:
        """What to say where a step ran out of GPU memory all the same: the plan beside the fact, and what would fit.

        Args:
            allocated: bytes that were allocated when it happened (`torch.cuda.max_memory_allocated`), a lower bound.
        """
        largest = sorted(self.choice.memory.parts.items(), key=lambda part: -part[1])[:3]
        text = f"out of GPU memory with {_size(allocated)} allocated; planned were {_size(self.gpu)} "
        text += f"({self.policy}; mostly {', '.join(f'{name} {_size(size)}' for name, size in largest)}), on a GPU of "
        text += f"{_size(self.gpu_bytes)}. "
        if self.gpu_bytes is None:
            return text + "Give the planner gpu_bytes."
        # What the plan missed, other processes included, is taken as missed by every other plan too.
        room = self.gpu_bytes - max(0, allocated - self.gpu)
        leaner = [c for c in self.choices() if c.fits(room, self.host_bytes) and c.memory.gpu < self.choice.memory.gpu]
        if leaner:
            policy = leaner[0].policy
            return text + (
                f"This would fit: chunk={policy.chunk}, offload={policy.offload!r}, save_attention={policy.save_attention}."
            )
        longest = replace(self, fixed={}).longest(gpu_bytes=room)
        return text + (f"A context of {longest} tokens would fit." if longest else "No context fits beside it.")

    def describe(self) -> str:
        """One line: what was chosen and what it takes."""
        line = f"{self.policy}: {_size(self.gpu)} of GPU memory"
        if self.host:
            line += f", {_size(self.host)} of host memory"
        if self.seconds is not None and self.card is not None:
            line += f", about {_time(self.seconds)} a step on {self.card.name}"
        return f"{self.work.shape.name}, context {self.work.context}: {line}"

    def table(self, contexts: Iterable[int] | None = None) -> Any:
        """A `rich.table.Table`: context by policy, GPU and host memory, seconds; the choice in bold, what doesn't fit dim.

        Columns: where layer inputs wait, tokens per chunk, whether attention outputs are saved or computed again, GPU memory in
        all and over the loaded model, pinned host memory, estimated time of a step.
        """
        work = self.work
        title = f"{work.shape.name}, {work.weights}, {'LoRA' if work.ranks else 'all parameters'}"
        table = _table(f"{title}, completion {work.completion}, group {work.group}", ["context"], COLUMNS)
        for context in contexts or _around(work):
            picked = self.at(context)
            for choice in _telling(self.choices(context), picked):
                fits = choice.fits(self.gpu_bytes, self.host_bytes)
                style = "bold" if picked is not None and choice.policy == picked.policy else "" if fits else "dim"
                table.add_row(f"{context:,}", *_cells(choice), style=style)
            table.add_section()
        return table

    def longest_table(self) -> Any:
        """A `rich.table.Table`: the longest context on cards of 16 to 141 GB, with the policy and time there."""
        table = _table(
            "Longest context that fits", ["card", "context"], [name for name in COLUMNS if name != "over model"]
        )
        for size in SIZES:
            card = card_of_size(size)
            on_card = replace(self, gpu_bytes=size, card=card)
            longest = on_card.longest()
            choice = on_card.at(longest) if longest else None
            cells = _cells(choice) if choice is not None else ()
            table.add_row(card.name, f"{longest:,}" if cells else "none", *cells[:4], *cells[5:])
        return table


def plan(
    model_or_config: Any,
    *,
    context: int,
    completion: int,
    group: int = 1,
    weights: str = "bf16",
    lora: Any = None,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    chunk: int | None = None,
    offload: str | None = None,
    save_attention: bool | None = None,
) -> Plan:
    """Plan one training step: forward, backward and AdamW over one group of rows that share a prompt.

    Policies are tried in this order and the first that fits is taken: layer inputs (and attention outputs) kept on the GPU,
    on the host, then smaller chunks.

    Args:
        model_or_config: a model, a Transformers config, a config.json or a folder with one, or a name.
        context: tokens of one row, prompt and completion.
        completion: tokens of a row that carry a loss.
        group: rows that share the prompt.
        weights: "bf16", "fp16" or "fp32".
        lora: a peft.LoraConfig, a rank (on all linear layers but the head), or None to train all parameters.
        gpu_bytes: the card's total memory; None for this machine's GPU, or no limit where there is none.
        host_bytes: the machine's total memory; None for this machine's.
        chunk, offload, save_attention: as for `longreach.enable`, to lay them down instead of planning them.

    Raises:
        ValueError: an argument is off; the message names it.
        PlanError: nothing fits; the message says what would.
    """
    work = Work(ModelShape.of(model_or_config), *_checked(context, completion, group), _format(weights), {})
    work = replace(work, ranks=_ranks(lora, work.shape))
    fixed = _fixed(chunk, offload, save_attention)
    here = _this_gpu() if gpu_bytes is None else None
    if here is not None:
        gpu_bytes, card = here
    else:
        card = card_of_size(gpu_bytes) if gpu_bytes is not None else CARDS["CPU"]
    if host_bytes is None:
        import psutil

        host_bytes = psutil.virtual_memory().total
    choices = [_choice(work, policy, card) for policy in _policies(fixed)]
    chosen = next((choice for choice in choices if choice.fits(gpu_bytes, host_bytes)), None)
    made = Plan(work, chosen or choices[-1], card, gpu_bytes, host_bytes, fixed)
    if chosen is None:
        raise PlanError(_refusal(made, choices))
    return made


def _choice(work: Work, policy: Policy, card: Card | None) -> Choice:
    return Choice(policy, step_memory(work, policy), None if card is None else step_seconds(work, policy, card))


def _policies(fixed: Mapping[str, Any]) -> Iterator[Policy]:
    """In the order in which they are tried; the leanest last."""
    for chunk in (fixed["chunk"],) if "chunk" in fixed else CHUNKS:
        for offload in (fixed["offload"],) if "offload" in fixed else PLACES:
            if chunk != CHUNKS[0] and "chunk" not in fixed and offload == "none" and "offload" not in fixed:
                continue  # a smaller chunk comes after the offload, not instead of it
            for save in (fixed["save_attention"],) if "save_attention" in fixed else (True, False):
                yield Policy(chunk, offload, save)


def _refusal(made: Plan, choices: list[Choice]) -> str:
    work = made.work
    gpu = min(choices, key=lambda c: c.gpu_needed)
    host = min(choices, key=lambda c: c.host_needed)
    text = f"{work.shape.name} ({work.weights}, {'LoRA' if work.ranks else 'all parameters'}): a context of {work.context} "
    text += f"(completion {work.completion}, group {work.group}) does not fit "
    text += f"{_size(made.gpu_bytes)} of GPU and {_size(made.host_bytes)} of host memory. "
    text += (
        f"It needs a GPU of {_enough(gpu.gpu_needed)} and, with that, a host of {_enough(gpu.host_needed / HOST_SHARE)}"
    )
    if host.host_needed < gpu.host_needed:
        text += f"; or, with less on the host, a GPU of {_enough(host.gpu_needed)}"
    longest = made.longest()
    if longest:
        return f"{text}. The longest context that fits here is {longest} tokens."
    weights = gpu.memory.parts["weights"]
    if weights > (made.gpu_bytes or 0):
        text += f". No context fits here: the weights alone take {_size(weights)}"
    else:
        text += f". No context fits here: the weights, what trains and one chunk take {_size(gpu.memory.gpu)}"
    return f"{text}. Choose a smaller model" + ("." if work.ranks else ", or train an adapter (lora=16).")


def _checked(context: int, completion: int, group: int) -> tuple[int, int, int]:
    for name, value in (("context", context), ("completion", completion), ("group", group)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number from 1 up")
    if completion >= context:
        raise ValueError(
            f"completion={completion} with context={context}: the context is prompt and completion together, so it must be longer"
        )
    return context, completion, group


def _format(weights: str) -> str:
    if weights not in FORMATS:
        raise ValueError(f"weights={weights!r}: choose one of {', '.join(map(repr, FORMATS))}")
    return weights


def _fixed(chunk: int | None, offload: str | None, save_attention: bool | None) -> dict[str, Any]:
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk={chunk!r}: give the tokens per chunk, a whole number from 1 up, or None")
    if offload is not None and offload not in PLACES:
        raise ValueError(f"offload={offload!r}: choose one of {', '.join(map(repr, PLACES))}, or None")
    given = {"chunk": chunk, "offload": offload, "save_attention": save_attention}
    return {name: value for name, value in given.items() if value is not None}


def _ranks(lora: Any, shape: ModelShape) -> dict[str, int]:
    """Adapter rank of each linear layer."""
    if lora is None:
        return {}
    if isinstance(lora, int) and not isinstance(lora, bool) and lora > 0:
        return dict.fromkeys(shape.linears, lora)
    rank, targets = getattr(lora, "r", None), getattr(lora, "target_modules", None)
    if not isinstance(rank, int):
        raise ValueError(f"lora={lora!r}: give a peft.LoraConfig, a rank from 1 up, or None")
    if targets is None or targets == "all-linear":
        return dict.fromkeys(shape.linears, rank)
    named = {targets} if isinstance(targets, str) else set(targets)
    found = {name: rank for name in shape.linears if any(name == t or name == t.rsplit(".", 1)[-1] for t in named)}
    if not found:
        raise ValueError(f"lora.target_modules={targets!r} names none of {', '.join(shape.linears)}")
    return found


def _this_gpu() -> tuple[int, Card | None] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    return facts.total_memory, card_named(facts.name)


def _around(work: Work) -> list[int]:
    """Contexts to show beside the one asked for."""
    powers = [2**k for k in range(12, 21) if 2**k > work.completion]
    near = sorted(powers, key=lambda n: abs(n.bit_length() - work.context.bit_length()))[:5]
    return sorted({*near, work.context})


def _telling(choices: list[Choice], picked: Choice | None) -> list[Choice]:
    """Enough of the policies to see why one was picked: all before it and one after, or the last."""
    if picked is None:
        return choices[-1:]
    at = next(i for i, choice in enumerate(choices) if choice.policy == picked.policy)
    return choices[: at + 2]


def _table(title: str, first: list[str], columns: Iterable[str]) -> Any:
    """An empty `rich.table.Table` that fits 80 columns; `_cells` fills what follows the first columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (*first, *columns):
        table.add_column(name, justify="left" if name in ("card", "inputs", "attention") else "right", no_wrap=True)
    return table


def _cells(choice: Choice) -> tuple[str, ...]:
    policy, memory = choice.policy, choice.memory
    place = {"none": "GPU"}.get(policy.offload, policy.offload)
    kept = "saved" if policy.save_attention else "again"
    host = _size(memory.host) if memory.host else "-"
    seconds = "" if choice.seconds is None else _time(choice.seconds)
    return place, str(policy.chunk), kept, _size(memory.gpu), _size(memory.above_weights), host, seconds


def _size(size: float | None) -> str:
    return "any amount" if size is None else f"{size / GB:.1f} GB"


def _enough(size: float) -> str:
    """A size to buy: rounded up."""
    return f"{math.ceil(size / GB * 10) / 10:.1f} GB"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
