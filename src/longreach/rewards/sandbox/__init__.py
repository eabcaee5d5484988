"""Running untrusted code: one locked-down process per completion, forked from a clean zygote."""

from longreach.rewards.sandbox.outcome import (
    CallOutcome,
    Check,
    IsolationError,
    Limits,
    ProgramOutcome,
    SuiteOutcome,
    Usage,
)
from longreach.rewards.sandbox.pool import Sandbox
from longreach.rewards.sandbox.suite import Suite, SuiteError

__all__ = [
    "CallOutcome",
    "Check",
    "IsolationError",
    "Limits",
    "ProgramOutcome",
    "Sandbox",
    "Suite",
    "SuiteError",
    "SuiteOutcome",
    "Usage",
]
