"""Runs of one or two processes that see the same rows; started by test_two_processes.py."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch

import longreach.trainers as ours

from . import tiny

Settings = dict[str, Any]
# For one process; with two, each has half of `per_device_train_batch_size`
CASES: dict[str, Settings] = {
    "full": dict(loss_type="dapo"),
    "lora, kl": dict(loss_type="grpo", beta=0.04, lora=True),
    "joined micro-batches": dict(loss_type="grpo", per_device_train_batch_size=4, gradient_accumulation_steps=4),
    "group over processes": dict(loss_type="dr_grpo", num_generations=8, gradient_accumulation_steps=1),
    "one process skips all": dict(loss_type="dapo", tied="w1"),
    "sft": dict(trainer="sft"),
}


class ByContent:
    """Completions drawn from the prompt and the row's place in its group, whoever holds the row."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        first = self.accelerator.process_index * len(prompt_ids)  # type: ignore[attr-defined]
        out = []
        for i, ids in enumerate(prompt_ids):
            draw = random.Random(str((ids, self.state.global_step, (first + i) % self.num_generations)))  # type: ignore
            out.append([draw.randrange(3, tiny.WORDS) for _ in range(draw.randrange(2, 9))] + [tiny.EOS])
        return out, None


class ContentGRPO(ByContent, ours.GRPOTrainer):
    pass


def train(name: str, processes: int, folder: str) -> Any:
    settings = dict(CASES[name])
    kind, use_lora, tied = settings.pop("trainer", "grpo"), settings.pop("lora", False), settings.pop("tied", None)
    rows = settings.pop("per_device_train_batch_size", 8) // processes
    common = tiny.RUN | dict(output_dir=folder, max_steps=3, learning_rate=1e-4, per_device_train_batch_size=rows)
    common |= dict(chunk=16, parity_check=False, shuffle_dataset=False)
    if kind == "sft":
        args = ours.SFTConfig(**common, max_length=64, **settings)
        made: Any = ours.SFTTrainer(tiny.model(), args, train_dataset=tiny.pairs(), processing_class=tiny.tokenizer())
    else:

        def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
            scores = tiny.reward(completions)
            return [1.0 if tied and p.split()[0] in ("w0", "w7") else s for p, s in zip(prompts, scores)]

        defaults = dict(num_generations=4, gradient_accumulation_steps=2, max_completion_length=10)
        args = ours.GRPOConfig(**(common | defaults | settings))
        made = ContentGRPO(
            tiny.model(), reward, args, tiny.prompts(), processing_class=tiny.tokenizer(),
            peft_config=tiny.lora() if use_lora else None,
        )  # fmt: skip
    made.train()
    return made


def result(trainer: Any) -> dict[str, Any]:
    steps = tiny.history(trainer, "loss", "grad_norm", "reward", "skipped/rows")
    return {"steps": steps, "parameters": tiny.trained(trainer)}


def worker(rank: int, processes: int, port: int, folder: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes)
    )
    torch.set_num_threads(1)
    for name in CASES:
        made = train(name, processes, folder)
        assert made.accelerator.num_processes == processes
        if rank == 0:
            torch.save(result(made), Path(folder) / f"{name}.pt")
    torch.distributed.destroy_process_group()
