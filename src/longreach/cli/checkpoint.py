"""Checkpoints of a run: the newest one, and whether it can be read before anything long begins."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from longreach.cli.terminal import ConfigError

CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first."""
    if not output_dir.is_dir():
        return []
    found = [(int(match[1]), p) for p in output_dir.iterdir() if (match := CHECKPOINT.fullmatch(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found)]


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done when the checkpoint was written, as its trainer_state.json says."""
    return int(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])


def resumable(output_dir: Path) -> Path:
    """The newest checkpoint in ``output_dir``. Raises ``ConfigError`` if there is none or it is damaged."""
    found = checkpoints(output_dir)
    if not found:
        raise ConfigError(f"--resume: {str(output_dir)!r} holds no checkpoint; start the run without --resume")
    newest = found[-1]
    damage = _damage(newest)
    if damage:
        older = f", or remove it to go on from {found[-2].name}" if len(found) > 1 else ""
        raise ConfigError(f"--resume: {str(newest)!r} is damaged: {damage}; start again without --resume{older}")
    return newest


def _damage(checkpoint: Path) -> str | None:
    """What keeps the checkpoint from being read, or None."""
    try:
        step_of(checkpoint)
    except FileNotFoundError:
        return "trainer_state.json is missing"
    except (ValueError, KeyError, TypeError):
        return "trainer_state.json is not readable"
    weights = sorted(checkpoint.glob("*.safetensors"))
    if not weights:
        return "it holds no .safetensors file"
    for file in weights:
        reason = _torn(file)
        if reason:
            return f"{file.name} {reason}"
    for name in ("optimizer.pt", "scheduler.pt"):
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if not zipfile.is_zipfile(file):
            return f"{name} is cut short"
    return None


def _torn(file: Path) -> str | None:
    """Why a safetensors file can't be whole, from its header and size alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="np") as tensors:
            tensors.keys()
    except (SafetensorError, OSError) as error:
        return f"can't be read ({error})"
    return None
