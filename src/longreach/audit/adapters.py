"""Reward functions of other libraries, turned into TRL's signature so that they can be audited.

The libraries are imported only when an adapter is used; none is a dependency of this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RewardFunction = Callable[..., list[float | None]]


class AdapterError(TypeError):
    """The object is not what the adapter takes."""


def from_verifiers(rubric: Any, *, answer: str = "answer") -> RewardFunction:
    """A reward function from a ``verifiers`` rubric (``verifiers.Rubric`` and its subclasses, versions 0.1.x).

    Each completion becomes a rollout state with ``prompt``, ``completion``, ``answer``, ``task`` and ``info`` (the other
    columns), is scored by the rubric's own ``score_rollout``, and its weighted sum is the reward. Groups are scored one
    by one; a rubric with group functions is refused by the library itself.

    Raises:
        AdapterError: if ``rubric`` has no ``score_rollout``.
    """
    if not callable(getattr(rubric, "score_rollout", None)):
        raise AdapterError(f"rubric: got {type(rubric).__name__}; it must be a verifiers.Rubric with score_rollout()")
    parameters = inspect.signature(rubric.score_rollout).parameters

    async def score(prompt: Any, completion: Any, row: dict[str, Any]) -> float:
        state: dict[str, Any] = {
            "prompt": prompt,
            "completion": completion,
            "answer": row.get(answer, ""),
            "task": row.get("task", "default"),
            "info": {k: v for k, v in row.items() if k != answer},
            "timing": {"scoring_ms": 0.0, "total_ms": 0.0},
            "trajectory": [],
        }
        known = {**state, "state": state, "score_sem": contextlib.AsyncExitStack()}
        arguments = {name: known[name] for name in parameters if name in known}
        returned = await rubric.score_rollout(**arguments)
        if returned is not None and hasattr(returned, "reward"):  # versions before 0.1.6 return the score
            return float(returned.reward)
        return float(state["reward"])

    return _per_completion(score, type(rubric).__name__)


def from_verifiers_task(task: type, *, columns: Mapping[str, str] | None = None) -> RewardFunction:
    """A reward function from a ``verifiers.v1.Task`` class, whose ``@reward`` methods score a trace.

    Each completion becomes a two-message trace (the prompt, and the completion as sampled by the model) that is scored
    without a runtime, so rewards that need one are left out, as the library documents. Fields of the task's data are
    filled from the columns of the same name.

    Args:
        columns: field of the data -> column, where the names differ.

    Raises:
        AdapterError: if ``task`` is no Task class.
        ImportError: if ``verifiers`` is not installed, or a version without ``verifiers.v1``.
    """
    if not (isinstance(task, type) and callable(getattr(task, "data_type", None))):
        raise AdapterError(f"task: got {task!r}; it must be a subclass of verifiers.v1.Task")
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    data_type: Any = task.data_type()  # type: ignore[attr-defined]

    async def score(prompt: Any, completion: Any, row: dict[str, Any]) -> float:
        question = _text(prompt)
        named = row | {field: row[column] for field, column in (columns or {}).items()}
        fields = {name: value for name, value in named.items() if name in data_type.model_fields}
        data = data_type(**fields | {"prompt": question})
        nodes = [
            MessageNode(message=UserMessage(content=question)),
            MessageNode(parent=0, message=AssistantMessage(content=_text(completion)), sampled=True),
        ]
        agent = AgentInfo(config=AgentConfig())
        trace = Trace(task=TraceTask(type=task.__name__, data=data), agent=agent, nodes=nodes)
        await task(data).score(trace)
        return float(trace.reward)

    return _per_completion(score, task.__name__)


def from_inspect(
    scorer: Any, *, target: str = "answer", value_to_float: Callable[[Any], float] | None = None
) -> RewardFunction:
    """A reward function from an Inspect scorer (``inspect_ai.scorer.Scorer``).

    Each completion becomes a ``TaskState`` whose output is the completion's text, the ``target`` column its ``Target``.
    The score's value is turned into a number by ``value_to_float``, by default Inspect's own (C 1, P 0.5, I and N 0).

    Raises:
        AdapterError: if ``scorer`` is not callable.
        ImportError: if ``inspect_ai`` is not installed.
    """
    if not callable(scorer):
        raise AdapterError(f"scorer: got {type(scorer).__name__}; it must be an Inspect scorer")
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelName, ModelOutput
    from inspect_ai.scorer import Target
    from inspect_ai.scorer import value_to_float as inspect_value_to_float
    from inspect_ai.solver import TaskState

    number = value_to_float or inspect_value_to_float()

    async def score(prompt: Any, completion: Any, row: dict[str, Any]) -> float:
        question, answer = _text(prompt), _text(completion)
        state = TaskState(
            model=ModelName("audit/completion"),
            sample_id=0,
            epoch=0,
            input=question,
            messages=[ChatMessageUser(content=question), ChatMessageAssistant(content=answer)],
            target=Target(str(row[target])),
            output=ModelOutput.from_content("audit/completion", answer),
            metadata={k: v for k, v in row.items() if k != target},
        )
        result = await scorer(state, Target(str(row[target])))
        if result is None:
            raise ValueError("scorer: it returned no score")
        return float(number(result.value))

    return _per_completion(score, getattr(scorer, "__name__", "scorer"))


def _per_completion(score: Callable[[Any, Any, dict[str, Any]], Any], name: str) -> RewardFunction:
    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        async def all_scores() -> list[float | None]:
            rows = [{k: v[i] for k, v in columns.items()} for i in range(len(completions))]
            return [await score(p, c, row) for p, c, row in zip(prompts, completions, rows)]

        return asyncio.run(all_scores())

    reward.__name__ = name
    return reward


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(value[-1].get("content") or "") if value else ""
