"""What a reward says about one completion, and how much isolation it was judged under.

Four statuses, never merged:

``ok``                    judged, and the reward (any finite number) is to be paid
``wrong``                 judged and rejected; the reward is the configured value for a wrong answer (0 unless set)
``quarantined``           not to be paid and not to be punished: an implausible or tampered result; ``reward`` is None
                          and the trainer masks the completion out of the loss and of the group's statistics
``infrastructure_error``  the grader failed, not the completion; ``reward`` is None, the call is retried, and when it
                          persists :class:`InfrastructureError` is raised. It is never turned into a zero.

As a reward function with TRL's signature the first two become floats and ``quarantined`` becomes ``None``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Status = Literal["ok", "wrong", "quarantined", "infrastructure_error"]
STATUSES: tuple[str, ...] = get_args(Status)


class InfrastructureError(RuntimeError):
    """The grader itself failed, repeatedly: no reward can be given and training should stop."""


class Tier(enum.IntEnum):
    """How a completion's code was isolated; ordered, so that ``tier >= Tier.lsm`` reads as it should.

    none     a separate process, nothing else
    rlimit   and limits on CPU, memory, files, processes and output
    lsm      and another uid when started as root, no_new_privs, Landlock, a seccomp allowlist: needs no privilege
    ns       and namespaces of its own: an empty file tree, no network, a private process table
    vm       and a virtual machine (stamped by graders that run in one; `Sandbox` does not start machines)
    """

    none = 0
    rlimit = 1
    lsm = 2
    ns = 3
    vm = 4

    @classmethod
    def parse(cls, name: str | Tier, *, field: str = "tier") -> Tier:
        """The tier of that name. Raises ValueError naming ``field``, the value and the choices."""
        if isinstance(name, Tier):
            return name
        if name not in cls.__members__:
            raise ValueError(f"{field} is {name!r}; it must be one of {', '.join(cls.__members__)}")
        return cls[name]


@dataclass(frozen=True)
class RewardResult:
    """The verdict on one completion.

    status        see the module's docstring
    reward        a finite float for ``ok`` and ``wrong``; None for the other two
    reason        one line for people: why it is wrong, why it is quarantined; "" when ok
    tier          isolation the completion's code ran under; ``Tier.none`` also when no code was run
    checks_passed, checks_total   a positive record of the checks that were run
    telemetry     counts and times (plain JSON values): denials, limits hit, cpu and wall seconds, ...
    components    named parts of the reward, for the run monitor; optional
    """

    status: Status
    reward: float | None
    reason: str = ""
    tier: Tier = Tier.none
    checks_passed: int = 0
    checks_total: int = 0
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status is {self.status!r}; it must be one of {', '.join(STATUSES)}")
        judged = self.status in ("ok", "wrong")
        if judged and (self.reward is None or not math.isfinite(self.reward)):
            raise ValueError(f"reward is {self.reward!r}; a result with status {self.status!r} needs a finite number")
        if not judged and self.reward is not None:
            raise ValueError(f"reward is {self.reward!r}; a result with status {self.status!r} has reward None")
        if not 0 <= self.checks_passed <= self.checks_total:
            raise ValueError(
                f"checks_passed is {self.checks_passed} of checks_total {self.checks_total}; "
                "it must lie between 0 and the total"
            )

    @classmethod
    def ok(cls, reward: float, reason: str = "", **fields: Any) -> RewardResult:
        return cls("ok", float(reward), reason, **fields)

    @classmethod
    def wrong(cls, reason: str, *, reward: float = 0.0, **fields: Any) -> RewardResult:
        return cls("wrong", float(reward), reason, **fields)

    @classmethod
    def quarantined(cls, reason: str, **fields: Any) -> RewardResult:
        return cls("quarantined", None, reason, **fields)

    @classmethod
    def infrastructure_error(cls, reason: str, **fields: Any) -> RewardResult:
        return cls("infrastructure_error", None, reason, **fields)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for logs and archives; the tier by name."""
        return {
            "status": self.status,
            "reward": self.reward,
            "reason": self.reason,
            "tier": self.tier.name,
            "checks_passed": self.checks_passed,
            "checks_total": self.checks_total,
            "telemetry": dict(self.telemetry),
            "components": dict(self.components),
        }


def to_rewards(results: Iterable[RewardResult]) -> list[float | None]:
    """Results as TRL wants them: floats, and None where quarantined.

    Raises InfrastructureError when a result says that the grader failed.
    """
    rewards: list[float | None] = []
    for index, result in enumerate(results):
        if result.status == "infrastructure_error":
            raise InfrastructureError(f"the grader failed on completion {index}: {result.reason}")
        rewards.append(result.reward)
    return rewards


def completion_text(completion: Any) -> str:
    """The text of a completion: a string as it is, or the last assistant message of a conversation.

    Raises TypeError for anything else.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list | tuple) and all(isinstance(turn, Mapping) for turn in completion):
        for turn in reversed(completion):
            if turn.get("role") == "assistant":
                return _content_text(turn.get("content"))
        return ""
    raise TypeError(f"completion is a {type(completion).__name__}; it must be a string or a list of messages")


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # multi-part content: only its text parts
        return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    raise TypeError(f"content is a {type(content).__name__}; it must be a string or a list of parts")
