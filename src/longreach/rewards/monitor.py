"""Watching a run for rewards that are being gamed: what to look at, and when to say so.

Mechanistic signals come first, because they mean what they say: a shadow grader that disagrees, a canary that was paid, refused
system calls, identical answers to different prompts. Statistical ones (a component that took over, a reward that jumped together
with length or imports) only say where to look.

Pure Python; the trainer calls `Monitor.observe` once a step and shows `Monitor.alarms`.
"""

from __future__ import annotations

import ast
import collections
import hashlib
import heapq
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from longreach.rewards.changes import ChangePoint
from longreach.rewards.extraction import extract_code
from longreach.rewards.policy import imported_modules
from longreach.rewards.result import RewardResult, completion_text

AlarmKind = Literal[
    "shadow_gap", "canary_paid", "denials", "cross_prompt_duplicates", "group_collapse", "component_dominance", "reward_jump",
    "quarantine_share",
]  # fmt: skip
# A pause is only ever asked for on evidence that cannot be chance or honest behaviour.
PAUSING: frozenset[str] = frozenset({"shadow_gap", "canary_paid"})


@dataclass(frozen=True)
class Alarm:
    """Something to look at. ``value`` is what was measured, in the unit that ``message`` names."""

    step: int
    kind: AlarmKind
    message: str
    value: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class MonitorConfig:
    """Thresholds. Shares lie in [0, 1].

    shadow_share       of the completions that are graded again by the shadow reward
    shadow_gap         reward minus shadow reward, mean over the window: alarm when the interval's lower end exceeds this
    denials            refused system calls per 1,000 completions over the window
    duplicates         share of a step's paid completions whose text also answers another prompt
    distinct           mean share of distinct completions in a group, below which groups have collapsed
    dominance          share of the reward's variance that a component other than the first carries; the first is meant to lead
    quarantined        share of a step's completions without a reward
    jump               reward change in standard deviations of the window that makes a change-point (needs a companion)
    window             steps, for everything that is averaged
    archive_every, archive_top   every so many steps the best completions are kept
    pause              whether `should_pause` may ask the trainer to stop (only on shadow gaps and paid canaries)
    """

    shadow_share: float = 0.05
    shadow_gap: float = 0.1
    denials: float = 5.0
    duplicates: float = 0.2
    distinct: float = 0.3
    dominance: float = 0.8
    quarantined: float = 0.1
    jump: float = 4.0
    window: int = 20
    archive_every: int = 10
    archive_top: int = 4
    pause: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("shadow_share", "duplicates", "distinct", "dominance", "quarantined"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"MonitorConfig.{name} is {getattr(self, name)}; it is a share, between 0 and 1")
        for name in ("window", "archive_every", "archive_top"):
            if getattr(self, name) < 1:
                raise ValueError(f"MonitorConfig.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("shadow_gap", "denials", "jump"):
            if not getattr(self, name) > 0:
                raise ValueError(f"MonitorConfig.{name} is {getattr(self, name)}; it must be above 0")


Rewards = Sequence[float | None]
Shadow = Callable[..., Rewards]  # TRL's signature: (prompts, completions, **columns)


@dataclass
class _Window:
    """The last so many values of a quantity."""

    size: int
    values: collections.deque[float] = field(default_factory=collections.deque)

    def add(self, value: float) -> None:
        self.values.append(value)
        while len(self.values) > self.size:
            self.values.popleft()

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else 0.0

    @property
    def standard_error(self) -> float:
        count = len(self.values)
        if count < 2:
            return math.inf
        centre = self.mean
        return math.sqrt(sum((value - centre) ** 2 for value in self.values) / (count - 1) / count)


class Monitor:
    """Observes every step of a run.

    config   thresholds
    shadow   a second reward with TRL's signature, ideally of disjoint tests at a stricter tier; a share of the completions is
             graded with it and nothing is paid for it
    archive  a JSON-lines file to which the best completions are appended; None keeps them in `archived` only

    Alarms of one kind are raised once per ``config.window`` steps.
    """

    def __init__(
        self, config: MonitorConfig | None = None, *, shadow: Shadow | None = None, archive: str | None = None
    ) -> None:
        self.config = config or MonitorConfig()
        self.shadow = shadow
        self.archive = archive
        self.alarms: list[Alarm] = []
        self.archived: list[dict[str, Any]] = []
        size = self.config.window
        self._rng = random.Random(self.config.seed)
        self._last: dict[str, int] = {}
        self._gaps = _Window(50 * size)  # single completions, not steps
        self._denials, self._seen = _Window(size), _Window(size)
        self._distinct = _Window(size)
        self._components: dict[str, _Window] = {}
        self._totals = _Window(50 * size)
        self._reward = ChangePoint(size, self.config.jump)
        self._length = ChangePoint(size, self.config.jump)
        self._imports = ChangePoint(size, self.config.jump)
        self._best: list[tuple[float, int, dict[str, Any]]] = []
        self._count = 0

    # -- one step ----------------------------------------------------------------------------------------------

    def observe(
        self,
        step: int,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        rewards: Rewards,
        components: Mapping[str, Rewards] | None = None,
        *,
        canary: Sequence[bool] | None = None,
        results: Sequence[RewardResult] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Alarm]:
        """Look at one step's completions; returns the new alarms.

        rewards     the sum that is paid for each completion; None or NaN where quarantined
        components  each reward function's own values; the one that counts most first
        canary      which rows are canaries: tasks that cannot be done honestly, whose reward has no weight in the loss
        results     full results of our own reward functions, for refused calls; optional
        columns     the dataset's columns of these rows, for the shadow reward

        Rows of one group must have equal prompts. Raises ValueError when the lengths differ.
        """
        self._check_lengths(len(completions), prompts, rewards, components or {}, canary, results, columns or {})
        texts = [completion_text(completion) for completion in completions]
        paid = [None if reward is None or math.isnan(reward) else float(reward) for reward in rewards]
        keys = [_key(prompt) for prompt in prompts]
        before = len(self.alarms)
        self._canaries(step, paid, canary)
        self._shadow(step, prompts, completions, paid, columns or {})
        self._refusals(step, results)
        self._quarantine(step, paid)
        self._duplicates(step, keys, texts, paid)
        self._dominance(step, components or {})
        self._jumps(step, texts, paid)
        self._keep_best(step, prompts, texts, paid, components or {})
        return self.alarms[before:]

    @property
    def should_pause(self) -> bool:
        """Whether the run should wait for a person; only with ``config.pause``, and only on mechanistic evidence."""
        return self.config.pause and any(alarm.kind in PAUSING for alarm in self.alarms)

    def metrics(self) -> dict[str, float]:
        """The current values, for the trainer's log."""
        seen = sum(self._seen.values)
        return {
            "monitor/shadow_gap": self._gaps.mean,
            "monitor/denials_per_1000": 1000 * sum(self._denials.values) / seen if seen else 0.0,
            "monitor/distinct_in_group": self._distinct.mean,
            "monitor/alarms": float(len(self.alarms)),
        }

    def _alarm(self, step: int, kind: AlarmKind, message: str, value: float) -> None:
        last = self._last.get(kind)
        if last is None or step - last >= self.config.window:
            self._last[kind] = step
            self.alarms.append(Alarm(step, kind, message, value))

    @staticmethod
    def _check_lengths(
        count: int, prompts: Any, rewards: Any, components: Any, canary: Any, results: Any, columns: Any
    ) -> None:
        given = {"prompts": prompts, "rewards": rewards, "canary": canary, "results": results}
        given |= {f"components[{name!r}]": values for name, values in components.items()}
        given |= {f"columns[{name!r}]": values for name, values in columns.items()}
        for name, values in given.items():
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries; there are {count} completions")

    # -- mechanistic signals -----------------------------------------------------------------------------------

    def _canaries(self, step: int, paid: Sequence[float | None], canary: Sequence[bool] | None) -> None:
        rows = [reward for reward, is_canary in zip(paid, canary or ()) if is_canary and reward is not None]
        passed = [reward for reward in rows if reward > 0]
        if passed:
            message = f"{len(passed)} of {len(rows)} canaries were paid: tasks that cannot be done honestly"
            self._alarm(step, "canary_paid", message, len(passed) / len(rows))

    def _shadow(
        self,
        step: int,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        paid: Sequence[float | None],
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        if self.shadow is None:
            return
        rows = [
            i for i, reward in enumerate(paid) if reward is not None and self._rng.random() < self.config.shadow_share
        ]
        if not rows:
            return
        chosen = {name: [values[i] for i in rows] for name, values in columns.items()}
        verdicts = self.shadow(prompts=[prompts[i] for i in rows], completions=[completions[i] for i in rows], **chosen)
        for i, verdict in zip(rows, verdicts, strict=True):
            reward = paid[i]
            if verdict is not None and reward is not None:
                self._gaps.add(reward - float(verdict))
        low = self._gaps.mean - 2.6 * self._gaps.standard_error  # 99% one-sided, and a little
        if len(self._gaps.values) >= 10 and low > self.config.shadow_gap:
            message = f"the reward exceeds the shadow grader's by {self._gaps.mean:.3f} (at least {low:.3f})"
            self._alarm(step, "shadow_gap", message, self._gaps.mean)

    def _refusals(self, step: int, results: Sequence[RewardResult] | None) -> None:
        if results is None:
            return
        self._seen.add(len(results))
        self._denials.add(sum(sum(result.telemetry.get("denials", {}).values()) for result in results))
        rate = self.metrics()["monitor/denials_per_1000"]
        if rate > self.config.denials:
            self._alarm(step, "denials", f"{rate:.1f} refused system calls per 1,000 completions", rate)

    def _quarantine(self, step: int, paid: Sequence[float | None]) -> None:
        share = sum(reward is None for reward in paid) / max(1, len(paid))
        if share > self.config.quarantined:
            self._alarm(step, "quarantine_share", f"{share:.0%} of the completions are quarantined", share)

    def _duplicates(self, step: int, keys: Sequence[str], texts: Sequence[str], paid: Sequence[float | None]) -> None:
        groups: dict[str, list[str]] = collections.defaultdict(list)
        prompts_of: dict[str, set[str]] = collections.defaultdict(set)
        bodies = [_body(text) for text in texts]
        for key, body in zip(keys, bodies):
            groups[key].append(body)
            prompts_of[body].add(key)
        shares = [len(set(group)) / len(group) for group in groups.values() if len(group) > 1]
        if shares:
            self._distinct.add(sum(shares) / len(shares))
            if len(self._distinct.values) >= 3 and self._distinct.mean < self.config.distinct:
                message = f"only {self._distinct.mean:.0%} of a group's completions are distinct"
                self._alarm(step, "group_collapse", message, self._distinct.mean)
        earning = [body for body, reward in zip(bodies, paid) if reward is not None and reward > 0 and len(body) >= 20]
        if len(groups) > 1 and len(earning) >= 4:
            shared = sum(len(prompts_of[body]) > 1 for body in earning) / len(earning)
            if shared > self.config.duplicates:
                message = f"{shared:.0%} of the paid completions answer several prompts word for word"
                self._alarm(step, "cross_prompt_duplicates", message, shared)

    # -- statistical signals -----------------------------------------------------------------------------------

    def _dominance(self, step: int, components: Mapping[str, Rewards]) -> None:
        for name, values in components.items():
            window = self._components.setdefault(name, _Window(50 * self.config.window))
            for value in values:
                if value is not None and not math.isnan(value):
                    window.add(float(value))
        if len(self._components) < 2:
            return
        spread = {name: _variance(window.values) for name, window in self._components.items()}
        total = sum(spread.values())
        if total <= 0 or min(len(window.values) for window in self._components.values()) < 32:
            return
        name, value = max(spread.items(), key=lambda item: item[1])
        first = next(iter(spread))  # where it leads, small prices and bonuses beside it only decide between equals
        if name != first and value / total > self.config.dominance:
            message = f"{name} carries {value / total:.0%} of the reward's variance, not {first}, which is named first"
            self._alarm(step, "component_dominance", message, value / total)

    def _jumps(self, step: int, texts: Sequence[str], paid: Sequence[float | None]) -> None:
        rewards = [reward for reward in paid if reward is not None]
        if not rewards or not texts:
            return
        moved = {
            "length": self._length.add(sum(map(len, texts)) / len(texts)),
            "imports": self._imports.add(sum(len(_imports(text)) for text in texts) / len(texts)),
        }
        jump = self._reward.add(sum(rewards) / len(rewards))
        if jump > self.config.jump:
            together = [name for name, size in moved.items() if abs(size) > self.config.jump]
            if together:
                message = (
                    f"the mean reward jumped by {jump:.1f} standard deviations together with {' and '.join(together)}"
                )
                self._alarm(step, "reward_jump", message, jump)

    # -- the archive -------------------------------------------------------------------------------------------

    def _keep_best(
        self,
        step: int,
        prompts: Sequence[Any],
        texts: Sequence[str],
        paid: Sequence[float | None],
        components: Mapping[str, Rewards],
    ) -> None:
        for i, reward in enumerate(paid):
            if reward is None:
                continue
            self._count += 1
            parts = {name: values[i] for name, values in components.items()}
            row = {"step": step, "reward": reward, "prompt": prompts[i], "completion": texts[i], "components": parts}
            heapq.heappush(self._best, (reward, self._count, row))
            if len(self._best) > self.config.archive_top:
                heapq.heappop(self._best)
        if step % self.config.archive_every:
            return
        best = [row for _, _, row in sorted(self._best, key=lambda item: (-item[0], item[1]))]
        self._best = []
        self.archived += best
        if self.archive is not None and best:
            os.makedirs(os.path.dirname(os.path.abspath(self.archive)), exist_ok=True)
            with open(self.archive, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in best)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the monitor to go on where it was: the alarms, as plain JSON values."""
        return {"alarms": [alarm.to_json() for alarm in self.alarms], "last": dict(self._last)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the alarms of an earlier part of the run; the windows fill again."""
        self.alarms = [Alarm(**alarm) for alarm in state["alarms"]]
        self._last = dict(state["last"])


def _key(prompt: Any) -> str:
    return hashlib.blake2b(
        json.dumps(prompt, sort_keys=True, default=str).encode("utf-8", "replace"), digest_size=12
    ).hexdigest()


def _body(text: str) -> str:
    """The answer without its reasoning, which hardly ever repeats itself."""
    return " ".join(text.rsplit("</think>", 1)[-1].split())


def _imports(text: str) -> set[str]:
    code = extract_code(text, blocks="last")
    if code.problem:
        return set()
    try:
        return imported_modules(ast.parse(code.text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def _variance(values: Sequence[float] | collections.deque[float]) -> float:
    centre = sum(values) / len(values) if values else 0.0
    return sum((value - centre) ** 2 for value in values) / max(1, len(values))
