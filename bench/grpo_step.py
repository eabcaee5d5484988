"""A whole GRPO step of Qwen3-4B in 4 bits with LoRA: seconds for rollout, rewards and training; ours, TRL's or Unsloth's.

    python -m bench.grpo_step --engine longreach
    python -m bench.grpo_step --engine trl --warm-completion 64
    python -m bench.grpo_step --engine unsloth --warm-completion 64     # where it is installed, without vLLM
    python -m bench.grpo_step --device cpu --tiny --engine longreach          # tests the script

8 prompts of 2,048 tokens, 8 completions of 1,024 tokens each (random weights seldom end one earlier), micro-batches of one group.
Weights are random, of the real shape, loaded in NF4 from a folder that is written first; LoRA r=32 on all linear layers. The last
of `--steps` steps is reported (with `--after FILE` it waits for that file first); those before it hold compilation and
captures, and may be cut short (`--warm-completion`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import measure, models

PROMPTS, GROUP, PROMPT, COMPLETION = 8, 8, 2048, 1024
KEY = ("engine", "model", "layers", "prompt", "completion")


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(out=measure.RESULTS / "grpo_step.json")
    parser.add_argument("--engine", default="longreach", choices=("longreach", "trl", "unsloth"))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument(
        "--warm-completion",
        type=int,
        default=0,
        metavar="TOKENS",
        help="length of completions in all steps but the last",
    )
    parser.add_argument("--folder", type=Path, default=None, help="where the random model is written (kept)")
    parser.add_argument("--only-write", action="store_true", help="write the folder and stop")
    parser.set_defaults(completion=COMPLETION)
    options = measure.parse(parser, argv)
    if options.tiny:
        options.prompt //= 64
        options.warm_completion //= 16
    shape = models.shape_of(options.model, options.layers, options.tiny)
    positions = options.prompt + options.completion + 64
    folder = options.folder or Path(f"/tmp/random-{shape.name}-{shape.layers}{'-tiny' if options.tiny else ''}")
    if options.only_write:
        models.write(shape, positions, folder, options.device)
        return
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, "-m", "bench.grpo_step", "--only-write", *(argv or sys.argv[1:])], check=True)
    models.stretch(folder, positions)
    trainer = make(options, shape, folder, positions)
    trainer.asked = options
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    note(options, shape, trainer)


def make(options: Any, shape: Any, folder: Path, positions: int) -> Any:
    """The engine's trainer, with clocks around its phases."""
    quantized = options.device == "cuda"
    if options.engine == "unsloth":
        from unsloth import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(
            str(folder), max_seq_length=positions, load_in_4bit=quantized, dtype=torch.bfloat16
        )
        model = FastLanguageModel.get_peft_model(
            model, r=models.RANK, lora_alpha=2 * models.RANK, target_modules=models.LINEARS,
            use_gradient_checkpointing="unsloth",
        )  # fmt: skip
    from datasets import Dataset
    from transformers import AutoTokenizer

    if options.engine != "unsloth":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = load(options, folder, quantized)
    if options.engine == "longreach":
        from longreach import GRPOConfig, GRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer
    args = GRPOConfig(
        output_dir="/tmp/grpo-step", max_steps=options.steps, per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=PROMPTS, num_generations=GROUP, max_completion_length=options.completion,
        temperature=1.0, learning_rate=1e-6, bf16=options.device == "cuda", use_cpu=options.device == "cpu",
        save_strategy="no", report_to=[], logging_steps=1, disable_tqdm=True,
        **({"max_length": positions, "parity_check": False} if options.engine == "longreach" else {}),
    )  # fmt: skip
    rows = [models.token_ids(options.prompt, shape.vocab - 2, seed=i) for i in range(PROMPTS * options.steps)]
    data = Dataset.from_dict({"prompt": [" ".join(f"w{t}" for t in row.tolist()) for row in rows]})
    return timed(GRPOTrainer)(
        model=model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer
    )


def load(options: Any, folder: Path, quantized: bool) -> Any:
    """4-bit model with a fresh adapter: ours by our loader, TRL's by bitsandbytes."""
    if options.engine == "longreach":
        import longreach

        weights = "nf4" if quantized else None
        model, _ = longreach.load(
            str(folder), weights=weights, lora=models.RANK, device=options.device, parity_check=False
        )
        return model
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kwargs: dict[str, Any] = {"dtype": torch.bfloat16}
    if quantized:
        kwargs |= {
            "device_map": {"": 0},
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
        }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    if quantized:
        model = prepare_model_for_kbit_training(model)
    return get_peft_model(
        model,
        LoraConfig(r=models.RANK, lora_alpha=2 * models.RANK, target_modules=models.LINEARS, task_type="CAUSAL_LM"),
    )


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Differs between completions, so that every row has a gradient."""
    return [float(sum(ids) % 97) for ids in completion_ids]


def timed(kind: Any) -> Any:
    """The trainer's class, noting seconds per phase and step."""

    class Timed(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seconds: dict[str, list[float]] = {"rollout": [], "reward": []}
            self.marks: list[float] = []
            super().__init__(*args, **kwargs)

        def _clock(self, phase: str, call: Any) -> Any:
            measure.synchronize("cuda" if torch.cuda.is_available() else "cpu")
            start = time.perf_counter()
            out = call()
            measure.synchronize("cuda" if torch.cuda.is_available() else "cpu")
            self.seconds[phase].append(time.perf_counter() - start)
            return out

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            last = len(self.seconds["rollout"]) == self.asked.steps - 1
            self.generation_config.max_new_tokens = (not last and self.asked.warm_completion) or self.asked.completion
            if last:
                measure.wait_for(self.asked.after)
                self.marks[-1] = time.perf_counter()
            out = self._clock("rollout", lambda: super(Timed, self)._generate_single_turn(*args, **kwargs))
            self.tokens = sum(map(len, out[0]))
            return out

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            return self._clock("reward", lambda: super(Timed, self)._calculate_rewards(*args, **kwargs))

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if not self.marks:
                self.marks.append(time.perf_counter())
            return super().training_step(*args, **kwargs)

        def log(self, *args: Any, **kwargs: Any) -> None:
            measure.synchronize("cuda" if torch.cuda.is_available() else "cpu")
            self.marks.append(time.perf_counter())
            super().log(*args, **kwargs)

    return Timed


def note(options: Any, shape: Any, trainer: Any) -> None:
    """Print and record the last step."""
    whole = trainer.marks[options.steps] - trainer.marks[options.steps - 1]
    rollout, rewards = trainer.seconds["rollout"][-1], trainer.seconds["reward"][-1]
    entry = {
        "engine": options.engine, "model": shape.name, "layers": shape.layers, "weights": "nf4", "prompts": PROMPTS,
        "group": GROUP, "prompt": options.prompt, "completion": options.completion, "steps": options.steps,
        "tokens": trainer.tokens, "step_s": whole, "rollout_s": rollout, "reward_s": rewards,
        "training_s": whole - rollout - rewards,
        "peak_bytes": torch.cuda.max_memory_allocated() if options.device == "cuda" else None,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }  # fmt: skip
    measure.put(options.out, entry, options.commit, KEY)
    print(
        f"{options.engine}: step {whole:.1f} s = rollout {rollout:.1f} + reward {rewards:.2f} + training "
        f"{entry['training_s']:.1f}, {trainer.tokens:,} tokens, peak {(entry['peak_bytes'] or 0) / 2**30:.1f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
