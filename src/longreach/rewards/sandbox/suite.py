"""Unit tests against a candidate in two processes: the tests in one, the candidate in the other, the grader in between.

The tests' process starts clean for every completion and holds nothing that the candidate could have touched. What
must pass is known before anything runs, from the tests' own text.
"""

from __future__ import annotations

import ast
import json
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longreach.rewards.result import InfrastructureError
from longreach.rewards.sandbox.child.tester import ASK
from longreach.rewards.sandbox.child.wire import LENGTH, NONCE_BYTES, OK
from longreach.rewards.sandbox.outcome import Check, Limits, SuiteOutcome, Usage
from longreach.rewards.sandbox.process import Zygote
from longreach.rewards.sandbox.session import CandidateFailed, Session, clip

_REPLY = struct.Struct("<BI")
_GONE = 9  # a status that means: the candidate's process has ended
MAX_CALLS = 100_000


class SuiteError(InfrastructureError):
    """The suite itself is broken, or needs what cannot be had: its author must change it."""


@dataclass(frozen=True)
class Suite:
    """Tests of a module named ``module``.

    snippets  statements that raise when the candidate is wrong (``"assert f(1) == 2"``); the candidate's public
    names are in scope files     test files by name: ``test_*`` functions without parameters, ``Test*`` classes,
    `unittest.TestCase`s;
              they import the candidate as ``module``. Files without tests are importable helpers; they come first
    in_place  lists, dicts and sets that a call changed are changed in the tests too. Leave it off unless the task is to
              change its argument: a check that reads its inputs again could be talked into agreeing
    """

    snippets: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    module: str = "solution"
    in_place: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.snippets, str):
            raise TypeError("snippets is a string; it must be a list of strings, one for each check")
        for index, snippet in enumerate(self.snippets):
            _parse(snippet, f"snippets[{index}]")
        if not self.module.isidentifier():
            raise ValueError(f"module is {self.module!r}; it must be an identifier")
        if not self.expected():
            raise ValueError("the suite holds no check: give snippets, or files with test_* functions")

    def names(self) -> dict[str, list[str]]:
        """The tests of every file, in order."""
        return {file: _tests_in(file, source) for file, source in self.files.items()}

    def expected(self) -> list[str]:
        """The name of every check that must pass."""
        checks = [f"check {index}" for index in range(len(self.snippets))]
        return checks + [f"{file}::{name}" for file, names in self.names().items() for name in names]


def _parse(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} is not Python: {error}") from None


def _tests_in(file: str, source: str) -> list[str]:
    names: list[str] = []
    for node in _parse(source, file).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if node.args.args or node.args.posonlyargs or node.args.kwonlyargs:
                raise ValueError(f"{file}::{node.name} takes parameters; fixtures are not supported")
            names.append(node.name)
        elif isinstance(node, ast.ClassDef):
            case = any(ast.unparse(base).split(".")[-1] == "TestCase" for base in node.bases)
            if case or node.name.startswith("Test"):
                methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
                names += [f"{node.name}.{method}" for method in methods if method.startswith("test")]
    return names


def run_suite(zygote: Zygote, source: str, suite: Suite, limits: Limits, test_limits: Limits) -> SuiteOutcome:
    """Run the suite. Raises SuiteError when the tests are at fault, ZygoteDied when the zygote is."""
    with Session(zygote, limits) as candidate:
        try:
            candidate.load(source, "", objects=True)
        except CandidateFailed as failed:
            candidate.close()
            return SuiteOutcome((), failed.failure, failed.error, zygote.tier, candidate.usage)
        tests = Session(zygote, test_limits, "tests")
        try:
            report, failed_ = _converse(tests, candidate, suite)
        finally:
            tests.close()
            candidate.close()
    checks = tuple(Check(r["name"], bool(r["passed"]), clip(r["message"])) for r in report["records"])
    if report["unsupported"]:
        raise SuiteError(report["unsupported"])
    failure, error = (failed_.failure, failed_.error) if failed_ else ("", "")
    if report["broken"]:
        if not failed_ and report["broken"].startswith("suite: ") and not _candidates_fault(report["broken"]):
            raise SuiteError(report["broken"])
        failure, error = failure or "exception", error or clip(report["broken"])
    if not failure and [check.name for check in checks] != suite.expected():
        raise SuiteError(f"{len(checks)} checks were recorded and {len(suite.expected())} expected")
    return SuiteOutcome(checks, failure, error, zygote.tier, _both(candidate.usage, tests.usage))


def _candidates_fault(broken: str) -> bool:
    """A test file that cannot import a name, or fails while it calls the candidate at import, says so about the
    candidate.
    """
    return any(kind in broken for kind in ("ImportError", "AttributeError", "RemoteError", "NameError"))


def _converse(tests: Session, candidate: Session, suite: Suite) -> tuple[dict[str, Any], CandidateFailed | None]:
    """Pass the tests' questions to the candidate until the tests have reported."""
    head = {
        "module": suite.module,
        "snippets": list(suite.snippets),
        "files": dict(suite.files),
        "names": suite.names(),
        "in_place": suite.in_place,
    }
    payload = json.dumps(head).encode()
    nonce = secrets.token_bytes(NONCE_BYTES)
    failed: CandidateFailed | None = None
    try:
        tests.send(nonce + LENGTH.pack(len(payload)) + payload)
        for _ in range(MAX_CALLS):
            status, body = tests.receive(nonce, bytes(NONCE_BYTES))
            if status == OK:
                return json.loads(body), failed
            if status != ASK:
                break
            if failed is None:
                try:
                    answer, body, _ = candidate.exchange(body)
                except CandidateFailed as error:
                    failed = error
            if failed is not None:
                answer, body = _GONE, failed.error.encode()
            tests.send(_REPLY.pack(answer, len(body)) + body)
    except CandidateFailed as error:  # of the tests' process, maybe over values that the candidate made so
        return _NOTHING, failed or CandidateFailed("undecided", f"the tests' process failed: {error.error}")
    return _NOTHING, failed or CandidateFailed("undecided", f"the tests made more than {MAX_CALLS} calls, or broke off")


_NOTHING: dict[str, Any] = {"records": [], "broken": "", "unsupported": ""}


def _both(one: Usage, other: Usage) -> Usage:
    return Usage(one.cpu_s + other.cpu_s, one.wall_s, max(one.max_rss_bytes, other.max_rss_bytes), dict(one.denials))
