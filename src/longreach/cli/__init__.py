"""The ``longreach`` command. Each command is a file with a function of the same name; heavy imports stay inside it."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec

import typer

COMMANDS = ("demo", "train", "plan", "chat", "audit", "export", "report", "doctor")  # in the order --help lists them

app = typer.Typer(
    name="longreach",
    help="Reinforcement learning and fine-tuning of language models on very long contexts, with exact gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        from longreach import __version__

        typer.echo(f"longreach {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    # bitsandbytes, where it is installed, warns about a kernel of its own that nothing here uses. In a command the loggers are
    # ours to set; in a library they are its user's.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


for _name in COMMANDS:
    # A command whose file an installation lacks is not offered at all.
    if find_spec(f"{__name__}.{_name}") is not None:
        app.command(name=_name)(getattr(import_module(f"{__name__}.{_name}"), _name))
