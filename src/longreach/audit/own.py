"""This package's own rewards, set up for the columns of the corpus, so that they can be audited like anybody's.

longreach audit longreach.audit.own:code_reward --kind function --kind program
longreach audit longreach.audit.own:speed_reward --kind speed
longreach audit longreach.audit.own:math_reward --kind maths --kind format --kind text --kind tool
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from longreach import rewards
from longreach.audit.proof import equal
from longreach.audit.schema import Tolerance
from longreach.rewards.code import CodeReward
from longreach.rewards.recipes import SpeedRecipe
from longreach.rewards.speed import SpeedReward


class code_reward:
    """`longreach.rewards.code_reward` on fresh inputs from the corpus's generators, checked by its references."""

    def __init__(self, **settings: Any) -> None:
        self.reward: CodeReward = rewards.code_reward(**settings)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return self.reward(prompts, completions, task=_tasks(columns, len(completions)))

    def grade(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[rewards.RewardResult]:
        """As `__call__`, with reasons."""
        return self.reward.grade(prompts, completions, task=_tasks(columns, len(completions)))


class speed_reward:
    """`longreach.rewards.speed_reward` against the corpus's baselines, one recipe a task."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.sandbox = rewards.Sandbox(limits=rewards.Limits(cpu_s=10, wall_s=30, output_bytes=1 << 22), workers=1)
        self.rewards: dict[str, SpeedReward] = {}

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return rewards.to_rewards(self.grade(prompts, completions, **columns))

    def grade(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[rewards.RewardResult]:
        """As `__call__`, with reasons."""
        results = []
        for index, completion in enumerate(completions):
            row = {name: values[index] for name, values in columns.items()}
            if row["task_id"] not in self.rewards:
                recipe = _recipe(row)
                self.rewards[row["task_id"]] = rewards.speed_reward(recipe, sandbox=self.sandbox, **self.settings)
            results += self.rewards[row["task_id"]].grade(None, [completion])
        return results


def math_reward(**settings: Any) -> Callable[..., list[float | None]]:
    """`longreach.rewards.math_reward`, which takes the corpus's columns as they are."""
    return rewards.math_reward(**settings)


math_reward.audit_factory = True  # type: ignore[attr-defined]


def _tasks(columns: dict[str, Any], count: int) -> list[Any]:
    rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
    return [_task(json.dumps(row, sort_keys=True)) for row in rows]


@cache
def _task(row_json: str) -> rewards.FunctionTask | rewards.ProgramTask:
    row = json.loads(row_json)
    generate = _defined(row["generator"], "generate")
    if row["kind"] == "program":
        reference = _defined(row["reference"], "main")
        return rewards.ProgramTask(tuple(zip(row["inputs"], row["outputs"])), generate=generate, reference=reference)
    return rewards.FunctionTask(
        row["entry_point"],
        generate=lambda rng: tuple(generate(rng)),
        reference=_defined(row["reference"], row["entry_point"]),
        cases=tuple((tuple(case["args"]), case["expected"]) for case in row["cases"]),
        rel_tol=row["rel_tol"],
        abs_tol=row["abs_tol"],
    )


def _recipe(row: dict[str, Any]) -> SpeedRecipe:
    generate = _defined(row["generator"], "generate")
    name, tolerance = row["entry_point"], Tolerance(absolute=row["abs_tol"], relative=row["rel_tol"])
    shape = row["cases"][-1]["expected"]  # an answer of the usual size, for what receiving one costs
    return SpeedRecipe(
        name=name,
        function=name,
        baseline=row["baseline"],
        idle=f"ANSWER = {shape!r}\n\n\ndef {name}(*args):\n    return ANSWER\n",
        generate=lambda rng: tuple(generate(rng)),
        edge=lambda rng: tuple(generate(rng)),
        verify=lambda args, want, value: "" if equal(value, want, tolerance) else "a wrong value",
    )


def _defined(source: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"__name__": "corpus"}
    exec(compile(source, f"<corpus {name}>", "exec"), namespace)
    return namespace[name]
