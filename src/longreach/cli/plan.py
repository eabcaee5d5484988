"""``longreach plan``: what a training step takes on a card, how it will run there, and the longest context that fits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

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
    model: Annotated[str, typer.Argument(help="Hub id, local folder, or config.json; well-known models work offline.")],
    context: Annotated[int, typer.Option(help="Tokens of one row, prompt and completion.")] = 32768,
    completion: Annotated[int, typer.Option(help="Tokens of a row that carry a loss.")] = 1024,
    group: Annotated[int, typer.Option(help="Completions that share a prompt.")] = 1,
    prompts: Annotated[int, typer.Option(help="Groups in one step.")] = 1,
    rollout_rows: Annotated[
        int | None, typer.Option(help="Completions sampled at a time; shows what sampling takes beside the step.")
    ] = None,
    weights: Annotated[str, typer.Option(help="bf16, fp16, fp32, nf4 or mxfp4.")] = "bf16",
    lora: Annotated[int, typer.Option(help="Adapter rank; 0 trains all parameters.")] = 32,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw_8bit, paged_adamw_8bit, or a value of `optim`.")
    ] = "adamw",
    embedding: Annotated[str | None, typer.Option(help="int8: embedding and head in 8 bits.")] = None,
    release_gradients: Annotated[bool, typer.Option(help="Update each layer inside the backward.")] = False,
    reference: Annotated[bool, typer.Option(help="A second copy of the model scores completions (KL term).")] = False,
    gpu: Annotated[str | None, typer.Option(help="The card's memory, e.g. 24GB; default: this machine's.")] = None,
    host: Annotated[str | None, typer.Option(help="The host's memory, e.g. 128GB; default: this machine's.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens per chunk; default: planned.")] = None,
    offload: Annotated[
        str | None,
        typer.Option(help="What waits on the host: none, host (layer inputs), rows or keys; default: planned."),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep every k-th layer's input only; default: planned.")
    ] = None,
) -> None:
    """Print context by policy, with GPU and host memory and seconds, and the longest context that fits."""
    from longreach.cli.terminal import console
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
            optimizer=optimizer,
            embedding=embedding,
            release_gradients=release_gradients,
            reference=reference,
            gpu_bytes=_bytes("--gpu", gpu),
            host_bytes=_bytes("--host", host),
            chunk=chunk,
            offload=offload,
            keep_every=keep_every,
        )
    except PlanError as error:
        screen.print(f"[red]Does not fit.[/red] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    screen.print(f"[bold]{made.describe()}", soft_wrap=True, highlight=False)
    screen.print(made.parts_table(), highlight=False)
    screen.print(made.table(), highlight=False)
    screen.print(made.longest_table(), highlight=False)
    _notes(made, screen)


def _notes(made: Plan, screen: Console) -> None:
    work = made.work
    longest = made.longest()
    notes = [f"longest context that fits here: {longest:,} tokens"]
    if work.shape.positions is not None and max(longest, work.context) > work.shape.positions:
        notes.append(
            f"the config names {work.shape.positions:,} positions; beyond them set rotary scaling (rope_parameters) in the config"
        )
    if made.card is not None and not made.card.measured:
        notes.append(f"rates of {made.card.name} are estimated from its data sheet; memory does not depend on them")
    if not work.shape.fused:
        notes.append(f"{work.shape.kind} layers run as Transformers' modules; their workspace is an upper estimate")
    if work.format.packed:
        notes.append(f"{work.weights}: a layer's weights are dequantized once per pass, for all of its chunks")
    notes.append("GPU: tensors at the peak of a step with its optimizer; the driver takes about 0.7 GB more")
    for note in notes:
        screen.print(f"  {note}", soft_wrap=True, highlight=False)


def _bytes(option: str, text: str | None) -> int | None:
    """24GB, 24, 22.5GiB: a bare number means GB."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = (found[2].upper() or "GB") if found else "?"
    if found is None or unit not in UNITS or float(found[1]) == 0:
        raise typer.BadParameter(f"{option} {text!r}: give a size such as 24GB or 22.5GiB")
    return int(float(found[1]) * UNITS[unit])
