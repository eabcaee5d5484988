"""The file ``longreach train`` reads: which keys there are, in sections or flat, and what may stand in them.

``method``, ``model``, ``reward``, ``data``, ``lora`` and ``monitor`` are ours. Every other key is a field of the trainer's config
under TRL's own name, at the top level or below ``training``. The flat names of TRL's own scripts
(``model_name_or_path``, ``dataset_name``, ``reward_funcs``, ``use_peft``, ``lora_r``, ...) are understood too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longreach.cli.terminal import ConfigError
from longreach.spelling import nearest

METHODS = ("grpo", "sft")
SECTIONS = ("method", "model", "reward", "data", "lora", "monitor", "training")

# TRL's flat names -> (section, key); a section that is one value has the key None.
ALIASES: dict[str, tuple[str, str | None]] = {
    "model_name_or_path": ("model", "name_or_path"),
    "reward_funcs": ("reward", None),
    "dataset_name": ("data", "train"),
    "dataset_config": ("data", "name"),
    "dataset_train_split": ("data", "split"),
    "dataset_test_split": ("data", "eval_split"),
    "use_peft": ("lora", "enabled"),
    "lora_r": ("lora", "r"),
    "lora_alpha": ("lora", "lora_alpha"),
    "lora_dropout": ("lora", "lora_dropout"),
    "lora_target_modules": ("lora", "target_modules"),
    "lora_target_parameters": ("lora", "target_parameters"),
    "lora_modules_to_save": ("lora", "modules_to_save"),
    "use_rslora": ("lora", "use_rslora"),
    "use_dora": ("lora", "use_dora"),
}


# What a section may be, where it is of another kind.
FORMS = {
    "model": "a folder, a Hub id or zoo, or a mapping with name_or_path",
    "data": "a file, a folder, a Hub id or zoo:TASK, or a mapping with train",
    "reward": "path/to/file.py:function, or a list of such",
    "lora": "a rank, true or false, or a mapping of PEFT's fields",
    "monitor": "a mapping of shadow, shadow_share, canary, pause",
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """``name_or_path``: a folder, a Hub id, or "zoo" for the embedded model. ``weights``: storage, None as stored.
    ``embedding``: "int8" for embedding and head in 8 bits."""

    name_or_path: str = Field(min_length=1)
    weights: Literal["bf16", "fp16", "fp32", "nf4", "mxfp4"] | None = None
    embedding: Literal["int8"] | None = None


class DataSection(_Section):
    """``train``, ``eval``: a file, a folder of files, a saved dataset, a Hub id or "zoo:TASK" (with the last four)."""

    train: str = Field(min_length=1)
    eval: str | None = None
    name: str | None = None
    split: str = "train"
    eval_split: str | None = None
    length: int = Field(default=2048, ge=1)
    size: int = Field(default=256, ge=1)
    eval_size: int = Field(default=64, ge=1)
    seed: int = Field(default=0, ge=0)


class MonitorSection(_Section):
    """The watch on a GRPO run's rewards.

    ``shadow``: a second reward, FILE:FUNCTION, that grades ``shadow_share`` of the completions again and pays nothing.
    ``canary``: a boolean column of the data; such rows can't be solved honestly, count for nothing in the loss, and are an
    alarm when they are paid. ``pause``: stop, with a checkpoint, when the shadow disagrees or a canary is paid.
    """

    shadow: str | None = None
    shadow_share: float = Field(default=0.05, gt=0, le=1)
    canary: str | None = None
    pause: bool = False


class TrainFile(_Section):
    """A checked config file. ``lora`` and ``training``, fields of PEFT's and the trainer's config, checked later."""

    method: Literal["grpo", "sft"]
    model: ModelSection
    data: DataSection
    reward: tuple[str, ...] = ()
    lora: dict[str, Any] | None = None
    monitor: MonitorSection = MonitorSection()
    training: dict[str, Any] = Field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """Safe YAML which refuses a key given twice; PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: a key must be a name, not {key!r}")
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ``ConfigError`` if the file is absent, not YAML, or not a mapping."""
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        raise ConfigError(f"config {str(path)!r}: no such file{nearest(path.name, beside) if beside else ''}")
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"config {str(path)!r}:{where} not YAML: {error.problem}") from None
    except ConfigError:
        raise
    except (ValueError, yaml.YAMLError) as error:  # bytes that are no text, a date that is none
        raise ConfigError(f"config {str(path)!r}: not YAML: {error}") from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"config {str(path)!r}: holds {type(value).__name__}, not a mapping of settings")
    return value


def parse(raw: dict[str, Any], fields: dict[str, list[str]]) -> TrainFile:
    """Check the mapping of a config file and bring it into sections.

    ``fields`` maps each method to the field names of its trainer's config. Raises ``ConfigError`` for an unknown key
    (with the nearest valid one), a key given in two places, a missing one, or a value of the wrong kind.
    """
    sections = _into_sections(raw, _method(raw), fields)
    sections.setdefault("training", {})
    try:
        file = TrainFile.model_validate(sections)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None
    if file.method == "grpo" and not file.reward:
        raise ConfigError("reward is missing; method grpo needs one: reward: path/to/file.py:function")
    if file.method == "sft" and file.reward:
        raise ConfigError(f"reward={list(file.reward)}: method sft takes no reward; remove it or use method: grpo")
    if file.method == "sft" and "monitor" in sections:
        raise ConfigError("monitor: method sft has no rewards to watch; remove the section or use method: grpo")
    return file


def _method(raw: dict[str, Any]) -> str:
    method = raw.get("method")
    if method not in METHODS:
        given = "method is missing" if method is None else f"method={method!r} is unknown"
        raise ConfigError(f"{given}; write method: grpo or method: sft")
    return method


def _into_sections(raw: dict[str, Any], method: str, fields: dict[str, list[str]]) -> dict[str, Any]:
    sections: dict[str, Any] = {name: _long_form(name, raw[name]) for name in SECTIONS if name in raw}
    for key, value in raw.items():
        if key in SECTIONS:
            continue
        if key in ALIASES:
            _place(sections, key, *ALIASES[key], value)
        elif key in fields[method]:
            _place(sections, key, "training", key, value)
        else:
            raise ConfigError(_unknown(str(key), method, fields))
    for key in sections.get("training", {}):
        if key not in fields[method]:
            raise ConfigError(_unknown(str(key), method, fields, prefix="training."))
    lora = sections.get("lora")
    if isinstance(lora, dict) and not lora.pop("enabled", True):
        sections["lora"] = None
    return sections


def _long_form(name: str, value: Any) -> Any:
    """A section as a mapping, from its short form: ``model: PATH``, ``data: PATH``, ``lora: 16``, one reward."""
    if name == "model" and isinstance(value, str):
        return {"name_or_path": value}
    if name == "data" and isinstance(value, str):
        return {"train": value}
    if name == "reward" and isinstance(value, str):
        return [value]
    if name == "lora":
        if isinstance(value, bool):
            return {} if value else None
        if isinstance(value, int):
            return {"r": value}
    if name == "training":
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ConfigError(f"training={value!r}: must be a mapping of the trainer's fields")
    return dict(value) if isinstance(value, dict) else value


def _place(sections: dict[str, Any], given: str, section: str, key: str | None, value: Any) -> None:
    if key is None:
        if section in sections:
            raise ConfigError(f"{given} and {section} are both given; they mean the same: keep one")
        sections[section] = _long_form(section, value)
        return
    # ``lora: false`` beside a flat lora_r is a contradiction, not a section to add to.
    if section in sections and not isinstance(sections[section], dict):
        raise ConfigError(f"{given} and {section}={sections[section]!r} are both given; keep one")
    target = sections.setdefault(section, {})
    if key in target:
        raise ConfigError(f"{given} and {section}.{key} are both given; they mean the same: keep one")
    target[key] = value


def _unknown(key: str, method: str, fields: dict[str, list[str]], prefix: str = "") -> str:
    for other, names in fields.items():
        if other != method and key in names:
            return f"unknown key {prefix + key!r}: it belongs to method {other}, and method is {method}"
    valid = fields[method] + ([] if prefix else [*SECTIONS, *ALIASES])
    return f"unknown key {prefix + key!r}{nearest(key, valid)}"


def _explain(item: Any) -> str:
    """One of pydantic's findings in the words of this package."""
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        sections: dict[str, type[BaseModel]] = {
            "model": ModelSection, "data": DataSection, "monitor": MonitorSection,
        }  # fmt: skip
        section = sections.get(str(item["loc"][0]), TrainFile)
        return f"unknown key {name!r}{nearest(str(item['loc'][-1]), list(section.model_fields))}"
    if item["type"] == "missing":
        example = {"model": "model: Qwen/Qwen3-4B", "data": "data: train.jsonl"}.get(name, f"a value for {name}")
        return f"{name} is missing; write {example}"
    if name in FORMS:
        return f"{name}={item['input']!r}: must be {FORMS[name]}"
    return f"{name}={item['input']!r}: {item['msg'][:1].lower()}{item['msg'][1:]}"
