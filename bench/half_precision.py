"""300 steps of the same training in fp16, bf16 and fp32: loss curves, skipped steps, final loss scale.

    python -m bench.half_precision --steps 300
    python -m bench.half_precision --device cpu --tiny --precisions bf16,fp32      # tests the script

The model is a Qwen3 of 8 layers and width 512 with random weights; the text repeats a random pattern, which it learns to see.
`full` trains every weight (fp32, products in the precision named); `lora` an fp32 adapter on a frozen base stored in that
precision. Attention runs on the memory-efficient kernels, which cards without bf16 use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench.measure import RESULTS, provenance

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
SMOOTH = 25  # steps over which losses are averaged before they are compared


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--precisions", default="fp32,bf16,fp16")
    parser.add_argument("--modes", default="full,lora")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a test of the script")
    parser.add_argument("--out", type=Path, default=RESULTS / "half_precision.json")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(argv)
    if options.tiny:
        options.steps = 3
    runs = [
        run(mode, precision, options)
        for mode in options.modes.split(",")
        for precision in options.precisions.split(",")
    ]
    for mode in options.modes.split(","):
        compare([r for r in runs if r["mode"] == mode])
    held = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(r["mode"], r["precision"]) for r in runs}
    held = [r for r in held if (r["mode"], r["precision"]) not in done]
    options.out.write_text(json.dumps([*held, *runs], indent=1) + "\n", encoding="utf-8")


def run(mode: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    from peft import LoraConfig

    from longreach import SFTConfig, SFTTrainer

    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder, backend(options.device):
        trainer = SFTTrainer(
            model=model(mode, precision, options),
            args=SFTConfig(
                folder, fp16=precision == "fp16", bf16=precision == "bf16", max_steps=options.steps, logging_steps=1,
                per_device_train_batch_size=8, learning_rate=1e-3, lr_scheduler_type="constant_with_warmup", warmup_steps=10,
                chunk=256, max_length=None, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=options.device == "cpu",
                seed=0,
            ),
            train_dataset=text(options),
            processing_class=tokenizer(),
            peft_config=adapter if mode == "lora" else None,
        )  # fmt: skip
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [entry["loss"] for entry in logs]
    norms = [entry["grad_norm"] for entry in logs]
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    scaler = trainer.accelerator.scaler
    found = {
        "mode": mode, "precision": precision, "steps": len(losses), "losses": [round(x, 5) for x in losses],
        "not_finite": sum(not math.isfinite(x) for x in losses),
        "weights_finite": all(bool(p.isfinite().all()) for p in weights),
        "grad_norm_not_finite": sum(not math.isfinite(x) for x in norms),
        "overflow_steps": logs[-1].get("overflow_steps"), "loss_scale": None if scaler is None else scaler.get_scale(),
        **provenance(options.commit),
    }  # fmt: skip
    told = {k: v for k, v in found.items() if k not in ("losses", "versions")}
    print(told, losses[:2], "...", losses[-2:], flush=True)
    return found


def compare(runs: list[dict[str, Any]]) -> None:
    """Distance of the smoothed losses to those of fp32, the largest over the run and the mean of the last 50 steps."""
    exact = next((r for r in runs if r["precision"] == "fp32"), None)
    for other in runs:
        if exact is None or other is exact:
            continue
        a, b = (smoothed(r["losses"]) for r in (exact, other))
        other["largest_difference_to_fp32"] = max(abs(x - y) for x, y in zip(a, b))
        tail = [sum(r["losses"][-50:]) / len(r["losses"][-50:]) for r in (exact, other)]
        other["final_loss"], other["final_difference_to_fp32"] = tail[1], tail[1] - tail[0]
        names = ("mode", "precision", "largest_difference_to_fp32", "final_loss", "final_difference_to_fp32")
        print({k: other[k] for k in names}, flush=True)


def smoothed(losses: list[float]) -> list[float]:
    width = min(SMOOTH, len(losses))
    return [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]


def model(mode: str, precision: str, options: argparse.Namespace) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    width, layers = (64, 2) if options.tiny else (512, 8)
    config = Qwen3Config(
        vocab_size=862, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    made = Qwen3ForCausalLM(config)
    dtype = getattr(torch, DTYPES[precision]) if mode == "lora" else torch.float32
    return made.to(dtype).to(options.device)


def text(options: argparse.Namespace) -> Any:
    from datasets import Dataset

    length, draw = (64 if options.tiny else 512), torch.Generator().manual_seed(0)
    rows = []
    for _ in range(8 * options.steps):
        period = int(torch.randint(8, 64, (), generator=draw))
        pattern = torch.randint(2, 862, (period,), generator=draw)
        rows.append(pattern.repeat(length // period + 1)[:length].tolist())
    return Dataset.from_dict({"input_ids": rows})


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from longreach.zoo import model_path

    return AutoTokenizer.from_pretrained(model_path())


def backend(device: str) -> contextlib.AbstractContextManager[Any]:
    if device == "cpu":
        return contextlib.nullcontext()
    from longreach.attention.aten_cuda import EfficientAttention
    from longreach.attention.select import use_backend

    return use_backend(EfficientAttention())


if __name__ == "__main__":
    main()
