"""A reward for GPU kernels (Triton or torch source) that are right and faster.

Less trusted than the sandboxed rewards, and stamped `Tier.rlimit`: a process that uses the GPU needs its driver's
devices, threads and a compiler, so it can read this user's files and use the network. Run it in a container or machine
that holds nothing of worth.

What holds nevertheless: the candidate's process never holds an expected value; inputs come from seeds that are released when the
clock starts; the clock is the trainer's, across the process boundary, and stops when the outputs have arrived; those outputs are
judged in another process against a truth in higher precision, with the baseline's own error as the measure.
"""

from __future__ import annotations

import contextlib
import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.rewards.code import log_results
from longreach.rewards.extraction import Blocks, extract_code
from longreach.rewards.gpu.process import KernelFailed, KernelProcess
from longreach.rewards.gpu.recipes import KERNEL_RECIPES, KernelRecipe
from longreach.rewards.result import InfrastructureError, RewardResult, Tier, completion_text, to_rewards
from longreach.rewards.sandbox.session import Timing
from longreach.rewards.speed import log2_pay
from longreach.rewards.timing import DeadZone, Ratio, compare, median_timing


@dataclass(frozen=True)
class KernelPlan:
    """rounds: timed batches of each side; confidence: of the interval; floor: of the dead zone (a log);
    calibrations: A/A measurements before the first completion; load_s, call_s: patience for compiling and for a batch."""

    rounds: int = 15
    confidence: float = 0.99
    floor: float = 0.05
    calibrations: int = 4
    load_s: float = 60.0
    call_s: float = 30.0

    def __post_init__(self) -> None:
        if self.rounds < 11:
            raise ValueError(f"rounds is {self.rounds}; at least 11 are needed for an interval")
        if self.calibrations < 2:
            raise ValueError(f"calibrations is {self.calibrations}; a dead zone needs at least 2")


class _WrongOutput(Exception):
    pass


def error_problem(verdict: Mapping[str, Any], factor: float) -> str:
    """ "" when the candidate's errors are within ``factor`` of the baseline's, with a grain of rounding allowed."""
    if verdict["problem"]:
        return str(verdict["problem"])
    grain = verdict["epsilon"] * verdict["scale"]
    for name, ours, theirs in zip(("rms", "largest"), verdict["candidate"], verdict["baseline"]):
        if not ours <= factor * theirs + grain:
            return f"its {name} error is {ours:.3g}; the baseline's is {theirs:.3g}"
    return ""


