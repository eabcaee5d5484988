"""The planner: how a training step will run on a given card, what it takes, and the longest context that fits.

Everything follows from the model's dimensions, the step's shape and the total memory of card and host, never from what is free at
run time: the same step gets the same plan on every machine like this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .arguments import (
    adapter_itemsize,
    check_counts,
    form_of_weights,
    in_eight_bits,
    laid_down,
    limits_of,
    optimizer_of,
    ranks_of,
)
from .choice import Choice, card_bytes, choices, choose, leanest
from .limits import HOST_SHARE, Limits
from .memory import Memory
from .policy import Policy
from .sampling import Sampling, fitting_rows, samples, sampling_memory
from .shape import ModelShape
from .speed import GB, Card
from .work import FORMATS, Work

LONGEST = 1 << 24  # where the search for the longest context ends


class PlanError(ValueError):
    """No policy fits; the message says what would."""


@dataclass(frozen=True)
class Plan:
    """A training step that fits: the policy chosen, its memory and time.

    Attributes:
        work: the step.
        choice: the policy, its bytes by purpose, seconds on the card.
        limits: what it was made for.
        fixed: what the caller laid down instead of leaving it to the planner.
        sampling: how completions are sampled between the steps, None if they are not.
    """

    work: Work
    choice: Choice
    limits: Limits
    fixed: Mapping[str, Any]
    sampling: Sampling | None = None

    @property
    def policy(self) -> Policy:
        return self.choice.policy

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for `longreach.enable`."""
        return self.policy.options

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
        """Estimated time of one step; None on a card whose rates are not known."""
        return self.choice.seconds if self.limits.card is not None else None

    @property
    def card(self) -> Card | None:
        return self.limits.card

    @property
    def sampled(self) -> Memory | None:
        """What sampling takes between the steps."""
        return None if self.sampling is None else sampling_memory(self.work, self.sampling)

    @property
    def fits(self) -> bool:
        return self.choice.fits(self.limits) and self._samples(self.work)

    def _samples(self, work: Work) -> bool:
        return self.sampling is None or samples(work, self.limits, _placed(work, self.limits, self.sampling))

    def choices(self, context: int | None = None) -> list[Choice]:
        """Every policy in the order of preference, at another context if given."""
        return [choice for tier in choices(self._at(context), self.limits, self.fixed) for choice in tier]

    def at(self, context: int, too_large: set[Policy] | None = None) -> Choice | None:
        """What the planner picks at another context; None where nothing fits. `too_large` as for `choose`."""
        return self.alone(context, too_large) if self._samples(self._at(context)) else None

    def alone(self, context: int, too_large: set[Policy] | None = None) -> Choice | None:
        """The same, of the step without regard to sampling."""
        return choose(self._at(context), self.limits, self.fixed, too_large=too_large)

    def _at(self, context: int | None) -> Work:
        return self.work if context is None else replace(self.work, context=context)

    def longest(self, gpu_bytes: int | None = None, host_bytes: int | None = None) -> int:
        """Longest context in tokens that fits (the completion stays as it is), 0 if not even a short one does.

        Args:
            gpu_bytes, host_bytes: another card or machine; None for the plan's own limits.
        """
        mine = self.limits
        limits = replace(mine, gpu_bytes=gpu_bytes or mine.gpu_bytes, host_bytes=host_bytes or mine.host_bytes)
        limited = replace(self, limits=limits)
        low, high = self.work.completion + 1, LONGEST
        too_large: set[Policy] = set()  # at `low`, and so at every longer context
        if limited.at(low, too_large) is None:
            return 0
        while high - low > 1:
            middle, failing = (low + high) // 2, set(too_large)
            if limited.at(middle, failing) is None:
                high = middle
            else:
                low, too_large = middle, failing
        return low

    def limit(self, longest: int) -> str:
        """What keeps a context longer than `longest` from fitting: "GPU", "host" or, at the end of the search, "search"."""
        if longest >= LONGEST - 1:
            return "search"
        roomier = replace(self, limits=replace(self.limits, host_bytes=None))
        return "host" if roomier.at(longest + 1) is not None else "GPU"

    def on(self, limits: Limits) -> Plan:
        """The same step planned for another machine; where it does not fit, the plan that needs least of the GPU."""
        sampling = None if self.sampling is None else _placed(self.work, limits, self.sampling)
        return made(self.work, limits, self.fixed, sampling=sampling, refuse=False)

    def out_of_memory(self, allocated: int) -> str:
        """What to say where a step ran out of GPU memory all the same: the plan beside the fact, and what would fit.

        Args:
            allocated: bytes that were allocated when it happened (`torch.cuda.max_memory_allocated`), a lower bound.
        """
        largest = sorted(self.choice.memory.parts.items(), key=lambda part: -part[1])[:3]
        total = self.limits.gpu_bytes
        text = f"out of GPU memory with {size(allocated)} allocated; planned were {size(self.gpu)} "
        text += f"({self.policy}; mostly {', '.join(f'{name} {size(part)}' for name, part in largest)}), on a GPU of "
        text += f"{size(total)}. "
        if total is None:
            return text + "Give the planner gpu_bytes."
        # What the plan missed, other processes included, is taken as missed by every other plan too.
        room = replace(self.limits, gpu_bytes=total - max(0, allocated - self.gpu))
        leaner = choose(self.work, room, self.fixed, below=self.choice.memory.gpu)
        if leaner is not None:
            fit = ", ".join(f"{name}={value!r}" for name, value in leaner.policy.options.items())
            return text + f"This would fit: {fit}."
        longest = replace(self, fixed={}).longest(gpu_bytes=room.gpu_bytes)
        return text + (f"A context of {longest} tokens would fit." if longest else "No context fits beside it.")

    def describe(self) -> str:
        """One line: what was chosen and what it takes."""
        line = f"{self.policy}: {size(self.gpu)} of {'GPU ' if self.limits.offload else ''}memory"
        if self.host:
            line += f", {size(self.host)} of host memory"
        if self.sampled is not None:
            apart = f" with {size(self.sampled.host)} on the host" if self.sampled.host else ""
            line += f" ({size(self.sampled.gpu)}{apart} while sampling)"
        if self.seconds is not None and self.card is not None:
            line += f", about {duration(self.seconds)} a step on {self.card.name}"
        rows = f"context {self.work.context}"
        if self.work.group * self.work.prompts > 1:
            rows += (
                f", {self.work.prompts} × {self.work.group} rows"
                if self.work.prompts > 1
                else f", group {self.work.group}"
            )
        return f"{self.work.shape.name}, {rows}: {line}"

    def parts_table(self) -> Any:
        """A `rich.table.Table`: what the memory of the step, and of sampling, is for."""
        from .tables import parts_table

        return parts_table(self)

    def table(self, contexts: Iterable[int] | None = None) -> Any:
        """A `rich.table.Table`: context by policy, GPU and host memory, seconds; the choice in bold, what doesn't fit dim.

        Columns: where layer inputs (rows, keys) wait, tokens per chunk, whether attention outputs are saved or computed again,
        GPU memory in all and over the loaded model, pinned host memory, estimated time of a step.
        """
        from .tables import step_table

        return step_table(self, contexts)

    def card_table(self, host_bytes: int | None = None) -> Any:
        """A `rich.table.Table`: this step on cards of 16 to 141 GB, or what it would need. Hosts as for `longest_table`."""
        from .tables import card_table

        return card_table(self, host_bytes)

    def longest_table(self, host_bytes: int | None = None) -> Any:
        """A `rich.table.Table`: the longest context on cards of 16 to 141 GB, what ends it, the policy and time there.

        Args:
            host_bytes: the host's memory; None for the plan's own, and for a plan without a card twice the card's.
        """
        from .tables import longest_table

        return longest_table(self, host_bytes)


