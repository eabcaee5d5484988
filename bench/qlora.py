"""A QLoRA training step of Qwen3-4B's shape, optimizer included: seconds and peak memory, 4-bit weights beside 16-bit ones.

    python -m bench.qlora --cases 4096:1024:host,32768:8192:host --weights nf4,bf16
    python -m bench.qlora --cases 131072:4096:rows --repeats 1
    python -m bench.qlora --cases 389120:8192:keys --repeats 0 --cap 24 --progress
    python -m bench.qlora --cases 4096:1024:host --release --repeats 0    # each layer is updated inside the backward
    python -m bench.qlora --device cpu --tiny          # tests the script

A step is forward, backward and optimizer on one sequence with LoRA r=16 on all seven kinds of linear layer; the loss is the mean
negative log-prob of the last 1,024 tokens. Adapters are bf16, as TRL makes them for quantized models, and so are their gradients
and optimizer states. With --repeats 0 only a first step is made, for its memory: its seconds hold the compilation of
kernels. Weights are random, of the real shapes; head and embedding stay in bf16 unless --embedding int8 is given.
Peak is all that torch allocates during a step after the first, weights included. A case is context:chunk:offload.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

import longreach
from bench import measure, models
from longreach.quant.embedding import store_in_8_bits

GB = 1e9


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(out=measure.RESULTS / "qlora.json")
    parser.add_argument("--weights", default="nf4", help="of nf4, mxfp4, bf16, e.g. nf4,bf16 (default: nf4)")
    parser.add_argument("--cases", default="4096:1024:host,32768:8192:host", help="context:chunk:offload, ...")
    parser.add_argument("--cap", type=float, default=None, metavar="GB", help="let torch allocate no more than this")
    parser.add_argument("--progress", action="store_true", help="print when the backward has passed a layer")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--embedding", default=None, choices=("int8",))
    parser.add_argument("--optimizer", default="adamw", choices=models.OPTIMIZERS)
    parser.add_argument("--release", action="store_true", help="gradients of one layer at a time")
    options = measure.parse(parser, argv)
    cases = [tuple(case.split(":")) for case in options.cases.split(",")]
    if options.tiny:
        cases = [(str(max(int(n) // 64, 16)), str(max(int(c) // 64, 4)), o) for n, c, o in cases]
    if options.cap and options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * GB / total)
    for weights in options.weights.split(","):
        bench = Bench(options, weights, max(int(n) for n, *_ in cases))
        for context, chunk, offload in cases:
            bench.case(int(context), int(chunk), offload)
        del bench
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


class Bench:
    def __init__(self, options: Any, weights: str, longest: int) -> None:
        self.options, self.weights = options, weights
        self.shape = models.shape_of(options.model, options.layers, options.tiny)
        model = models.build(self.shape, longest, options.device)
        if weights != "bf16":
            models.pack(model, weights)
        if options.embedding:
            store_in_8_bits(model)
        self.model = adapt(model, options.rank)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = models.optimizer(options.optimizer, trained)
        if options.release:
            longreach.enable(self.model, parity_check=False)
            self.optimizer = longreach.release_gradients(self.model, self.optimizer)
        self.loaded = measure.loaded_bytes(options.device)
        self.began = time.perf_counter()
        if options.progress:
            for i, layer in enumerate(self.model.get_base_model().get_decoder().layers):
                first = next(p for p in layer.parameters() if p.requires_grad)
                first.register_post_accumulate_grad_hook(lambda p, i=i: self.passed(i))

    def passed(self, layer: int) -> None:
        measure.synchronize(self.options.device)
        print(
            f"layer {layer}: backward passed {time.perf_counter() - self.began:.1f} s after the step began", flush=True
        )

    def case(self, context: int, chunk: int, offload: str) -> None:
        options = self.options
        longreach.enable(self.model, chunk=chunk, offload=offload, parity_check=False)
        ids = models.token_ids(context, self.shape.vocab)
        tree = longreach.TokenTree.from_groups([(ids[: -options.completion], [ids[-options.completion :]])])
        first = self.step(tree)
        timed = [self.step(tree) for _ in range(options.repeats)] or [first]
        peaks = [peak for _, peak in timed if peak is not None]
        case = "qlora" + f" {options.optimizer}" * (options.optimizer != "adamw") + " released" * options.release
        entry = {
            "engine": "longreach", "case": case, "model": self.shape.name, "layers": self.shape.layers,
            "weights": self.weights, "embedding": options.embedding, "rank": options.rank, "context": context,
            "completion": options.completion, "group": 1, "prompts": 1, "chunk": chunk, "offload": offload,
            "first_step_s": first[0], "step_s": statistics.median(seconds for seconds, _ in timed),
            "repeats": options.repeats, "cap_gb": options.cap, "optimizer": options.optimizer, "released": options.release,
            "loaded_bytes": self.loaded, "peak_bytes": max(peaks, default=None),
        }  # fmt: skip
        measure.record(options.out, entry, options.commit)
        if peaks:
            print(
                f"  {self.weights} chunk {chunk} {offload}: peak {max(peaks) / GB:.2f} GB, loaded {self.loaded / GB:.2f}"
            )

    def step(self, tree: Any) -> tuple[float, int | None]:
        """Seconds and peak bytes of one step."""
        cuda = self.options.device == "cuda"
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        measure.synchronize(self.options.device)
        start = self.began = time.perf_counter()
        loss = -torch.cat(longreach.token_logprobs(self.model, tree)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        measure.synchronize(self.options.device)
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() if cuda else None


def adapt(model: Any, rank: int) -> Any:
    """LoRA on all seven kinds of linear layer in bf16; both matrices random, so that every gradient is alive."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=models.LINEARS, init_lora_weights=False)
    adapted = get_peft_model(model, config)
    for p in adapted.parameters():
        if p.requires_grad:
            p.data = p.data.bfloat16()
    return adapted


if __name__ == "__main__":
    main()
