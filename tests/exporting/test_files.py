"""Shards, model card and upload."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import longreach
from longreach.exporting.errors import ExportError
from longreach.exporting.shards import ShardWriter
from longreach.exporting.upload import upload
from tests.exporting.models import adapted, tokenizer_for


def test_shards_are_ordinary_safetensors(tmp_path: Path) -> None:
    tensors = {
        f"t{i}": torch.randn(7, 9).to(d) for i, d in enumerate([torch.bfloat16, torch.float16, torch.float32] * 3)
    }
    tensors["scalar"], tensors["codes"] = torch.tensor(3.0), torch.arange(9, dtype=torch.uint8)
    with ShardWriter(tmp_path, max_shard_bytes=600) as writer:
        for name, tensor in tensors.items():
            pieces = tensor.split(2) if tensor.dim() > 1 else [tensor]
            writer.add(name, tensor.dtype, tuple(tensor.shape), pieces)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    read = {k: v for file in set(index["weight_map"].values()) for k, v in load_file(tmp_path / file).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype


def test_many_tensors_open_another_shard(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        for i in range(2000):
            writer.add(f"model.layers.{i}.weight", torch.uint8, (1,), [torch.tensor([i % 256], dtype=torch.uint8)])
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1 and sum(len(load_file(f)) for f in files) == 2000


def test_card_says_what_it_is_and_how_it_was_trained(base, tmp_path: Path) -> None:
    model, tokenizer = adapted("qwen3", base("qwen3")), tokenizer_for("qwen3")
    run = longreach.export(model, tokenizer, tmp_path / "run", format="adapter").path
    (base("qwen3") / "LICENSE").write_text("x")
    header = {
        "type": "header", "run": "night-3", "method": "grpo", "model": "org/name", "started": "2026-11-30",
        "versions": {"trl": "9"},
        "config": {"data": {"train": "logs.jsonl"}, "reward": ["reward.py:score"], "training": {"learning_rate": 1e-5}},
    }  # fmt: skip
    (run / "log.jsonl").write_text(json.dumps(header) + "\n")
    text = (longreach.export(run, None, tmp_path / "m").path / "README.md").read_text()
    for said in ("# night-3", "library_name: transformers", "logs.jsonl", "reward.py:score", "learning_rate", "trl 9", "LICENSE",
                 "rank 4, alpha 8", "relative difference"):  # fmt: skip
        assert said in text, said
    assert str(tmp_path) not in text.replace("logs.jsonl", "")
    text = (longreach.export(run, None, tmp_path / "n", verify="off").path / "README.md").read_text()
    assert "was not compared" in text


class Hub:
    """What upload calls, recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: (
            self.calls.append((name, kwargs)) or SimpleNamespace(commit_url="https://hub/commit")
        )


def test_upload_dry_run_lists_and_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "sub" / "x.json").write_text("{}")
    hub, lines = Hub(), []
    assert upload(tmp_path, "me/model", private=True, dry_run=True, say=lines.append, api=hub) is None
    assert not hub.calls and "private" in lines[0]
    assert any("model.safetensors  3.0 MB" in line for line in lines) and any("sub/x.json" in line for line in lines)


def test_upload(tmp_path: Path) -> None:
    hub = Hub()
    assert upload(tmp_path, "me/model", private=False, dry_run=False, say=print, api=hub) == "https://hub/commit"
    assert [name for name, _ in hub.calls] == ["create_repo", "upload_folder"] and hub.calls[0][1]["private"] is False
    file = tmp_path / "m.gguf"
    file.write_text("x")
    upload(file, "me/model", private=True, dry_run=False, say=print, api=hub)
    assert hub.calls[-1][0] == "upload_file" and hub.calls[-1][1]["path_in_repo"] == "m.gguf"


def test_a_refused_upload_keeps_the_export(tmp_path: Path) -> None:
    class Refusing(Hub):
        def create_repo(self, *args, **kwargs):
            raise OSError("no network")

    with pytest.raises(ExportError, match=r"upload='me/model': no network. The export itself is in"):
        upload(tmp_path, "me/model", private=True, dry_run=False, say=print, api=Refusing())
