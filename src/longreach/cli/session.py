"""One run from first step to page, for ``demo`` and ``train``: header and footer of the log, summary, Ctrl-C."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longreach.cli import machine
from longreach.cli.checkpoint import checkpoints, step_of
from longreach.cli.display import clock
from longreach.cli.recorder import Recorder
from longreach.report import FORMAT, write_page
from longreach.trainers.checkpoint import InterruptCallback


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``status`` is "finished" or "interrupted"; ``page`` is the written report."""

    status: str
    step: int
    page: Path


def quiet_libraries() -> None:
    """Switch off what would run through the run's own display: progress bars of Transformers and Datasets, and a notice that is
    for TRL's authors."""
    import warnings

    import datasets
    import transformers

    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def write_header(
    recorder: Recorder, run: str, method: str, model: str, config: dict[str, Any], *, resume: Path | None = None
) -> None:
    """Write the log's header record. ``config`` is what the user set, for a reader and to run it again."""
    header = {
        "type": "header",
        "format": FORMAT,
        "run": run,
        "method": method,
        "model": model,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "device": machine.device(),
        "config": config,
    }
    if resume is not None:
        header["resumed_from"] = step_of(resume)
    recorder.log.write(header)


def run(
    trainer: Any,
    recorder: Recorder,
    console: Console,
    *,
    resume: Path | None = None,
    how_to_resume: str,
) -> Outcome:
    """Train, and leave a complete log and page behind however it ends.

    Args:
        trainer: a Transformers trainer which has ``recorder`` among its callbacks.
        resume: checkpoint to go on from.
        how_to_resume: the command to show after such an end.

    Ctrl-C, or a pause that the monitor asks for, ends the run after its step, with a checkpoint. Any exception passes
    through once the footer is written.
    """
    interrupt = InterruptCallback()
    trainer.add_callback(interrupt)
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        _finish(recorder, trainer, status, error=f"{type(error).__name__}: {error}".strip(": "))
        raise
    stopped = interrupt.interrupted or recorder.paused
    status = "interrupted" if stopped else "finished"
    page = _finish(recorder, trainer, status)
    show_summary(console, recorder, status, page)
    if stopped:
        saved = checkpoints(recorder.log.path.parent)
        console.print(f"checkpoint saved: {saved[-1] if saved else None}", markup=False, soft_wrap=True)
        console.print(f"to go on: {how_to_resume}", markup=False, soft_wrap=True)
    return Outcome(status, trainer.state.global_step, page)


def _finish(recorder: Recorder, trainer: Any, status: str, error: str | None = None) -> Path:
    recorder.display.end()
    saved = checkpoints(recorder.log.path.parent)
    recorder.log.write(
        {
            "type": "footer",
            "status": status,
            "steps": trainer.state.global_step,
            "seconds": recorder.seconds,
            "error": error,
            "checkpoint": str(saved[-1]) if saved else None,
        }
    )
    return write_page(recorder.log.path)


def show_summary(console: Console, recorder: Recorder, status: str, page: Path) -> None:
    """Print the run's headline numbers and where its files are."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("status", f"{status} in {clock(recorder.seconds)}")
    held = [(row["step"], row["reward"]) for row in recorder.evals if row.get("reward") is not None]
    if held:
        text = f"{held[0][1]:.3f} at step {held[0][0]}"
        table.add_row("held-out reward", text + (f"  →  {held[-1][1]:.3f} at step {held[-1][0]}" if held[1:] else ""))
    rewards = [row["reward"] for row in recorder.steps if row.get("reward") is not None]
    if rewards:
        tail = rewards[-10:]
        table.add_row("training reward", f"{sum(tail) / len(tail):.3f}, mean of the last {len(tail)} steps")
    losses = [row["loss"] for row in recorder.steps if row.get("loss") is not None]
    if losses and not rewards:
        table.add_row("loss", f"{losses[0]:.4f}  →  {losses[-1]:.4f}")
    speeds = sorted(row["tokens_per_second"] for row in recorder.steps if row.get("tokens_per_second"))
    if speeds:
        table.add_row("speed", f"{speeds[len(speeds) // 2]:,.0f} tokens/s, median step")
    memory = [used.get("device", used.get("host", 0)) for row in recorder.steps if (used := row.get("memory"))]
    if memory:
        table.add_row("memory", f"{max(memory) / 1e9:.2f} GB, peak")
    if recorder.alarms:
        table.add_row("alarms", f"{len(recorder.alarms)}, the first at step {recorder.alarms[0]['step']}")
    table.add_row("log", str(recorder.log.path))
    table.add_row("page", str(page))
    console.print()
    console.print(table)
