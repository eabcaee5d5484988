"""The same training step through Unsloth (bf16 or NF4 weights, its own checkpointing with offload), where it is installed.

    python -m bench.peers.unsloth_step --lengths 16384,32768,131072 --folder /tmp/random-model

It loads from a folder, which is written first by a process of its own. Set HF_HUB_OFFLINE=1 where there is no network.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench import measure, models


def main(argv: list[str] | None = None) -> None:
    parser = measure.peer_arguments(__doc__ or "")
    parser.add_argument("--weights", default="bf16", choices=("bf16", "nf4"))
    parser.add_argument("--folder", type=Path, default=None, help="where the random model is written (kept)")
    parser.add_argument("--only-write", action="store_true", help="write the folder and stop")
    options = measure.parse(parser, argv)
    shape = models.shape_of(options.model, options.layers, options.tiny)
    positions = measure.longest(options)
    folder = options.folder or Path(f"/tmp/random-{shape.name}-{shape.layers}")
    if options.only_write:
        models.write(shape, positions, folder, options.device)
        return
    if importlib.util.find_spec("unsloth") is None:
        raise SystemExit("unsloth is not installed here: pip install unsloth (it is not a dependency of this project)")
    if not (folder / "config.json").exists():
        subprocess.run(
            [sys.executable, "-m", "bench.peers.unsloth_step", "--only-write", *(argv or sys.argv[1:])], check=True
        )
    models.stretch(folder, positions)
    model = load(folder, positions, options.weights)
    from bench.peers.transformers_step import run_cases

    run_cases(
        options, shape, model, "unsloth", lambda ids, completion: loss(model, ids, completion), weights=options.weights
    )


def load(folder: Path, longest: int, weights: str) -> Any:
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]  # before Transformers: it patches it

    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder), max_seq_length=longest, dtype=torch.bfloat16, load_in_4bit=weights == "nf4"
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=models.RANK,
        lora_alpha=2 * models.RANK,
        lora_dropout=0,
        bias="none",
        target_modules=models.LINEARS,
        use_gradient_checkpointing="unsloth",
        random_state=1,
    )
    return FastLanguageModel.for_training(model) or model


def loss(model: Any, ids: Any, completion: int) -> Any:
    labels = ids.clone()
    labels[:, :-completion] = -100
    return model(input_ids=ids, labels=labels, use_cache=False).loss


if __name__ == "__main__":
    main()
