"""The run log: one JSON object a line, written while a run goes on and read by the page.

Kinds of record, told apart by ``type``:

``header``  once per start of the program: ``format``, ``run``, ``method``, ``model``, ``started`` (ISO 8601),
            ``versions``, ``commit``, ``device``, ``config``; after ``--resume`` a second header carries
            ``resumed_from`` (a step).
``step``    one per optimizer step: ``step``, ``total_steps``, ``seconds`` (since the start), ``step_seconds``,
            ``loss``, ``grad_norm``, ``learning_rate``, ``reward``, ``reward_std``, ``rewards`` (name -> mean),
            ``groups_without_signal`` (0 to 1), ``length`` (``mean``, ``min``, ``max`` in tokens, ``clipped`` 0 to 1),
            ``entropy`` and ``kl`` (nats a token), ``tokens`` (since the start), ``tokens_per_second``, ``memory``
            (``host`` and ``device``, bytes), ``completions`` (a sample), ``alarms``, ``other`` (further metrics).
``eval``    one per held-out evaluation: ``step``, ``seconds``, ``reward``, ``rewards``, ``loss``, ``length``,
            ``completions``, ``other``.
``footer``  ``status`` ("finished", "interrupted", "failed"), ``steps``, ``seconds``, ``error``, ``checkpoint``.

A field that a method doesn't have (an SFT step has no reward) is left out, never written as zero.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
LOG_NAME = "log.jsonl"
PAGE_NAME = "report.html"

Record = dict[str, Any]


class LogError(ValueError):
    """A run log that is absent, unreadable or of another format; the message says which line and why."""


@dataclass(frozen=True)
class RunLog:
    """A run as its log tells it. ``steps`` and ``evals`` are in order of step, each step once: the last word on it."""

    path: Path
    header: Record
    starts: tuple[Record, ...]
    steps: tuple[Record, ...]
    evals: tuple[Record, ...]
    footer: Record | None
    alarms: tuple[Record, ...] = field(default=())

    @property
    def status(self) -> str:
        """ "finished", "interrupted", "failed", or "running" while no footer was written."""
        return self.footer["status"] if self.footer else "running"


def find_log(run: str | Path) -> Path:
    """Return the log of ``run``, a run's folder or the log itself. Raises ``LogError`` if there is none."""
    path = Path(run)
    log = path / LOG_NAME if path.is_dir() else path
    if not log.is_file():
        beside = sorted(p.parent.name for p in path.parent.glob(f"*/{LOG_NAME}"))[-5:] if path.parent.is_dir() else []
        hint = f"; runs there: {', '.join(beside)}" if beside else ""
        raise LogError(f"RUN={str(run)!r}: no {LOG_NAME} there; give the folder of a run{hint}")
    return log


def read_log(run: str | Path) -> RunLog:
    """Read the log of ``run`` (a folder or the file). A half-written last line, as a killed run leaves it, is dropped.

    Raises ``LogError`` naming the line for anything else that is not a record of this format.
    """
    path = find_log(run)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise LogError(f"{path}: not the log of a run: {error}") from None
    starts: list[Record] = []
    steps: dict[int, Record] = {}
    evals: dict[int, Record] = {}
    footer: Record | None = None
    for number, line in enumerate(lines, 1):
        record = _parse(path, number, line, last=number == len(lines))
        if record is None:
            continue
        kind = record["type"]
        if kind == "header":
            starts.append(_checked_header(path, number, record))
            footer = None
            # A resumed run repeats the steps after its checkpoint: what was logged for them before no longer holds.
            resumed = record.get("resumed_from")
            if resumed is not None:
                steps = {step: row for step, row in steps.items() if step <= resumed}
                evals = {step: row for step, row in evals.items() if step <= resumed}
        elif kind == "step":
            steps[record["step"]] = record
        elif kind == "eval":
            evals[record["step"]] = record
        elif kind == "footer":
            footer = record
        else:
            raise LogError(f"{path}:{number}: type={kind!r} is none of header, step, eval, footer")
    if not starts:
        raise LogError(f"{path}: no header record; is this the log of a run?")
    ordered = tuple(steps[step] for step in sorted(steps))
    alarms = tuple(alarm for row in ordered for alarm in row.get("alarms", ()))
    return RunLog(path, starts[0], tuple(starts), ordered, tuple(evals[s] for s in sorted(evals)), footer, alarms)


def _parse(path: Path, number: int, line: str, last: bool) -> Record | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        if last:
            return None
        raise LogError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict) or "type" not in record:
        raise LogError(f"{path}:{number}: a record needs a 'type'")
    if record["type"] in ("step", "eval") and not isinstance(record.get("step"), int):
        raise LogError(f"{path}:{number}: step={record.get('step')!r} is not a whole number")
    return record


def _checked_header(path: Path, number: int, record: Record) -> Record:
    if record.get("format") != FORMAT:
        raise LogError(f"{path}:{number}: format={record.get('format')!r}; this version reads format {FORMAT}")
    return record
