"""What is audited: a reward function, named or given, and how it is called.

A name (``file.py:reward`` or ``package.module:reward``) is imported in a process of its own. A function object is
carried there by fork, so closures and bound methods work too.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longreach.spelling import nearest

RewardFunction = Callable[..., Any]
FACTORY = (
    "if it makes a reward, write reward = math_reward() into a file and name file.py:reward; made for the corpus's columns are "
    "code_reward, math_reward and speed_reward in longreach.audit.own"
)


class TargetError(ValueError):
    """The reward function that should be audited cannot be found or called."""


def check_name(name: str) -> None:
    """Raise TargetError for a name that can't be one, or a file that is not there; nothing is imported."""
    place, separator, attribute = name.rpartition(":")
    if not separator or not place or not attribute:
        held = _functions(Path(name)) if name.endswith(".py") else []
        hint = f"; it holds {', '.join(held)}: name one, {name}:{held[0]}" if held else ""
        raise TargetError(f"target: got {name!r}; it must be file.py:function or module:function{hint}")
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TargetError(f"target: there is no file {place}{nearest(path.name, beside)}")


def _functions(path: Path) -> list[str]:
    """Public functions and classes that a Python file defines, read without running it."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def resolve(name: str) -> RewardFunction:
    """The object ``file.py:attribute`` or ``module:attribute`` names.

    A class or a function whose ``audit_factory`` attribute is true is called without arguments first.
    """
    check_name(name)
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        module = _from_file(Path(place))
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise TargetError(f"target: cannot import {place!r}: {error}") from error
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            own = [key for key, held in vars(value).items() if callable(held) and not key.startswith("_")]
            raise TargetError(f"target: {place} has no {part!r}{nearest(part, own)}")
        value = getattr(value, part)
    if inspect.isclass(value) or getattr(value, "audit_factory", False):
        value = value()
    if not callable(value):
        raise TargetError(f"target: {name} is a {type(value).__name__}; it must be callable")
    check_call(value, name)
    return value


def check_call(reward: RewardFunction, name: str) -> None:
    """Raise TargetError for a signature that takes no `prompts` and `completions` by name, as TRL gives them."""
    try:
        signature = inspect.signature(reward)
    except ValueError:  # written in C without one
        return
    try:
        signature.bind_partial(prompts=[], completions=[])
    except TypeError as error:
        raise TargetError(
            f"target: {name} can't be called as f(prompts=..., completions=..., **columns): {error}; {FACTORY}"
        ) from None


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # its neighbours must be importable, as when it is run
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def label(target: str | RewardFunction) -> str:
    """A readable name."""
    if isinstance(target, str):
        return Path(target).name if target.rpartition(":")[0].endswith(".py") else target
    return getattr(target, "__name__", type(target).__name__)


def digest(target: str | RewardFunction) -> str:
    """SHA-256 that says which grader was audited: of the named file, else of the object's source and settings."""
    if isinstance(target, str):
        place = target.rpartition(":")[0]
        if place.endswith(".py"):
            return hashlib.sha256(Path(place).read_bytes()).hexdigest()
        spec = importlib.util.find_spec(place)
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
        return hashlib.sha256(target.encode()).hexdigest()
    subject = target if inspect.isroutine(target) else type(target)
    try:
        source = inspect.getsource(subject)
    except (OSError, TypeError):  # made in an interactive session: only its name is left
        source = f"{getattr(subject, '__module__', '')}.{getattr(subject, '__qualname__', '')}"
    settings = "" if inspect.isroutine(target) else _settings(target)
    return hashlib.sha256(f"{source}\0{settings}".encode()).hexdigest()


def _settings(target: Any) -> str:
    values = sorted(
        (k, v) for k, v in getattr(target, "__dict__", {}).items() if isinstance(v, str | int | float | bool)
    )
    return repr(values)
