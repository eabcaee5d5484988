"""The planner against the card: predicted peak of a step beside `torch.cuda.max_memory_allocated`.

    python -m bench.planner                       # on a GPU, about a minute and a half
    python -m bench.planner --only dense          # or: streamed, packed: a part of the points, which joins the file
    python -m bench.planner --missing             # what the file does not have yet
    python -m bench.planner --join                # add the steps that bench.train_step has measured
    python -m bench.planner --device meta         # against a replay of the engine's allocations, without a GPU
    python -m bench.planner --device meta --tiny  # a few points of it: tests the script

Models of few layers and real widths, several lengths, groups, policies and forms of weights; a step is forward, backward and
AdamW, whose states are there before it. Written to bench/results/planner.json with the relative error of each point.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import longreach
from bench import measure, models
from longreach.context.memory import step_memory
from longreach.context.policy import Policy
from longreach.context.shape import ModelShape
from longreach.context.work import Work

ALLOWED = 0.10


@dataclass(frozen=True)
class Step:
    """One point: rows and how they run."""

    context: int
    policy: Policy
    group: int = 1
    prompts: int = 1
    completion: int = 1024


def _step(context: int, chunk: int, offload: str, save: bool = False, keep: int = 1, **rows: int) -> Step:
    return Step(context, Policy(chunk, offload, save, keep), **rows)


K = 1024
# part, model, layers, weights, steps
CASES: tuple[tuple[str, str, int, str, tuple[Step, ...]], ...] = (
    ("streamed", "Qwen3-1.7B", 6, "bf16", (
        _step(32 * K, 4 * K, "rows", True), _step(64 * K, 8 * K, "keys", True), _step(128 * K, 8 * K, "keys", True),
    )),
    ("streamed", "Qwen3-4B", 6, "bf16", (
        _step(32 * K, 4 * K, "host", keep=3), _step(64 * K, 8 * K, "rows", True), _step(64 * K, 4 * K, "keys", keep=2),
        _step(32 * K, 8 * K, "keys", True, group=8),
    )),
    ("dense", "Qwen3-4B", 4, "bf16", (
        _step(4 * K, 1 * K, "host", True), _step(16 * K, 4 * K, "none", True), _step(32 * K, 8 * K, "host", group=4),
        _step(64 * K, 8 * K, "host", True),
    )),
    ("dense", "Qwen3-0.6B", 8, "bf16", (
        _step(8 * K, 8 * K, "none"), _step(32 * K, 8 * K, "host", group=8), _step(64 * K, 8 * K, "host", True),
        _step(1280, 8 * K, "host", True, prompts=8, group=8),
    )),
    ("dense", "Qwen3-1.7B", 6, "bf16", (
        _step(32 * K, 8 * K, "none"), _step(32 * K, 4 * K, "host"), _step(32 * K, 8 * K, "host", True, group=8),
    )),
    ("dense", "Qwen3-8B", 4, "bf16", (_step(32 * K, 8 * K, "none"), _step(32 * K, 2 * K, "host", True))),
    ("dense", "Llama-3.1-8B", 4, "bf16", (_step(32 * K, 8 * K, "none"),)),
    ("dense", "Gemma-3-12B", 6, "bf16", (_step(32 * K, 8 * K, "host"),)),
    ("packed", "Qwen3-4B", 6, "nf4", (
        _step(4 * K, 1 * K, "host", True), _step(32 * K, 4 * K, "host", True), _step(64 * K, 8 * K, "keys", True),
    )),
    ("packed", "gpt-oss-20b", 4, "mxfp4", (
        _step(8 * K, 2 * K, "none", True), _step(32 * K, 4 * K, "host", True), _step(64 * K, 8 * K, "keys", True),
    )),
    ("packed", "gpt-oss-20b", 4, "bf16", (_step(32 * K, 8 * K, "host", True),)),
)  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "meta"))
    parser.add_argument("--only", default=None, choices=("dense", "streamed", "packed"), help="one part of the points")
    parser.add_argument("--missing", action="store_true", help="keep the file's points, and run those that it lacks")
    parser.add_argument(
        "--join", action="store_true", help="add the steps of full depth in bench/results/train_step.json"
    )
    parser.add_argument("--tiny", action="store_true", help="two layers of one model")
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "planner.json")
    parser.add_argument("--commit", default=None, help="commit to note where git is not at hand")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; --device meta replays the engine's allocations")
    held = _held(options.out, options.device) if options.only or options.missing else []
    if options.join:
        _join(options.out)
        return
    points: list[dict[str, Any]] = []
    for part, name, layers, weights, steps in CASES:
        if options.only not in (None, part) or (options.device == "meta" and weights != "bf16"):
            continue
        if options.tiny and name != "Qwen3-0.6B":
            continue
        if options.missing:
            steps = tuple(step for step in steps if not _has(held, name, step, weights))
        if not steps:
            continue
        points += _case(part, name, 2 if options.tiny else layers, weights, steps, options.device)
        points_now = [old for old in held if options.missing or old["part"] != options.only] + points
        result = {"against": options.device, "points": points_now, **measure.provenance(options.commit)}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    measured = [p for p in points if p["measured_bytes"]]
    within = sum(abs(p["error"]) <= ALLOWED for p in measured)
    print(f"{within} of {len(measured)} within {ALLOWED:.0%}; {len(points) - len(measured)} did not run")


def _join(path: Path) -> None:
    """Steps that `bench.train_step` measured, which has no optimizer, beside their plan."""
    result = json.loads(path.read_text(encoding="utf-8"))
    records = json.loads((measure.RESULTS / "train_step.json").read_text(encoding="utf-8"))
    found = []
    for r in records:
        if (
            r["engine"] != "longreach"
            or r["case"] == "group rows"
            or not r.get("peak_bytes")
            or r.get("weights", "bf16") != "bf16"
        ):
            continue
        shape = models.shape_of(r["model"], r["layers"], tiny=False)
        policy = Policy(r["chunk"], r["offload"], r["save_attention"], r.get("keep_every", 1))
        step = Step(r["context"], policy, r["group"], r["prompts"], r["completion"])
        plan = step_memory(_work(shape, step, "bf16", dict.fromkeys(shape.linears, models.RANK)), policy)
        predicted = plan.gpu - plan.parts["optimizer states"]
        found.append({
            "part": "whole", "model": shape.name, "layers": shape.layers, **_facts(step, "bf16"), "moment": plan.moment,
            "parts": dict(plan.parts), "host_bytes": plan.host, "predicted_bytes": predicted,
            "measured_bytes": r["peak_bytes"], "error": predicted / r["peak_bytes"] - 1,
        })  # fmt: skip
        print(_line(found[-1]))
    result["points"] = [old for old in result["points"] if old["part"] != "whole"] + found
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _work(shape: ModelShape, step: Step, weights: str, ranks: dict[str, int]) -> Work:
    return Work(shape, step.context, step.completion, step.group, weights, ranks, prompts=step.prompts)


def _held(path: Path, device: str) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [p for p in found["points"] if "part" in p] if found["against"] == device else []


def _has(held: list[dict[str, Any]], name: str, step: Step, weights: str) -> bool:
    wanted = {"model": name, **_facts(step, weights)}
    return any(old["measured_bytes"] and all(old[key] == value for key, value in wanted.items()) for old in held)


def _case(
    part: str, name: str, layers: int, weights: str, steps: tuple[Step, ...], device: str
) -> list[dict[str, Any]]:
    shape = models.shape_of(name, layers, tiny=False)
    bare = models.build(shape, 131072 + 2048, device)
    model = models.adapt(bare if weights == "bf16" else models.pack(bare, weights))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device == "cuda")
    if device == "cuda":
        warm_up(shape, model, optimizer)
    found = []
    for step in steps:
        began = time.perf_counter()
        try:
            made = point(shape, model, optimizer, step, device, weights)
        except (RuntimeError, ValueError) as error:  # one point that does not run is reported beside the others
            made = {"model": name, "layers": layers, "measured_bytes": None, "why": f"{type(error).__name__}: {error}"}
            made |= _facts(step, weights)
        found.append({"part": part, **made})
        print(_line(found[-1]), f"{time.perf_counter() - began:.1f} s", flush=True)
    del bare, model, optimizer, trained
    gc.collect()
    return found


def warm_up(shape: ModelShape, model: Any, optimizer: Any) -> None:
    """The optimizer's states, libraries' workspaces, compiled kernels."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    on_card(model, optimizer, _tree(shape, Step(4096, Policy(2048, "none"))), {"chunk": 2048, "offload": "none"})


