"""GRPO on prompts of 2,000 tokens and more: a TRL script with one import changed. Runs on a laptop's CPU in about a minute.

python examples/grpo_long_context.py
python examples/grpo_long_context.py --length 8192 --steps 4
"""

import argparse

from longreach import GRPOConfig, GRPOTrainer, zoo  # with TRL: from trl import GRPOConfig, GRPOTrainer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(zoo.model_path()), help="a Hub id or a local folder")
    parser.add_argument("--task", default="program_trace", choices=[task.name for task in zoo.tasks()])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", default="out/grpo_long_context")
    return parser.parse_args()


def main() -> None:
    options = parse()
    task = zoo.task(options.task)
    args = GRPOConfig(
        output_dir=options.output,
        max_length=options.length + 256,  # prompt + completion; a longer prompt is an error before training starts
        max_completion_length=8,
        num_generations=8,
        per_device_train_batch_size=32,
        learning_rate=4e-4,
        lr_scheduler_type="linear",
        max_steps=options.steps,
        logging_steps=1,
        bf16=False,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=task.reward,  # TRL's signature; the dataset's `answer` column arrives as an argument
        args=args,
        train_dataset=task.dataset("train", size=256, length=options.length),
    )
    trainer.train()
    for step in trainer.state.log_history:
        if "reward" in step:
            print(f"step {step['step']:3}   reward {step['reward']:.2f}   skipped rows {step['skipped/rows']:.0%}")


if __name__ == "__main__":
    main()
