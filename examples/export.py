"""Train a small adapter, export it to every format, and talk to the GGUF file. Runs on a laptop's CPU in a minute.

pip install -e '.[export]' && python examples/export.py
"""

import argparse
from pathlib import Path

from peft import LoraConfig

import longreach
from longreach import SFTConfig, SFTTrainer, zoo


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(zoo.model_path()), help="a Hub id or a local folder")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("out/export"))
    return parser.parse_args()


def train(options: argparse.Namespace) -> SFTTrainer:
    rows = zoo.task("program_trace").dataset("train", size=32, length=512)
    rows = rows.map(
        lambda row: {"completion": [{"role": "assistant", "content": " " + row["answer"]}]},
        remove_columns=["answer", "key", "task"],
    )
    args = SFTConfig(
        output_dir=str(options.output / "run"),
        max_length=1024,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        max_steps=options.steps,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(options.model, args=args, train_dataset=rows, peft_config=lora)
    trainer.train()
    return trainer


def main() -> None:
    options = parse()
    trainer = train(options)
    tokenizer = trainer.processing_class
    for format, quantization in (
        ("adapter", None),
        ("merged", None),
        ("vllm", None),
        ("ollama", "q8_0"),
        ("gguf", "q4_k_m"),
    ):
        made = longreach.export(
            trainer.model, tokenizer, options.output / format, format=format, quantization=quantization, force=True
        )
        for check in made.checks:  # a check that fails raises longreach.exporting.errors.MismatchError
            logits = check.record.get("logits")
            print(f"{format:8} {check.name:32}", f"KL {logits['kl']:.1e} nats" if logits else "")


if __name__ == "__main__":
    main()