class KernelReward:
    """What `kernel_reward` returns: callable with TRL's signature, `grade` for full results, `close` when done."""

    def __init__(
        self,
        recipe: KernelRecipe,
        *,
        device: str,
        plan: KernelPlan,
        pay: Callable[[float], float],
        wrong: float,
        blocks: Blocks,
    ) -> None:
        self.__name__ = f"kernel_reward_{recipe.name}"
        self.recipe, self.device, self.plan, self.pay = recipe, device, plan, pay
        self.wrong, self.blocks = wrong, blocks
        self.dead_zone = DeadZone(plan.floor)
        self._judge: KernelProcess | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_judge": None, "dead_zone": DeadZone(self.plan.floor)}

    @property
    def isolation_tier(self) -> str:
        """The name of the tier that completions run at."""
        return Tier.rlimit.name

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
            return RewardResult.wrong(answer.problem, reward=self.wrong, tier=Tier.rlimit)
        try:
            return self.grade_source(answer.text)
        except InfrastructureError as error:
            return RewardResult.infrastructure_error(str(error), tier=Tier.rlimit)

    def grade_source(self, source: str) -> RewardResult:
        """Measure and judge a kernel that is already extracted. Raises InfrastructureError."""
        while self.dead_zone.count < self.plan.calibrations:
            self._calibrate()
        try:
            ratio, checks = self.measure(source)
        except InfrastructureError as error:
            self._calibrate()  # raises when it is we who fail; else this candidate took what the judge needed
            return RewardResult.quarantined(f"beside it, {error}", tier=Tier.rlimit)
        except KernelFailed as failed:
            telemetry = {"failure": failed.failure}
            reason = f"{failed.failure}: {failed.error}"
            return RewardResult.wrong(reason, reward=self.wrong, tier=Tier.rlimit, telemetry=telemetry)
        except _WrongOutput as wrong:
            return RewardResult.wrong(str(wrong), reward=self.wrong, tier=Tier.rlimit, checks_total=1)
        return self._verdict(ratio, checks)

    def _calibrate(self) -> None:
        """The baseline as a candidate: how large a speed-up chance shows. Raises InfrastructureError."""
        try:
            self.dead_zone.add(self.measure(self.recipe.baseline)[0])
        except (KernelFailed, _WrongOutput) as error:
            message = f"the baseline of {self.recipe.name} does not pass its own checks: {error}"
            raise InfrastructureError(message) from error

    def _verdict(self, ratio: Ratio, checks: int) -> RewardResult:
        zone = self.dead_zone.log_width
        telemetry = {"speedup": ratio.speedup, "speedup_low": math.exp(ratio.low), "dead_zone": math.exp(zone) - 1}
        fields: dict[str, Any] = {
            "tier": Tier.rlimit,
            "checks_passed": checks,
            "checks_total": checks,
            "telemetry": telemetry,
        }
        if ratio.speedup > self.recipe.max_speedup:
            return RewardResult.quarantined(f"a speed-up of {ratio.speedup:.1f} is implausible", **fields)
        paid = ratio.speedup if ratio.low > zone or ratio.high < -zone else 1.0
        telemetry["speedup_paid"] = paid
        return RewardResult.ok(self.pay(paid), **fields)

    # -- measuring ---------------------------------------------------------------------------------------------

    def measure(self, source: str) -> tuple[Ratio, int]:
        """(speed-up, checks passed). Raises KernelFailed and _WrongOutput for the candidate, InfrastructureError for us."""
        judge = self._trusted_process()
        rng = random.Random(secrets.randbits(256))
        candidate = KernelProcess(self.device)
        try:
            candidate.ask({"op": "setup", "inputs": self.recipe.inputs}, self.plan.call_s)
            request = {"op": "add", "role": "candidate", "source": source, "function": self.recipe.function}
            candidate.ask(request, self.plan.load_s)
            checks = 0
            for sizes in (*self.recipe.edge_sizes, self.recipe.sizes):
                self._check(candidate, judge, rng, sizes)
                checks += 1
            rounds = [self._round(candidate, judge, rng) for _ in range(self.plan.rounds + 1)][1:]  # the first warms up
            return self._ratio(rounds), checks + self.plan.rounds + 1
        finally:
            candidate.close()

    def _batch(self, rng: random.Random, calls: int, sizes: Mapping[str, int]) -> dict[str, Any]:
        seeds = [rng.getrandbits(62) for _ in range(calls)]
        return {"seeds": seeds, "sizes": dict(sizes), "mix_seed": rng.getrandbits(62)}

    def _check(
        self, candidate: KernelProcess, judge: KernelProcess, rng: random.Random, sizes: Mapping[str, int]
    ) -> None:
        """One call whose whole output is judged."""
        batch = self._batch(rng, 1, sizes)
        said, _ = candidate.ask({"op": "run", "role": "candidate", **batch}, self.plan.load_s)
        self._judge_output(judge, batch, said)

    def _ratio(self, rounds: Sequence[Mapping[str, Timing]]) -> Ratio:
        """The speed-up on the wall clock, what the exchange itself costs taken off both sides."""
        overhead = median_timing([took["idle"] for took in rounds])
        base = median_timing([took["baseline"] for took in rounds])
        if base.wall_ns < 1.25 * overhead.wall_ns:
            raise InfrastructureError(
                f"{self.recipe.name} cannot be timed: a batch of the baseline takes {base.wall_ns / 1e6:.2f} ms, of which "
                f"{overhead.wall_ns / 1e6:.2f} ms are the exchange itself. Give the recipe larger sizes or more calls"
            )
        sides = [[took[side] for took in rounds] for side in ("baseline", "candidate")]
        return compare(*sides, overhead=overhead, charge_ns=0.0, confidence=self.plan.confidence)[1]

    def _round(self, candidate: KernelProcess, judge: KernelProcess, rng: random.Random) -> dict[str, Timing]:
        """The same fresh batch on both sides and on the idle one, in random order: their times. The output is judged."""
        batch = self._batch(rng, self.recipe.calls, self.recipe.sizes)
        turns = ["candidate", "baseline", "idle"]
        rng.shuffle(turns)
        took: dict[str, Timing] = {}
        said = None
        for turn in turns:
            request = {"op": "run", "role": turn, **batch}
            if turn == "candidate":
                said, nanoseconds = candidate.ask(request, self.plan.call_s)
            else:
                _, nanoseconds = self._ask_trusted(judge, request)
            took[turn] = Timing(nanoseconds, nanoseconds)
        self._judge_output(judge, batch, said)
        return took

    def _judge_output(self, judge: KernelProcess, batch: dict[str, Any], said: Any) -> None:
        if not (
            isinstance(said, dict) and said.keys() == {"dtype", "shape", "data"} and isinstance(said["shape"], list)
        ):
            raise KernelFailed("protocol", "the reply describes no tensor")
        verdict, _ = self._ask_trusted(judge, {"op": "judge", "said": said, **batch})
        problem = error_problem(verdict, self.recipe.error_factor)
        if problem:
            raise _WrongOutput(problem)

    def _ask_trusted(self, judge: KernelProcess, request: dict[str, Any]) -> tuple[Any, int]:
        try:
            return judge.ask(request, self.plan.load_s)
        except KernelFailed as error:
            self.close()
            raise InfrastructureError(f"the judging process of {self.recipe.name} failed: {error.error}") from error

    def _trusted_process(self) -> KernelProcess:
        """The process that runs our own sources; kept from one completion to the next."""
        if self._judge is None:
            judge = KernelProcess(self.device)
            self._judge = judge
            self._ask_trusted(judge, {"op": "setup", "inputs": self.recipe.inputs})
            for role in ("baseline", "truth", "idle"):
                source = getattr(self.recipe, role)
                self._ask_trusted(
                    judge, {"op": "add", "role": role, "source": source, "function": self.recipe.function}
                )
        return self._judge

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._judge is not None:
            with contextlib.suppress(OSError):
                self._judge.close()
            self._judge = None

    def __enter__(self) -> KernelReward:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def kernel_reward(
    recipe: str | KernelRecipe,
    *,
    device: str = "cuda",
    plan: KernelPlan | None = None,
    pay: Callable[[float], float] = log2_pay,
    wrong: float = 0.0,
    blocks: Blocks = "one",
    min_tier: str | Tier = Tier.lsm,
) -> KernelReward:
    """A reward for fast kernels, with TRL's signature. You must say ``min_tier="rlimit"``: it reaches no more than that.

    recipe  ``"row_softmax"``, ``"matmul_bf16"`` or a `KernelRecipe` of your own
    device  where kernels run; ``"cpu"`` for trying things out
    pay     speed-up -> reward of a right kernel, as in `speed_reward`
    """
    if Tier.parse(min_tier, field="min_tier") > Tier.rlimit:
        raise InfrastructureError(
            "kernel_reward runs candidates at isolation tier 'rlimit': they can read this user's files and use the network. "
            "Run it where that does no harm and pass min_tier='rlimit'"
        )
    if isinstance(recipe, str):
        if recipe not in KERNEL_RECIPES:
            raise ValueError(f"recipe is {recipe!r}; there are {', '.join(KERNEL_RECIPES)}, or give a KernelRecipe")
        recipe = KERNEL_RECIPES[recipe]
    return KernelReward(recipe, device=device, plan=plan or KernelPlan(), pay=pay, wrong=wrong, blocks=blocks)
