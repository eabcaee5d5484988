"""Reward functions as the trainer calls them: what they return is checked, and no failure becomes a number."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..rewards.result import InfrastructureError

logger = logging.getLogger(__name__)

RETRY_SECONDS: tuple[float, ...] = (1.0, 5.0)  # pauses between calls of a grader that failed


class RewardError(ValueError):
    """A reward function returned something that is not one number or None per completion."""


def checked(reward: Any) -> Any:
    """The reward function, with its result checked; models and model names are given back as they are.

    An :class:`InfrastructureError` is retried after each of `RETRY_SECONDS` and then stops training. Any other
    exception passes through with a note naming the function.
    """
    if isinstance(reward, str | nn.Module) or not callable(reward):
        return reward
    name = reward_name(reward)

    if is_async(reward):

        async def call_async(*args: Any, **kwargs: Any) -> list[float | None]:
            for pause in (*RETRY_SECONDS, None):
                try:
                    return check_rewards(await reward(*args, **kwargs), name, kwargs["completions"])
                except InfrastructureError as error:
                    await asyncio.sleep(_retry(error, name, pause))
                except Exception as error:
                    _add_note(error, name)
                    raise
            raise AssertionError("unreachable")

        return _named(call_async, reward, name)

    def call(*args: Any, **kwargs: Any) -> list[float | None]:
        for pause in (*RETRY_SECONDS, None):
            try:
                return check_rewards(reward(*args, **kwargs), name, kwargs["completions"])
            except InfrastructureError as error:
                time.sleep(_retry(error, name, pause))
            except Exception as error:
                _add_note(error, name)
                raise
        raise AssertionError("unreachable")

    return _named(call, reward, name)


def check_rewards(rewards: Any, name: str, completions: Sequence[Any]) -> list[float | None]:
    """One float or None per completion. NaN counts as None: the completion is left out.

    Raises:
        RewardError: naming the function, what it returned and what would be right.
    """
    right = f"it must return a list of {len(completions)} numbers or None, one per completion"
    if isinstance(rewards, Tensor):
        rewards = rewards.tolist()
    if isinstance(rewards, str) or not hasattr(rewards, "__iter__"):
        raise RewardError(f"reward function {name!r} returned {rewards!r:.80}; {right}")
    values = list(rewards)
    if len(values) != len(completions):
        raise RewardError(f"reward function {name!r} returned {len(values)} values; {right}")
    out: list[float | None] = []
    for i, value in enumerate(values):
        if value is None:
            out.append(None)
            continue
        try:
            number = float(value) if not isinstance(value, str) else None
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise RewardError(f"reward function {name!r} returned {value!r:.80} for completion {i}; {right}")
        if math.isinf(number):
            raise RewardError(f"reward function {name!r} returned {value!r} for completion {i}; rewards must be finite")
        out.append(None if math.isnan(number) else number)
    return out


def reward_name(reward: Any) -> str:
    """The name that TRL gives to a reward function in its metrics."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return getattr(reward, "__name__", type(reward).__name__)


def is_async(reward: Any) -> bool:
    """Whether a call gives a coroutine: a function, a partial of one, or an object whose `__call__` is one."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


def _named(call: Callable[..., Any], reward: Any, name: str) -> Callable[..., Any]:
    call.__name__ = call.__qualname__ = name
    call.__doc__ = getattr(reward, "__doc__", None)
    call.__wrapped__ = reward  # type: ignore[attr-defined]
    return call


def _retry(error: InfrastructureError, name: str, pause: float | None) -> float:
    if pause is None:
        raise InfrastructureError(
            f"reward function {name!r}: the grader keeps failing ({error}); training stops, since a failed grader says "
            "nothing about the completions"
        ) from error
    logger.warning("reward function %r: the grader failed (%s); trying again in %g s", name, error, pause)
    return pause


def _add_note(error: Exception, name: str) -> None:
    if not isinstance(error, RewardError):
        error.add_note(f"raised by reward function {name!r}: training stops, a failed reward is never counted as 0")
