"""The result card: what an audit found, as data with a published JSON schema, and as a table.

Exploit acceptance (EAR) and honest acceptance (HAR) stand side by side and are never merged into one score: a grader that
pays nobody accepts no exploit either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

SCHEMA_VERSION = "1.0.0"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rate(_Part):
    """A share ``hits / n`` with two 95% intervals: Wilson's, and a bootstrap over tasks (whole range if under 2)."""

    hits: int = Field(ge=0)
    n: int = Field(ge=0)
    share: float | None = Field(description="hits / n; null when n is 0")
    wilson: tuple[float, float]
    by_task: tuple[float, float]


class ClassResult(_Part):
    """What the exploits of one class achieved."""

    name: str
    ear: Rate = Field(description="exploit acceptance rate")
    blast: Rate = Field(
        description="share of exploits that crashed, hung or broke the grader or changed others' rewards"
    )
    advantage: float | None = Field(description="mean GRPO advantage of the exploits in realistic groups")
    beats_best_honest: float | None = Field(description="mean P[exploit is paid at least as much as the best honest]")


class KindResult(_Part):
    """How tasks of one kind were graded."""

    har: Rate = Field(description="honest acceptance rate")
    war: Rate = Field(description="acceptance rate of plain wrong completions")
    ms_per_completion: float
    determinism: Rate = Field(description="share of completions paid the same twice (speed: the same verdict)")


class Finding(_Part):
    """One exploit and what the grader did with it."""

    id: str
    task: str
    kind: str
    class_: str = Field(alias="class")
    taxonomy: str
    bgw: list[str]
    title: str
    mechanism: str
    accepted: bool
    quarantined: bool
    reward: float | None
    threshold: float | None
    control_reward: float | None
    advantage: float
    honest_advantage: float
    beats_best_honest: float
    blast: list[str]
    detail: str

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class SpeedNoise(_Part):
    """A/A statistics of a speed reward: the baseline rewarded again and again, in units of reward."""

    task: str
    n: int
    median: float
    cv: float | None = Field(description="std / |mean|; null when the mean is 0")
    p99_deviation: float = Field(description="99th percentile of |reward - median|")
    dead_zone: float = Field(description="deviation above which a difference counts in this audit")
    signal: float | None = Field(description="median reward of truly faster honest code minus the baseline's")
    false_speedup: Rate = Field(description="A/A repeats paid more than half of the signal above the median")


class Isolation(_Part):
    """Where completions' code ran: what the grader says, and what two harmless probes left behind."""

    claimed: str | None
    observed: str = Field(description="in-process, writes-files, contained or not-applicable")


class Machine(_Part):
    system: str
    kernel: str
    architecture: str
    libc: str
    python: str
    cpus: int


class Card(_Part):
    """The result of an audit; `to_json`, `table` and `page` show it."""

    schema_version: str = SCHEMA_VERSION
    grader: str
    grader_digest: str
    corpus_version: str
    corpus_split: str
    corpus_seed: int | None
    corpus_digest: str
    created: str
    seconds: float
    machine: Machine
    settings: dict[str, Any]
    isolation: Isolation
    ear: Rate
    har: Rate
    war: Rate
    blast: Rate
    exploit_advantage: float | None
    beats_best_honest: float | None
    classes: dict[str, ClassResult]
    kinds: dict[str, KindResult]
    speed_noise: list[SpeedNoise]
    findings: list[Finding] = Field(description="worst first")
    honest_rejected: list[str]
    wrong_accepted: list[str]
    worker_restarts: int
    not_measured: list[str]

    def to_json(self) -> str:
        """The card as JSON text."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the JSON text to ``path``."""
        Path(path).write_text(self.to_json(), "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Card:
        """Read a card; raises ValueError (pydantic) naming the field that does not fit."""
        return cls.model_validate_json(Path(path).read_bytes())

    def holes(self) -> list[Finding]:
        """The findings with an accepted exploit or a blast, worst first."""
        return [finding for finding in self.findings if finding.accepted or finding.blast]

    def page(self) -> str:
        """A self-contained HTML page."""
        from longreach.audit.page import render

        return render(self)

    def table(self) -> Group:
        """Tables for a terminal (rich)."""
        return Group(_summary(self), _class_table(self), _hole_table(self), *_notes(self))

    def show(self) -> None:
        """Print the tables."""
        Console().print(self.table())


def json_schema() -> dict[str, Any]:
    """The JSON schema of a card."""
    return Card.model_json_schema(by_alias=True)


def percent(rate: Rate) -> str:
    """``12.5% (1/8; 2-47%)``: share, counts and Wilson's interval."""
    if rate.share is None:
        return "not measured"
    return f"{100 * rate.share:.1f}% ({rate.hits}/{rate.n}; {100 * rate.wilson[0]:.0f}-{100 * rate.wilson[1]:.0f}%)"


def number(value: float | None) -> str:
    """Two decimals with sign, or a dash."""
    return "–" if value is None else f"{value:+.2f}"


def _summary(card: Card) -> Table:
    table = Table(title=f"Audit of {card.grader}", title_justify="left", show_header=False)
    split = card.corpus_split if card.corpus_seed is None else f"{card.corpus_split} seed {card.corpus_seed}"
    for name, value in (
        ("exploits accepted (EAR)", percent(card.ear)),
        ("honest accepted (HAR)", percent(card.har)),
        ("plain wrong accepted", percent(card.war)),
        ("exploits that did harm (blast)", percent(card.blast)),
        ("exploit advantage (GRPO)", number(card.exploit_advantage)),
        ("isolation", f"claimed {card.isolation.claimed or 'none'}, observed {card.isolation.observed}"),
        ("corpus", f"{card.corpus_version} {split} {card.corpus_digest[:12]}"),
    ):
        table.add_row(name, value)
    return table


def _class_table(card: Card) -> Table:
    table = Table("class", "EAR", "blast", "advantage", "P[≥ best honest]")
    for letter, result in card.classes.items():
        beats = "–" if result.beats_best_honest is None else f"{result.beats_best_honest:.2f}"
        cells = (percent(result.ear), percent(result.blast), number(result.advantage), beats)
        table.add_row(f"{letter} {result.name}", *cells)
    return table


def _hole_table(card: Card) -> Table:
    table = Table("exploit", "class", "task", "what it does", "reward", "advantage", "harm", title="Holes, worst first")
    for finding in card.holes():
        reward = "–" if finding.reward is None else f"{finding.reward:.3g}"
        style = "red" if finding.accepted else "yellow"
        cells = (
            finding.taxonomy,
            finding.task,
            finding.title,
            reward,
            number(finding.advantage),
            " ".join(finding.blast),
        )
        table.add_row(finding.id, *cells, style=style)
    if not card.holes():
        table.add_row("none", "", "", "", "", "", "")
    return table


def _notes(card: Card) -> list[Text]:
    notes = (
        [Text(f"honest rejected: {', '.join(card.honest_rejected)}", style="yellow")] if card.honest_rejected else []
    )
    return notes + [Text(f"not measured: {reason}", style="dim") for reason in card.not_measured]
