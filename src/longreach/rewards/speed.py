"""Rewards for code that is right and faster than a baseline, measured so that only being faster helps."""

from __future__ import annotations

import math
import random
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longreach.rewards.code import log_results
from longreach.rewards.extraction import Blocks, extract_code
from longreach.rewards.recipes import RECIPES, SpeedRecipe
from longreach.rewards.result import InfrastructureError, RewardResult, Tier, completion_text, to_rewards
from longreach.rewards.sandbox import Limits, Sandbox
from longreach.rewards.sandbox.process import Zygote, ZygoteDied
from longreach.rewards.sandbox.session import CandidateFailed, Session, Timing
from longreach.rewards.timing import DeadZone, Ratio, compare, median_timing, pick_cpu, sole_use

ATTEMPTS = 3


@dataclass(frozen=True)
class TimingPlan:
    """How much to measure, and when to believe it.

    rounds, max_rounds   timed rounds; more are added while the interval is wider than ``width``
    edge_checks          untimed checks on odd inputs before
    confidence           of the two-sided interval of the median; its lower end must clear the dead zone before
    anything is paid floor                the dead zone is never below it (a ratio minus one) calibrations
    A/A measurements before the first completion, and one more after every ``recalibrate`` completions
    free_import_ns       CPU time that loading the program may take beyond the baseline's before it is charged to
    the calls disagreement         how far below the CPU clock's speed-up the wall clock's may lie (a log) before it
    is quarantined idle_share           CPU time that a candidate may use while it should wait, as a share of the
    baseline's
    """

    rounds: int = 15
    max_rounds: int = 45
    width: float = 0.10
    edge_checks: int = 6
    confidence: float = 0.99
    floor: float = 0.03
    calibrations: int = 12
    recalibrate: int = 64
    free_import_ns: int = 5_000_000
    disagreement: float = 0.25
    idle_share: float = 0.5

    def __post_init__(self) -> None:
        if not 11 <= self.rounds <= self.max_rounds:
            raise ValueError(
                f"rounds is {self.rounds} and max_rounds {self.max_rounds}; at least 11, and max_rounds no less"
            )
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence is {self.confidence}; it must lie in [0.5, 1)")
        if self.calibrations < 4:
            raise ValueError(f"calibrations is {self.calibrations}; a dead zone needs at least 4")


class WrongAnswer(Exception):
    """A value that fails the recipe's bound."""


@dataclass(frozen=True)
class Measurement:
    """A right candidate's speed: by CPU time and by wall time, and what it did while it should wait."""

    cpu: Ratio
    wall: Ratio
    idle_share: float
    charge_ns: float
    checks: int


Pay = Callable[[float], float]


def log2_pay(speedup: float) -> float:
    """1 for a right answer, and one more for each doubling; a slower one loses up to 1."""
    return 1.0 + max(-1.0, math.log2(speedup))


class _Contest:
    """The processes of one measurement, on one CPU."""

    def __init__(
        self, zygote: Zygote, limits: Limits, recipe: SpeedRecipe, plan: TimingPlan, rng: random.Random
    ) -> None:
        self.zygote, self.limits, self.recipe, self.plan, self.rng = zygote, limits, recipe, plan, rng
        self.sessions: list[Session] = []
        self.checks = 0

    def open(self, source: str, limits: Limits) -> tuple[Session, Timing]:
        session = Session(self.zygote, limits)
        self.sessions.append(session)
        session.measure_cpu()
        before = session.cpu_ns()
        session.load(source, self.recipe.function)
        return session, Timing(0, session.cpu_ns() - before)

    def close(self) -> None:
        for session in self.sessions:
            session.close()

    def trusted(self, session: Session, args: Sequence[Any]) -> tuple[Any, Timing]:
        """A call of our own code: when it fails, that is not the candidate's doing."""
        try:
            return session.call(self.recipe.function, args)
        except CandidateFailed as error:
            raise InfrastructureError(f"the baseline of {self.recipe.name} failed: {error.error}") from error

    def verify(self, args: Sequence[Any], expected: Any, value: Any) -> None:
        self.checks += 1
        try:
            problem = self.recipe.verify(args, expected, value)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            problem = f"a value that cannot be judged ({type(error).__name__})"
        if problem:
            raise WrongAnswer(problem)

    def measure(self, source: str) -> Measurement:
        """Raises WrongAnswer and CandidateFailed."""
        plan = self.plan
        # our own processes must outlast the candidate's: it may not make them look like the ones that failed
        patient = replace(self.limits, cpu_s=10 * self.limits.cpu_s, wall_s=2 * self.limits.wall_s + 10)
        baseline, base_load = self.open(self.recipe.baseline, patient)
        idle, _ = self.open(self.recipe.idle, patient)
        candidate, load = self.open(source, self.limits)
        for index in range(plan.edge_checks + 1):  # the last one is a timed input whose time does not count
            args = self.recipe.edge(self.rng) if index < plan.edge_checks else self.recipe.generate(self.rng)
            expected, _ = self.trusted(baseline, args)
            self.verify(args, expected, candidate.call(self.recipe.function, args)[0])
            self.trusted(idle, args)
        base_times: list[Timing] = []
        cand_times: list[Timing] = []
        idle_times: list[Timing] = []
        waited = 0
        while True:
            waited += self._round(baseline, candidate, idle, base_times, cand_times, idle_times)
            if len(base_times) < plan.rounds:
                continue
            extra = max(0, load.cpu_ns - base_load.cpu_ns - plan.free_import_ns)
            charge = extra / len(cand_times)
            overhead = median_timing(idle_times)
            cpu, wall = compare(base_times, cand_times, overhead=overhead, charge_ns=charge, confidence=plan.confidence)
            if cpu.high - cpu.low <= plan.width or len(base_times) >= plan.max_rounds:
                share = waited / max(1, sum(timing.cpu_ns for timing in base_times))
                return Measurement(cpu, wall, share, charge, self.checks)

    def _round(
        self,
        baseline: Session,
        candidate: Session,
        idle: Session,
        base_times: list[Timing],
        cand_times: list[Timing],
        idle_times: list[Timing],
    ) -> int:
        """One fresh input for all three, in random order. Returns the CPU time that the candidate used out of turn."""
        args = self.recipe.generate(self.rng)
        turns = ["baseline", "candidate", "idle"]
        self.rng.shuffle(turns)
        expected = value = None
        out_of_turn = 0
        for turn in turns:
            if turn == "candidate":
                value, timing = candidate.call(self.recipe.function, args)
                cand_times.append(timing)
            elif turn == "baseline":
                before = candidate.cpu_ns()
                expected, timing = self.trusted(baseline, args)
                out_of_turn += candidate.cpu_ns() - before
                base_times.append(timing)
            else:
                idle_times.append(self.trusted(idle, args)[1])
        self.verify(args, expected, value)
        return out_of_turn


