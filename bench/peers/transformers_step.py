"""The same training step through stock Transformers and PEFT: sdpa attention, gradient checkpointing, bf16.

    python -m bench.peers.transformers_step --lengths 16384,32768

The head runs on the tokens with a loss alone, as TRL does it. The everyday case runs its 64 rows in batches of eight.
"""

from __future__ import annotations

from typing import Any

import torch
from bench.train_step import EVERYDAY

from bench import measure, models

BATCH = 8  # rows at once in the everyday case


def main(argv: list[str] | None = None) -> None:
    options = measure.parse(measure.arguments(__doc__ or ""), argv)
    shape = models.shape_of(options.model, options.layers, options.tiny)
    model = models.adapt(models.build(shape, max([*options.lengths, 2048]), options.device))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    run_cases(options, shape, model, "transformers", lambda ids, completion: loss(model, ids, completion))


def loss(model: Any, ids_BS: torch.Tensor, completion: int) -> torch.Tensor:
    logits = model(input_ids=ids_BS, use_cache=False, logits_to_keep=completion + 1).logits[:, :-1]
    labels = ids_BS[:, -completion:]
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def run_cases(options: Any, shape: Any, model: Any, engine: str, loss_of: Any) -> None:
    """The sequence cases and, if asked for, the everyday case of any engine that takes padded rows."""
    device = options.device
    loaded = measure.loaded_bytes(device)

    def note(case: str, step: Any, *, context: int, completion: int, group: int = 1, prompts: int = 1) -> None:
        found = measure.attempt(
            step, model, loaded=loaded, device=device, repeats=options.repeats, budget=options.budget
        )
        entry = {
            "engine": engine, "case": case, "model": shape.name, "layers": shape.layers, "dtype": "bf16",
            "context": context, "completion": completion, "group": group, "prompts": prompts, **found,
        }  # fmt: skip
        if found["step_s"] is not None:
            entry["utilization"] = measure.utilization(shape, context, completion, group, prompts, found["step_s"])
        measure.record(options.out, entry, options.commit)

    for length in options.lengths:
        ids = models.token_ids(length, shape.vocab)[None].to(device)
        note(
            "sequence", lambda ids=ids: measure.timed_step(lambda: loss_of(ids, options.completion), device),
            context=length, completion=options.completion,
        )  # fmt: skip
    if options.everyday:
        prompts, size, prompt, completion = EVERYDAY
        if options.tiny:
            prompt, completion = prompt // 64, completion // 64
        batches = everyday_rows(shape.vocab, prompts, size, prompt, completion).to(device).split(BATCH)

        def step() -> tuple[float, float]:
            parts = [measure.timed_step(lambda b=b: loss_of(b, completion) / len(batches), device) for b in batches]
            return sum(p[0] for p in parts), sum(p[1] for p in parts)

        note("everyday", step, context=prompt + completion, completion=completion, group=size, prompts=prompts)


def everyday_rows(vocab: int, prompts: int, size: int, prompt: int, completion: int) -> torch.Tensor:
    """[prompts * size, prompt + completion]: the rows of the tree in `train_step.py`."""
    rows = []
    for i in range(prompts):
        root = models.token_ids(prompt, vocab, seed=i)
        rows += [torch.cat([root, models.token_ids(completion, vocab, seed=99 + i * size + j)]) for j in range(size)]
    return torch.stack(rows)


if __name__ == "__main__":
    main()
