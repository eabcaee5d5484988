"""``longreach export``: from a run's folder to weights that other programs load, compared with the model that trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from longreach.exporting.pipeline import Exported

MISMATCH = 1  # exit status when the export does not compute what the model computes


def export(
    run: Annotated[
        str, typer.Argument(help="Folder of a run, of an adapter or of a model; a GGUF file; a model's Hub id; or zoo.")
    ],
    format: Annotated[str, typer.Option("--format", "-f", help="adapter | merged | vllm | gguf | ollama")] = "merged",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; with --format gguf also a file NAME.gguf; RUN-FORMAT if left out."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            "-q",
            help="merged: bf16 or fp16; gguf, ollama: f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, mxfp4, ...",
        ),
    ] = None,
    verify: Annotated[
        str,
        typer.Option(
            help="full: load the export back and compare it with the training model; weights: read merged weights back; off"
        ),
    ] = "full",
    weights: Annotated[
        str | None,
        typer.Option(help="What an adapter was trained on, nf4 or mxfp4; what the run's log says if left out."),
    ] = None,
    merge_onto: Annotated[
        str,
        typer.Option(help="trained: the weights that were trained against; original: the 16-bit ones before 4 bits."),
    ] = "trained",
    force: Annotated[bool, typer.Option("--force", help="Replace what is at --out, in one step.")] = False,
    as_adapter: Annotated[
        bool, typer.Option("--as-adapter", help="With --format vllm: the adapter, not merged.")
    ] = False,
    upload: Annotated[str | None, typer.Option(help="Also upload to this Hub repository, USER/NAME.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Create that repository public, not private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --upload: only list what would be uploaded.")
    ] = False,
) -> None:
    """Export a trained model, and prove it by loading it back."""
    from longreach.cli.terminal import console, fail
    from longreach.model_name import model_place

    screen = console()
    target = out or Path(
        f"{run.rstrip('/').rpartition('/')[2] if not Path(run).is_dir() else run.rstrip('/')}-{format}"
    )
    try:
        model_place(run)  # before the heavy imports: a wrong name is said at once
    except (ValueError, FileNotFoundError) as error:
        fail(error)
    quiet()
    from longreach.exporting.errors import ExportError, MismatchError
    from longreach.exporting.pipeline import export as make

    try:
        made = make(
            run,
            None,
            target,
            format=format,
            quantization=quantization,
            verify=verify,
            force=force,
            weights=weights,
            merge_onto=merge_onto,
            as_adapter=as_adapter,
            upload=upload,
            private=not public,
            dry_run=dry_run,
            say=lambda line: screen.print(line, markup=False, soft_wrap=True),
        )
    except MismatchError as error:
        _say_mismatch(error)
        raise typer.Exit(MISMATCH) from None
    except ExportError as error:
        fail(error)
    show(made, screen)


def quiet() -> None:
    """Switch off the progress bars and notices of Transformers, which would run through the command's own lines."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _say_mismatch(error: Exception) -> None:
    from rich.console import Console
    from rich.text import Text

    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    stderr.print(Text("not verified: ", style="bold red") + Text(str(error)))


def show(made: Exported, screen: Any) -> None:
    """What was compared, remarks, and where the export is."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("loaded back as", "relative difference", "largest", "same top token", "KL, nats"):
        table.add_column(title, justify="left" if title == "loaded back as" else "right")
    for check in made.checks:
        found = check.record.get("logits")
        numbers = (
            [f"{found['relative']:.1e}", f"{found['largest']:.2g}", f"{found['agreement']:.1%}", f"{found['kl']:.1e}"]
            if found
            else ["", "", "", ""]
        )
        table.add_row(check.name, *numbers)
    if made.checks:
        screen.print(table)
        adapted = [c.record["adapter"]["weights"] for c in made.checks if "adapter" in c.record]
        if adapted:
            screen.print(f"the adapter's change arrived in all {adapted[0]} weights that it is for")
    else:
        screen.print("not compared with the training model (--verify off)")
    for note in made.notes:
        screen.print(note, markup=False, soft_wrap=True)
    if made.uploaded:
        screen.print(f"uploaded: {made.uploaded}", markup=False, soft_wrap=True)
    screen.print(f"written to {made.path}", markup=False, soft_wrap=True)
