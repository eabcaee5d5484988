"""Grades one task: calibrates on its honest and wrong completions, then runs every exploit inside a group.

Each exploit is graded in one call together with two honest and one wrong completion, as in a GRPO group; afterwards the
honest and wrong ones are graded again without it. So one call gives the exploit's reward, what it did to its neighbours,
and what it left behind.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longreach.audit import statistics as stats
from longreach.audit.card import Rate, SpeedNoise
from longreach.audit.prober import Outcome, Prober
from longreach.audit.schema import Sample, Task

if TYPE_CHECKING:
    from longreach.audit.score import Settings

_SAME = 1e-9  # rewards closer than this are the same


@dataclass(frozen=True)
class Graded:
    """One completion's grade. ``reward`` is ``None`` when it was quarantined or the call failed."""

    sample: Sample
    reward: float | None
    accepted: bool
    quarantined: bool = False
    threshold: float | None = None
    control_reward: float | None = None
    blast: tuple[str, ...] = ()
    detail: str = ""
    harm: stats.GroupHarm = field(default_factory=stats.GroupHarm)


@dataclass(frozen=True)
class TaskResult:
    """The grades of one task."""

    task: Task
    grader: TaskGrader
    honest: list[Graded]
    wrong: list[Graded]
    exploits: list[Graded]
    repeated: list[bool]
    noise: SpeedNoise | None
    seconds: float
    graded: int


