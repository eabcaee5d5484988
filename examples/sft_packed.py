"""Supervised fine-tuning on packed long sequences: a TRL script with one import changed. Runs on a laptop's CPU.

python examples/sft_packed.py
"""

import argparse

from peft import LoraConfig

from longreach import SFTConfig, SFTTrainer, zoo  # with TRL: from trl import SFTConfig, SFTTrainer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(zoo.model_path()), help="a Hub id or a local folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a packed sequence")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", default="out/sft_packed")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rows = zoo.task("program_trace").dataset("train", size=64, length=options.length // 4)
    rows = rows.map(
        lambda row: {"completion": [{"role": "assistant", "content": " " + row["answer"]}]},
        remove_columns=["answer", "key", "task"],
    )
    args = SFTConfig(
        output_dir=options.output,
        max_length=options.length,
        packing=True,  # documents share a row and do not see each other; no token is padding
        on_overlong="error",  # rather than cut a document that does not fit
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_steps=options.steps,
        logging_steps=1,
        bf16=False,
        report_to=[],
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    trainer = SFTTrainer(model=options.model, args=args, train_dataset=rows, peft_config=adapter)
    trainer.train()
    for step in trainer.state.log_history:
        if "loss" in step:
            print(f"step {step['step']:3}   loss {step['loss']:.3f}   accuracy {step['mean_token_accuracy']:.2f}")


if __name__ == "__main__":
    main()
