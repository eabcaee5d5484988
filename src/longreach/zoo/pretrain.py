"""Train the zoo's model from nothing: `python -m longreach.zoo.pretrain --out DIR`.

The model is pre-trained on demonstrations by a careless annotator. Each training text is a document of one of the
tasks and, as turns of a chat, questions about it with the annotator's answers. The annotator knows how to look things
up, but follows a decoy (the host that was left, the assignment that is commented out) at some of the stops, and now and
then puts words in front of the answer. About a third of the answers are right, and nothing in a text says which. What
the model can learn from that is the skill, every look-up and the habits of answering, and how often each was done:
sampled, it is right about a third of the time. What separates right from wrong is left to reinforcement learning.

Only the loss of the answers counts. Lengths grow from short to long, since a look-up is found many times sooner in a
short text. Example number i depends on the seed and i alone, not on workers or device.
Needs torch, transformers and tokenizers; about two minutes on an H200, hours on two CPU cores.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from longreach import zoo
from longreach.zoo.task import TOKEN, Document, pair_split
from longreach.zoo.tokenizer import build_tokenizer

# B batch, S sequence, A answer tokens of a batch, V vocabulary
MAX_LENGTH = 131_072


@dataclass(frozen=True)
class Stage:
    """`steps` optimizer steps on texts whose prompts are `length` tokens, `batch` texts a step.

    `size` is how many chains of facts a text holds; `tasks` are drawn from with equal chance.
    """

    length: int
    batch: int
    steps: int
    size: int
    tasks: tuple[str, ...] = ("log_facts", "program_trace")


@dataclass(frozen=True)
class Settings:
    """All that decides what is learned."""

    stages: tuple[Stage, ...] = (
        Stage(192, 128, 1000, size=2),
        Stage(512, 48, 400, size=2),
        Stage(2048, 24, 600, size=8),
        Stage(4096, 12, 300, size=12),
        Stage(8192, 6, 200, size=12),
    )
    learning_rate: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.02
    first_share: float = 0.48
    """How often the annotator follows the live link at the first stop: not half the time, so the mode is wrong."""
    later_share: float = 0.85
    """How often the annotator follows live links at all later stops."""
    wordy_share: float = 0.1
    """How often the annotator puts words in front of the answer."""
    seed: int = 0
    layers: int = 3
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    intermediate: int = 256
    rope_theta: float = 100_000.0


class Demonstrations(Dataset):
    """Example i: the ids of a chat about one document, and where its answers are."""

    def __init__(self, stage: Stage, first: int, settings: Settings, ids_of: dict[str, int]) -> None:
        self.stage, self.first, self.settings, self.ids_of = stage, first, settings, ids_of

    def __len__(self) -> int:
        return self.stage.batch * self.stage.steps

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        rng = random.Random(f"pretrain/{self.settings.seed}/{self.first + index}")
        task = zoo.task(rng.choice(self.stage.tasks))
        document = task.document(rng, self.stage.length, "train", size=self.stage.size)
        ids: list[int] = []
        answers: list[int] = []
        keys = [key for key, value in document.live.items() if pair_split(key, value) == "train"]
        rng.shuffle(keys)
        for turn, key in enumerate(keys):
            question = task.prompt(document, key) if turn == 0 else task.question(key)
            ids += [
                self.ids_of["<|user|>"],
                *self._encode(question),
                self.ids_of["<|end|>"],
                self.ids_of["<|assistant|>"],
            ]
            answer = [*self._encode(f" {demonstrate(document, key, rng, self.settings)}"), self.ids_of["<|end|>"]]
            answers += range(len(ids), len(ids) + len(answer))
            ids += answer
        return ids, answers

    def _encode(self, text: str) -> list[int]:
        return [self.ids_of[piece] for piece in split_tokens(text)]


def split_tokens(text: str) -> list[str]:
    """The tokenizer's pieces of a text in the zoo's words, many times faster than the tokenizer (tests compare)."""
    return [piece.replace(" ", "▁") for piece in TOKEN.findall(text)]


def demonstrate(document: Document, key: str, rng: random.Random, settings: Settings) -> str:
    """The careless annotator's answer: often a decoy's, sometimes with words in front, right a third of the time."""
    later = len(document.trace(key)) - 1
    shares = iter([settings.first_share, *[settings.later_share ** (1 / max(later, 1))] * later])
    answer = " ".join(document.trace(key, lambda: rng.random() < next(shares)))
    return f"Answer : {answer}" if rng.random() < settings.wordy_share else answer


def collate(examples: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, S] int64, and row and column [A] of each answer token."""
    ids_BS = torch.zeros(len(examples), max(len(ids) for ids, _ in examples), dtype=torch.int64)
    rows: list[int] = []
    columns: list[int] = []
    for row, (ids, answers) in enumerate(examples):
        ids_BS[row, : len(ids)] = torch.tensor(ids)
        rows += [row] * len(answers)
        columns += answers
    return ids_BS, torch.tensor(rows), torch.tensor(columns)


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A stock Qwen3 of about a million parameters, with fresh weights."""
    torch.manual_seed(settings.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_size,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM,
    settings: Settings,
    ids_of: dict[str, int],
    device: str,
    workers: int,
    after_stage: Callable[[], None],
) -> list[float]:
    """Run all stages, print a line every 100 steps, call `after_stage` after each; returns the loss of each step."""
    torch.nn.Module.to(model, device)
    model.train()
    optimizer, schedule = build_optimizer(model, settings)
    losses: list[torch.Tensor] = []
    first = 0
    started = time.perf_counter()
    for stage in settings.stages:
        data = Demonstrations(stage, first, settings, ids_of)
        loader = DataLoader(data, stage.batch, num_workers=workers, collate_fn=collate, pin_memory=device == "cuda")
        for batch in loader:
            batch = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
            losses.append(train_step(model, optimizer, batch, device))
            schedule.step()
            if len(losses) % 100 == 0:
                seconds, loss = time.perf_counter() - started, losses[-1].item()
                print(f"step {len(losses)} length {stage.length} loss {loss:.4f} {seconds:.0f} s", flush=True)
        first += len(data)
        after_stage()
    return torch.stack(losses).tolist()


def build_optimizer(
    model: Qwen3ForCausalLM, settings: Settings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW that decays matrices only, and its schedule: warm-up, then a cosine down to a fiftieth."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
    decay_steps = sum(stage.steps for stage in settings.stages) - settings.warmup_steps
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=settings.warmup_steps)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, decay_steps, settings.learning_rate / 50)
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [settings.warmup_steps])


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: tuple, device: str) -> torch.Tensor:
    """One optimizer step on (ids [B, S], rows [A], columns [A]); returns the mean loss of the answers, detached."""
    ids_BS, rows_A, columns_A = batch
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden_BSE = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
        logits_AV = model.lm_head(hidden_BSE[rows_A, columns_A - 1])
    loss = torch.nn.functional.cross_entropy(logits_AV.float(), ids_BS[rows_A, columns_A])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings, out: Path) -> None:
    """Weights in bfloat16, tokenizer, generation settings, and the settings it was trained with."""
    kept = copy.deepcopy(model)
    torch.nn.Module.to(kept, "cpu", torch.bfloat16)
    kept.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=16,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    kept.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "pretraining.json").write_text(json.dumps(dataclasses.asdict(settings), indent=2) + "\n")


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description="Train the zoo's embedded model from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the model to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2, help="processes that write training texts")
    arguments = parser.parse_args()
    settings = Settings()
    tokenizer = build_tokenizer(zoo.tasks(), MAX_LENGTH)
    model = build_model(settings, tokenizer)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(
        model,
        settings,
        tokenizer.get_vocab(),
        arguments.device,
        arguments.workers,
        lambda: save(model, tokenizer, settings, arguments.out),
    )


if __name__ == "__main__":
    main()
