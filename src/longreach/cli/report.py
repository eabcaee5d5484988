"""``longreach report RUN``: write the page of a run again from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or its log.jsonl.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page [default: report.html beside the log].")
    ] = None,
) -> None:
    """Write the page of a run from its log, also while the run goes on."""
    from longreach.cli.terminal import console, fail
    from longreach.report import LogError, write_page

    try:
        page = write_page(run, out)
    except (LogError, OSError) as error:
        fail(error)
    console().print(f"wrote {page}", soft_wrap=True)
