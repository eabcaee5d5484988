"""What commands say: one console, one way to fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

WRONG_INPUT = 2  # exit status for what the user can mend in a config, a path or an option
INTERRUPTED = 130  # the shell's convention for a program ended by Ctrl-C


class ConfigError(ValueError):
    """Wrong input. The message names the field, its value and what would be right."""


def console() -> Console:
    """The console for results and progress, on standard output."""
    from rich.console import Console

    return Console(highlight=False)


def fail(error: Exception) -> NoReturn:
    """Print ``error`` to standard error, without a traceback, and exit with status 2."""
    from rich.console import Console
    from rich.text import Text

    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    stderr.print(Text("error: ", style="bold red") + Text(str(error)))
    raise typer.Exit(WRONG_INPUT)
