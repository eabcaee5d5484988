"""One training step through exact chunked layers: seconds, memory above the loaded model, share of the roofline.

    python -m bench.train_step --lengths 16384,32768,131072 --offload host
    python -m bench.train_step --lengths 16384 --shallow 131072@2,131072@6
    python -m bench.train_step --lengths 389120 --offload keys --layers 4 --repeats 1
    python -m bench.train_step --group 8 --prompts 8192,32768
    python -m bench.train_step --everyday --lengths ''
    python -m bench.train_step --device cpu --tiny          # tests the script

A step is the forward and backward of one sequence with LoRA r=32 on all seven kinds of linear layer; the loss is the mean
negative log-prob of the last 1,024 tokens. Weights are random, of the real shapes, bf16 unless --weights says so. With --group,
the completions of a group branch off one prompt, and the same rows are run one after the other for comparison. Medians of the
steps after the first; the first step's time is noted too.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import longreach
from bench import measure, models
from longreach.context.offload import POLICIES

EVERYDAY = (8, 8, 256, 1024)  # prompts, completions of each, tokens of both


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.add_argument("--chunk", type=int, default=None, help="tokens per chunk (default: the engine's choice)")
    parser.add_argument("--offload", default="auto", choices=("auto", *POLICIES))
    parser.add_argument("--weights", default="bf16", choices=("bf16", "nf4", "mxfp4"))
    parser.add_argument("--keep-every", type=int, default=1, help="keep the inputs of every so-many-th layer only")
    parser.add_argument(
        "--save-attention",
        action=argparse.BooleanOptionalAction,
        default="auto",
        help="keep attention outputs for the backward (default: the engine's choice)",
    )
    parser.add_argument(
        "--group", type=int, default=0, help="completions per prompt of the group case; 0 leaves it out"
    )
    parser.add_argument(
        "--prompts", type=measure.numbers, default=[8192, 32768], help="prompt lengths of the group case"
    )
    parser.add_argument(
        "--shallow-prompts",
        type=measure.depths,
        default=[],
        metavar="PROMPT@LAYERS",
        help="of the group case, on few layers",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="one step a context for its peak alone; time is not noted, so others may run beside",
    )
    parser.add_argument("--row-sample", type=int, default=0, help="run only so many of the group's rows and scale up")
    parser.add_argument(
        "--trees-only",
        action="store_true",
        help="no rows: each of them is the sequence of that context, if that is run",
    )
    options = measure.parse(parser, argv)
    options.repeats = 0 if options.memory else options.repeats
    if options.tiny:
        options.prompts = [max(n // 64, 8) for n in options.prompts]
        options.shallow_prompts = [(max(n // 64, 8), min(layers, 2)) for n, layers in options.shallow_prompts]
    Bench(options).run()


class Bench:
    def __init__(self, options: Any) -> None:
        self.options = options
        self.model: Any = None
        self.warming = self.warmed = False

    def prepare(self, layers: int | None) -> None:
        """A model of so many layers in place of the last one."""
        options = self.options
        self.model = None
        gc.collect()
        self.shape = models.shape_of(options.model, layers, options.tiny)
        prompts = [*options.prompts, *(prompt for prompt, _ in options.shallow_prompts)]
        positions = max([measure.longest(options), *(prompt + options.completion for prompt in prompts)])
        model = models.build(self.shape, positions, options.device)
        self.model = models.adapt(model if options.weights == "bf16" else models.pack(model, options.weights))
        self.loaded = measure.loaded_bytes(options.device)
        longreach.enable(
            self.model,
            chunk=options.chunk or "auto",
            offload=options.offload,
            save_attention=options.save_attention,
            keep_every=options.keep_every,
            parity_check=False,
        )

    def run(self) -> None:
        """Case after case, model after model; the first model's may be warmed, and wait, before any is timed."""
        waiting = True
        for layers, each in itertools.groupby(self.cases(), key=lambda case: case[0]):
            self.prepare(layers)
            runs = [run for _, run in each]
            if waiting and self.options.warm:
                self.warming = True
                for run in runs:
                    run()
                self.warming, self.warmed = False, True
            if waiting:
                measure.wait_for(self.options.after)
            for run in runs:
                run()
            waiting = self.warmed = False

    def cases(self) -> Iterator[tuple[int | None, Callable[[], None]]]:
        """Each with its depth."""
        options = self.options
        for context in options.lengths:
            yield options.layers, functools.partial(self.sequence, context)
        if options.everyday:
            yield options.layers, self.everyday
        for prompt in options.prompts if options.group else []:
            yield options.layers, functools.partial(self.group, prompt, options.completion)
        for context, layers in options.shallow:
            yield layers, functools.partial(self.sequence, context)
        for prompt, layers in options.shallow_prompts if options.group else []:
            yield layers, functools.partial(self.group, prompt, options.completion)

    def sequence(self, length: int) -> None:
        completion = self.options.completion
        ids = models.token_ids(length, self.shape.vocab)
        tree = longreach.TokenTree.from_groups([(ids[:-completion], [ids[-completion:]])])
        self.case("memory" if self.options.memory else "sequence", tree, context=length, completion=completion)

    def case(self, name: str, tree: Any, *, context: int, completion: int, group: int = 1, prompts: int = 1) -> None:
        found = self.measured(lambda: measure.timed_step(lambda: self.loss(tree), self.options.device))
        self.note(name, found, context=context, completion=completion, group=group, prompts=prompts)

    def measured(self, step: Callable[[], tuple[float, float]]) -> dict[str, Any]:
        options = self.options
        return measure.attempt(
            step, self.model, loaded=self.loaded, device=options.device, budget=options.budget,
            repeats=0 if self.warming else options.repeats, warmed=self.warmed,
        )  # fmt: skip

    def loss(self, tree: Any) -> torch.Tensor:
        return -torch.cat(longreach.token_logprobs(self.model, tree)).mean()

    def group(self, prompt: int, completion: int) -> None:
        """A tree of the group, then its rows one after the other (what padding each to full length costs)."""
        size = self.options.group
        root = models.token_ids(prompt, self.shape.vocab)
        leaves = [models.token_ids(completion, self.shape.vocab, seed=1 + i) for i in range(size)]
        at = {"context": prompt + completion, "completion": completion, "group": size}
        self.case("group tree", longreach.TokenTree.from_groups([(root, leaves)]), **at)
        if self.options.trees_only:
            return
        shared = self.gradients()
        rows = [longreach.TokenTree.from_groups([(root, [leaf])]) for leaf in leaves[: self.options.row_sample or size]]

        def step() -> tuple[float, float]:
            parts = [measure.timed_step(lambda row=row: self.loss(row) / size, self.options.device) for row in rows]
            return sum(p[0] for p in parts) * size / len(rows), sum(p[1] for p in parts) * size / len(rows)

        found = self.measured(step)
        found["rows_run"] = len(rows)
        if len(rows) == size and found["step_s"] is not None:
            found["gradient_difference"] = measure.difference(shared, self.gradients())
        self.note("group rows", found, **at)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]

    def everyday(self) -> None:
        prompts, size, prompt, completion = EVERYDAY
        if self.options.tiny:
            prompt, completion = prompt // 64, completion // 64
        ids = [models.token_ids(prompt, self.shape.vocab, seed=i) for i in range(prompts)]
        answers = [
            [models.token_ids(completion, self.shape.vocab, seed=99 + i * size + j) for j in range(size)]
            for i in range(prompts)
        ]
        tree = longreach.TokenTree.from_groups(list(zip(ids, answers)))
        self.case("everyday", tree, context=prompt + completion, completion=completion, group=size, prompts=prompts)

    def note(
        self, name: str, found: dict[str, Any], *, context: int, completion: int, group: int, prompts: int = 1
    ) -> None:
        from longreach.context.install import engine_of

        engine = engine_of(self.model)
        assert engine is not None
        tokens = prompts * (context - completion + group * completion)
        policy = engine.settle(tokens, prompts * group * completion).policy
        entry = {
            "engine": "longreach", "case": name, "model": self.shape.name, "layers": self.shape.layers, "dtype": "bf16",
            "context": context, "completion": completion, "group": group, "prompts": prompts, "chunk": policy.chunk,
            "offload": policy.offload, "save_attention": policy.save_attention, **found,
        }  # fmt: skip
        if policy.keep_every != 1:
            entry["keep_every"] = policy.keep_every
        if self.options.weights != "bf16":
            entry["weights"] = self.options.weights
        # what the other layers would add to the peak, and how many there are
        trained = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        entry["layer_gradient_bytes"] = trained // self.shape.layers
        entry["whole_layers"] = models.shape_of(self.options.model, None, self.options.tiny).layers
        if name == "memory":
            for seconds in ("first_step_s", "forward_s", "backward_s", "repeats"):
                entry.pop(seconds, None)
            entry["step_s"] = None
        elif name != "group rows" and found["step_s"] is not None:
            entry["utilization"] = measure.utilization(self.shape, context, completion, group, prompts, found["step_s"])
        if not self.warming:
            measure.record(self.options.out, entry, self.options.commit)


if __name__ == "__main__":
    main()
