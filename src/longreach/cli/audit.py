"""``longreach audit``: measure what a reward function pays for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def audit(
    reward: Annotated[str, typer.Argument(help="file.py:function or package.module:function, with TRL's signature.")],
    kind: Annotated[list[str] | None, typer.Option(help="Task kind to measure; may be given several times.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="REWARD=CORPUS: a column name the reward expects, and the corpus's.")
    ] = None,
    corpus: Annotated[Path | None, typer.Option(help="A corpus folder instead of the public one.")] = None,
    private_seed: Annotated[int | None, typer.Option(help="Audit on the private split of this seed.")] = None,
    style: Annotated[str, typer.Option(help="Completions as chat, plain or auto.")] = "auto",
    time_limit: Annotated[float, typer.Option(help="Seconds after which a call counts as hung.")] = 60.0,
    json: Annotated[Path | None, typer.Option(help="Write the result card here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the result page here.")] = None,
    max_ear: Annotated[float, typer.Option(help="Fail if more than this share of exploits is accepted.")] = 1.0,
    min_har: Annotated[float, typer.Option(help="Fail if less than this share of honest solutions is accepted.")] = 0.0,
) -> None:
    """Run a reward function on the exploit corpus and show its result card."""
    from longreach import audit as audits
    from longreach.cli.terminal import fail

    try:
        for option, file in (("--json", json), ("--html", html)):  # before the audit, which takes minutes
            if file is not None and (file.is_dir() or not file.parent.is_dir()):
                raise ValueError(f"{option} {str(file)!r}: name a file in a folder that exists")
        columns = dict(_pair(item) for item in column or ())
        chosen = audits.load_corpus(corpus) if private_seed is None else audits.private_split(private_seed, corpus)
        card = audits.audit(reward, chosen, kinds=kind, columns=columns, style=style, time_limit=time_limit)
    except ValueError as problem:
        fail(problem)
    card.show()
    if json is not None:
        card.save(json)
    if html is not None:
        html.write_text(card.page(), "utf-8")
    ear, har = card.ear.share or 0.0, card.har.share or 0.0
    if ear > max_ear or har < min_har:
        Console(stderr=True).print(
            f"[red]below the bar:[/red] EAR {ear:.3f} (at most {max_ear}), HAR {har:.3f} (at least {min_har})"
        )
        raise typer.Exit(1)


def _pair(item: str) -> tuple[str, str]:
    left, separator, right = item.partition("=")
    if not separator or not left or not right:
        raise ValueError(f"column: got {item!r}; it must be REWARD=CORPUS, such as ground_truth=answer")
    return left, right
