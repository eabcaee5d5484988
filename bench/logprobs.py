"""How far the log-probs of the rollout engine, of the trainer and of exact arithmetic lie apart, on the same tokens.

    python -m bench.rollout --logprobs                       # after the timings
    python -m bench.logprobs --layers 36                     # alone
    python -m bench.logprobs --device cpu --tiny             # tests the script

Three scores of the tokens that the engine drew: its own, the trainer's in bf16 and the trainer's in fp32 (the same weights,
every product and sum in fp32). Rounding alone sets the trainer in bf16 apart from fp32; an engine whose distance from the
trainer is about that, and which is no further from fp32 than the trainer is, adds nothing of its own. All depend on the weights:
adapters as strong as the layers themselves, which is what PEFT's random start makes, are noisier than trained ones.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

import longreach
from bench import measure, models
from longreach.rollout import SamplingParams, generate, release_rollout

GROUP = 8
KEY = ("engine", "case", "model", "layers", "weights", "prompt", "new", "adapters")
TOKENS = 160  # of a completion: 8 groups of 8 make 10,240
ADAPTERS = {"random": None, "trained": 1e-3}  # standard deviation of B; None leaves PEFT's random start, about 0.1


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(out=measure.RESULTS / "rollout.json", lengths=[1024])
    parser.add_argument("--new", type=int, default=TOKENS, help=f"tokens of a completion (default: {TOKENS})")
    options = measure.parse(parser, argv)
    shape = models.shape_of(options.model, options.layers, options.tiny)
    length = options.lengths[0]
    model = models.adapt(models.build(shape, length + options.new + 64, options.device))
    prompts = [models.token_ids(length, shape.vocab, seed=i).tolist() for i in range(8)]
    for adapters in ADAPTERS:
        found = differences(model, prompts, options.new, adapters)
        entry = {
            "engine": "longreach log-probs", "case": "log-probs", "model": shape.name, "layers": shape.layers, "weights": "bf16",
            "prompt": length, "new": options.new, **found,
        }  # fmt: skip
        measure.put(options.out, entry, options.commit, KEY)
        print(text_of(found), flush=True)


def differences(model: Any, prompts: list[list[int]], new: int, adapters: str) -> dict[str, Any]:
    """Mean and 99th percentile of |difference| in nats, of every pair of the three.

    Args:
        model: with adapters, whose B are drawn anew where `adapters` says how strong they are.
        adapters: a key of ADAPTERS.
    """
    if (spread := ADAPTERS[adapters]) is not None:
        _draw_b(model, spread)
    sampling = SamplingParams(max_new_tokens=new, stop_ids=())
    out = generate(model, prompts, sampling=sampling, group=GROUP)
    groups = [(p, [c.ids for c in out[i * GROUP : i * GROUP + GROUP]]) for i, p in enumerate(prompts)]
    tree = longreach.TokenTree.from_groups(groups)
    engine = torch.cat([torch.tensor(c.logprobs) for c in out])
    trainer = _scored(model, tree)
    release_rollout(model)
    exact = _scored(copy.deepcopy(model).float(), tree)
    found: dict[str, Any] = {"adapters": adapters, "tokens": len(engine), "mean_logprob": float(exact.mean())}
    for name, a, b in (
        ("engine_trainer", engine, trainer), ("trainer_fp32", trainer, exact), ("engine_fp32", engine, exact)
    ):  # fmt: skip
        gap = (a - b).abs()
        found |= {f"{name}_mean": float(gap.mean()), f"{name}_p99": float(gap.quantile(0.99))}
    return found


def text_of(found: dict[str, Any]) -> str:
    pairs = (
        ("engine_trainer", "engine to trainer"),
        ("trainer_fp32", "trainer to fp32"),
        ("engine_fp32", "engine to fp32"),
    )
    parts = [f"{words} {found[f'{name}_mean']:.5f} (p99 {found[f'{name}_p99']:.4f})" for name, words in pairs]
    return f"log-probs, {found['adapters']} adapters, {found['tokens']:,} tokens, nats: {', '.join(parts)}"


def _draw_b(model: Any, spread: float) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=spread)


def _scored(model: Any, tree: longreach.TokenTree) -> torch.Tensor:
    longreach.enable(model, parity_check=False)
    with torch.no_grad():
        return torch.cat(longreach.token_logprobs(model, tree)).float().cpu()


if __name__ == "__main__":
    main()
