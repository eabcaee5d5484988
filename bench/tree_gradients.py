"""Gradients of a group as a tree, against its rows of full length one after the other; both against rows in fp32.

    python -m bench.tree_gradients
    python -m bench.tree_gradients --device cpu --tiny          # tests the script

LoRA gradients of 8 completions on one prompt, few layers of real widths, the same weights in bf16 and in fp32. A tree whose
gradients are right differs from the rows in bf16 by no more than the rows in bf16 differ from those in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

import longreach
from bench import measure, models

GROUP = 8
KEY = ("model", "layers", "prompt", "completion", "chunk")


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(
        out=measure.RESULTS / "tree_gradients.json", model="Qwen3-0.6B", layers=4, lengths=[2048], completion=256
    )
    parser.add_argument("--chunk", type=int, default=1024, help="tokens per chunk (default: 1024)")
    options = measure.parse(parser, argv)
    shape = models.shape_of(options.model, options.layers, options.tiny)
    for prompt in options.lengths:
        found = differences(options, shape, prompt)
        entry = {"model": shape.name, "layers": shape.layers, "prompt": prompt, "completion": options.completion}
        entry |= {"group": GROUP, "chunk": options.chunk, **found}
        measure.put(options.out, entry, options.commit, KEY)
        print(shape.name, prompt, {name: f"{value:.2e}" for name, value in found.items()}, flush=True)


def differences(options: Any, shape: Any, prompt: int) -> dict[str, float]:
    """Norms of differences of all gradients, relative to the rows' in fp32."""
    root = models.token_ids(prompt, shape.vocab)
    leaves = [models.token_ids(options.completion, shape.vocab, seed=1 + i) for i in range(GROUP)]
    tree = [longreach.TokenTree.from_groups([(root, leaves)])]
    rows = [longreach.TokenTree.from_groups([(root, [leaf])]) for leaf in leaves]
    found = {}
    model = models.adapt(models.build(shape, prompt + options.completion, options.device))
    for name in ("bf16", "fp32"):
        model = model.float() if name == "fp32" else model  # the values of bf16 in a wider type
        longreach.enable(model, chunk=options.chunk, offload="none", parity_check=False)
        found[name] = [gradients(model, trees) for trees in (tree, rows)]
    (tree_16, rows_16), (tree_32, rows_32) = found["bf16"], found["fp32"]
    return {
        "bf16_tree_to_rows": measure.difference(tree_16, rows_16, rows_32),
        "bf16_rows_to_fp32": measure.difference(rows_16, rows_32),
        "bf16_tree_to_fp32": measure.difference(tree_16, rows_32),
        "fp32_tree_to_rows": measure.difference(tree_32, rows_32),
    }


def gradients(model: Any, trees: list[Any]) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    for tree in trees:
        (-torch.cat(longreach.token_logprobs(model, tree)).sum()).backward()
    return [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]


if __name__ == "__main__":
    main()
