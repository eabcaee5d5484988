"""What a completion's code is judged by: functions, programs, unit-test suites. The grader's side only; none of it
is sent.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longreach.rewards.compare import show
from longreach.rewards.sandbox.suite import Suite

Arguments = Sequence[Any]


@dataclass(frozen=True)
class Relation:
    """A metamorphic check: how the answer must change when the input does.

    transform  (rng, args) -> other args
    holds      (args, value, other args, other value) -> bool
    """

    name: str
    transform: Callable[[random.Random, Arguments], Arguments]
    holds: Callable[[Arguments, Any, Arguments, Any], bool]


@dataclass(frozen=True)
class FunctionTask:
    """A function to write.

    function   its name, or ``"Class.method"`` (called on a new instance each time)
    generate   (rng) -> a tuple of arguments: fresh secret inputs, ``fresh`` of them for every completion
    reference  (*args) -> the expected value; it runs in the grader
    check      (args, value) -> whether a value is right, for tasks with many right answers
    relations  metamorphic checks on generated inputs
    cases      fixed (args, expected) pairs, run in random order among the fresh ones
    rel_tol, abs_tol   for floats
    """

    function: str
    generate: Callable[[random.Random], Arguments] | None = None
    reference: Callable[..., Any] | None = None
    check: Callable[[Arguments, Any], bool] | None = None
    relations: Sequence[Relation] = ()
    cases: Sequence[tuple[Arguments, Any]] = ()
    fresh: int = 20
    rel_tol: float = 1e-9
    abs_tol: float = 1e-12

    def __post_init__(self) -> None:
        if not all(part.isidentifier() for part in self.function.split(".")):
            raise ValueError(f"function is {self.function!r}; it must be a name such as 'f' or 'Class.method'")
        if self.generate is not None and not (self.reference or self.check or self.relations):
            raise ValueError("generate is given, but neither reference, check nor relations to judge its inputs by")
        if self.generate is None and (self.reference or self.relations):
            raise ValueError("reference or relations need generate, a function (rng) -> arguments")
        if self.generate is None and not self.cases:
            raise ValueError("a FunctionTask needs generate or cases: there is nothing to check")
        if self.fresh < 1:
            raise ValueError(f"fresh is {self.fresh}; it must be at least 1")

    def weaknesses(self, samples: int = 200, seed: int = 0) -> list[str]:
        """Ways in which a lazy answer would do well: run it once when you write a task. Empty is good."""
        expected = [value for _, value in self.cases]
        if self.generate is not None and self.reference is not None:
            rng = random.Random(seed)
            expected += [self.reference(*self.generate(rng)) for _ in range(samples)]
        found = []
        if expected:
            value, count = Counter(show(item, 400) for item in expected).most_common(1)[0]
            if count > len(expected) / 2:
                found.append(f"the constant {value} is right on {count} of {len(expected)} inputs")
        if self.generate is None:
            found.append(f"{len(self.cases)} fixed cases and no fresh inputs: they can be learnt by heart")
        return found


@dataclass(frozen=True)
class ProgramTask:
    """A program to write that reads standard input and writes standard output.

    cases      fixed (stdin, stdout) pairs
    generate   (rng) -> stdin, for fresh inputs; with ``reference`` (stdin) -> stdout
    check      (stdin, stdout) -> whether an output is right, instead of comparing it
    rel_tol    when given, numbers in the output agree within it
    """

    cases: Sequence[tuple[str, str]] = ()
    generate: Callable[[random.Random], str] | None = None
    reference: Callable[[str], str] | None = None
    check: Callable[[str, str], bool] | None = None
    fresh: int = 5
    rel_tol: float | None = None

    def __post_init__(self) -> None:
        if self.generate is None and not self.cases:
            raise ValueError("a ProgramTask needs generate or cases: there is nothing to check")
        if self.generate is not None and not (self.reference or self.check):
            raise ValueError("generate is given, but neither reference nor check to judge its inputs by")
        for index, case in enumerate(self.cases):
            if len(case) != 2 or not all(isinstance(text, str) for text in case):
                raise ValueError(f"cases[{index}] is {show(case)}; it must be a pair of strings (stdin, stdout)")


@dataclass(frozen=True)
class SuiteTask:
    """A module to write that passes unit tests; see `Suite`. ``starting_source`` is prepended to every completion."""

    suite: Suite
    starting_source: str = field(default="", repr=False)


Task = FunctionTask | ProgramTask | SuiteTask


def task_from_column(value: Any) -> Task:
    """A task from a dataset's column: a task, or a dict or JSON text in one of the usual forms.

    ``{"fn_name": "f", "inputs": [[1, 2], ...], "outputs": [3, ...]}``   calls of a function
    ``{"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}``              programs
    ``{"tests": ["assert f(1, 2) == 3", ...]}`` or just the list         unit tests
    """
    if isinstance(value, FunctionTask | ProgramTask | SuiteTask):
        return value
    if isinstance(value, Suite):
        return SuiteTask(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"the task column holds {show(value)}; it must be a task, a dict or JSON text") from None
    if isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        return SuiteTask(Suite(snippets=tuple(value)))
    if isinstance(value, Mapping):
        return _from_mapping(value)
    raise ValueError(f"the task column holds {show(value)}; it must be a task, a dict or a list of assertions")


def _from_mapping(value: Mapping[str, Any]) -> Task:
    if value.get("tests"):
        return SuiteTask(Suite(snippets=tuple(value["tests"])))
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not inputs or not outputs or len(inputs) != len(outputs):
        raise ValueError(
            f"the task column has {len(inputs or ())} inputs and {len(outputs or ())} outputs; "
            "it needs as many of one as of the other, and at least one"
        )
    pairs = tuple(zip(inputs, outputs))
    name = value.get("fn_name") or value.get("function")
    if name:
        return FunctionTask(str(name), cases=tuple((tuple(args), expected) for args, expected in pairs))
    return ProgramTask(cases=pairs)
