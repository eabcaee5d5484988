"""A run while it goes on: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from longreach.report.log import Record


def display_for(console: Console) -> LineDisplay | LiveDisplay:
    """The display that suits where ``console`` writes to."""
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


def clock(seconds: float | None) -> str:
    """1:02:03, 4:05, or -:-- when it isn't known."""
    if seconds is None:
        return "-:--"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def facts(record: Record) -> str:
    """What a step's line says: reward or loss, completion length, speed, memory; only what the record has."""
    parts = []
    if record.get("reward") is not None:
        parts.append(f"reward {record['reward']:.3f}")
    elif record.get("loss") is not None:
        parts.append(f"loss {record['loss']:.4f}")
    length = record.get("length", {}).get("mean")
    if length is not None:
        parts.append(f"length {length:.0f}")
    if record.get("tokens_per_second"):
        parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    memory = record.get("memory", {})
    used = memory.get("device", memory.get("host"))
    if used:
        parts.append(f"{used / 1e9:.2f} GB")
    return "  ".join(parts)


def evaluation(record: Record) -> str:
    """The line of a held-out evaluation."""
    value = f"reward {record['reward']:.3f}" if record.get("reward") is not None else ""
    if not value and record.get("loss") is not None:
        value = f"loss {record['loss']:.4f}"
    return f"held-out at step {record['step']}  {value}"


class LineDisplay:
    """One plain line per record: for logs, pipes and CI."""

    def __init__(self, console: Console) -> None:
        self.console, self.total = console, 0

    def begin(self, step: int, total: int) -> None:
        self.total = total

    def step(self, record: Record, eta: float | None) -> None:
        self.say(f"step {record['step']}/{self.total}  {facts(record)}  eta {clock(eta)}")

    def evaluated(self, record: Record) -> None:
        self.say(evaluation(record))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def end(self) -> None:
        pass


class LiveDisplay:
    """A progress bar with the last step's numbers; evaluations and messages scroll by above it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[facts]}"),
            TextColumn("[dim]eta {task.fields[eta]}"),
            console=console,
        )
        self.task = self.bar.add_task("", total=0, facts="", eta=clock(None))

    def begin(self, step: int, total: int) -> None:
        self.bar.update(self.task, total=total, completed=step)
        self.bar.start()

    def step(self, record: Record, eta: float | None) -> None:
        self.bar.update(self.task, completed=record["step"], facts=facts(record), eta=clock(eta))

    def evaluated(self, record: Record) -> None:
        self.say(evaluation(record))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def end(self) -> None:
        self.bar.stop()
