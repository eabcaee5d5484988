"""Tables of full fine-tuning, half precision, whole GRPO steps and gradients of trees, for `make_tables`."""

from __future__ import annotations

from typing import Any

from bench.markdown import table

from bench import models

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
            peak = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e9:.1f}"
            time = [peak, f"{r['step_s']:.2f}" + " (see below)" * ("note" in r and bool(peak))]
        rows.append([r["model"], WEIGHTS[weights], OPTIMIZERS[optimizer], PLACES[place], f"{r['context']:,}", *time])
    header = ["model", "weights", "optimizer", "gradients", "tokens", "peak GB", "s"]
    notes = dict.fromkeys(r["note"] for r in records if "note" in r)
    return [
        "## Full fine-tuning", "",
        f"Forward, backward and optimizer of one sequence with every parameter trained, full depth, random values "
        f"({_where(records[0])}; "
        "`bench/full_finetune.py`). Peak is all that PyTorch has allocated, weights and optimizer states included.", "",
        *table(header, rows), *(line for note in notes for line in (note, "")),
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
    return [
        "## fp16, bf16 and fp32", "",
        f"{first['steps']} steps of the same run through `SFTTrainer`, with the attention kernels of cards without bf16 "
        f"({_where(first)}; `bench/half_precision.py`). Last losses: mean of 50 steps. Largest difference: to fp32, of losses "
        "averaged over 25 steps.", "",
        *table(header, rows),
    ]  # fmt: skip


ENGINES = {"longreach": "Longreach", "unsloth": "Unsloth, without vLLM", "trl": "TRL"}


def grpo_steps(records: list[dict[str, Any]]) -> list[str]:
    """Seconds of rollout, reward and training, from `bench/grpo_step.py`."""
    if not records:
        return []
    ours = next((r["step_s"] for r in records if r["engine"] == "longreach"), None)
    rows = [
        [ENGINES[r["engine"]], *(f"{r[k]:.2f}" for k in ("rollout_s", "reward_s", "training_s", "step_s")),
         "" if ours is None else f"{r['step_s'] / ours:.1f}×", f"{r['tokens']:,}", f"{r['peak_bytes'] / 2**30:.1f}"]
        for r in sorted(records, key=lambda r: list(ENGINES).index(r["engine"]))
    ]  # fmt: skip
    r = records[0]
    text = (
        f"{r['model']}{_depth(r)} in NF4 with LoRA r=32, {r['prompts']} prompts of {r['prompt']:,} tokens, {r['group']} "
        f"completions of {r['completion']:,} each, the optimizer's step included ({_where(r)}; `bench/grpo_step.py`). The step "
        "before it, which compiles and captures, is not counted. Seconds; peak is all that PyTorch has allocated."
    )
    header = ["engine", "rollout", "reward", "training", "step", "of ours", "tokens", "peak GiB"]
    return ["## A whole GRPO step", "", text, "", *table(header, rows)]


def _depth(r: dict[str, Any]) -> str:
    whole = models.shape_of(r["model"], None, tiny=False).layers
    return "" if r["layers"] == whole else f", {r['layers']} of its {whole} layers,"


def tree_gradients(records: list[dict[str, Any]]) -> list[str]:
    """Differences of gradients, from `bench/tree_gradients.py`."""
    if not records:
        return []
    r = records[0]
    text = (
        "Gradients of a group as a tree and as rows, LoRA on few layers of real widths, norms of differences relative to the "
        f"rows in fp32 ({_where(r)}; `bench/tree_gradients.py`)."
    )
    rows = [
        [f"{r['model']}, {r['layers']} layers, {r['group']} × {r['completion']:,} on {r['prompt']:,}",
         *(f"{r[k]:.1e}" for k in ("bf16_tree_to_rows", "bf16_rows_to_fp32", "bf16_tree_to_fp32", "fp32_tree_to_rows"))]
        for r in records
    ]  # fmt: skip
    header = ["group", "bf16: tree to rows", "rows: bf16 to fp32", "tree in bf16 to rows in fp32", "fp32: tree to rows"]
    return [text, "", *table(header, rows)]


def _where(r: dict[str, Any]) -> str:
    return f"{r['card']}, commit {r['commit'][:10]}, torch {r['versions']['torch']}"
