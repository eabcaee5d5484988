"""Microseconds of one decode step at a given number of own keys, on few layers: what tells two forms of a kernel apart.

    python -m bench.decode_step --batches 1,8,32,128
    python -m bench.decode_step --layers 8 --weights nf4 --batches 1,32
    python -m bench.decode_step --device cpu --tiny          # tests the script

Random weights of the real shapes, LoRA r=32 attached, prompts of 1,024 tokens, groups of up to 8. The step's CUDA graph (the
layers and the head, without the draw) is replayed with every row at `--own` keys of its own. Each timed replay follows another
without a gap; the shortest and the median are noted. Replays of a few layers are shorter than a time slice of a shared
card, so the shortest holds even beside other processes. Two runs with different `--layers` give the time of one layer.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench import measure, models
from longreach.rollout import RolloutOptions, SamplingParams, generate, release_rollout, rollout_engine

GROUP = 8
REPEATS = 400
SECONDS = 1.0  # of replays, at most
KEY = ("engine", "case", "model", "layers", "weights", "batch", "prompt", "own")


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(out=measure.RESULTS / "decode_step.json", lengths=[1024], layers=4)
    parser.add_argument("--batches", type=measure.numbers, default=[1, 8, 32, 128])
    parser.add_argument("--weights", default="bf16", choices=("bf16", "nf4", "mxfp4"))
    parser.add_argument("--own", type=int, default=512, help="keys of each row's own (default: 512)")
    options = measure.parse(parser, argv)
    if options.tiny:
        options.own, options.layers, options.batches = 8, 2, [min(b, 8) for b in options.batches][:2]
    shape = models.shape_of(options.model, options.layers, options.tiny)
    length = options.lengths[0]
    model = models.build(shape, length + 2 * options.own + 64, options.device)
    model = models.adapt(model if options.weights == "bf16" else models.pack(model, options.weights))
    for batch in options.batches:
        group = min(GROUP, batch)
        prompts = [models.token_ids(length, shape.vocab, seed=i).tolist() for i in range(max(1, batch // group))]
        times = step_times(model, prompts, group, options.own)
        entry = {
            "engine": "longreach", "case": "decode step", "model": shape.name, "layers": shape.layers, "weights": options.weights,
            "batch": batch, "prompt": length, "own": options.own,
            "shortest_us": min(times), "median_us": statistics.median(times),
        }  # fmt: skip
        measure.put(options.out, entry, options.commit, KEY)
        print(
            f"{shape.name} {options.weights}, {shape.layers} layers, batch {batch}: "
            f"{min(times):.1f} us, median {statistics.median(times):.1f}",
            flush=True,
        )


def step_times(model: Any, prompts: list[list[int]], group: int, own: int) -> list[float]:
    """Microseconds of replays of the step over len(prompts) × group rows, each with `own` keys of its own."""
    release_rollout(model)
    rows = len(prompts) * group
    times: list[float] = []

    def on_token(_number: int, _ids: list[int]) -> bool:
        if not times:  # all rows are under way
            times.extend(_replays(rollout_engine(model), rows, own))
        return False

    sampling = SamplingParams(max_new_tokens=2 * own, stop_ids=())
    generate(model, prompts, sampling=sampling, group=group, options=RolloutOptions(rows=rows), on_token=on_token)
    return times


def _replays(engine: Any, rows: int, own: int) -> list[float]:
    state = engine.state
    state.active_S.zero_()  # a step adds nothing to the lengths
    state.own_length_S[:rows] = own
    if engine.graphs is None:
        began = time.perf_counter()
        engine.step.logits(rows)
        return [(time.perf_counter() - began) * 1e6]
    graph, _ = engine.graphs.graphs[rows]
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < REPEATS and time.perf_counter() < end:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return times


if __name__ == "__main__":
    main()
