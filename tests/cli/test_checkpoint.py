"""Checkpoints to resume from: the newest, and only a whole one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from longreach.cli.checkpoint import checkpoints, resumable, step_of
from longreach.cli.terminal import ConfigError


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}), encoding="utf-8")
    save_file({"a": np.zeros((64, 64), np.float32)}, path / "adapter_model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"x": torch.zeros(4)}, path / name)
    return path


def test_the_newest_is_by_number_and_not_by_name(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    assert resumable(tmp_path).name == "checkpoint-100" and step_of(resumable(tmp_path)) == 100


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="holds no checkpoint; start the run without --resume"):
            resumable(folder)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("trainer_state.json", None, "trainer_state.json is missing"),
        ("trainer_state.json", b"{", "trainer_state.json is not readable"),
        ("trainer_state.json", b"{}", "trainer_state.json is not readable"),
        ("adapter_model.safetensors", None, "holds no .safetensors file"),
        ("adapter_model.safetensors", b"\x00" * 40, "adapter_model.safetensors can't be read"),
        ("adapter_model.safetensors", "half", "adapter_model.safetensors can't be read"),
        ("optimizer.pt", None, "optimizer.pt is missing"),
        ("optimizer.pt", "half", "optimizer.pt is cut short"),
        ("scheduler.pt", "half", "scheduler.pt is cut short"),
    ],
)
def test_damage_is_found_before_anything_long(
    tmp_path: Path, name: str, damage: bytes | str | None, message: str
) -> None:
    checkpoint(tmp_path, 5)
    file = checkpoint(tmp_path, 10) / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if isinstance(damage, str) else damage)
    with pytest.raises(ConfigError, match=message) as error:
        resumable(tmp_path)
    assert "remove it to go on from checkpoint-5" in str(error.value)
