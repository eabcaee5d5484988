"""Fields of the dataclasses that configure a run (the trainer's, PEFT's): which exist, and values of the right kind."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from longreach.cli.terminal import ConfigError
from longreach.spelling import nearest

# The classes that a method's configuration inherits from: package, file, class.
LINEAGE: dict[str, tuple[tuple[str, str, str], ...]] = {
    method: (
        ("transformers", "training_args.py", "TrainingArguments"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        ("trl", f"trainer/{method}_config.py", name),
        ("longreach", "trainers/config.py", name),
    )
    for method, name in (("grpo", "GRPOConfig"), ("sft", "SFTConfig"))
}


def declared_names(method: str) -> list[str] | None:
    """What `field_names` gives of a method's configuration, read from the source without importing it: seconds sooner.

    None if the classes are not where they are expected; then only importing them tells.
    """
    names: dict[str, None] = {}
    for package, file, name in LINEAGE[method]:
        spec = find_spec(package)
        places = [Path(folder) / file for folder in (spec.submodule_search_locations or ())] if spec else []
        source = next((place.read_text(encoding="utf-8") for place in places if place.is_file()), "")
        body = next((node.body for node in ast.parse(source).body if getattr(node, "name", None) == name), None)  # type: ignore[attr-defined]
        if body is None:
            return None
        names |= dict.fromkeys(found for node in body if (found := _declared(node)))
    return list(names)


def _declared(node: ast.stmt) -> str | None:
    """The name of a field that a class body declares and its constructor takes."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
        return None
    kept_out = isinstance(node.value, ast.Call) and any(
        option.arg == "init" and isinstance(option.value, ast.Constant) and option.value.value is False
        for option in node.value.keywords
    )
    plain = not ast.unparse(node.annotation).startswith(("ClassVar", "typing.ClassVar"))
    return node.target.id if plain and not kept_out else None


def field_names(config_class: type) -> list[str]:
    """Names that the constructor of the dataclass takes."""
    return [field.name for field in dataclasses.fields(config_class) if field.init]


def checked(config_class: type, values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """``values`` with each brought to the kind its field declares: the text "1e-5", as YAML reads it, becomes a number.

    Raises ``ConfigError`` naming the field, the value and the kind wanted; for an unknown name, the nearest valid one.
    """
    known = field_names(config_class)
    hints = typing.get_type_hints(config_class)
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    out: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"unknown key {section + name!r}{nearest(name, known)}")
        hint = hints[name]
        if isinstance(value, bool) and hint is str and defaults[name] == "auto":  # save_attention
            value = str(value).lower()
        if _unchecked(hint):
            out[name] = value
            continue
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        try:
            out[name] = adapter.validate_python(value)
        except ValidationError as error:
            reason = "; ".join(dict.fromkeys(item["msg"] for item in error.errors()))
            raise ConfigError(f"{section}{name}={value!r}: {reason[:1].lower()}{reason[1:]}") from None
    return out


def build(config_class: type, values: Mapping[str, Any], section: str = "") -> Any:
    """An instance of the dataclass from checked values; what its own checks find becomes a ``ConfigError``."""
    try:
        return config_class(**checked(config_class, values, section))
    except ConfigError:
        raise
    except (ValueError, TypeError, NotImplementedError, ImportError, OSError) as error:
        raise ConfigError(f"{section.rstrip('.') or config_class.__name__}: {error}") from error


def _unchecked(hint: Any) -> bool:
    """True for a type that pydantic cannot check from YAML, such as one that only exists as an object."""
    arguments = typing.get_args(hint)
    plain = (str, int, float, bool, list, dict, tuple, set, type(None))
    if arguments and typing.get_origin(hint) not in (typing.Literal, list, dict, tuple, set):
        return not any(not _unchecked(item) for item in arguments)
    return not (
        hint in plain or typing.get_origin(hint) is not None or (isinstance(hint, type) and issubclass(hint, str))
    )
