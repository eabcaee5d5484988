"""Limits on one completion, and what running it came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from longreach.rewards.result import InfrastructureError, Tier

# Why a run ended early; "" when it did not. "undecided" is for suites whose own process failed: nobody knows by whose fault.
FAILURES = ("", "load", "exception", "memory", "wall", "cpu", "output", "denials", "protocol", "died", "undecided")


class IsolationError(InfrastructureError):
    """The isolation that was asked for cannot be had on this machine."""


@dataclass(frozen=True)
class Limits:
    """What one completion's process may use.

    cpu_s         whole seconds of CPU time (rounded up), over all its calls
    wall_s        seconds on the grader's clock, over all its calls
    memory_bytes  address space on top of the interpreter's own
    stack_bytes   of the main thread
    output_bytes  of one reply, or of a program's standard output
    source_bytes  of the code; longer is refused unread
    open_files    descriptors
    denials       refused system calls before the process is killed
    native_code   whether new machine code may be mapped: off, extension modules that are not loaded yet cannot be
    imported cpu           the one CPU to run on, or None for any

    No files can be written and no process or thread started, whatever the limits.
    """

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    stack_bytes: int = 64 << 20
    output_bytes: int = 1 << 20
    source_bytes: int = 1 << 18
    open_files: int = 32
    denials: int = 200
    native_code: bool = True
    cpu: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("native_code", "cpu"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"Limits.{item.name} is {value!r}; it must be a positive number")
        if self.open_files < 8:
            raise ValueError(f"Limits.open_files is {self.open_files}; a process needs at least 8")

    def for_process(self) -> dict[str, int]:
        """The limits that the process's own setup needs, as whole numbers."""
        return {
            "cpu_s": max(1, int(-(-self.cpu_s // 1))),
            "memory_bytes": int(self.memory_bytes),
            "stack_bytes": int(self.stack_bytes),
            "open_files": int(self.open_files),
            "denials": int(self.denials),
            "native_code": int(self.native_code),
            "cpu": -1 if self.cpu is None else self.cpu,
        }


@dataclass(frozen=True)
class Usage:
    """What the process used, as its parent saw it; ``denials`` counts refused system calls by name."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    max_rss_bytes: int = 0
    denials: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "cpu_s": round(self.cpu_s, 6),
            "wall_s": round(self.wall_s, 6),
            "max_rss_bytes": self.max_rss_bytes,
            "denials": dict(self.denials),
        }


@dataclass(frozen=True)
class CallOutcome:
    """Calls of one function: the values it returned, in order, up to the first failure.

    failure  "" when every input was answered, else one of ``FAILURES``
    error    what went wrong, for people: ``"ValueError: ..."``; text from the candidate is clipped
    """

    values: tuple[Any, ...]
    failure: str
    error: str
    tier: Tier
    usage: Usage = field(default_factory=Usage)

    @property
    def ok(self) -> bool:
        return not self.failure

    @property
    def denials(self) -> Mapping[str, int]:
        return self.usage.denials


@dataclass(frozen=True)
class ProgramOutcome:
    """A program's run: standard output and error as bytes, and its exit code (negative: the signal that ended it)."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    failure: str
    error: str
    tier: Tier
    usage: Usage = field(default_factory=Usage)

    @property
    def ok(self) -> bool:
        """Ran to its end, with exit code 0."""
        return not self.failure and self.exit_code == 0


@dataclass(frozen=True)
class Check:
    """One check of a suite that was run."""

    name: str
    passed: bool
    message: str = ""


@dataclass(frozen=True)
class SuiteOutcome:
    """A suite's run: a positive record for every check that was run. ``failure`` is about the candidate's process."""

    checks: tuple[Check, ...]
    failure: str
    error: str
    tier: Tier
    usage: Usage = field(default_factory=Usage)

    @property
    def ok(self) -> bool:
        return not self.failure and bool(self.checks) and all(check.passed for check in self.checks)
