"""Tables of full fine-tuning and of training in half precision, for `make_tables`."""

from __future__ import annotations

from typing import Any

from bench.markdown import table

WEIGHTS = {"fp32": "fp32, products in bf16", "bf16": "bf16"}
OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "AdamW, 8 bits", "paged8bit": "AdamW, 8 bits, paged"}
PLACES = {"device": "released", "host": "released, states on the host", "kept": "kept to the end"}


def full_finetuning(records: list[dict[str, Any]]) -> list[str]:
    """Peak and seconds of whole steps, from `bench/full_finetune.py`."""
    if not records:
        return []
    rows = []
    for r in records:
        weights, rest = r["case"].split("+")
        optimizer, place = rest.split("@")
        time = ["out of memory", ""]
        if r["step_s"] is not None:
            time = [f"{r['peak_bytes'] / 1e9:.1f}", f"{r['step_s']:.2f}"]
        rows.append([r["model"], WEIGHTS[weights], OPTIMIZERS[optimizer], PLACES[place], f"{r['context']:,}", *time])
    header = ["model", "weights", "optimizer", "gradients", "tokens", "peak GB", "s"]
    where = f"{records[0]['card']}, commit {records[0]['commit'][:10]}, torch {records[0]['versions']['torch']}"
    return [
        "## Full fine-tuning", "",
        f"Forward, backward and optimizer of one sequence with every parameter trained, full depth, random values ({where}; "
        "`bench/full_finetune.py`). Peak is all that PyTorch has allocated, weights and optimizer states included.", "",
        *table(header, rows),
    ]  # fmt: skip


def half_precision(records: list[dict[str, Any]]) -> list[str]:
    """Losses after the last 50 of the steps against fp32, from `bench/half_precision.py`."""
    if not records:
        return []
    rows = []
    for r in records:
        last = sum(r["losses"][-50:]) / len(r["losses"][-50:])
        off = r.get("largest_difference_to_fp32")
        skipped = r["overflow_steps"]
        rows.append([
            {"full": "all", "lora": "adapter"}[r["mode"]], r["precision"], f"{r['losses'][0]:.3f}", f"{last:.4f}",
            "" if off is None else f"{off:.4f}", "" if skipped is None else str(skipped), str(r["not_finite"]),
        ])  # fmt: skip
    header = ["weights trained", "products", "first loss", "last losses", "largest difference", "skipped", "NaN"]
    first = records[0]
    where = f"{first['card']}, commit {first['commit'][:10]}, torch {first['versions']['torch']}"
    return [
        "## fp16, bf16 and fp32", "",
        f"{first['steps']} steps of the same run through `SFTTrainer`, with the attention kernels of cards without bf16 ({where};"
        " `bench/half_precision.py`). Last losses: mean of 50 steps. Largest difference: to fp32, of losses averaged over 25 "
        "steps.", "",
        *table(header, rows),
    ]  # fmt: skip
