"""A tiny random model with the zoo's tokenizer, and a folder with data, reward and config to train it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

REWARD = """
def score(prompts, completions, answer, **columns):
    return [float(len(text) % 7) / 7 for text in completions]


def short(completions, completion_ids, **columns):
    return [-0.01 * len(ids) for ids in completion_ids]
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from longreach.zoo import tasks
    from longreach.zoo.tokenizer import build_tokenizer

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer(tasks(), 4096)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes run.yaml, with changes (None removes a key), into a folder of its own, which becomes the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = [f'{{"prompt": "Log of one day : {n} {n + 1} {n + 2}", "answer": "{n}"}}\n' for n in range(10, 18)]
    (tmp_path / "train.jsonl").write_text("".join(rows), encoding="utf-8")

    def write(**changes: Any) -> Path:
        settings = {
            "method": "grpo",
            "model": str(tiny_model),
            "reward": ["reward.py:score", "reward.py:short"],
            "data": {"train": "train.jsonl", "eval": "train.jsonl"},
            "max_steps": 4,
            "learning_rate": "1e-3",
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "max_completion_length": 6,
            "max_length": 64,
            "bf16": False,
            "use_cpu": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_on_start": True,
            **changes,
        }
        path = tmp_path / "run.yaml"
        path.write_text(
            yaml.safe_dump({key: value for key, value in settings.items() if value is not None}), encoding="utf-8"
        )
        return path

    return write
