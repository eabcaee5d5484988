"""The planner's tables, for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .choice import Choice
from .limits import Limits
from .plan import Plan, duration, size
from .speed import GB, card_of_size
from .work import Work

SIZES = tuple(amount * GB for amount in (16, 24, 40, 48, 80, 141))  # of cards that `longest_table` has a line for
BEYOND = "*"  # marks a context that is longer than the positions which the model's config names
HOST_PER_CARD = 2  # a host's memory in those of its card, where nobody says
COLUMNS = ("inputs", "chunk", "attention", "GPU", "over model", "host", "step")  # of a choice in a table
SHORT = tuple(name for name in COLUMNS if name not in ("attention", "over model"))


def step_table(plan: Plan, contexts: Iterable[int] | None = None) -> Any:
    """Context by policy; see `Plan.table`."""
    work = plan.work
    title = (
        f"{work.shape.name}, {work.weights}, {'LoRA' if work.ranks else 'all parameters'}, completion {work.completion}"
    )
    title += f", group {work.group}" + (f", {work.prompts} prompts" if work.prompts > 1 else "")
    table = _table(title, ["context"], COLUMNS)
    for context in contexts or _around(work):
        picked = plan.at(context)
        alone = picked or plan.alone(context)  # where only sampling does not fit, what the step would take
        for choice in _telling(plan.choices(context), alone):
            fits = picked is not None and choice.fits(plan.limits)
            style = "bold" if picked is not None and choice.policy == picked.policy else "" if fits else "dim"
            table.add_row(f"{context:,}", *_cells(choice, timed=plan.card is not None), style=style)
        table.add_section()
    return table


def parts_table(plan: Plan) -> Any:
    """What the memory of a step, and of sampling, is for; see `Plan.parts_table`."""
    memory, sampled = plan.choice.memory, plan.sampled
    columns = ["step", *(["sampling"] if sampled is not None else []), *(["host"] if memory.host else [])]
    table = _table(f"Where it goes, in {memory.moment}", ["what"], columns)
    found = [
        memory.parts,
        *([sampled.parts] if sampled is not None else []),
        *([memory.host_parts] if memory.host else []),
    ]
    names = dict.fromkeys(name for parts in found for name in parts)
    for name in names:
        table.add_row(name, *(size(parts[name]) if name in parts else "" for parts in found))
    table.add_row("in all", *(size(sum(parts.values())) for parts in found), style="bold")
    return table


def card_table(plan: Plan, host_bytes: int | None = None) -> Any:
    """The step on cards of 16 to 141 GB; see `Plan.card_table`."""
    table = _table(f"A context of {plan.work.context:,} on each card", ["card", "memory"], SHORT)
    for found in on_cards(plan, host_bytes):
        assert found.limits.card is not None and found.limits.gpu_bytes is not None
        first = (found.limits.card.name, f"{found.limits.gpu_bytes // GB} GB")
        if found.fits:
            table.add_row(*first, *_short(found.choice))
        else:
            table.add_row(*first, "does not fit", "", *_needs(found), style="dim")
    return table


def longest_table(plan: Plan, host_bytes: int | None = None) -> Any:
    """The longest context on cards of 16 to 141 GB; see `Plan.longest_table`."""
    table = _table("Longest context that fits", ["card", "context", "limit"], SHORT)
    for found in on_cards(plan, host_bytes):
        assert found.limits.card is not None
        longest = found.longest()
        choice = found.at(longest) if longest else None
        if choice is None:
            table.add_row(found.limits.card.name, "none", found.limit(plan.work.completion), style="dim")
        else:
            limit = found.limit(longest)
            beyond = plan.work.shape.positions is not None and longest > plan.work.shape.positions
            context = f"{'> ' if limit == 'search' else ''}{longest:,}{BEYOND if beyond else ''}"
            table.add_row(found.limits.card.name, context, limit, *_short(choice))
    return table


def _needs(plan: Plan) -> tuple[str, str]:
    """GPU and host memory of the leanest way to run what does not fit."""
    memory, sampled = plan.choice.memory, plan.sampled
    gpu = max(memory.gpu, sampled.gpu if sampled is not None else 0)
    host = max(memory.host, sampled.host if sampled is not None else 0)
    return size(gpu), size(host) if host else "-"


def on_cards(plan: Plan, host_bytes: int | None = None) -> Iterator[Plan]:
    """The plan of the same step for each card of the tables."""
    for amount in SIZES:
        host = host_bytes or (plan.limits.host_bytes if plan.card is not None else HOST_PER_CARD * amount)
        yield plan.on(Limits(amount, host, card_of_size(amount)))


def _around(work: Work) -> list[int]:
    """Contexts to show beside the one asked for."""
    powers = [2**k for k in range(12, 21) if 2**k > work.completion]
    near = sorted(powers, key=lambda n: abs(n.bit_length() - work.context.bit_length()))[:5]
    return sorted({*near, work.context})


def _telling(choices: list[Choice], picked: Choice | None) -> list[Choice]:
    """Enough of the policies to see why one was picked: the pick, the fastest of each placement before it, and one after."""
    if picked is None:
        return choices[-1:]
    at = next(i for i, choice in enumerate(choices) if choice.policy == picked.policy)
    before = {choice.policy.offload: choice for choice in reversed(choices[:at])}
    shown = sorted({*(choices.index(choice) for choice in before.values()), at, min(at + 1, len(choices) - 1)})
    return [choices[i] for i in shown]


def _table(title: str, first: list[str], columns: Iterable[str]) -> Any:
    """An empty `rich.table.Table` that fits 80 columns; `_cells` fills what follows the first columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (*first, *columns):
        table.add_column(
            name, justify="left" if name in ("card", "what", "limit", "inputs", "attention") else "right", no_wrap=True
        )
    return table


def _short(choice: Choice) -> list[str]:
    return [cell for name, cell in zip(COLUMNS, _cells(choice)) if name in SHORT]


def _cells(choice: Choice, timed: bool = True) -> tuple[str, ...]:
    policy, memory = choice.policy, choice.memory
    place = {"none": "GPU"}.get(policy.offload, policy.offload)
    place += "" if policy.keep_every == 1 else f"/{policy.keep_every}"
    kept = "saved" if policy.save_attention else "again"
    host = size(memory.host) if memory.host else "-"
    step = duration(choice.seconds) if timed else "-"
    return place, str(policy.chunk), kept, size(memory.gpu), size(memory.above_weights), host, step
