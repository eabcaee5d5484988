"""Rewards for code: right on inputs that nobody could have known, or nothing."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from longreach.rewards.compare import matches, same_output, show
from longreach.rewards.extraction import Blocks, extract_code
from longreach.rewards.policy import Policy
from longreach.rewards.result import InfrastructureError, RewardResult, Tier, completion_text, to_rewards
from longreach.rewards.sandbox import Limits, Sandbox
from longreach.rewards.tasks import Arguments, FunctionTask, ProgramTask, Relation, SuiteTask, Task, task_from_column

# A process that broke the protocol, or kept asking for what it may not have, was attacking.
TAMPERING = ("protocol", "denials")
Tampering = Literal["wrong", "quarantine"]


class GradeRecord:
    """Builds a result while the checks run."""

    def __init__(self, tier: Tier, total: int) -> None:
        self.tier, self.total, self.passed = tier, total, 0
        self.telemetry: dict[str, Any] = {"cpu_s": 0.0, "wall_s": 0.0, "max_rss_bytes": 0, "denials": {}}

    def add(self, outcome: Any) -> None:
        usage = outcome.usage
        self.telemetry["cpu_s"] += usage.cpu_s
        self.telemetry["wall_s"] += usage.wall_s
        self.telemetry["max_rss_bytes"] = max(self.telemetry["max_rss_bytes"], usage.max_rss_bytes)
        denials = self.telemetry["denials"]
        for name, count in usage.denials.items():
            denials[name] = denials.get(name, 0) + count
        if outcome.failure:
            self.telemetry["failure"] = outcome.failure

    def fields(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "checks_passed": self.passed,
            "checks_total": self.total,
            "telemetry": self.telemetry,
        }


class CodeReward:
    """What `code_reward` returns: callable with TRL's signature, `grade` for full results, `close` when done."""

    def __init__(
        self,
        task: Task | None,
        *,
        column: str,
        sandbox: Sandbox,
        owns_sandbox: bool,
        correct: float,
        wrong: float,
        partial: bool,
        blocks: Blocks,
        policy: Policy | None,
        tampering: Tampering,
        seed: int | None,
    ) -> None:
        self.__name__ = "code_reward"
        self.task, self.column, self.sandbox = task, column, sandbox
        self._owns_sandbox = owns_sandbox
        self.correct, self.wrong, self.partial = correct, wrong, partial
        self.blocks, self.policy, self.tampering, self.seed = blocks, policy, tampering, seed

    @property
    def isolation_tier(self) -> str:
        """The name of the tier that completions run at."""
        return self.sandbox.tier.name

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        results = self.grade(prompts, completions, **columns)
        log_results(self.__name__, results, columns.get("log_metric"))
        return to_rewards(results)

    def grade(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[RewardResult]:
        """One result for each completion; a grader's failure is a result too, it does not raise."""
        if self.task is None and self.column not in columns:
            raise ValueError(
                f"the dataset has no column {self.column!r}; pass code_reward a task, or column= with the name of the "
                f"one that holds them (there are: {', '.join(sorted(columns)) or 'none'})"
            )
        tasks = [self.task] * len(completions) if self.task is not None else columns[self.column]
        if len(tasks) != len(completions):
            raise ValueError(f"{len(completions)} completions came with {len(tasks)} tasks in column {self.column!r}")
        return list(self.sandbox.map(self._grade_pair, zip(completions, tasks)))

    def _grade_pair(self, pair: tuple[Any, Any]) -> RewardResult:
        completion, task = pair
        answer = extract_code(completion_text(completion), blocks=self.blocks)
        if answer.problem:
            return RewardResult.wrong(answer.problem, reward=self.wrong, tier=self.sandbox.tier)
        try:
            return self.grade_source(answer.text, task_from_column(task))
        except Unjudgeable as error:
            return RewardResult.quarantined(str(error), tier=self.sandbox.tier)
        except InfrastructureError as error:
            return RewardResult.infrastructure_error(str(error), tier=self.sandbox.tier)

    def grade_source(self, source: str, task: Task) -> RewardResult:
        """Judge a program that is already extracted. Raises InfrastructureError."""
        if isinstance(task, FunctionTask):
            result = self._grade_function(source, task)
        elif isinstance(task, ProgramTask):
            result = self._grade_program(source, task)
        else:
            result = self._grade_suite(source, task)
        if self.policy is not None:
            findings = self.policy.findings(source)
            result = replace(result, telemetry={**result.telemetry, "policy": findings})
        return result

    def _rng(self, source: str) -> random.Random:
        if self.seed is None:
            return random.Random(secrets.randbits(256))
        return random.Random(hashlib.blake2b(f"{self.seed}\0{source}".encode("utf-8", "replace")).digest())

    # -- kinds of task -----------------------------------------------------------------------------------------

    def _grade_function(self, source: str, task: FunctionTask) -> RewardResult:
        rng = self._rng(source)
        inputs, checks = _plan_function(task, rng)
        outcome = self.sandbox.call(source, task.function, inputs)
        record = GradeRecord(outcome.tier, len(checks))
        record.add(outcome)
        reason = ""
        for needs, judge in checks:
            if any(index >= len(outcome.values) for index in needs):
                continue
            problem = _judged(judge, [outcome.values[index] for index in needs])
            record.passed += not problem
            reason = reason or problem
        return self._verdict(record, outcome.failure, outcome.error, reason)

    def _grade_program(self, source: str, task: ProgramTask) -> RewardResult:
        rng = self._rng(source)
        cases: list[tuple[str, str | None]] = list(task.cases)
        if task.generate is not None:
            for _ in range(task.fresh):
                stdin = _trusted("generate", task.generate, rng)
                expected = _trusted("reference", task.reference, stdin) if task.reference else None
                cases.append((stdin, expected))
        rng.shuffle(cases)
        record = GradeRecord(self.sandbox.tier, len(cases))
        failure = error = reason = ""
        for stdin, expected in cases:
            outcome = self.sandbox.run_program(source, stdin)
            record.tier = outcome.tier
            record.add(outcome)
            if outcome.failure in TAMPERING or (not outcome.ok and not self.partial):
                last = outcome.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
                failure = outcome.failure or "exception"
                error = outcome.error or f"exit code {outcome.exit_code}: {show(last[0] if last else '')}"
                break
            right = outcome.ok and _right_output(task, stdin, expected, outcome.stdout)
            record.passed += right
            if not right:
                reason = reason or f"wrong output for one of {len(cases)} inputs"
                if not self.partial:
                    break
        return self._verdict(record, failure, error, reason)

    def _grade_suite(self, source: str, task: SuiteTask) -> RewardResult:
        outcome = self.sandbox.run_suite(task.starting_source + source, task.suite)
        record = GradeRecord(outcome.tier, len(task.suite.expected()))
        record.add(outcome)
        record.passed = sum(check.passed for check in outcome.checks)
        reason = next((f"{check.name}: {check.message}" for check in outcome.checks if not check.passed), "")
        return self._verdict(record, outcome.failure, outcome.error, reason)

    def _verdict(self, record: GradeRecord, failure: str, error: str, reason: str) -> RewardResult:
        fields = record.fields()
        if failure == "undecided":
            return RewardResult.quarantined(error, **fields)
        attacked = failure in TAMPERING or bool(record.telemetry["denials"])
        if attacked and self.tampering == "quarantine":
            return RewardResult.quarantined(f"{failure or 'refused system calls'}: {error}", **fields)
        if not failure and record.passed == record.total:
            return RewardResult.ok(self.correct, **fields)
        text = f"{failure}: {error}" if failure else reason
        if self.partial and record.passed:
            share = record.passed / record.total
            return RewardResult.wrong(text, reward=self.wrong + share * (self.correct - self.wrong) / 2, **fields)
        return RewardResult.wrong(text, reward=self.wrong, **fields)

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._owns_sandbox:
            self.sandbox.close()

    def __enter__(self) -> CodeReward:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


Judge = Callable[[list[Any]], str]


def _plan_function(task: FunctionTask, rng: random.Random) -> tuple[list[Arguments], list[tuple[list[int], Judge]]]:
    """All inputs in random order, and the checks on their values: ([indices needed], judge)."""
    wanted: list[tuple[list[Arguments], Callable[[list[Any]], str]]] = []
    for args, expected in task.cases:
        wanted.append(([tuple(args)], _equals(task, expected)))
    for _ in range(task.fresh if task.generate is not None else 0):
        args = tuple(_trusted("generate", task.generate, rng))
        if task.reference is not None:
            wanted.append(([args], _equals(task, _trusted("reference", task.reference, *args))))
        if task.check is not None:
            wanted.append(([args], _satisfies(task, args)))
        for relation in task.relations:
            other = tuple(_trusted(f"transform of {relation.name}", relation.transform, rng, args))
            wanted.append(([args, other], _relates(relation, args, other)))
    slots = [(index, place) for index, (needed, _) in enumerate(wanted) for place in range(len(needed))]
    rng.shuffle(slots)
    position = {slot: at for at, slot in enumerate(slots)}
    inputs = [wanted[index][0][place] for index, place in slots]
    checks: list[tuple[list[int], Judge]] = []
    for index, (needed, judge) in enumerate(wanted):
        at = [position[index, place] for place in range(len(needed))]
        checks.append((at, judge))
    return inputs, checks


def _equals(task: FunctionTask, expected: Any) -> Callable[[list[Any]], str]:
    def judge(values: list[Any]) -> str:
        right = matches(expected, values[0], rel_tol=task.rel_tol, abs_tol=task.abs_tol)
        return "" if right else f"a wrong value: {show(values[0])}"

    return judge


def _satisfies(task: FunctionTask, args: Arguments) -> Callable[[list[Any]], str]:
    assert task.check is not None
    check = task.check
    return lambda values: "" if check(args, values[0]) is True else f"a value that fails the check: {show(values[0])}"


def _relates(relation: Relation, args: Arguments, other: Arguments) -> Callable[[list[Any]], str]:
    def judge(values: list[Any]) -> str:
        return "" if relation.holds(args, values[0], other, values[1]) is True else f"breaks {relation.name}"

    return judge


# What judging raises when it meets a value of a kind it did not expect: such a value is simply wrong.
_WRONG_KIND = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class Unjudgeable(Exception):
    """The task's own check failed in a way that says nothing about the value."""


def _judged(judge: Callable[..., str], *args: Any) -> str:
    try:
        return judge(*args)
    except _WRONG_KIND as error:
        return f"a value that cannot be judged ({type(error).__name__})"
    except Exception as error:
        raise Unjudgeable(f"the task's check raised {type(error).__name__}: {error}") from error


def _right_output(task: ProgramTask, stdin: str, expected: str | None, stdout: bytes) -> bool:
    if task.check is not None:
        check = task.check
        return not _judged(lambda: "" if check(stdin, stdout.decode("utf-8")) is True else "wrong")
    assert expected is not None
    return same_output(expected, stdout, rel_tol=task.rel_tol)


def _trusted(what: str, function: Callable[..., Any] | None, *args: Any) -> Any:
    """The task author's own code: when it raises, that is the grader's failure and nobody's wrong answer."""
    assert function is not None
    try:
        return function(*args)
    except Exception as error:
        raise InfrastructureError(f"the task's {what} raised {type(error).__name__}: {error}") from error


def log_results(name: str, results: Sequence[RewardResult], log_metric: Any) -> None:
    """Shares and counts for the trainer's log, when it offers `log_metric`."""
    if log_metric is None or not results:
        return
    for status in ("ok", "wrong", "quarantined"):
        log_metric(f"{name}/{status}", sum(result.status == status for result in results) / len(results))
    denials = sum(sum(result.telemetry.get("denials", {}).values()) for result in results)
    log_metric(f"{name}/denials", denials / len(results))


def code_reward(
    task: Task | None = None,
    *,
    column: str = "task",
    sandbox: Sandbox | None = None,
    tier: str | Tier = "auto",
    min_tier: str | Tier = Tier.lsm,
    limits: Limits | None = None,
    workers: int = 2,
    packages: Sequence[str] = (),
    correct: float = 1.0,
    wrong: float = 0.0,
    partial: bool = False,
    blocks: Blocks = "one",
    policy: Policy | None = None,
    tampering: Tampering = "wrong",
    seed: int | None = None,
) -> CodeReward:
    """A reward for code that is right, with TRL's signature ``f(prompts, completions, **columns) -> list[float |
    None]``.

    task      a `FunctionTask`, `ProgramTask` or `SuiteTask` for every completion; None to read one per row from
    ``column`` sandbox   one to share; otherwise one is made from ``tier``, ``min_tier``, ``limits``, ``workers``
    and ``packages`` correct, wrong   the rewards; ``partial`` pays up to half of the way for the share of checks
    passed, never more blocks    ``"one"``: a completion holds exactly one Python code block; ``"last"``: the last
    one counts policy    static rules whose breaches are noted in the telemetry (they change no reward: see
    `policy_reward`) seed      makes the secret inputs a function of it and the program; leave it None in training

    Quarantined completions get None: the trainer masks them. Raises InfrastructureError when the grader fails.
    """
    if tampering not in ("wrong", "quarantine"):
        raise ValueError(f"tampering is {tampering!r}; it must be 'wrong' or 'quarantine'")
    if not wrong < correct:
        raise ValueError(f"wrong is {wrong} and correct is {correct}; a right answer must be worth more")
    box = sandbox or Sandbox(tier, min_tier=min_tier, limits=limits, workers=workers, packages=packages)
    return CodeReward(
        task,
        column=column,
        sandbox=box,
        owns_sandbox=sandbox is None,
        correct=correct,
        wrong=wrong,
        partial=partial,
        blocks=blocks,
        policy=policy,
        tampering=tampering,
        seed=seed,
    )
