"""Full fine-tuning of every parameter, with gradients released layer by layer: peak memory and seconds of a whole step.

    python -m bench.full_finetune --model Qwen3-8B --lengths 4096,16384
    python -m bench.full_finetune --cases fp32+adamw@host --lengths 16384
    python -m bench.full_finetune --device cpu --tiny          # tests the script

A step is forward, backward and optimizer of one sequence; the loss is the mean negative log-prob of its last tokens. Weights
are random, of the real shapes. A case is WEIGHTS+OPTIMIZER@PLACE: weights bf16, or fp32 under bf16 autocast; optimizer adamw
(PyTorch's, fused), adamw8bit or paged8bit (bitsandbytes); place of its states device or host. `kept` for the place is the plain
loop, which holds all gradients until the end. The first step, which makes the states, is not timed.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from typing import Any

import torch

import longreach
from bench import measure, models

CASES = "fp32+adamw8bit@device,fp32+adamw@device,bf16+adamw8bit@device,bf16+adamw8bit@kept"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(model="Qwen3-8B", lengths=[4096, 16384], repeats=1, out=measure.RESULTS / "full_finetune.json")
    parser.add_argument("--cases", default=CASES, help=f"default: {CASES}")
    parser.add_argument("--offload", default="auto", help="of layer inputs (default: auto)")
    options = measure.parse(parser, argv)
    for case in options.cases.split(","):
        run_case(case, options)


def run_case(case: str, options: Any) -> None:
    weights, rest = case.split("+")
    kind, place = rest.split("@")
    shape = models.shape_of(options.model, options.layers, options.tiny)
    model = models.build(shape, max(options.lengths), options.device, dtype=DTYPES[weights])
    longreach.enable(model, offload=options.offload, parity_check=False)
    loaded = measure.loaded_bytes(options.device)
    optimizer = models.optimizer(kind, model.parameters())
    if place != "kept":
        optimizer = longreach.release_gradients(model, optimizer, states=place)
    for length in options.lengths:
        entry = {
            "engine": "longreach", "case": case, "model": shape.name, "layers": shape.layers, "context": length,
            "completion": options.completion, "parameters": sum(p.numel() for p in model.parameters()),
            "loaded_bytes": loaded, "policy": policy(model, length, options),
        }  # fmt: skip
        try:
            entry |= measured(model, optimizer, shape, length, weights, options)
        except torch.OutOfMemoryError as error:
            entry |= {"step_s": None, "error": str(error).split(". ")[0]}
        measure.record(options.out, entry, options.commit)
    del model, optimizer
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def policy(model: Any, length: int, options: Any) -> str:
    """How the engine runs this length."""
    from longreach.context.install import engine_of

    engine = engine_of(model)
    assert engine is not None
    return str(engine.settle(length, options.completion, True).policy)


def measured(model: Any, optimizer: Any, shape: Any, length: int, weights: str, options: Any) -> dict[str, Any]:
    ids = models.token_ids(length, shape.vocab)
    tree = longreach.TokenTree.from_groups([(ids[: -options.completion], [ids[-options.completion :]])])
    cast = torch.autocast(options.device, torch.bfloat16) if weights == "fp32" else contextlib.nullcontext()
    seconds, losses, peak = [], [], None
    for number in range(options.repeats + 1):
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        measure.synchronize(options.device)
        start = time.perf_counter()
        with cast:
            loss = -torch.cat(longreach.token_logprobs(model, tree)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measure.synchronize(options.device)
        if number:
            seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
        del loss  # with it goes the step's host memory, which the next one takes
        peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    step_s = statistics.median(seconds)
    above = None if peak is None else peak - measure_states(model, optimizer)
    return {
        "step_s": step_s, "repeats": len(seconds), "losses": losses, "peak_bytes": peak,
        "states_bytes": measure_states(model, optimizer) - weight_bytes(model), "above_weights_and_states_bytes": above,
        "grad_norm": None if getattr(optimizer, "grad_norm", None) is None else float(optimizer.grad_norm),
    }  # fmt: skip


def weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def measure_states(model: Any, optimizer: Any) -> int:
    """Bytes of the weights and of the optimizer states that are on their device."""
    states = [x for held in optimizer.state.values() for x in held.values() if isinstance(x, torch.Tensor)]
    device = next(model.parameters()).device
    seen = {x.data_ptr(): x.numel() * x.element_size() for x in states if x.device == device}
    return weight_bytes(model) + sum(seen.values())


if __name__ == "__main__":
    main()
