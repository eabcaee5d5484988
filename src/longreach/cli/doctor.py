"""``longreach doctor``: what is installed, what it will run on and why, and whether the engine is exact here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def doctor(
    self_test: Annotated[bool, typer.Option(help="Compare the engine with stock layers on a tiny model.")] = True,
) -> None:
    """Show versions, devices, memory, attention backend; test attention on gpt-oss and the engine against stock Transformers."""
    from longreach.cli.terminal import console

    screen = console()
    for title, rows in (
        ("Versions", _versions),
        ("Machine", _machine),
        ("Attention", _attention),
        ("Attention implementations on gpt-oss (sinks, windows)", _implementations),
        ("Untrusted code", _isolation),
    ):
        _show(screen, title, rows())
    if self_test and not _self_test(screen):
        raise typer.Exit(1)


def _show(screen: Console, title: str, rows: list[tuple[str, str]]) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    screen.print(f"[bold]{title}")
    screen.print(table)


def _versions() -> list[tuple[str, str]]:
    from longreach.cli import machine

    found = machine.versions(machine.PACKAGES + machine.OPTIONAL)
    rows = list(found.items())
    rows += [(name, "not installed (optional)") for name in machine.OPTIONAL if name not in found]
    return [*rows, ("commit", machine.commit() or "not in a repository")]


def _machine() -> list[tuple[str, str]]:
    import psutil

    from longreach.cli import machine

    facts = machine.device()
    rows = [("device", f"{facts['kind']}: {facts['name']}")]
    if facts["kind"] == "cuda":
        rows.append(("GPUs", f"{facts['count']}, compute capability {facts['capability']}"))
        rows.append(("GPU memory", f"{facts['memory_bytes'] / 1e9:.1f} GB"))
    rows.append(("CPU", f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads"))
    free = psutil.virtual_memory().available
    rows.append(("memory", f"{facts['host_memory_bytes'] / 1e9:.1f} GB, {free / 1e9:.1f} GB of it free"))
    rows.append(("system", facts["system"]))
    return rows


def _attention() -> list[tuple[str, str]]:
    """The backend for the usual dtypes and head sizes on this device, and why each faster one was passed over."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    rows = []
    for dtype in (*half, torch.float32):
        for head_dim in (64, 128):
            name = str(dtype).removeprefix("torch.")
            rows.append((f"{name}, head size {head_dim}", _backend(device, dtype, head_dim)))
    rows.append(("with logit softcap", _backend(device, half[0], 128, softcap=30.0)))
    return rows


def _backend(device: Any, dtype: Any, head_dim: int, softcap: float | None = None) -> str:
    """The backend that will run, and why those before it in order of preference can't."""
    from longreach.attention.select import explain

    passed_over: list[str] = []
    for name, reason in explain(device, dtype, head_dim, softcap=softcap):
        if reason is None:
            return name + "".join(f"; {text}" for text in passed_over)
        passed_over.append(f"{name} {reason}")
    return "none: " + "; ".join(passed_over)


def _implementations() -> list[tuple[str, str]]:
    """Every registered implementation against eager in fp64: which ones train gpt-oss wrongly, and how wrongly."""
    import torch

    from longreach.context.implementations import check_implementations

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [(finding.name, str(finding)) for finding in check_implementations(device)]


def _isolation() -> list[tuple[str, str]]:
    """The isolation that the rewards' sandbox reaches on this machine, and what keeps it from a higher one."""
    import warnings

    from longreach.rewards import Sandbox, Tier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a low tier is what we are here to show
        with Sandbox(min_tier=Tier.none, workers=1) as sandbox:
            rows = [("isolation tier", sandbox.tier.name)]
            rows += [("passed over", note) for note in sandbox.notes]
    if sandbox.tier < Tier.lsm:
        rows.append(("", "rewards that run code refuse less than lsm, unless min_tier says so"))
    return rows


def _self_test(screen: Console) -> bool:
    """A random two-layer model, one shared-prompt group: the engine against stock eager layers, loss and gradients."""
    import time

    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from longreach.context.install import enable, engine_of
    from longreach.context.parity import ParityError, check_parity

    screen.print("[bold]Self-test")
    began = time.monotonic()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    enable(model, chunk=16, parity_check=False)
    engine = engine_of(model)
    assert engine is not None
    try:
        parity = check_parity(model, engine)
    except ParityError as error:
        screen.print(f"  [red]NOT exact[/red]: {error}", soft_wrap=True)
        return False
    screen.print(
        "  a prompt with three completions, fp32, engine against stock eager Transformers:\n"
        f"  log-probs differ by {parity.logprob:.1e} nats, gradients by {parity.gradient:.1e} of their norm "
        f"({time.monotonic() - began:.1f} s)",
        soft_wrap=True,
    )
    screen.print("  [green]exact to rounding[/green]")
    return True