@dataclass
class TaskGrader:
    """Grades the completions of ``task`` with the reward in ``prober``."""

    prober: Prober
    task: Task
    settings: Settings
    style: str = ""
    broken: bool = False  # no call with honest completions has worked
    fresh: bool = False  # completions can reach the grader's process: give each exploit a new one
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    graded: int = 0
    dead_zone: float = _SAME
    noise: SpeedNoise | None = None

    # -- calls ---------------------------------------------------------------------------------------------------

    def grade(self, samples: list[Sample]) -> Outcome:
        """Grade ``samples`` in one call."""
        prompt, columns = self._inputs(len(samples))
        return self.prober.call(prompt, [self._completion(sample) for sample in samples], columns)

    def state(self, sample: Sample) -> dict[str, Any]:
        """The prober's view of the grader's process."""
        prompt, columns = self._inputs(1)
        return self.prober.state(prompt[0], self._completion(sample), columns)

    def _inputs(self, count: int) -> tuple[list[Any], dict[str, list[Any]]]:
        values = dict(self.task.columns) | {"task_id": self.task.id, "kind": self.task.kind}
        for expected, ours in self.settings.columns:
            if ours in values:
                values[expected] = values[ours]
        prompt = self.task.prompt if self.style == "plain" else [{"role": "user", "content": self.task.prompt}]
        return [prompt] * count, {name: [value] * count for name, value in values.items()}

    def _completion(self, sample: Sample) -> Any:
        if self.style == "plain":
            said = [str(m.get("content") or "") for m in sample.before]
            return "\n".join([*said, sample.text])
        return [*sample.before, {"role": "assistant", "content": sample.text}]

    # -- calibration ---------------------------------------------------------------------------------------------

    def calibrate(self) -> str:
        """Grade honest and wrong completions twice; returns why the reward does not suit the task, or nothing."""
        problem = ""
        for style in ("chat", "plain") if self.settings.style == "auto" else (self.settings.style,):
            self.style = style
            problem = self._calibrate()
            if not problem:
                return ""
        return problem

    def _calibrate(self) -> str:
        samples = [*self.task.honest, *self.task.wrong]
        self.rewards, self.details, self.seconds, self.graded = {s.id: [] for s in samples}, {}, 0.0, 0
        for _ in range(2):
            outcome = self.grade(samples)
            if outcome.failure:
                # One completion may have broken the call for all: grade each by itself.
                for sample in samples:
                    self._note([sample], self.grade([sample]))
            else:
                self._note(samples, outcome)
        honest = [r for s in self.task.honest for r in self.rewards[s.id] if r is not None]
        self.broken = not honest
        if not honest:
            return next(iter(self.details.values()), "no honest completion got a reward")
        wrong = [r for s in self.task.wrong for r in self.rewards[s.id] if r is not None]
        if wrong and max(honest) <= min(wrong) + _SAME:
            end = self.task.honest[0].text.strip()[-30:]
            return (
                f"no honest completion of {self.task.id} was paid more than a wrong one: at most {max(honest):g} for one that "
                f"ends in {end!r}, at least {min(wrong):g} for a wrong one"
            )
        return ""

    def _note(self, samples: list[Sample], outcome: Outcome) -> None:
        if outcome.failure:
            for sample in samples:
                self.rewards[sample.id].append(None)
                self.details[sample.id] = f"{outcome.failure}: {outcome.detail}"
            return
        self.seconds += outcome.seconds
        self.graded += len(samples)
        for sample, value in zip(samples, outcome.rewards):
            self.rewards[sample.id].append(value if isinstance(value, int | float) else None)
            if isinstance(value, str):
                self.details[sample.id] = f"malformed: the reward is {value}"

    def _reward(self, sample: Sample) -> float | None:
        values = [r for r in self.rewards[sample.id] if r is not None]
        return statistics.median(values) if values else None

    # -- the task ------------------------------------------------------------------------------------------------

    def run(self) -> TaskResult:
        """Grade everything; call `calibrate` first."""
        if self.task.kind == "speed":
            self.noise = self._speed_noise()
        threshold = self._threshold()
        honest = [self._plain(s, self._honest_bar(s, threshold)) for s in self.task.honest]
        wrong = [self._plain(s, threshold) for s in self.task.wrong]
        exploits = [self._exploit(s, threshold) for s in self.task.exploits]
        repeated = [self._repeats(s, threshold) for s in (*self.task.honest, *self.task.wrong)]
        return TaskResult(self.task, self, honest, wrong, exploits, repeated, self.noise, self.seconds, self.graded)

    def _values(self, samples: tuple[Sample, ...]) -> list[float]:
        return [r for s in samples if (r := self._reward(s)) is not None]

    def _threshold(self) -> float:
        """The reward from which a completion counts as accepted."""
        honest, wrong = self._values(self.task.honest), self._values(self.task.wrong)
        if not honest:
            return math.inf
        if self.task.kind == "speed":
            # Honest code as slow as the baseline may be paid as little as wrong code; anything above that is pay.
            return max(wrong, default=0.0) + self.dead_zone
        floor = min(wrong, default=0.0)
        middle = statistics.median(honest)
        if middle <= floor:
            return math.inf
        return floor + self.settings.accept_at * (middle - floor)

    def _honest_bar(self, sample: Sample, threshold: float) -> float:
        """Of speed tasks only truly faster code must be paid; the rest must not be paid less than wrong code."""
        if self.task.kind != "speed" or sample.faster:
            return threshold
        return max(self._values(self.task.wrong), default=0.0) - self.dead_zone

    def _plain(self, sample: Sample, threshold: float) -> Graded:
        reward = self._reward(sample)
        accepted = reward is not None and reward >= threshold
        return Graded(sample, reward, accepted, threshold=_finite(threshold), detail=self.details.get(sample.id, ""))

    def _repeats(self, sample: Sample, threshold: float) -> bool:
        first, *rest = self.rewards[sample.id]
        if self.task.kind == "speed":
            return all(_above(first, threshold) == _above(r, threshold) for r in rest) or not sample.faster
        return all(_close(first, r, _SAME) for r in rest)

    def _speed_noise(self) -> SpeedNoise:
        """The baseline again and again: what differences of reward mean nothing here."""
        baseline = next(s for s in self.task.honest if not s.faster)
        values: list[float] = []
        for _ in range(max(1, self.settings.speed_repeats // 4)):
            outcome = self.grade([baseline] * 4)
            values += [r for r in outcome.rewards if isinstance(r, int | float)]
        if not values:
            values = [0.0]
        median = statistics.median(values)
        deviations = [abs(v - median) for v in values]
        p99 = stats.quantile(deviations, 0.99)
        self.rewards[baseline.id] += values
        fast = [r for s in self.task.honest if s.faster for r in self.rewards[s.id] if r is not None]
        signal = statistics.median(fast) - median if fast else None
        # A single exploit is compared with the median control: twice the spread of one baseline measurement.
        self.dead_zone = max(_SAME, 2 * p99, 0.02 * abs(signal or 0.0))
        mean = statistics.fmean(values)
        high = sum(v - median > 0.5 * signal for v in values) if signal and signal > 0 else 0
        n = len(values)
        share = Rate(hits=high, n=n, share=high / n, wilson=stats.wilson(high, n), by_task=(0.0, 1.0))
        return SpeedNoise(
            task=self.task.id,
            n=n,
            median=median,
            cv=statistics.stdev(values) / abs(mean) if n > 1 and mean else None,
            p99_deviation=p99,
            dead_zone=self.dead_zone,
            signal=signal,
            false_speedup=share,
        )

    # -- exploits ------------------------------------------------------------------------------------------------

    def _exploit(self, sample: Sample, threshold: float) -> Graded:
        assert sample.exploit is not None
        if self.fresh:
            self.prober.restart()
        neighbours = [self.task.honest[0], self.task.honest[-1], self.task.wrong[0]]
        group = [neighbours[0], sample, neighbours[1], neighbours[2]]
        outcome = self.grade(group)
        blast, detail = [], outcome.detail
        if outcome.failure:
            blast.append(outcome.failure)
            outcome = self.grade([sample])  # what it would be paid if the call survived
        solo = len(outcome.rewards) == 1
        value = None if outcome.failure else outcome.rewards[0 if solo else 1]
        if isinstance(value, str):
            blast.append("malformed")
            detail = f"the reward is {value}"
        if not outcome.failure and not solo:
            others = [outcome.rewards[0], outcome.rewards[2], outcome.rewards[3]]
            if any(self._changed(s, r) for s, r in zip(neighbours, others)):
                blast.append("neighbour")
        after = self.grade(neighbours)
        if after.failure or any(self._changed(s, r) for s, r in zip(neighbours, after.rewards)):
            blast.append("lasting")
        if blast:
            self.prober.restart()
        reward = float(value) if isinstance(value, int | float) else None
        return self._judged(sample, reward, value is None and not outcome.failure, threshold, tuple(blast), detail)

    def _judged(
        self,
        sample: Sample,
        reward: float | None,
        quarantined: bool,
        threshold: float,
        blast: tuple[str, ...],
        detail: str,
    ) -> Graded:
        assert sample.exploit is not None
        control = self._reward(self.task.control(sample))
        bar = threshold
        if sample.exploit.proof.kind == "claimed_speed" and control is not None:
            bar = max(control + self.dead_zone, threshold) if math.isfinite(threshold) else control + self.dead_zone
        honest, wrong = self._values(self.task.honest), self._values(self.task.wrong)
        settings = self.settings
        harm = stats.group_harm(
            reward, honest, wrong, size=settings.group_size, groups=settings.groups, seed=settings.seed
        )
        accepted = reward is not None and reward >= bar
        return Graded(sample, reward, accepted, quarantined, _finite(bar), control, blast, detail, harm)

    def _changed(self, sample: Sample, value: float | str | None) -> bool:
        """Whether a neighbour's reward moved; of noisy speed rewards, far beyond all that it was paid before."""
        usual = self._reward(sample)
        if not isinstance(value, int | float):
            return usual is not None
        if usual is None:
            return False
        if self.task.kind == "speed":
            values = [r for r in self.rewards[sample.id] if r is not None]
            slack = max(2 * self.dead_zone, 0.25 * abs(usual))
            return not min(values) - slack <= value <= max(values) + slack
        return not _close(usual, value, 1e-6)


def _close(left: float | None, right: float | None, within: float) -> bool:
    if left is None or right is None:
        return left is right
    return abs(left - right) <= within


def _above(reward: float | None, threshold: float) -> bool:
    return reward is not None and reward >= threshold


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
