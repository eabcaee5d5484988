"""GRPO of gpt-oss-20b's shape under a hard cap of GPU memory, through the trainer: peak memory and seconds of each step.

    python -m bench.gpt_oss_grpo --cap 15 --steps 5 --group 4 --prompt 2048 --completion 1024 --new 1024
    python -m bench.gpt_oss_grpo --device cpu --tiny          # tests the script

Random MXFP4 weights of all 24 layers, embedding and head in 8 bits, LoRA on attention and experts, AdamW. The cap is PyTorch's
own (`set_per_process_memory_fraction`): what does not fit ends the run. --new tokens of each completion are sampled (no end
before that); with fewer than --completion the row is filled up with random tokens to its full length, so that the training step
is the one that was asked for. Rewards are random.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import longreach
from bench import gpt_oss, measure
from longreach.quant.embedding import store_in_8_bits

GB = 10**9


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=float, default=15.0, help="GB (10^9 bytes) that PyTorch may allocate")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--completion", type=int, default=1024)
    parser.add_argument("--new", type=int, default=1024, help="tokens that are really sampled")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "gpt_oss.json")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(argv)
    options.weights = "mxfp4"
    if options.tiny:
        options.layers, options.prompt, options.completion, options.new = 2, 32, 16, 8
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * GB / total)
    run(options)


def run(options: Any) -> None:
    began = time.perf_counter()
    model = gpt_oss.build(options, options.prompt + options.completion)
    store_in_8_bits(model)
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    trainer = Timed(
        options,
        model=model,
        reward_funcs=reward,
        args=longreach.GRPOConfig(
            output_dir="gpt_oss_grpo", report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
            max_steps=options.steps, per_device_train_batch_size=options.group, num_generations=options.group,
            max_completion_length=options.completion, max_length=options.prompt + options.completion,
            generation_kwargs={"min_new_tokens": options.new, "max_new_tokens": options.new}, learning_rate=1e-5,
            parity_check=False, bf16=options.device == "cuda", use_cpu=options.device == "cpu", beta=0.0,
            rollout_memory="release", on_misfit="warn",
        ),
        train_dataset=prompts(options),
        processing_class=tokenizer(model.config.vocab_size),
        peft_config=LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules=gpt_oss.ATTENTION, target_parameters=gpt_oss.EXPERTS
        ),
    )  # fmt: skip
    print(f"trainer ready after {time.perf_counter() - began:.1f} s", flush=True)
    trainer.train()
    trainer.note()


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    draw = random.Random(0)
    return [draw.random() for _ in completions]


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A word for every id."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def prompts(options: Any) -> Dataset:
    draw = random.Random(1)
    high = 500 if options.tiny else 200_000
    return Dataset.from_dict(
        {"prompt": [" ".join(f"w{draw.randrange(3, high)}" for _ in range(options.prompt)) for _ in range(16)]}
    )


class Timed(longreach.GRPOTrainer):
    """Times rollouts and steps, and fills completions up to the full length."""

    def __init__(self, options: Any, **kwargs: Any) -> None:
        self.asked, self.sampling_s, self.steps, self.peaks = options, [], [], []
        super().__init__(**kwargs)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        began = self._now()
        ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)[:2]
        self.sampling_s.append(self._now() - began)
        print(f"sampled {[len(i) for i in ids]} tokens in {self.sampling_s[-1]:.2f} s", flush=True)
        draw, length = random.Random(len(self.sampling_s)), self.asked.completion
        high = self.model.config.vocab_size
        filled = [[*i, *(draw.randrange(3, high) for _ in range(length - len(i)))] for i in ids]
        if logprobs is not None and any(len(i) < length for i in ids):
            logprobs = None
        return filled, logprobs

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.asked.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = self._now()
        loss = super().training_step(*args, **kwargs)
        self.steps.append(self._now() - began)
        self.peaks.append(torch.cuda.max_memory_allocated() if self.asked.device == "cuda" else 0)
        print(f"step {len(self.steps)}: {self.steps[-1]:.2f} s, peak {self.peaks[-1] / GB:.2f} GB", flush=True)
        return loss

    def _now(self) -> float:
        measure.synchronize(self.asked.device)
        return time.perf_counter()

    def note(self) -> None:
        options = self.asked
        entry = {
            "engine": "longreach", "case": f"GRPO under a cap of {options.cap:g} GB", "model": "gpt-oss-20b",
            "layers": options.layers, "context": options.prompt + options.completion, "completion": options.completion,
            "group": options.group, "prompts": 1, "rank": options.rank, "weights": "mxfp4, int8 embedding and head",
            "steps": len(self.steps), "sampled_tokens": options.new, "rollout": self._rollout,
            "sampling_s": self.sampling_s, "steps_with_sampling_s": self.steps,
            "step_s": sorted(self.steps)[len(self.steps) // 2],
            "peak_bytes": max(self.peaks), "losses": [h["loss"] for h in self.state.log_history if "loss" in h],
        }  # fmt: skip
        measure.record(options.out, entry, options.commit)


if __name__ == "__main__":
    main()