def _facts(step: Step, weights: str) -> dict[str, Any]:
    policy = step.policy
    return {
        "weights": weights, "context": step.context, "completion": step.completion, "group": step.group,
        "prompts": step.prompts, "chunk": policy.chunk, "offload": policy.offload,
        "save_attention": policy.save_attention, "keep_every": policy.keep_every,
    }  # fmt: skip


def _tree(shape: ModelShape, step: Step) -> longreach.TokenTree:
    leaves = [models.token_ids(step.completion, shape.vocab, seed=i + 1) for i in range(step.group)]
    prompts = [models.token_ids(step.context - step.completion, shape.vocab, seed=100 + i) for i in range(step.prompts)]
    return longreach.TokenTree.from_groups([(prompt, leaves) for prompt in prompts])


def point(
    shape: ModelShape, model: Any, optimizer: Any, step: Step, device: str, weights: str = "bf16"
) -> dict[str, Any]:
    """One step beside its plan."""
    ranks = {name: models.RANK for name in shape.linears if _adapted(model, name)}
    work = _work(shape, step, weights, ranks)
    plan, tree, how = step_memory(work, step.policy), _tree(shape, step), step.policy.options
    if device == "cuda":
        predicted, measured = plan.gpu, on_card(model, optimizer, tree, how)
    else:
        from bench.replay import replay

        optimizer.zero_grad()
        # A replay counts neither the loaded model nor what libraries take.
        predicted, measured = plan.above_weights - plan.parts["kernel libraries"], replay(model, tree, **how).peak
    return {
        "model": shape.name, "layers": shape.layers, **_facts(step, weights), "moment": plan.moment,
        "parts": dict(plan.parts), "host_bytes": plan.host, "predicted_bytes": predicted, "measured_bytes": measured,
        "error": predicted / measured - 1,
    }  # fmt: skip


def _adapted(model: Any, name: str) -> bool:
    return any(f".{name}.lora_A" in key for key, _ in model.named_parameters())


def on_card(model: Any, optimizer: Any, tree: Any, how: dict[str, Any]) -> int:
    """Peak bytes of one step."""
    longreach.enable(model, parity_check=False, **how)
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    (-torch.cat(longreach.token_logprobs(model, tree)).mean()).backward()
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _line(found: dict[str, Any]) -> str:
    which = Policy(found["chunk"], found["offload"], found["save_attention"], found["keep_every"])
    at = f"{found['model']}/{found['layers']} {found['weights']} {found['context']:>7} x{found['prompts']}x{found['group']}"
    if not found["measured_bytes"]:
        return f"{at:40} {which!s:58} {found['why'][:200]}"
    sizes = f"{found['predicted_bytes'] / 2**30:6.2f} planned, {found['measured_bytes'] / 2**30:6.2f} GiB"
    return f"{at:40} {which!s:58} {sizes} {found['error']:+.1%} ({found['moment']})"


if __name__ == "__main__":
    main()