def plan(
    model_or_config: Any,
    *,
    context: int,
    completion: int,
    group: int = 1,
    weights: str | None = None,
    lora: Any = None,
    lora_dtype: str | None = None,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    prompts: int = 1,
    rollout_rows: int | None = None,
    optimizer: str = "adamw",
    embedding: str | None = None,
    release_gradients: bool = False,
    reference: bool = False,
    chunk: int | None = None,
    offload: str | None = None,
    save_attention: bool | None = None,
    keep_every: int | None = None,
) -> Plan:
    """Plan one training step: forward, backward and optimizer over groups of rows that share a prompt.

    Policies are tried in this order and the first that fits is taken: layer inputs (and attention outputs) kept on the GPU, on
    the host, smaller chunks, hidden and gradient rows on the host, keys and values on the host; with a small host, only every
    k-th layer's input.

    Args:
        model_or_config: a model, a Transformers config, a config.json or a folder with one, or a name.
        context: tokens of one row, prompt and completion.
        completion: tokens of a row that carry a loss.
        group: rows that share a prompt.
        weights: "bf16", "fp16", "fp32", "nf4" or "mxfp4"; None for what the checkpoint stores, as for `longreach.load`, or the
            model that is given has.
        lora: a peft.LoraConfig, a rank (on all linear layers but the head, experts included), or None to train all parameters.
        lora_dtype: "bf16" for adapters in 16 bits; None for PEFT's fp32.
        gpu_bytes: the card's total memory; None for this machine's GPU, or no limit, and no times, where there is none.
        host_bytes: the machine's total memory; None for this machine's.
        prompts: groups in one step.
        rollout_rows: completions sampled at a time between the steps, each prompt's keys and values stored once, on the
            host where the card is too small; None to leave sampling out.
        optimizer: a kind of `work.OPTIMIZERS`, or a value of Transformers' `optim`.
        embedding: "int8" for embedding and head in 8 bits, as for `longreach.load`.
        release_gradients: each layer is updated inside the backward, as in the trainers' configurations.
        reference: a second copy of the model scores the completions (KL term without an adapter).
        chunk, offload, save_attention, keep_every: as for `longreach.enable`, to lay them down instead of planning them.

    Raises:
        ValueError: an argument is off, the message names it; or `load` or the first step would refuse what is asked for.
        PlanError: nothing fits; the message says what would.
    """
    shape = ModelShape.of(model_or_config)
    check_counts(context=context, completion=completion, group=group, prompts=prompts)
    if rollout_rows is not None:
        check_counts(rollout_rows=rollout_rows)
    ranks, form = ranks_of(lora, shape), form_of_weights(weights, model_or_config, shape)
    if FORMATS[form].packed and not ranks:
        raise ValueError(f"lora=None: weights in {form} are frozen, so nothing trains; give lora, or weights='bf16'")
    work = Work(
        shape, context, completion, group, form, ranks, prompts=prompts, optimizer=optimizer_of(optimizer),
        eight_bit_tables=in_eight_bits(embedding, shape), released=release_gradients, reference=reference,
    )  # fmt: skip
    if lora_dtype is not None:
        work = replace(
            work, trained_count=work.trained, trained_bytes=work.trained * adapter_itemsize(lora_dtype, lora)
        )
    limits, fixed = limits_of(gpu_bytes, host_bytes), laid_down(chunk, offload, save_attention, keep_every)
    sampling = None
    if rollout_rows is not None:
        sampling = _placed(work, limits, Sampling(rollout_rows, -(-rollout_rows // group)))
    return made(work, limits, fixed, sampling=sampling)


def _placed(work: Work, limits: Limits, sampling: Sampling) -> Sampling:
    """Prompts' keys and values on the card if they fit, else on the host."""
    on_card = replace(sampling, on_host=False)
    return on_card if samples(work, limits, on_card) else replace(sampling, on_host=True)


def made(
    work: Work, limits: Limits, fixed: Mapping[str, Any], *, sampling: Sampling | None = None, refuse: bool = True
) -> Plan:
    """The plan of a step. Where nothing fits: `PlanError`, or with `refuse=False` the plan that needs least of the GPU."""
    chosen = choose(work, limits, fixed)
    found = Plan(work, chosen or leanest(work, limits, fixed), limits, fixed, sampling)
    if refuse and not found.fits:
        raise PlanError(refusal(found))
    return found


def refusal(found: Plan) -> str:
    """Why a plan that does not fit is refused, and what would fit."""
    work, limits = found.work, found.limits
    if found.choice.fits(limits) and found.sampling is not None and found.sampled is not None:
        return _refused_sampling(found, found.sampling, found.sampled)
    tried = found.choices()
    gpu = min(tried, key=lambda c: (c.gpu_needed, c.host_needed))
    host = min(tried, key=lambda c: (c.host_needed, c.gpu_needed))
    rows = f"completion {work.completion}, group {work.group}" + (
        f", {work.prompts} prompts" if work.prompts > 1 else ""
    )
    text = f"{work.shape.name} ({work.weights}, {'LoRA' if work.ranks else 'all parameters'}): a context of {work.context} "
    text += f"({rows}) does not fit {size(limits.gpu_bytes)} of GPU and {size(limits.host_bytes)} of host memory. "
    text += (
        f"It needs a GPU of {enough(gpu.gpu_needed)} and, with that, a host of {enough(gpu.host_needed / HOST_SHARE)}"
    )
    if host.host_needed < gpu.host_needed:
        text += f"; or, with less on the host, a GPU of {enough(host.gpu_needed)}"
    longest = found.longest()
    if longest:
        return f"{text}. The longest context that fits here is {longest} tokens."
    weights = gpu.memory.parts["weights"]
    if weights > (limits.gpu_bytes or 0):
        text += f". No context fits here: the weights alone take {size(weights)}"
    else:
        text += f". No context fits here: the weights, what trains and one chunk take {size(gpu.memory.gpu)}"
    return f"{text}. Choose a smaller model" + (
        (f", or 4-bit weights (weights={_smaller(work.shape)})." if not work.format.packed else ".")
        if work.ranks
        else ", or train an adapter (lora=16)."
    )


def _smaller(shape: ModelShape) -> str:
    """`weights` that takes less than 16 bits: a checkpoint that is packed already is not quantized again."""
    return "'nf4'" if shape.quantization is None else "None, as stored"


def _refused_sampling(found: Plan, sampling: Sampling, sampled: Memory) -> str:
    work, limits = found.work, found.limits
    text = f"{work.shape.name} ({work.weights}): sampling {sampling.rows} completions of {work.completion} tokens on prompts of "
    cache = size(sampled.parts["cache of keys and values"])
    text += f"{work.prompt} takes {size(sampled.gpu)}, {cache} of it for keys and values; "
    text += f"it needs a GPU of {enough(card_bytes(sampled))}, not {size(limits.gpu_bytes)}. "
    fewer = fitting_rows(work, limits, sampling.rows, sampling.prompts)
    if fewer is not None:
        return text + f"{fewer.rows} completions at a time would fit."
    longest = found.longest()
    return text + (f"The longest context that fits here is {longest} tokens." if longest else "No context fits here.")


def size(amount: float | None) -> str:
    return "any amount" if amount is None else f"{amount / GB:.1f} GB"


def enough(amount: float) -> str:
    """A size to buy: rounded up."""
    return f"{math.ceil(amount / GB * 10) / 10:.1f} GB"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
