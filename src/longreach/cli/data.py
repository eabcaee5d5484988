"""Data for ``longreach train``: where it lies, whether it has rows, whether the columns fit the method."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.config import DataSection
from longreach.cli.terminal import ConfigError
from longreach.spelling import nearest

if TYPE_CHECKING:
    from datasets import Dataset

    from longreach.zoo import Task

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ZOO = "zoo:"


def load_data(section: DataSection, method: str, base: Path) -> tuple[Dataset, Dataset | None]:
    """Training and held-out rows. Paths are relative to ``base``, the folder of the config file.

    Raises ``ConfigError`` if a source is absent, unreadable, empty, or lacks what ``method`` needs.
    """
    train = _load(section.train, "data.train", section, section.split, base, held_out=False)
    _check(train, "data.train", section.train, method)
    held_out = None
    if section.eval is not None:
        held_out = _load(section.eval, "data.eval", section, section.eval_split or "train", base, held_out=True)
    elif section.eval_split is not None:
        held_out = _load(section.train, "data.eval_split", section, section.eval_split, base, held_out=True)
    elif section.train.startswith(ZOO):
        held_out = _load(section.train, "data.train", section, "heldout", base, held_out=True)
    if held_out is not None:
        _check(held_out, "data.eval", section.eval or f"{section.train}, split {section.eval_split}", method)
    return train, held_out


def _load(source: str, field: str, section: DataSection, split: str, base: Path, *, held_out: bool) -> Dataset:
    if source.startswith(ZOO):
        return _zoo(source, field, section, held_out)
    path = Path(source) if Path(source).is_absolute() else base / source
    if path.is_file():
        _check_split(split, field, source)
        return _file(path, field, source)
    if path.is_dir():
        return _folder(path, field, source, split)
    if HUB_ID.fullmatch(source) and Path(source).suffix not in READERS:
        return _hub(source, field, section, split)
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = nearest(path.name, beside) if beside else f"; there is no folder {str(path.parent)!r}"
    raise ConfigError(f"{field}={source!r}: no such file or folder{hint}")


def _zoo(source: str, field: str, section: DataSection, held_out: bool) -> Dataset:
    task = zoo_task(source.removeprefix(ZOO), f"{field}={source!r}")
    size = section.eval_size if held_out else section.size
    try:
        return task.dataset("heldout" if held_out else "train", size=size, length=section.length, seed=section.seed)
    except ValueError as error:
        raise ConfigError(f"data: {error}") from None


def zoo_task(name: str, given: str) -> Task:
    """The embedded task of that name. Raises ``ConfigError``, which begins with what the user has ``given``."""
    from longreach.zoo import task, tasks

    known = [item.name for item in tasks()]
    if name not in known:
        raise ConfigError(f"{given}: the zoo has no such task{nearest(name, known)}")
    return task(name)


def _file(path: Path, field: str, source: str) -> Dataset:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{field}={source!r}: unknown kind of file {path.suffix!r}; known: {', '.join(READERS)}")
    if path.stat().st_size == 0:
        raise ConfigError(f"{field}={source!r}: the file is empty")
    if path.suffix.lower() == ".jsonl":
        _check_lines(path, field, source)
    return _read(reader, [path], field, source)


def _folder(path: Path, field: str, source: str, split: str) -> Dataset:
    from datasets import Dataset, DatasetDict, load_from_disk

    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict):
            if split not in saved:
                raise ConfigError(f"{field}={source!r}: has no split {split!r}; its splits: {', '.join(saved)}")
            saved = saved[split]
        assert isinstance(saved, Dataset)
        return saved
    _check_split(split, field, source)
    found = {suffix: sorted(path.rglob(f"*{suffix}")) for suffix in READERS}
    kinds = [suffix for suffix, files in found.items() if files]
    if not kinds:
        raise ConfigError(f"{field}={source!r}: the folder holds no {', '.join(READERS)} file")
    if len(kinds) > 1:
        raise ConfigError(
            f"{field}={source!r}: the folder mixes {' and '.join(kinds)} files; keep one kind or name a file"
        )
    files = found[kinds[0]]
    if kinds[0] == ".jsonl":
        for file in files:
            _check_lines(file, field, f"{source}/{file.relative_to(path)}")
    return _read(READERS[kinds[0]], files, field, source)


def _check_split(split: str, field: str, source: str) -> None:
    """Files are one split: of another name, held-out rows would be those of training."""
    if split != "train":
        raise ConfigError(
            f"{field}: {source!r} has no split {split!r}: files are one split; name held-out files in data.eval"
        )


def _hub(source: str, field: str, section: DataSection, split: str) -> Dataset:
    from datasets import load_dataset

    try:
        return load_dataset(source, section.name, split=split)
    except Exception as error:  # the client raises a dozen kinds for a wrong id, split, or no network
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{field}={source!r}: no such file or folder beside the config, and not to be had from the Hub: {reason}"
        ) from error


def _read(reader: str, files: list[Path], field: str, source: str) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return load_dataset(reader, data_files=[str(file) for file in files], split="train")
    except (DatasetGenerationError, ValueError, OSError, StopIteration) as error:
        cause = error.__cause__ or error
        raise ConfigError(f"{field}={source!r}: cannot be read as {reader}: {str(cause).splitlines()[0]}") from error


def _check_lines(path: Path, field: str, source: str) -> None:
    """Each line of a .jsonl file must be an object; Arrow's own message names neither line nor cause."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{field}={source!r}: line {number} is not JSON ({error.msg})") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{field}={source!r}: line {number} is not an object but {type(row).__name__}")


def _check(data: Dataset, field: str, source: str, method: str) -> None:
    if len(data) == 0:
        raise ConfigError(f"{field}={source!r}: has no rows")
    columns = data.column_names
    if method == "grpo":
        if "prompt" not in columns:
            hint = nearest("prompt", columns) if len(columns) < 12 else ""
            raise ConfigError(
                f"{field}={source!r}: has no column 'prompt'; its columns: {', '.join(columns)}{_rename(hint)}"
            )
        _check_prompts(data, field, source)
    elif not ({"text"} <= set(columns) or {"messages"} <= set(columns) or {"prompt", "completion"} <= set(columns)):
        raise ConfigError(
            f"{field}={source!r}: method sft needs a column 'text' or 'messages', or 'prompt' and 'completion'; "
            f"its columns: {', '.join(columns)}"
        )


def _rename(hint: str) -> str:
    return hint if "did you mean" in hint else ""


def _check_prompts(data: Dataset, field: str, source: str) -> None:
    for number, prompt in enumerate(data["prompt"]):
        if isinstance(prompt, str) and prompt:
            continue
        if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
            continue
        shown = str(prompt) if len(str(prompt)) < 80 else str(prompt)[:77] + "..."
        raise ConfigError(
            f"{field}={source!r}: row {number}: prompt={shown!r}; it must be a text that is not empty or a list of "
            "messages, each with 'role' and 'content'"
        )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and "role" in message and "content" in message
