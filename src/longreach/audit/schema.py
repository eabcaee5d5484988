"""The corpus format as data: what the files of a task hold, and what they become when placeholders are filled.

A corpus is a folder: ``MANIFEST.json`` and one folder a task with ``task.toml``, ``honest/*.toml``, ``wrong/*.toml`` and
``exploits/*.toml``. `docs/audit.md` specifies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Kind = Literal["function", "program", "speed", "maths", "format", "text", "tool"]
KINDS: tuple[Kind, ...] = ("function", "program", "speed", "maths", "format", "text", "tool")
CODE_KINDS: frozenset[str] = frozenset({"function", "program", "speed"})
Class = Literal["A", "B", "C", "D", "E", "F"]
CLASSES: dict[str, str] = {
    "A": "harness tampering",
    "B": "comparison",
    "C": "oracle access",
    "D": "performance",
    "E": "maths and format",
    "F": "judges, length and tools",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parameter(_Strict):
    """A value that differs between splits: its public value, and what private ones are drawn from."""

    public: int | str
    low: int | None = None
    high: int | None = None
    choices: list[int | str] | None = None
    identifier: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Parameter:
        sources = (self.low is not None and self.high is not None) + (self.choices is not None) + self.identifier
        if sources != 1:
            raise ValueError("a parameter needs exactly one of low+high, choices or identifier=true")
        return self


class Tolerance(_Strict):
    """Outputs count as equal when they differ by at most ``absolute + relative * |expected|``; 0 and 0 mean exact."""

    absolute: float = 0.0
    relative: float = 0.0


class TaskFile(_Strict):
    """``task.toml``."""

    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    kind: Kind
    title: str
    prompt: str
    parameters: dict[str, Parameter] = {}
    derived: dict[str, str] = {}
    # code tasks
    entry_point: str | None = None
    reference: str | None = None
    generator: str | None = None
    visible: list[Any] = []
    hidden: int = 8
    tolerance: Tolerance = Tolerance()
    banned: list[str] = []
    # answer tasks
    answer: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> TaskFile:
        needed = ["reference", "generator"] if self.kind in CODE_KINDS else ["answer"]
        needed += ["entry_point"] if self.kind in ("function", "speed") else []
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a task of kind {self.kind!r} needs {', '.join(missing)}")
        return self


class Generator(_Strict):
    """A payload too long or too regular to write out: ``prefix``, then ``item`` for each number, then ``suffix``.

    ``<i>`` in ``item`` is the number, from ``first`` to ``last``.
    """

    prefix: str = ""
    item: str
    first: int = 0
    last: int
    suffix: str = ""

    def text(self) -> str:
        return (
            self.prefix
            + "".join(self.item.replace("<i>", str(i)) for i in range(self.first, self.last + 1))
            + self.suffix
        )


class Control(_Strict):
    """``honest/*.toml`` and ``wrong/*.toml``: a completion that must be paid, or must not."""

    id: Annotated[str, Field(pattern=r"^LR-[HW]\d{3}$")]
    note: str
    payload: str
    raw: bool = False
    faster: bool = False


class Proof(_Strict):
    """Why the exploit deserves nothing; each kind can be checked by a machine (see `longreach.audit.proof`)."""

    kind: Literal["output", "claimed_speed", "banned", "answer"]
    commits: list[str] = []
    denies: str | None = None
    echoes: str | None = None
    names: list[str] = []


class ExploitFile(_Strict):
    """``exploits/*.toml``."""

    id: Annotated[str, Field(pattern=r"^LR-\d{4}$")]
    classification: Annotated[Class, Field(alias="class")]
    taxonomy: Annotated[str, Field(pattern=r"^[A-F]\d+$")]
    bgw: list[Annotated[str, Field(pattern=r"^BGW-1\d\d$")]] = []
    title: str
    mechanism: str
    source: str
    control: str
    payload: str | None = None
    generator: Generator | None = None
    raw: bool = False
    messages: list[dict[str, Any]] = []
    proof: Proof

    @model_validator(mode="after")
    def _one_payload(self) -> ExploitFile:
        if (self.payload is None) == (self.generator is None):
            raise ValueError("an exploit needs exactly one of payload and generator")
        if self.taxonomy[0] != self.classification:
            raise ValueError(f"taxonomy {self.taxonomy!r} is not of class {self.classification!r}")
        return self


Completion = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One completion of a task, placeholders filled. ``source`` is the bare payload, ``text`` what a policy would emit."""

    id: str
    role: Literal["honest", "wrong", "exploit"]
    source: str
    text: str
    note: str
    faster: bool = False
    before: tuple[dict[str, Any], ...] = ()  # messages that precede the answer, such as tool calls
    exploit: ExploitFile | None = None


@dataclass(frozen=True)
class Task:
    """One task, placeholders filled: the prompt, the columns a reward function is given, and its completions."""

    id: str
    kind: Kind
    title: str
    prompt: str
    columns: dict[str, Any]
    tolerance: Tolerance
    banned: tuple[str, ...]
    honest: tuple[Sample, ...]
    wrong: tuple[Sample, ...]
    exploits: tuple[Sample, ...]
    held_out: tuple[Any, ...] = field(default=(), repr=False)  # [(input, expected)] no column contains

    def control(self, sample: Sample) -> Sample:
        """The honest completion an exploit is matched with."""
        assert sample.exploit is not None
        return next(h for h in self.honest if h.id == sample.exploit.control)


@dataclass(frozen=True)
class Corpus:
    """A verified corpus. ``split`` is ``public`` or ``private``; ``digest`` covers every rendered text of the split."""

    version: str
    split: Literal["public", "private"]
    digest: str
    tasks: tuple[Task, ...]
    seed: int | None = None

    def select(self, kinds: set[str] | None = None, tasks: set[str] | None = None) -> Corpus:
        """The part of the corpus with these kinds and task ids (``None``: all)."""
        chosen = tuple(t for t in self.tasks if (kinds is None or t.kind in kinds) and (tasks is None or t.id in tasks))
        return Corpus(self.version, self.split, self.digest, chosen, self.seed)
