"""Reward functions named in a config as ``path/to/file.py:function``: loaded, and tried before anything long begins."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from longreach.cli.data import ZOO, zoo_task
from longreach.cli.terminal import ConfigError
from longreach.spelling import nearest

Reward = Callable[..., Any]
TRIED_ROWS = 2


def load_rewards(names: Sequence[str], base: Path) -> list[Reward]:
    """The named functions, paths relative to ``base``. Raises ``ConfigError`` for any that can't be had."""
    return [load_reward(name, base) for name in names]


def load_reward(name: str, base: Path) -> Reward:
    """One reward function: ``file.py:function``, ``package.module:function`` or ``zoo:task``."""
    if name.startswith(ZOO):
        return zoo_task(name.removeprefix(ZOO), f"reward={name!r}").reward
    place, separator, function = name.rpartition(":")
    if not separator or not place or not function:
        raise ConfigError(f"reward={name!r}: must be path/to/file.py:function or package.module:function")
    module = _file(place, name, base) if place.endswith(".py") else _module(place, name)
    if not hasattr(module, function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"reward={name!r}: {place} has no function {function!r}{nearest(function, own) if own else ''}"
        )
    reward = getattr(module, function)
    if not callable(reward):
        raise ConfigError(f"reward={name!r}: {function} is {type(reward).__name__}, not a function")
    return reward


def _file(place: str, name: str, base: Path) -> ModuleType:
    path = Path(place) if Path(place).is_absolute() else base / place
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"reward={name!r}: no such file {str(path)!r}{nearest(path.name, beside) if beside else ''}")
    spec = importlib.util.spec_from_file_location(f"longreach_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[spec.name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"reward={name!r}: {path} raises when it is imported: {_last_line(error, path)}") from error
    return module


def _module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reward={name!r}: no module {error.name!r}; for a file write path/to/file.py:function"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"reward={name!r}: {place} raises when it is imported: {type(error).__name__}: {error}"
        ) from error


def _last_line(error: BaseException, path: Path) -> str:
    """Kind and text of an error, with the line of the user's file that led to it."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError in line {error.lineno}: {error.msg}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    where = f" (line {own[-1].lineno}: {own[-1].line})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def try_rewards(rewards: Sequence[Reward], names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Call each reward once as the trainer will, on the first rows with empty completions, and check what it returns.

    Raises ``ConfigError`` for a signature that the trainer's call does not fit, an error, or values that are not one
    number (or None) per completion. Rewards that are models are not called.
    """
    rows = rows[:TRIED_ROWS]
    talk = not isinstance(rows[0]["prompt"], str)
    arguments: dict[str, Any] = {
        "prompts": [row["prompt"] for row in rows],
        "completions": [[{"role": "assistant", "content": ""}] if talk else "" for _ in rows],
        "completion_ids": [[] for _ in rows],
        "trainer_state": SimpleNamespace(global_step=0, epoch=0.0, max_steps=0, log_history=[]),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    for key in rows[0]:
        if key not in ("prompt", "completion", "completion_ids"):
            arguments[key] = [row[key] for row in rows]
    for reward, name in zip(rewards, names, strict=True):
        if not hasattr(reward, "parameters"):
            _check_signature(reward, name, arguments)
            _check_values(_call(reward, name, arguments), name, arguments["completions"])


def _check_signature(reward: Reward, name: str, arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(reward).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"reward={name!r}: can't be called as the trainer does ({error}); write "
            "def reward(prompts, completions, **columns), where columns holds the other columns of the data; if it makes a "
            "reward, write reward = math_reward() into a file and name file.py:reward"
        ) from None


def _call(reward: Reward, name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        result = reward(**arguments)
        return asyncio.run(_await(result)) if inspect.isawaitable(result) else result
    except Exception as error:
        path = Path(inspect.getsourcefile(inspect.unwrap(reward)) or "?") if inspect.isroutine(reward) else Path("?")
        raise ConfigError(f"reward={name!r}: raised on an empty completion: {_last_line(error, path)}") from error


async def _await(result: Any) -> Any:
    return await result


def _check_values(values: Any, name: str, completions: Sequence[Any]) -> None:
    from longreach.trainers.reward_calls import RewardError, check_rewards

    try:
        check_rewards(values, name, completions)
    except RewardError as error:
        raise ConfigError(f"reward={name!r}: {error}") from None
    if any(isinstance(value, float) and math.isnan(value) for value in values):
        raise ConfigError(
            f"reward={name!r}: returned nan; it must be a finite number, or None where there is no reward"
        )
