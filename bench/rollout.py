"""Tokens per second of the rollout engine, beside Transformers' own generation; where the time goes.

    python -m bench.rollout --batches 1,8,32,128 --profile
    python -m bench.rollout --weights nf4 --batches 1,32
    python -m bench.rollout --model gpt-oss-20b --weights mxfp4 --batches 1,8,32,128
    python -m bench.rollout --batches 32 --peers
    python -m bench.rollout --layers 9 --prefix 131072
    python -m bench.rollout --device cpu --tiny          # tests the script

Weights are random, of the real shapes, bf16 unless said otherwise, LoRA r=32 attached. Prompts of 1,024 tokens, groups of up to
8, and completions of 1,024 that end only there. Decode tokens per second are those between a short and a full run of the same
requests, so that prompts, start-up and captures, which are noted apart, cancel. The roofline is the bytes that a step must read,
weights once (of experts, those that a random choice of the rows touches) and each key and value once (a prompt's once for its
group), at the card's measured bandwidth.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bench import logprobs, measure, models
from longreach.rollout import RolloutOptions, SamplingParams, generate, joined, release_rollout, rollout_engine

BANDWIDTH = 4.3e12  # bytes per second of an H200, as measured
GROUP = 8
KEY = (
    "engine",
    "case",
    "model",
    "layers",
    "weights",
    "batch",
    "prompt",
    "new",
    "group",
    "shared",
    "modules",
    "cublas",
    "adapters",
)


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(out=measure.RESULTS / "rollout.json", lengths=[1024])
    parser.add_argument("--batches", type=measure.numbers, default=[1, 8, 32, 128])
    parser.add_argument("--weights", default="bf16", choices=("bf16", "nf4", "mxfp4"))
    parser.add_argument("--new", type=int, default=1024, help="tokens of a completion (default: 1024)")
    parser.add_argument("--distinct", action="store_true", help="no two completions share a prompt")
    parser.add_argument("--modules", action="store_true", help="decode through the model's modules")
    parser.add_argument("--cublas", action="store_true", help="dense products by cuBLAS whatever the number of rows")
    parser.add_argument("--peers", action="store_true", help="also Transformers' generate and continuous batching")
    parser.add_argument("--prefix", type=int, default=0, help="instead: a group of 16 on a prompt of so many tokens")
    parser.add_argument(
        "--logprobs",
        action="store_true",
        help="also: the engine's log-probs against the trainer's (see bench.logprobs)",
    )
    parser.add_argument("--profile", action="store_true", help="write the kernels' times beside the results")
    options = measure.parse(parser, argv)
    if options.tiny:
        options.new, options.batches = 16, [min(b, 8) for b in options.batches][:2]
        options.prefix = options.prefix and 64
    Bench(options).run()


class Bench:
    def __init__(self, options: Any) -> None:
        self.options = options
        shape = models.shape_of(options.model, options.layers, options.tiny)
        self.shape = shape
        positions = max(options.lengths[0], options.prefix) + options.new + 64
        model = models.build(shape, positions, options.device)
        if options.weights != "bf16":
            model = models.pack(model, options.weights)
        self.model = models.adapt(model)
        self.weights, self.experts = _decode_bytes(self.model)

    def run(self) -> None:
        if self.options.cublas:
            joined.FEW_DENSE_ROWS = 0
        if self.options.prefix:
            self.prefix()
            return
        for batch in self.options.batches:
            group = 1 if self.options.distinct else min(GROUP, batch)
            self.ours(batch, group, self.options.lengths[0])
        if self.options.peers:
            for batch in self.options.batches:
                self.transformers(batch)
                self.continuous(batch)
        if self.options.logprobs:
            self.logprobs()  # last: it changes the adapters

    # ---- ours

    def ours(self, batch: int, group: int, length: int, *, shared: bool = True, new: int | None = None) -> None:
        release_rollout(self.model)
        options = RolloutOptions(rows=batch, share_prompts=shared, fused=not self.options.modules)
        prompts = self.prompts(batch // group, length)
        new = new or self.options.new

        def once(tokens: int) -> float:
            measure.synchronize(self.options.device)
            start = time.perf_counter()
            sampling = SamplingParams(max_new_tokens=tokens, stop_ids=())
            out = generate(self.model, prompts, sampling=sampling, group=group, options=options)
            assert all(len(c.ids) == tokens for c in out)
            measure.synchronize(self.options.device)
            return time.perf_counter() - start

        short = max(2, new // 16)
        first = once(new)  # memory, captures, compilation
        if self.options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        quick, full = once(short), once(new)
        rate = batch * (new - short) / (full - quick)
        step = (full - quick) / (new - short)
        weights = self.weights + self.experts * self.touched(batch)
        ideal = (weights + self.key_bytes(batch, group if shared else 1, length, new)) / BANDWIDTH
        self.note(
            "longreach", batch, group, length, new, tokens_per_s=rate, step_s=step, prefill_s=quick - short * step,
            first_call_s=first, full_call_s=full, roofline=ideal / step, shared=shared,
        )  # fmt: skip
        if self.options.profile:
            self.profile(batch, lambda: once(short))

    def logprobs(self) -> None:
        """The engine's log-probs against the trainer's in bf16 and in fp32, over 10,240 tokens."""
        length, new = self.options.lengths[0], max(4, min(logprobs.TOKENS, self.options.new))
        for adapters in logprobs.ADAPTERS:
            found = logprobs.differences(self.model, self.prompts(8, length), new, adapters)
            self.note("longreach log-probs", 64, 8, length, new, **found)

    def touched(self, batch: int) -> float:
        """Share of the experts that some row of a step chooses, if all are as likely."""
        shape = self.shape
        return 1 - (1 - shape.active / shape.experts) ** batch if shape.experts else 0.0

    def key_bytes(self, batch: int, group: int, prompt: int, new: int) -> int:
        """Bytes of keys and values that a step reads, at half of its completions' length."""
        engine = rollout_engine(self.model)
        assert engine.layers is not None
        total = 0
        for layer in engine.layers:
            tokens = prompt * batch // group + new // 2 * batch
            if layer.window is not None:
                tokens = min(layer.window, prompt + new // 2) * batch
            total += tokens * layer.token_bytes
        return total

    def profile(self, batch: int, run: Any) -> None:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.options.device == "cuda" else [])
        with profile(activities=kinds) as seen:
            run()
        order = "cuda_time_total" if self.options.device == "cuda" else "cpu_time_total"
        table = seen.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
        name = f"rollout_profile_{self.shape.name}_{self.options.weights}_{batch}.txt"
        self.options.out.with_name(name).write_text(table)

    def prefix(self) -> None:
        """A group of 16 on one long prompt: its keys read once a step, and 16 times."""
        for shared in (True, False):
            self.ours(16, 16, self.options.prefix, shared=shared, new=min(self.options.new, 128))

    # ---- Transformers

    def transformers(self, batch: int) -> None:
        """`generate` over prompts of equal length."""
        from transformers import GenerationConfig

        length, group = self.options.lengths[0], min(GROUP, batch)
        ids = torch.tensor(self.prompts(batch // group, length)).repeat_interleave(group, 0).to(self.options.device)

        def once(tokens: int) -> float:
            config = GenerationConfig(
                do_sample=True, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, top_k=0
            )
            measure.synchronize(self.options.device)
            start = time.perf_counter()
            with torch.no_grad():
                self.model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
            measure.synchronize(self.options.device)
            return time.perf_counter() - start

        short, new = 4, max(8, self.options.new // 8)  # its time per token hardly changes with the length
        once(2)
        quick, full = once(short), once(new)
        rate = batch * (new - short) / (full - quick)
        self.note("transformers generate", batch, group, length, new, tokens_per_s=rate, full_call_s=full, shared=False)

    def continuous(self, batch: int) -> None:
        from transformers import GenerationConfig

        length, group, new = self.options.lengths[0], min(GROUP, batch), max(8, self.options.new // 8)
        prompts = [p for p in self.prompts(batch // group, length) for _ in range(group)]
        base = self.model.get_base_model()

        def once(tokens: int) -> float:
            config = GenerationConfig(do_sample=True, max_new_tokens=tokens, pad_token_id=0, eos_token_id=-1, top_k=0)
            measure.synchronize(self.options.device)
            start = time.perf_counter()
            with torch.no_grad():
                base.eval().generate_batch(prompts, generation_config=config, progress_bar=False)
            measure.synchronize(self.options.device)
            return time.perf_counter() - start

        try:
            once(4)
            quick, full = once(4), once(new)
            found: dict[str, Any] = {"tokens_per_s": batch * (new - 4) / (full - quick), "full_call_s": full}
        except Exception as error:  # what a peer can't run is noted, not hidden
            found = {"tokens_per_s": None, "error": f"{type(error).__name__}: {error}"[:300]}
        self.note("transformers continuous batching", batch, group, length, new, shared=True, **found)

    # ---- parts

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [models.token_ids(length, self.shape.vocab, seed=i).tolist() for i in range(max(1, count))]

    def note(self, engine: str, batch: int, group: int, prompt: int, new: int, **found: Any) -> None:
        peak = torch.cuda.max_memory_allocated() if self.options.device == "cuda" else None
        entry = {
            "engine": engine, "case": "prefix" if self.options.prefix else "decode", "model": self.shape.name,
            "layers": self.shape.layers, "weights": self.options.weights, "batch": batch, "group": group, "prompt": prompt,
            "new": new, "modules": self.options.modules, "cublas": self.options.cublas, **found, "peak_bytes": peak,
        }  # fmt: skip
        record(self.options.out, entry, self.options.commit)


def record(path: Path, entry: dict[str, Any], commit: str | None) -> None:
    """Print an entry and put it into the file in place of an older one of the same case."""
    entry = measure.put(path, entry, commit, KEY)
    if "adapters" in entry:
        print(logprobs.text_of(entry), flush=True)
        return
    rate = entry.get("tokens_per_s")
    share = f", {entry['roofline']:.0%} of the roofline" if entry.get("roofline") else ""
    text = "failed: " + entry["error"] if rate is None else f"{rate:,.0f} tok/s{share}"
    if "step_s" in entry:
        text += f", step {entry['step_s'] * 1e3:.2f} ms, prefill {entry['prefill_s']:.2f} s"
        text += f", first call {entry['first_call_s']:.1f} s"
    print(
        entry["engine"],
        entry["model"],
        entry["weights"],
        f"batch {entry['batch']}",
        f"group {entry['group']}",
        text,
        flush=True,
    )


def _decode_bytes(model: Any) -> tuple[int, int]:
    """Bytes of weights that every step reads, all but an embedding that is not the head as well; and of experts."""
    causal = model.get_base_model()
    table, head = causal.get_input_embeddings().weight, causal.get_output_embeddings().weight
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    experts = sum(x.nbytes for name, x in tensors.items() if ".experts." in name)
    total = sum(x.nbytes for x in tensors.values()) - experts
    return total - (0 if table is head else table.nbytes), experts


if __name__ == "__main__":
    main()
