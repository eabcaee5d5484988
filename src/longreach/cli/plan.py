"""``longreach plan``: what a training step takes on a card, how it will run there, and the longest context that fits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from longreach.context.plan import Plan

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def plan(
    model: Annotated[
        str, typer.Argument(help="Hub id, local folder, config.json, or zoo; well-known models work offline.")
    ],
    context: Annotated[int, typer.Option(help="Tokens of one row, prompt and completion.")] = 32768,
    completion: Annotated[int, typer.Option(help="Tokens of a row that carry a loss.")] = 1024,
    group: Annotated[int, typer.Option(help="Completions that share a prompt.")] = 1,
    prompts: Annotated[int, typer.Option(help="Groups in one step.")] = 1,
    rollout_rows: Annotated[
        int | None, typer.Option(help="Completions sampled at a time; shows what sampling takes beside the step.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, nf4 or mxfp4 [default: as stored].")] = None,
    lora: Annotated[int, typer.Option(help="Adapter rank; 0 trains all parameters.")] = 32,
    lora_dtype: Annotated[
        str | None, typer.Option(help="bf16: adapters, their gradients and states in 16 bits; default: fp32.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw_8bit, paged_adamw_8bit, or a value of `optim`.")
    ] = "adamw",
    embedding: Annotated[str | None, typer.Option(help="int8: embedding and head in 8 bits.")] = None,
    release_gradients: Annotated[bool, typer.Option(help="Update each layer inside the backward.")] = False,
    reference: Annotated[bool, typer.Option(help="A second copy of the model scores completions (KL term).")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="The card's memory, e.g. 24GB; default: this machine's, or every size where it has none."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="The host's memory, e.g. 128GB; default: this machine's, or twice the card's where it has no card."
        ),
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens per chunk; default: planned.")] = None,
    offload: Annotated[
        str | None,
        typer.Option(help="What waits on the host: none, host (layer inputs), rows or keys; default: planned."),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep every k-th layer's input only; default: planned.")
    ] = None,
) -> None:
    """Print what a step takes, policy by policy or card by card, and the longest context that fits."""
    from longreach.cli.terminal import console, fail

    try:
        gpu_bytes, host_bytes = _bytes("--gpu", gpu), _bytes("--host", host)
        _check_name(model)
    except (ValueError, FileNotFoundError) as error:  # before the heavy imports: said at once
        fail(error)
    from longreach.context.plan import PlanError
    from longreach.context.plan import plan as make

    screen = console()
    try:
        made = make(
            model,
            context=context,
            completion=completion,
            group=group,
            prompts=prompts,
            rollout_rows=rollout_rows,
            weights=weights,
            lora=lora or None,
            lora_dtype=lora_dtype,
            optimizer=optimizer,
            embedding=embedding,
            release_gradients=release_gradients,
            reference=reference,
            chunk=chunk,
            offload=offload,
            keep_every=keep_every,
            gpu_bytes=gpu_bytes,
            host_bytes=host_bytes,
        )
    except PlanError as error:
        screen.print(f"[red]Does not fit.[/red] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None
    except ValueError as error:
        fail(error)
    form = _form_note(made, weights)
    if made.card is None and gpu is None:
        _without_a_card(made, form, host_bytes, screen)
    else:
        _with_a_card(made, form, screen)


def _check_name(model: str) -> None:
    from longreach.model_name import model_place

    model_place(model)


def _form_note(made: Plan, asked: str | None) -> str:
    """The weights that are counted, and why these."""
    from longreach.context.stored import stored_weights

    form = f"  weights: {made.work.weights}"
    if asked is not None:
        return form
    if stored_weights(made.work.shape) is None:
        return f"{form}, as the config names no dtype; --weights plans another form"
    return f"{form}, as the checkpoint stores them; --weights plans another form"


def _with_a_card(made: Plan, form: str, screen: Console) -> None:
    """One card in detail, the others by their longest context."""
    longest = made.longest()
    limit = made.limit(longest)
    ends = {"GPU": "then the GPU is full", "host": "then the host is full; --host plans a larger one"}
    more = f" ({ends[limit]})" if limit in ends else " and more, where the search ends"
    _print(screen, [f"[bold]{made.describe()}", form, "", made.parts_table(), made.table(), made.longest_table()])
    _print(screen, [f"  longest context that fits here: {longest:,} tokens{more}", *_notes(made)])


def _without_a_card(made: Plan, form: str, host_bytes: int | None, screen: Console) -> None:
    """Cards of every size, for a machine that has none itself."""
    from longreach.context.tables import HOST_PER_CARD

    hosts = f"hosts of {HOST_PER_CARD} × the card's memory are assumed, --host 128GB says otherwise"
    if host_bytes is not None:
        hosts = f"with a host of {host_bytes / 1e9:.0f} GB"
    _print(screen, [f"[bold]{made.describe()}, if all of it stays on the GPU", form])
    _print(screen, [f"  no GPU here: planned for cards elsewhere; {hosts}; --gpu 24GB plans one card in detail", ""])
    _print(screen, [made.card_table(host_bytes), made.longest_table(host_bytes)])
    rates = (
        "  rates: H200 as measured by this project, others estimated from data sheets; memory does not depend on them"
    )
    limit = "  limit: what is full at the longest context, the GPU or the host; search: nothing, where the search ends"
    _print(screen, [limit, *_notes(made), rates])


def _print(screen: Console, what: Sequence[Any]) -> None:
    for item in what:
        if isinstance(item, str):
            screen.print(item, soft_wrap=True, highlight=False)
        else:
            screen.print(item, highlight=False)


def _notes(made: Plan) -> list[str]:
    from longreach.context.precision import OVERFLOWING
    from longreach.context.tables import BEYOND

    work = made.work
    notes = []
    if work.shape.positions is not None:
        notes.append(
            f"{BEYOND} the config names {work.shape.positions:,} positions; beyond them set rotary scaling (rope_parameters)"
        )
    if made.card is not None and not made.card.measured:
        notes.append(f"rates of {made.card.name} are estimated from its data sheet; memory does not depend on them")
    if not work.shape.fused:
        notes.append(f"{work.shape.kind} layers run as Transformers' modules; their workspace is an upper estimate")
    if work.format.packed:
        notes.append(f"{work.weights}: a layer's weights are dequantized once per pass, for all of its chunks")
    if work.shape.kind in OVERFLOWING and work.itemsize == 2:
        notes.append(
            f"{work.shape.kind} leaves the range of fp16: a card without bf16, such as the T4, trains it in fp32 only "
            "(--weights fp32)"
        )
    notes.append("GPU: tensors at the peak of a step with its optimizer; the driver takes about 0.7 GB more")
    return [f"  {note}" for note in notes]


def _bytes(option: str, text: str | None) -> int | None:
    """24GB, 24, 22.5GiB: a bare number means GB."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = (found[2].upper() or "GB") if found else "?"
    if found is None or unit not in UNITS or float(found[1]) == 0:
        raise ValueError(f"{option} {text!r}: give a size such as 24GB or 22.5GiB")
    return int(float(found[1]) * UNITS[unit])
