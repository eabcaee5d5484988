"""The planner against the card: predicted peak of a step beside `torch.cuda.max_memory_allocated`.

    python -m bench.planner                       # on a GPU, about two minutes
    python -m bench.planner --device meta         # against a replay of the engine's allocations, without a GPU
    python -m bench.planner --device meta --tiny  # a few points of it: tests the script

Models of few layers and real widths, several lengths, groups and policies; a step is forward, backward and AdamW, the second of
two, so that optimizer states are there. Written to bench/results/planner.json with the relative error of each point.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from pathlib import Path
from typing import Any

import torch

import longreach
from bench import measure, models
from longreach.context.memory import Policy, Work, step_memory
from longreach.context.shape import ModelShape

COMPLETION = 1024
ALLOWED = 0.10
# context, group, chunk, offload, save_attention
STEPS = (
    (8192, 1, 8192, "none", False),
    (32768, 1, 8192, "none", False),
    (32768, 1, 4096, "host", False),
    (32768, 8, 8192, "host", False),
    (65536, 1, 8192, "host", True),
    (131072, 1, 8192, "host", False),
)
MODELS = (("Qwen3-0.6B", 8), ("Qwen3-1.7B", 6), ("Qwen3-4B", 4), ("Qwen3-8B", 4))
EXTRA = (("Llama-3.1-8B", 4, STEPS[1]), ("Gemma-3-12B", 6, STEPS[1]), ("Gemma-3-12B", 6, STEPS[5]))
TINY = tuple((1024 * context // 32768, group, 256, *rest) for context, group, _, *rest in STEPS[1:5])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "meta"))
    parser.add_argument("--tiny", action="store_true", help="one model, four short points")
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "planner.json")
    parser.add_argument("--commit", default=None, help="commit to note where git is not at hand")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; --device meta replays the engine's allocations")
    points = []
    for (name, layers), group in itertools.groupby(_points(options.tiny), key=lambda point: point[:2]):
        shape = models.shape_of(name, layers, tiny=False)
        model = models.adapt(models.build(shape, 131072 + COMPLETION, options.device))
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=options.device == "cuda"
        )
        for *_, step in group:
            points.append(point(shape, model, optimizer, step, options.device))
            print(_line(points[-1]), flush=True)
        del model, optimizer
        gc.collect()
    within = sum(abs(p["error"]) <= ALLOWED for p in points)
    print(f"{within} of {len(points)} within {ALLOWED:.0%}")
    result = {"against": options.device, "points": points, **measure.provenance(options.commit)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _points(tiny: bool) -> list[tuple[str, int, Any]]:
    if tiny:
        return [("Qwen3-0.6B", 2, step) for step in TINY]
    return [(name, layers, step) for name, layers in MODELS for step in STEPS] + list(EXTRA)


def point(shape: ModelShape, model: Any, optimizer: Any, step: Any, device: str) -> dict[str, Any]:
    context, group, chunk, offload, save = step
    completion = min(COMPLETION, context // 4)
    work = Work(shape, context, completion, group, "bf16", dict.fromkeys(shape.linears, models.RANK))
    plan = step_memory(work, Policy(chunk, offload, save))
    root = models.token_ids(work.prompt, shape.vocab)
    tree = longreach.TokenTree.from_groups(
        [(root, [models.token_ids(completion, shape.vocab, seed=i + 1) for i in range(group)])]
    )
    how = {"chunk": chunk, "offload": offload, "save_attention": save}
    if device == "cuda":
        predicted, measured = plan.gpu, on_card(model, optimizer, tree, how)
    else:
        from bench.replay import replay

        optimizer.zero_grad()
        # A replay counts neither the loaded model nor what libraries take.
        predicted, measured = plan.above_weights - plan.parts["kernel libraries"], replay(model, tree, **how).peak
    return {
        "model": shape.name, "layers": shape.layers, "context": context, "completion": completion, "group": group, **how,
        "moment": plan.moment, "parts": dict(plan.parts), "predicted_bytes": predicted, "measured_bytes": measured,
        "error": predicted / measured - 1,
    }  # fmt: skip


def on_card(model: Any, optimizer: Any, tree: Any, how: dict[str, Any]) -> int:
    longreach.enable(model, parity_check=False, **how)
    peak = 0
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        (-torch.cat(longreach.token_logprobs(model, tree)).mean()).backward()
        optimizer.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    return peak


def _line(found: dict[str, Any]) -> str:
    which = Policy(found["chunk"], found["offload"], found["save_attention"])
    sizes = f"{found['predicted_bytes'] / 2**30:6.2f} planned, {found['measured_bytes'] / 2**30:6.2f} GiB"
    at = f"{found['model']}/{found['layers']} {found['context']:>7} x{found['group']}"
    return f"{at:32} {which!s:46} {sizes} {found['error']:+.1%} ({found['moment']})"


if __name__ == "__main__":
    main()
