"""The same training step through stock Transformers and PEFT: sdpa attention, gradient checkpointing, bf16.

    python -m bench.peers.transformers_step --lengths 16384,32768

The head runs on the tokens with a loss alone, as TRL does it. The everyday case runs its 64 rows in batches of eight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from bench.train_step import EVERYDAY

from bench import measure, models

BATCH = 8  # rows at once in the everyday case


def main(argv: list[str] | None = None) -> None:
    options = measure.parse(measure.peer_arguments(__doc__ or ""), argv)
    shape = models.shape_of(options.model, options.layers, options.tiny)
    model = models.adapt(models.build(shape, measure.longest(options), options.device))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    run_cases(options, shape, model, "transformers", lambda ids, completion: loss(model, ids, completion))


def loss(model: Any, ids_BS: torch.Tensor, completion: int) -> torch.Tensor:
    logits = model(input_ids=ids_BS, use_cache=False, logits_to_keep=completion + 1).logits[:, :-1]
    labels = ids_BS[:, -completion:]
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def run_cases(options: Any, shape: Any, model: Any, engine: str, loss_of: Any, *, weights: str = "bf16") -> None:
    """The sequence cases and, if asked for, the everyday case of any engine that takes padded rows."""
    device = options.device
    loaded = measure.loaded_bytes(device)
    decoder = model.get_base_model().get_decoder()
    every = decoder.layers

    def run(name: str, step: Any, layers: int = 0, **at: int) -> None:
        """One case, on so many layers if it says so; the others stay loaded, and count as such."""
        model.zero_grad(set_to_none=True)
        decoder.layers = every[:layers] if layers else every
        how = {"loaded": loaded, "device": device, "budget": options.budget}
        if not warmed and options.warm:
            measure.attempt(step, model, repeats=0, **how)
            return
        found = measure.attempt(step, model, repeats=options.repeats, warmed=warmed, **how)
        at = {"group": 1, "prompts": 1, **at}
        cut = dataclasses.replace(shape, layers=layers, windows=shape.windows[:layers]) if layers else shape
        entry = {
            "engine": engine,
            "case": name,
            "model": shape.name,
            "layers": cut.layers,
            "dtype": "bf16",
            **at,
            **found,
        }
        if found["step_s"] is not None:
            entry["utilization"] = measure.utilization(cut, **at, seconds=found["step_s"])
        if weights != "bf16":
            entry["weights"] = weights
        if name == "everyday":
            entry["rows_run"] = options.everyday_batches * BATCH
        measure.record(options.out, entry, options.commit)

    warmed = False
    if options.warm:
        for name, step, at in cases(options, shape, loss_of):
            run(name, step, **at)
        warmed = True
    measure.wait_for(options.after)
    for name, step, at in cases(options, shape, loss_of):
        run(name, step, **at)
    decoder.layers = every


def cases(options: Any, shape: Any, loss_of: Any) -> Iterator[tuple[str, Any, dict[str, int]]]:
    """Name, step and sizes of each."""
    device = options.device
    for length, layers in [*((n, 0) for n in options.lengths), *options.shallow]:
        ids = models.token_ids(length, shape.vocab)[None].to(device)
        at = {"layers": layers, "context": length, "completion": options.completion}
        yield "sequence", lambda ids=ids: measure.timed_step(lambda: loss_of(ids, options.completion), device), at
    if options.everyday:
        prompts, size, prompt, completion = EVERYDAY
        if options.tiny:
            prompt, completion = prompt // 64, completion // 64
        batches = everyday_rows(shape.vocab, prompts, size, prompt, completion).to(device).split(BATCH)
        some, scale = batches[: options.everyday_batches], len(batches) / options.everyday_batches

        def step() -> tuple[float, float]:
            parts = [measure.timed_step(lambda b=b: loss_of(b, completion) / len(batches), device) for b in some]
            return sum(p[0] for p in parts) * scale, sum(p[1] for p in parts) * scale

        yield (
            "everyday",
            step,
            {"context": prompt + completion, "completion": completion, "group": size, "prompts": prompts},
        )


def everyday_rows(vocab: int, prompts: int, size: int, prompt: int, completion: int) -> torch.Tensor:
    """[prompts * size, prompt + completion]: the rows of the tree in `train_step.py`."""
    rows = []
    for i in range(prompts):
        root = models.token_ids(prompt, vocab, seed=i)
        rows += [torch.cat([root, models.token_ids(completion, vocab, seed=99 + i * size + j)]) for j in range(size)]
    return torch.stack(rows)


if __name__ == "__main__":
    main()