class SpeedReward:
    """What `speed_reward` returns: callable with TRL's signature, `grade` for full results, `close` when done."""

    def __init__(
        self,
        recipe: SpeedRecipe,
        *,
        sandbox: Sandbox,
        owns_sandbox: bool,
        plan: TimingPlan,
        pay: Pay,
        wrong: float,
        blocks: Blocks,
        cpu: int | None,
    ) -> None:
        self.__name__ = f"speed_reward_{recipe.name}"
        self.recipe, self.sandbox, self.plan, self.pay = recipe, sandbox, plan, pay
        self._owns_sandbox = owns_sandbox
        self.wrong, self.blocks = wrong, blocks
        self.cpu = pick_cpu(cpu)
        self.limits = replace(sandbox.limits, cpu=self.cpu, native_code=bool(recipe.packages))
        self._start()

    def _start(self) -> None:
        self.dead_zone = DeadZone(self.plan.floor)
        self._since = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "dead_zone", "_since")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def isolation_tier(self) -> str:
        """The name of the tier that completions run at."""
        return self.sandbox.tier.name

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        results = self.grade(prompts, completions, **columns)
        log_results(self.__name__, results, columns.get("log_metric"))
        return to_rewards(results)

    def grade(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[RewardResult]:
        """One result for each completion, measured one after the other."""
        return [self._grade_one(completion_text(completion)) for completion in completions]

    def _grade_one(self, completion: str) -> RewardResult:
        answer = extract_code(completion, blocks=self.blocks)
        if answer.problem:
            return RewardResult.wrong(answer.problem, reward=self.wrong, tier=self.sandbox.tier)
        try:
            return self.grade_source(answer.text)
        except InfrastructureError as error:
            return RewardResult.infrastructure_error(str(error), tier=self.sandbox.tier)

    # -- measuring ---------------------------------------------------------------------------------------------

    def calibrate(self, times: int) -> None:
        """Measure the baseline against itself, to learn how large a speed-up chance shows here and now."""
        for _ in range(times):
            measured = self.measure(self.recipe.baseline)
            if isinstance(measured, Measurement):
                self.dead_zone.add(measured.cpu)
            else:
                raise InfrastructureError(
                    f"the baseline of {self.recipe.name} does not pass its own checks: {measured[1]}"
                )

    def measure(self, source: str) -> Measurement | tuple[str, str, dict[str, Any]]:
        """A measurement, or (failure, error, telemetry). Raises InfrastructureError."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self.sandbox.lend() as zygote, sole_use(self.cpu):
                    return self._measure(zygote, source)
            except ZygoteDied as error:
                if attempt == ATTEMPTS:
                    raise InfrastructureError(
                        f"the sandbox failed {ATTEMPTS} times on one completion: {error}"
                    ) from error
        raise AssertionError("unreachable")

    def _measure(self, zygote: Zygote, source: str) -> Measurement | tuple[str, str, dict[str, Any]]:
        contest = _Contest(zygote, self.limits, self.recipe, self.plan, random.Random(secrets.randbits(256)))
        try:
            return contest.measure(source)
        except (WrongAnswer, CandidateFailed) as error:
            failure = error.failure if isinstance(error, CandidateFailed) else "wrong value"
            text = error.error if isinstance(error, CandidateFailed) else str(error)
            contest.close()
            usage = contest.sessions[-1].usage.to_json()
            return failure, text, {**usage, "checks": contest.checks}
        finally:
            contest.close()

    def grade_source(self, source: str) -> RewardResult:
        """Measure and judge a program that is already extracted. Raises InfrastructureError."""
        if len(source) > self.limits.source_bytes:
            return RewardResult.wrong("the source is too long", reward=self.wrong, tier=self.sandbox.tier)
        with self._lock:
            if self.dead_zone.count < self.plan.calibrations:
                self.calibrate(self.plan.calibrations - self.dead_zone.count)
            elif self._since >= self.plan.recalibrate:
                self._since = 0
                self.calibrate(1)
            self._since += 1
            measured = self.measure(source)
        tier = self.sandbox.tier
        if not isinstance(measured, Measurement):
            failure, error, telemetry = measured
            checks = telemetry.pop("checks")
            telemetry["failure"] = failure
            return RewardResult.wrong(
                f"{failure}: {error}",
                reward=self.wrong,
                tier=tier,
                checks_passed=max(0, checks - 1),
                checks_total=checks,
                telemetry=telemetry,
            )
        return self._verdict(measured, tier)

    def _verdict(self, measured: Measurement, tier: Tier) -> RewardResult:
        cpu, wall = measured.cpu, measured.wall
        zone = self.dead_zone.log_width
        telemetry: dict[str, Any] = {
            "speedup": cpu.speedup,
            "speedup_low": math.exp(cpu.low),
            "speedup_high": math.exp(cpu.high),
            "speedup_wall": wall.speedup,
            "rounds": cpu.rounds,
            "dead_zone": math.exp(zone) - 1,
            "idle_share": measured.idle_share,
            "import_charge_ns": measured.charge_ns,
        }
        fields: dict[str, Any] = {
            "tier": tier,
            "checks_passed": measured.checks,
            "checks_total": measured.checks,
            "telemetry": telemetry,
        }
        if cpu.speedup > self.recipe.max_speedup:
            return RewardResult.quarantined(f"a speed-up of {cpu.speedup:.1f} is implausible", **fields)
        if wall.high < cpu.low - self.plan.disagreement:
            return RewardResult.quarantined("faster by its CPU clock than by the wall clock", **fields)
        if measured.idle_share > self.plan.idle_share:
            return RewardResult.quarantined("it works while it should wait, which slows the baseline down", **fields)
        paid = 1.0
        if cpu.low > zone or cpu.high < -zone:
            paid = cpu.speedup
        telemetry["speedup_paid"] = paid
        reward = self.pay(paid)
        if not math.isfinite(reward):
            raise InfrastructureError(f"pay({paid}) is {reward}; it must be a finite number")
        return RewardResult.ok(reward, components={"right": self.pay(1.0), "speed": reward - self.pay(1.0)}, **fields)

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._owns_sandbox:
            self.sandbox.close()

    def __enter__(self) -> SpeedReward:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def speed_reward(
    recipe: str | SpeedRecipe,
    *,
    sandbox: Sandbox | None = None,
    tier: str | Tier = "auto",
    min_tier: str | Tier = Tier.lsm,
    limits: Limits | None = None,
    plan: TimingPlan | None = None,
    pay: Pay = log2_pay,
    wrong: float = 0.0,
    blocks: Blocks = "one",
    cpu: int | None = None,
) -> SpeedReward:
    """A reward for being right and faster than a baseline, with TRL's signature.

    recipe   ``"python_matmul"``, ``"vector_distances"`` or a `SpeedRecipe` of your own
    sandbox  one to share; otherwise one is made from ``tier``, ``min_tier`` and ``limits``
    plan     how much to measure (`TimingPlan`)
    pay      speed-up -> reward, of a right answer; it gets 1.0 unless the difference is beyond chance (a picklable
    function) wrong    the reward of a wrong answer cpu      the CPU to time on; by default the last this process
    may use

    Quarantined completions (an implausible speed-up, clocks that disagree) get None. Raises InfrastructureError.
    """
    if sys.platform != "linux":
        raise InfrastructureError("speed_reward reads another process's CPU clock, which needs Linux")
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"recipe is {recipe!r}; there are {', '.join(RECIPES)}, or give a SpeedRecipe")
        recipe = RECIPES[recipe]
    limits = limits or Limits(cpu_s=10, wall_s=30, output_bytes=1 << 22)
    box = sandbox or Sandbox(tier, min_tier=min_tier, limits=limits, workers=1, packages=recipe.packages)
    return SpeedReward(
        recipe,
        sandbox=box,
        owns_sandbox=sandbox is None,
        plan=plan or TimingPlan(),
        pay=pay,
        wrong=wrong,
        blocks=blocks,
        cpu=cpu,
    )
