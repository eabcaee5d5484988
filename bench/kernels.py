"""Fused kernels on a CUDA device: microseconds and GB/s of every op, beside plain PyTorch.

    python -m bench.kernels                # writes bench/results/kernels.json
    python -m bench.kernels --sweep        # also tries other block sizes and warps: how the fixed ones were chosen
    python -m bench.kernels --device cpu --tiny     # tests the script

Qwen3-4B's shapes in bf16: 8,192 tokens, hidden 2,560, MLP 9,728, 32 query and 8 key heads of 128, vocabulary 151,936
(1,024 rows of logits). Each op is captured into a CUDA graph over several sets of tensors, more than the L2 cache holds
together, and the graph replayed; the median of the replays is reported, and the time the host needs for one call.
GB/s counts each input read and each output written once. "PyTorch" is the plain-torch twin of the op, run eagerly.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.measure import provenance, replayed_microseconds
from torch import Tensor

from longreach import kernels
from longreach.kernels import dispatch

RESULT = Path(__file__).parent / "results" / "kernels.json"
EPS = 1e-6

# One run of an op, and the bytes it moves.
Op = tuple[Callable[[], Any], int]


@dataclass(frozen=True)
class Sizes:
    """What the ops run on: shapes and the device."""

    device: str = "cuda"
    T: int = 8192
    hidden: int = 2560
    mlp: int = 9728
    heads: int = 32
    keys: int = 8
    size: int = 128
    rows: int = 1024
    vocabulary: int = 151_936

    def half(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def single(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device)

    def labels(self) -> Tensor:
        return torch.randint(self.vocabulary, (self.rows,), device=self.device)


TINY = {"T": 32, "hidden": 64, "mlp": 96, "heads": 4, "keys": 2, "size": 16, "rows": 8, "vocabulary": 100}


def norm_op(s: Sizes) -> Op:
    x, w = s.half(s.T, s.hidden), s.half(s.hidden)
    return lambda: kernels.rms_norm(x, w, EPS), 4 * x.numel()


def norm_backward_op(s: Sizes, add: bool, need_dweight: bool = False) -> Op:
    x, dy, w, rstd = s.half(s.T, s.hidden), s.half(s.T, s.hidden), s.half(s.hidden), s.single(s.T)
    residual = s.half(s.T, s.hidden) if add else None
    return (
        lambda: kernels.rms_norm_backward(dy, x, w, rstd, add=residual, need_dweight=need_dweight),
        (8 if add else 6) * x.numel(),
    )


def rope_op(s: Sizes, with_norm: bool, backward: bool) -> Op:
    def heads() -> tuple[Tensor, Tensor]:
        qkv = s.half(s.T, s.heads + 2 * s.keys, s.size)
        return qkv[:, : s.heads], qkv[:, s.heads : s.heads + s.keys]

    q, k = heads()
    cos, sin = s.half(s.T, s.size), s.half(s.T, s.size)
    weights = (s.half(s.size), s.half(s.size)) if with_norm else (None, None)
    elements = q.numel() + k.numel()
    if not backward:
        return lambda: kernels.qk_norm_rope(q, k, cos, sin, *weights), 4 * elements + 4 * cos.numel()
    dq, dk = heads()
    stats = (s.single(s.T, s.heads), s.single(s.T, s.keys)) if with_norm else None
    inputs = (q, k) if with_norm else (None, None)
    return (
        lambda: kernels.qk_norm_rope_backward(dq, dk, *inputs, cos, sin, *weights, stats),
        (6 if with_norm else 4) * elements + 4 * cos.numel(),
    )


def swiglu_op(s: Sizes) -> Op:
    gate, up = s.half(s.T, s.mlp), s.half(s.T, s.mlp)
    return lambda: kernels.swiglu(gate, up), 6 * gate.numel()


def swiglu_backward_op(s: Sizes, return_h: bool) -> Op:
    dh, gate, up = s.half(s.T, s.mlp), s.half(s.T, s.mlp), s.half(s.T, s.mlp)
    return lambda: kernels.swiglu_backward(dh, gate, up, return_h=return_h), (12 if return_h else 10) * gate.numel()


def merge_op(s: Sizes, wide: bool) -> Op:
    a, b = (s.single if wide else s.half)(s.T, s.heads, s.size), s.half(s.T, s.heads, s.size)
    lse_a, lse_b = s.single(s.heads, s.T), s.single(s.heads, s.T)
    return (
        lambda: kernels.merge_blocks(a, lse_a, b, lse_b),
        2 * a.numel() * a.element_size() + 2 * b.numel() + 12 * lse_a.numel(),
    )


def sink_op(s: Sizes) -> Op:
    out, lse, sinks = s.half(s.T, s.heads, s.size), s.single(s.heads, s.T), s.half(s.heads)
    return lambda: kernels.apply_sink(out, lse, sinks), 4 * out.numel() + 8 * lse.numel()


def logprob_op(s: Sizes, entropy: bool) -> Op:
    logits, labels = s.half(s.rows, s.vocabulary), s.labels()
    return lambda: kernels.row_logprob(logits, labels, 0.9, None, entropy), 2 * logits.numel()


def logprob_backward_op(s: Sizes, entropy: bool) -> Op:
    logits, labels = s.half(s.rows, s.vocabulary), s.labels()
    lse, dlogprob, H = s.single(s.rows) + 12, s.single(s.rows), s.single(s.rows)
    dH = s.single(s.rows) if entropy else None
    return lambda: kernels.row_logprob_backward(logits, labels, lse, dlogprob, dH, H, 0.9), 4 * logits.numel()


OPS: dict[str, Callable[[Sizes], Op]] = {
    "rms_norm": norm_op,
    "rms_norm_backward": lambda s: norm_backward_op(s, False),
    "rms_norm_backward, add": lambda s: norm_backward_op(s, True),
    "rms_norm_backward, add, dweight": lambda s: norm_backward_op(s, True, True),
    "qk_norm_rope": lambda s: rope_op(s, True, False),
    "qk_norm_rope, no norm": lambda s: rope_op(s, False, False),
    "qk_norm_rope_backward": lambda s: rope_op(s, True, True),
    "qk_norm_rope_backward, no norm": lambda s: rope_op(s, False, True),
    "swiglu": swiglu_op,
    "swiglu_backward": lambda s: swiglu_backward_op(s, False),
    "swiglu_backward, h": lambda s: swiglu_backward_op(s, True),
    "merge_blocks, fp32": lambda s: merge_op(s, True),
    "merge_blocks, bf16": lambda s: merge_op(s, False),
    "apply_sink": sink_op,
    "row_logprob": lambda s: logprob_op(s, False),
    "row_logprob, entropy": lambda s: logprob_op(s, True),
    "row_logprob_backward": lambda s: logprob_backward_op(s, False),
    "row_logprob_backward, entropy": lambda s: logprob_backward_op(s, True),
}

# Settings tried by --sweep: (module of `kernels.jit`, {name: value}) for the ops they concern.
SWEEP: list[tuple[str, list[dict[str, int]], list[str]]] = [
    (
        "norm",
        [{"EACH": n} for n in (16, 32, 64)],
        ["rms_norm", "rms_norm_backward", "rms_norm_backward, add", "rms_norm_backward, add, dweight"],
    ),
    (
        "rope",
        [{"EACH": n} for n in (16, 32, 64)],
        ["qk_norm_rope", "qk_norm_rope, no norm", "qk_norm_rope_backward", "qk_norm_rope_backward, no norm"],
    ),
    (
        "swiglu",
        [{"BLOCK": b, "EACH": n} for b in (1024, 2048, 4096) for n in (8, 16)],
        ["swiglu", "swiglu_backward", "swiglu_backward, h"],
    ),
    (
        "merge",
        [{"ELEMENTS": b, "EACH": n} for b in (2048, 4096) for n in (8, 16)],
        ["merge_blocks, fp32", "merge_blocks, bf16", "apply_sink"],
    ),
    (
        "logprob",
        [{"BLOCK": b, "EACH_FORWARD": n} for b in (2048, 4096, 8192) for n in (32, 64)],
        ["row_logprob", "row_logprob, entropy"],
    ),
    (
        "logprob",
        [{"BLOCK": b, "EACH_BACKWARD": n} for b in (2048, 4096) for n in (16, 32)],
        ["row_logprob_backward", "row_logprob_backward, entropy"],
    ),
]


def device_microseconds(make: Callable[[Sizes], Op], sizes: Sizes) -> tuple[float, int]:
    """(median time of one call on the device, bytes it moves); on a CPU the time of a call."""
    run, size = make(sizes)
    if sizes.device != "cuda":
        return call_microseconds(make, sizes, calls=1), size
    runs = [run] + [make(sizes)[0] for _ in range(min(7, 400_000_000 // size))]
    return replayed_microseconds(runs, max(1, 8 // len(runs))), size


def call_microseconds(make: Callable[[Sizes], Op], sizes: Sizes, calls: int = 30) -> float:
    """What one call costs the host: on a GPU it returns before the device is done."""
    run, _ = make(sizes)
    run()
    _wait(sizes)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
        _wait(sizes)
    return statistics.median(times)


def _wait(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def stream_rate(sizes: Sizes, elements: int) -> float:
    """GB/s of y = 2x over large tensors: what a kernel that only reads and writes reaches on this card."""
    x, y = sizes.half(elements), sizes.half(elements)
    us, size = device_microseconds(lambda s: (lambda: torch.mul(x, 2, out=y), 4 * x.numel()), sizes)
    return size / us / 1e3


def measure(name: str, stream: float, sizes: Sizes) -> dict[str, Any]:
    us, size = device_microseconds(OPS[name], sizes)
    with dispatch.use("reference"):
        plain, _ = device_microseconds(OPS[name], sizes)
    rate = size / us / 1e3
    row = {
        "op": name,
        "microseconds": us,
        "gb_per_s": rate,
        "share_of_stream": rate / stream,
        "pytorch_microseconds": plain,
        "host_microseconds": call_microseconds(OPS[name], sizes),
    }
    row = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
    print(
        f"{name:34}{us:9.1f} us {rate:7.0f} GB/s {rate / stream:6.0%} of streaming; PyTorch {plain:8.1f} us; host "
        f"{row['host_microseconds']:5.1f} us",
        flush=True,
    )
    if sizes.device == "cuda":
        torch.cuda.empty_cache()
    return row


def sweep(sizes: Sizes) -> list[dict[str, Any]]:
    rows = []
    for place, settings, names in SWEEP:
        module = importlib.import_module(f"longreach.kernels.jit.{place}")
        for setting in settings:
            fixed = {name: getattr(module, name) for name in setting}
            for name, value in setting.items():
                setattr(module, name, value)
            for op in names:
                us, size = device_microseconds(OPS[op], sizes)
                rows.append({"op": op, **setting, "gb_per_s": round(size / us / 1e3)})
                print(op, setting, rows[-1]["gb_per_s"], "GB/s", flush=True)
            for name, value in fixed.items():
                setattr(module, name, value)
            torch.cuda.empty_cache()
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other block sizes and warps too (on a GPU)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small tensors: a test of the script")
    parser.add_argument("--out", type=Path, default=RESULT, help="JSON file to write")
    parser.add_argument("--commit", help="commit to record, where the sources lie outside a git checkout")
    options = parser.parse_args(argv)
    if options.sweep and options.device != "cuda":
        parser.error("--sweep tries settings of GPU kernels: it needs --device cuda")
    torch.manual_seed(0)
    sizes = Sizes(options.device, **(TINY if options.tiny else {}))
    stream = stream_rate(sizes, 1 << 12 if options.tiny else 1 << 28)
    print(f"streaming {stream:.0f} GB/s", flush=True)
    result: dict[str, Any] = {"machine": provenance(options.commit), "stream_gb_per_s": round(stream), "ops": []}
    for name in OPS:
        result["ops"].append(measure(name, stream, sizes))
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.sweep:
        result["sweep"] = sweep(sizes)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
