"""A GRPO step whose prompts' forward was the rollout's prefill: seconds, memory and gradients, with and without reusing it.

    python -m bench.prefill_reuse --cases 32768+1024x8,8*2048+1024x8
    python -m bench.prefill_reuse --cases 32768+1024x8 --offload host
    python -m bench.prefill_reuse --device cpu --cases 2048+256x4 --small          # the CPU figure
    python -m bench.prefill_reuse --device cpu --tiny                              # tests the script

A case PROMPTS*PROMPT+COMPLETIONxGROUP is one optimizer step: the prompts are put through the rollout engine's prefill, then each
group is a micro-batch of random completions, forward and backward, gradients summed. LoRA r=32, random weights of the real shape.
Chunk and policy are the planner's for the step. Medians of the rounds after the first, in which both ways take turns. The case of
several prompts has a difference of rounding: the rollout puts short prompts into one chunk.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from typing import Any

import torch

import longreach
from bench import measure, models
from longreach.context.logprob import score
from longreach.context.reuse import Prefill
from longreach.rollout import RolloutOptions, SamplingParams, rollout_engine
from longreach.rollout.completion import requests_of

KEY = ("model", "layers", "device", "prompts", "prompt", "completion", "group", "offload", "chunk", "save_attention")
CASE = re.compile(r"(?:(\d+)\*)?(\d+)\+(\d+)x(\d+)")


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(out=measure.RESULTS / "prefill_reuse.json")
    parser.add_argument("--cases", type=cases, default=cases("32768+1024x8,8*2048+1024x8"))
    parser.add_argument("--offload", default=None, help="where layer inputs wait (default: the planner's choice)")
    parser.add_argument("--small", action="store_true", help="a model of 512 x 4 layers in fp32, for a CPU")
    options = measure.parse(parser, argv)
    if options.tiny:
        options.cases = [
            (prompts, prompt // 64, max(new // 64, 4), group) for prompts, prompt, new, group in options.cases
        ]
    shape = models.shape_of(options.model, options.layers, options.tiny or options.small)
    model = made(options, shape, max(prompt + completion for _, prompt, completion, _ in options.cases))
    made_ready = [Case(options, shape, model, *case) for case in options.cases]
    for case in made_ready:
        case.round()
    measure.wait_for(options.after)
    for case in made_ready:
        case.run()


def cases(text: str) -> list[tuple[int, int, int, int]]:
    """(prompts, tokens of a prompt, of a completion, completions of a prompt) of each case."""
    found = [CASE.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise ValueError(f"--cases {text!r}: give PROMPTS*PROMPT+COMPLETIONxGROUP, e.g. 8*2048+1024x8")
    return [tuple(int(n or 1) for n in match.groups()) for match in found if match]  # type: ignore[misc]


def made(options: Any, shape: Any, positions: int) -> Any:
    """The model with its adapter."""
    if not options.small:
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        return models.adapt(models.build(shape, positions, options.device, dtype=dtype))
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=4096, max_position_embeddings=positions + 64,
    )  # fmt: skip
    return models.adapt(Qwen3ForCausalLM(config).train())


class Case:
    """One case, on the model that all share."""

    def __init__(
        self, options: Any, shape: Any, model: Any, prompts: int, prompt: int, completion: int, group: int
    ) -> None:
        self.options, self.shape, self.model, self.device = options, shape, model, options.device
        self.size = {"prompts": prompts, "prompt": prompt, "completion": completion, "group": group}
        plan = longreach.plan(
            self.model, context=prompt + completion, completion=completion, group=group, lora=models.RANK,
            weights="bf16" if self.device == "cuda" else "fp32", offload=options.offload,
        )  # fmt: skip
        self.policy = plan.policy
        self.rounds: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        self.gradients: dict[bool, list[torch.Tensor]] = {}
        self.plan = plan
        vocabulary = self.model.config.vocab_size
        self.prompts = [models.token_ids(prompt, vocabulary, seed=i).tolist() for i in range(prompts)]
        self.completions = [
            [models.token_ids(completion, vocabulary, seed=1000 + i * group + g) for g in range(group)]
            for i in range(prompts)
        ]

    def rollout(self, keep: Prefill | None) -> float:
        """Seconds of the prefill and two tokens."""
        sampling = SamplingParams(max_new_tokens=2, stop_ids=())
        requests = requests_of(self.model, self.prompts, sampling, 1, 0, None)
        engine = rollout_engine(self.model, RolloutOptions(fused=False))
        measure.synchronize(self.device)
        start = time.perf_counter()
        engine.run(requests, keep=keep)
        measure.synchronize(self.device)
        return time.perf_counter() - start

    def step(self, reuse: bool) -> dict[str, Any]:
        """One rollout and the training step after it."""
        for p in self.trained():
            p.grad = None
        gc.collect()
        keep = None
        if reuse:
            on_host, saves = self.policy.on_host, self.policy.save_attention
            keep = Prefill(on_host=on_host, save_attention=saves, required=True)
        found: dict[str, Any] = {"reused_tokens": 0, "forward_s": 0.0, "backward_s": 0.0}
        found["prefill_s"] = self.rollout(keep)
        found["kept_bytes"] = torch.cuda.memory_allocated() if self.device == "cuda" else None
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for i, prompt in enumerate(self.prompts):
            tree = longreach.TokenTree.from_groups([(prompt, self.completions[i])])
            last = i + 1 == len(self.prompts)
            kept, keep = keep, None if last else keep
            forward, backward = measure.timed_step(lambda: self.loss(tree, kept, found), self.device)  # noqa: B023
            found["forward_s"] += forward
            found["backward_s"] += backward
            kept = None
        found["step_s"] = found["forward_s"] + found["backward_s"]
        found["peak_bytes"] = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        return found

    def loss(self, tree: Any, keep: Prefill | None, found: dict[str, Any]) -> torch.Tensor:
        scores = score(self.model, tree, prefill=keep)
        found["reused_tokens"] += scores.reused
        return -torch.cat(scores.logprobs).mean()

    def trained(self) -> list[Any]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def round(self) -> None:
        """A step of each way."""
        longreach.enable(self.model, **self.plan.options, parity_check=False)
        for reuse in (False, True):
            self.rounds[reuse].append(self.step(reuse))
            self.gradients[reuse] = [p.grad.detach().clone() for p in self.trained()]

    def run(self) -> None:
        for _ in range(self.options.repeats):
            self.round()
        rounds, gradients = self.rounds, self.gradients
        entry = {
            "model": "small" if self.options.small else self.shape.name, "layers": self.model.config.num_hidden_layers,
            "device": self.device, **self.size, "offload": self.policy.offload, "chunk": self.policy.chunk,
            "save_attention": self.policy.save_attention, "repeats": self.options.repeats,
            "gradient_difference": measure.difference(gradients[True], gradients[False]),
            "without": middle(rounds[False]), "with": middle(rounds[True]),
        }  # fmt: skip
        measure.put(self.options.out, entry, self.options.commit, KEY)
        a, b = entry["without"], entry["with"]
        print(
            f"{entry['model']} {self.size} {self.policy}: step {a['step_s']:.2f} -> {b['step_s']:.2f} s (forward "
            f"{a['forward_s']:.2f} -> {b['forward_s']:.2f}), prefill {a['prefill_s']:.2f} -> {b['prefill_s']:.2f} s, peak "
            f"{(a['peak_bytes'] or 0) / 1e9:.2f} -> {(b['peak_bytes'] or 0) / 1e9:.2f} GB, {b['reused_tokens']} tokens reused, "
            f"gradients differ by {entry['gradient_difference']:.1e}",
            flush=True,
        )


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds after the first; the largest of the bytes."""
    timed = rounds[1:]
    out: dict[str, Any] = {"reused_tokens": timed[-1]["reused_tokens"]}
    for name in ("prefill_s", "forward_s", "backward_s", "step_s"):
        out[name] = statistics.median(each[name] for each in timed)
    for name in ("kept_bytes", "peak_bytes"):
        out[name] = None if timed[-1][name] is None else max(each[name] for each in rounds)
    return out


if __name__ == "__main__":
    main()
