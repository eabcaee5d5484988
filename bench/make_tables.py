"""docs/benchmarks.md and its plots: steps, planner, attention and kernels, from bench/results/*.json and nothing else.

python -m bench.make_tables                   # write the page
python -m bench.make_tables --check           # exit 1 if the page is not what the results say
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from bench.depth_tables import GIB, NAMES, Record, memory, seconds
from bench.kernel_tables import attention, decode_kernels, kernels
from bench.markdown import table
from bench.training_tables import full_finetuning, grpo_steps, half_precision, tree_gradients

from bench import plots
from longreach.context.plan import plan
from longreach.context.policy import PLACES, Policy
from longreach.context.speed import GB
from longreach.context.tables import SIZES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
ENGINES = ("longreach", "unsloth", "transformers")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write; plots go beside it")
    options = parser.parse_args(argv)
    files = {options.page: page(options.results)}
    for name, svg in drawings(steps(options.results)).items():
        files[options.page.parent / name] = svg
    if options.check:
        stale = [p for p, text in files.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
        if stale:
            sys.exit(f"not what the results say: {', '.join(str(p) for p in stale)}; run python -m bench.make_tables")
        return
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def steps(results: Path, weights: str = "bf16") -> list[Record]:
    return [r for r in _read(results / "train_step.json") if r.get("weights", "bf16") == weights]


def page(results: Path) -> str:
    records, packed = steps(results), steps(results, weights="nf4")
    parts = ["# Benchmarks", "", INTRODUCTION, ""]
    if records:
        parts += [STEP, "", _provenance([*records, *packed]), ""]
    parts += sequences(records, "One sequence") + pictures(records) + seconds(records) + memory(records)
    parts += groups(records) + tree_gradients(_read(results / "tree_gradients.json")) + everyday(records)
    parts += sequences(packed, "One sequence, NF4 weights") + seconds(packed)
    parts += grpo_steps(_read(results / "grpo_step.json")) + planner(_read(results / "planner.json"))
    parts += longest()
    parts += full_finetuning(_read(results / "full_finetune.json"))
    parts += half_precision(_read(results / "half_precision.json"))
    parts += attention(_read(results / "attention.json")) + kernels(_read(results / "kernels.json"))
    parts += decode_kernels(_read(results / "decode_kernels.json"))
    return "\n".join(parts).rstrip() + "\n"


INTRODUCTION = (
    "Made by `python -m bench.make_tables` from `bench/results/`; each figure has its script in `bench/`. "
    "`python -m bench.card` runs them all on a card, a group or a single one by its name (`--list`)."
)
STEP = (
    "A training step is one forward and backward with LoRA r=32 on all seven kinds of linear layer, bf16 weights unless said "
    "otherwise, random values in the model's real shape, the loss on the last 1,024 tokens of a sequence. Transformers runs "
    "with SDPA and gradient checkpointing, Unsloth with its own, which offloads; engines that are compared were timed one after "
    "the other on one card (Unsloth at 16K and 32K in an earlier session on the same kind of card). Seconds are medians of the "
    "steps after the first. Memory is PyTorch's peak less what the loaded model takes. The share of the roofline "
    "is the time that the model's own FLOP, without recomputation, would take at 790 TFLOP/s "
    "(matrix products) and 620 TFLOP/s (attention), over the time taken."
)


def _provenance(records: list[Record]) -> str:
    cards = sorted({r["card"] for r in records})
    commits = sorted({r["commit"][:10] for r in records})
    versions: dict[str, set[str]] = {}
    for r in records:
        for name, version in r["versions"].items():
            versions.setdefault(name, set()).add(str(version))
    listed = ", ".join(f"{name} {'/'.join(sorted(found))}" for name, found in sorted(versions.items()))
    return f"Card: {', '.join(cards)}. Commit: {', '.join(commits)}. Versions: {listed}."


def sequences(records: list[Record], title: str) -> list[str]:
    found = [r for r in records if r["case"] == "sequence"]
    if not found:
        return []
    out = [f"## {title}", ""]
    deepest = {r["model"]: max(o["layers"] for o in found if o["model"] == r["model"]) for r in found}
    for model, layers in sorted({(r["model"], r["layers"]) for r in found}):
        mine = [r for r in found if (r["model"], r["layers"]) == (model, layers)]
        mine.sort(key=lambda r: (r["context"], ENGINES.index(r["engine"]), str(_how(r))))
        out += [f"### {model}, {layers} layers", ""]
        header = [
            "context",
            "engine",
            "forward",
            "backward",
            "step",
            "first step",
            "GiB above the model",
            "of the roofline",
        ]
        rows = []
        for r in mine:
            start = [f"{r['context']:,}", f"{NAMES[r['engine']]}{_how(r)}"]
            if r["step_s"] is None:
                rows.append([*start, "", "", "out of memory", "", "", ""])
                continue
            times = [_seconds(r[k]) for k in ("forward_s", "backward_s", "step_s", "first_step_s")]
            if r["repeats"] == 0:
                times[:3] = ["", "", "first only"]
            # With few layers the last one, whose prompt needs keys only, would count too much.
            share = _percent(r.get("utilization")) if layers == deepest[model] and r["repeats"] else ""
            rows.append([*start, *times, _gib(r.get("above_weights_bytes")), share])
        out += table(header, rows)
    return out


def pictures(records: list[Record]) -> list[str]:
    names = drawings(records)
    return [line for name in names for line in (f"![{name.removesuffix('.svg').replace('_', ' ')}]({name})", "")]


def _how(r: Record) -> str:
    if r["engine"] != "longreach":
        return ""
    kept = PLACES[r["offload"]]
    every = r.get("keep_every", 1)
    kept += f", every {every} layers" if every > 1 else ""
    return f" ({kept}, chunk {r['chunk']:,}{', attention saved' if r['save_attention'] else ''})"


def groups(records: list[Record]) -> list[str]:
    trees, rows_of = (
        {(r["model"], r["layers"], r["context"], r["group"]): r for r in records if r["case"] == case}
        for case in ("group tree", "group rows")
    )
    for key in trees.keys() - rows_of.keys():  # a row of a group is a sequence of its length
        for r in records:
            if (r["engine"], r["case"], r["model"], r["layers"], r["context"]) == ("longreach", "sequence", *key[:3]):
                rows_of[key] = {**r, "step_s": r["step_s"] and key[3] * r["step_s"], "rows_run": 1}
    rows = []
    for key in sorted(trees.keys() & rows_of.keys(), key=lambda key: (key[0], key[2], key[1])):
        tree, single = trees[key], rows_of[key]
        if tree["step_s"] is None or single["step_s"] is None:
            continue
        gain = f"{single['step_s'] / tree['step_s']:.1f}×"
        prompt = key[2] - tree["completion"]
        run = single.get("rows_run", key[3])
        rows.append(
            [f"{key[0]}, {key[3]} × {tree['completion']:,} on {prompt:,}", f"{key[1]}", f"{tree['step_s']:.2f} s",
             f"{single['step_s']:.2f} s", "" if run == key[3] else f"{run}", gain, _gib(tree.get("above_weights_bytes"))]
        )  # fmt: skip
    if not rows:
        return []
    text = (
        "A GRPO group as a tree, and as rows of full length one after the other through the same engine; where only some of "
        "the equal rows were run, their time is scaled to all of them."
    )
    header = ["group", "layers", "tree", "rows", "of these run", "faster", "GiB above the model"]
    return ["## Groups that share a prompt", "", text, "", *table(header, rows)]


def everyday(records: list[Record]) -> list[str]:
    found = [r for r in records if r["case"] == "everyday"]
    found.sort(key=lambda r: (r["layers"], ENGINES.index(r["engine"])))
    rows = []
    for r in found:
        if r["step_s"] is None:
            rows.append([f"{r['layers']}", f"{NAMES[r['engine']]}{_how(r)}", "out of memory", "", ""])
            continue
        rows.append(
            [
                f"{r['layers']}",
                f"{NAMES[r['engine']]}{_how(r)}",
                f"{r['step_s']:.2f} s",
                _seconds(r["first_step_s"]),
                _gib(r.get("above_weights_bytes")),
            ]
        )
    if not rows:
        return []
    some = sorted({r["rows_run"] for r in found if r.get("rows_run", 64) < 64})
    scaled = f" (of their 64 equal rows {some[0]} were run, and the time scaled)" if some else ""
    text = (
        f"{found[0]['model']}: 8 prompts of 256 tokens, 8 completions of 1,024 each; the peers run padded rows, eight at "
        f"once{scaled}."
    )
    return [
        "## Everyday short rows",
        "",
        text,
        "",
        *table(["layers", "engine", "step", "first step", "GiB above the model"], rows),
    ]


def planner(result: Any) -> list[str]:
    if not result:
        return []
    against = {
        "cuda": f"`torch.cuda.max_memory_allocated` on {result['card']}",
        "meta": "a replay of the engine's own allocations on PyTorch's meta device (no GPU)",
    }[result["against"]]
    points = [p for p in result["points"] if p["measured_bytes"]]
    worst = max(abs(p["error"]) for p in points)
    within = sum(abs(p["error"]) <= 0.10 for p in points)
    text = (
        f"Predicted peak against {against}: {within} of {len(points)} points within 10%, the worst off by {worst:.1%}."
    )
    header = ["model, layers, weights", "context × rows", "policy", "planned GiB", "measured GiB", "error"]
    rows = [
        [f"{p['model']}, {p['layers']}, {p['weights']}", f"{p['context']:,} × {_rows(p)}", _policy(p),
         _gib(p["predicted_bytes"]), _gib(p["measured_bytes"]), f"{p['error']:+.1%}"]
        for p in points
    ]  # fmt: skip
    return ["## The planner", "", text, "", *table(header, rows)]


PLANNED = (
    ("Qwen3-4B", "nf4", {"lora": 16, "embedding": "int8"}),
    ("Qwen3-8B", "nf4", {"lora": 16, "embedding": "int8"}),
    ("gpt-oss-20b", "mxfp4", {"lora": 8, "embedding": "int8"}),
)
HOST = 256


@functools.cache
def longest() -> list[str]:
    """The longest context that fits each card, by the formula."""
    header = ["model, weights, LoRA", *(f"{amount // GB} GB" for amount in SIZES)]
    rows = []
    for name, weights, how in PLANNED:
        cells = []
        for amount in SIZES:
            asked = {"context": 2048, "completion": 1024, "optimizer": "adamw_8bit", "gpu_bytes": 10 * SIZES[-1]}
            made = plan(name, weights=weights, host_bytes=HOST * GB, **asked, **how)
            found = made.longest(gpu_bytes=amount)
            cells.append(f"{found // 1024:,}K" if found else "no")
        rows.append([f"{name}, {weights}, r={how['lora']}", *cells])
    text = (
        "Longest context of a training step by plan: completion 1,024, 8-bit AdamW, embedding and head in 8 bits, a host of "
        f"{HOST} GB, which is what limits all but the small cards (it keeps every k-th layer's input then)."
    )
    return ["### What fits, by plan", "", text, "", *table(header, rows)]


def _rows(point: Any) -> str:
    return f"{point['prompts']} × {point['group']}" if point["prompts"] > 1 else str(point["group"])


def _policy(point: Any) -> str:
    return str(Policy(point["chunk"], point["offload"], point["save_attention"], point["keep_every"]))


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def _seconds(time: float | None) -> str:
    return "" if time is None else f"{time:.2f} s"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def drawings(records: list[Record]) -> dict[str, str]:
    """Plots of memory and time against context, for each model at full depth that has two lengths or more."""
    out: dict[str, str] = {}
    found = [r for r in records if r["case"] == "sequence" and r["step_s"] is not None]
    for model in sorted({r["model"] for r in found}):
        depth = max(r["layers"] for r in found if r["model"] == model)
        series: dict[str, list[Record]] = {}
        for r in found:
            if r["model"] == model and r["layers"] == depth:
                series.setdefault(NAMES[r["engine"]] + _how(r), []).append(r)
        if max(len(s) for s in series.values()) < 2:
            continue
        stem = model.lower().replace(".", "_").replace("-", "_")
        memory = {
            n: [(r["context"], r["above_weights_bytes"] / GIB) for r in s if r.get("above_weights_bytes")]
            for n, s in series.items()
        }
        if any(memory.values()):
            out[f"memory_{stem}.svg"] = plots.lines(f"{model}: GiB above the loaded model", "GiB", memory)
        times = {n: [(r["context"], r["step_s"]) for r in s] for n, s in series.items()}
        out[f"time_{stem}.svg"] = plots.lines(f"{model}: seconds a step", "seconds", times)
    return out


if __name__ == "__main__":
    main()
