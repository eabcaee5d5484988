"""Fused kernels on a CUDA device: microseconds and GB/s of every op, beside plain PyTorch.

    python bench/kernels.py                # writes bench/results/kernels.json
    python bench/kernels.py --sweep        # also tries other block sizes and warps: how the fixed ones were chosen

Qwen3-4B's shapes in bf16: 8,192 tokens, hidden 2,560, MLP 9,728, 32 query and 8 key heads of 128, vocabulary 151,936
(1,024 rows of logits). Each op is captured into a CUDA graph over several sets of tensors, more than the L2 cache holds
together, and the graph replayed; the median of the replays is reported, and the time the host needs for one call.
GB/s counts each input read and each output written once. "PyTorch" is the plain-torch twin of the op, run eagerly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from machine import describe
from measure import replayed_microseconds
from torch import Tensor

from longreach import kernels
from longreach.kernels import dispatch
from longreach.kernels.jit import logprob, merge, norm, rope, swiglu

RESULT = Path(__file__).parent / "results" / "kernels.json"
T, HIDDEN, MLP, HEADS, KEYS, SIZE, ROWS, VOCABULARY = 8192, 2560, 9728, 32, 8, 128, 1024, 151_936
EPS = 1e-6

# One run of an op, and the bytes it moves.
Op = tuple[Callable[[], Any], int]


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def single(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def norm_op() -> Op:
    x, w = half(T, HIDDEN), half(HIDDEN)
    return lambda: kernels.rms_norm(x, w, EPS), 4 * x.numel()


def add_norm_op() -> Op:
    x, r, w = half(T, HIDDEN), half(T, HIDDEN), half(HIDDEN)
    return lambda: kernels.add_rms_norm(x, r, w, EPS), 8 * x.numel()


def norm_backward_op(add: bool, need_dweight: bool = False) -> Op:
    x, dy, w, rstd = half(T, HIDDEN), half(T, HIDDEN), half(HIDDEN), single(T)
    residual = half(T, HIDDEN) if add else None
    return (
        lambda: kernels.rms_norm_backward(dy, x, w, rstd, add=residual, need_dweight=need_dweight),
        (8 if add else 6) * x.numel(),
    )


def rope_op(with_norm: bool, backward: bool) -> Op:
    def heads() -> tuple[Tensor, Tensor]:
        qkv = half(T, HEADS + 2 * KEYS, SIZE)
        return qkv[:, :HEADS], qkv[:, HEADS : HEADS + KEYS]

    q, k = heads()
    cos, sin = half(T, SIZE), half(T, SIZE)
    weights = (half(SIZE), half(SIZE)) if with_norm else (None, None)
    elements = q.numel() + k.numel()
    if not backward:
        return lambda: kernels.qk_norm_rope(q, k, cos, sin, *weights), 4 * elements + 4 * cos.numel()
    dq, dk = heads()
    stats = (single(T, HEADS), single(T, KEYS)) if with_norm else None
    inputs = (q, k) if with_norm else (None, None)
    return (
        lambda: kernels.qk_norm_rope_backward(dq, dk, *inputs, cos, sin, *weights, stats),
        (6 if with_norm else 4) * elements + 4 * cos.numel(),
    )


def swiglu_op() -> Op:
    gate, up = half(T, MLP), half(T, MLP)
    return lambda: kernels.swiglu(gate, up), 6 * gate.numel()


def swiglu_backward_op(return_h: bool) -> Op:
    dh, gate, up = half(T, MLP), half(T, MLP), half(T, MLP)
    return lambda: kernels.swiglu_backward(dh, gate, up, return_h=return_h), (12 if return_h else 10) * gate.numel()


def merge_op(wide: bool) -> Op:
    a, b = (single if wide else half)(T, HEADS, SIZE), half(T, HEADS, SIZE)
    lse_a, lse_b = single(HEADS, T), single(HEADS, T)
    return (
        lambda: kernels.merge_blocks(a, lse_a, b, lse_b),
        2 * a.numel() * a.element_size() + 2 * b.numel() + 12 * lse_a.numel(),
    )


def sink_op() -> Op:
    out, lse, sinks = half(T, HEADS, SIZE), single(HEADS, T), half(HEADS)
    return lambda: kernels.apply_sink(out, lse, sinks), 4 * out.numel() + 8 * lse.numel()


def add_rows_op() -> Op:
    dst, src = single(65_536, KEYS, SIZE), half(65_536, KEYS, SIZE)
    return lambda: kernels.add_rows(dst, src), 10 * dst.numel()


def logprob_op(entropy: bool) -> Op:
    logits, labels = half(ROWS, VOCABULARY), torch.randint(VOCABULARY, (ROWS,), device="cuda")
    return lambda: kernels.row_logprob(logits, labels, 0.9, None, entropy), 2 * logits.numel()


def logprob_backward_op(entropy: bool) -> Op:
    logits, labels = half(ROWS, VOCABULARY), torch.randint(VOCABULARY, (ROWS,), device="cuda")
    lse, dlogprob, H = single(ROWS) + 12, single(ROWS), single(ROWS)
    dH = single(ROWS) if entropy else None
    return lambda: kernels.row_logprob_backward(logits, labels, lse, dlogprob, dH, H, 0.9), 4 * logits.numel()


OPS: dict[str, Callable[[], Op]] = {
    "rms_norm": norm_op,
    "add_rms_norm": add_norm_op,
    "rms_norm_backward": lambda: norm_backward_op(False),
    "rms_norm_backward, add": lambda: norm_backward_op(True),
    "rms_norm_backward, add, dweight": lambda: norm_backward_op(True, True),
    "qk_norm_rope": lambda: rope_op(True, False),
    "qk_norm_rope, no norm": lambda: rope_op(False, False),
    "qk_norm_rope_backward": lambda: rope_op(True, True),
    "qk_norm_rope_backward, no norm": lambda: rope_op(False, True),
    "swiglu": swiglu_op,
    "swiglu_backward": lambda: swiglu_backward_op(False),
    "swiglu_backward, h": lambda: swiglu_backward_op(True),
    "merge_blocks, fp32": lambda: merge_op(True),
    "merge_blocks, bf16": lambda: merge_op(False),
    "apply_sink": sink_op,
    "add_rows": add_rows_op,
    "row_logprob": lambda: logprob_op(False),
    "row_logprob, entropy": lambda: logprob_op(True),
    "row_logprob_backward": lambda: logprob_backward_op(False),
    "row_logprob_backward, entropy": lambda: logprob_backward_op(True),
}

# Settings tried by --sweep: (module, {name: value}) for the ops they concern.
SWEEP: list[tuple[Any, list[dict[str, int]], list[str]]] = [
    (
        norm,
        [{"EACH": n} for n in (16, 32, 64)],
        ["rms_norm", "add_rms_norm", "rms_norm_backward", "rms_norm_backward, add", "rms_norm_backward, add, dweight"],
    ),
    (
        rope,
        [{"EACH": n} for n in (16, 32, 64)],
        ["qk_norm_rope", "qk_norm_rope, no norm", "qk_norm_rope_backward", "qk_norm_rope_backward, no norm"],
    ),
    (
        swiglu,
        [{"BLOCK": b, "EACH": n} for b in (1024, 2048, 4096) for n in (8, 16)],
        ["swiglu", "swiglu_backward", "swiglu_backward, h"],
    ),
    (
        merge,
        [{"ELEMENTS": b, "EACH": n} for b in (2048, 4096) for n in (8, 16)],
        ["merge_blocks, fp32", "merge_blocks, bf16", "apply_sink", "add_rows"],
    ),
    (
        logprob,
        [{"BLOCK": b, "EACH_FORWARD": n} for b in (2048, 4096, 8192) for n in (32, 64)],
        ["row_logprob", "row_logprob, entropy"],
    ),
    (
        logprob,
        [{"BLOCK": b, "EACH_BACKWARD": n} for b in (2048, 4096) for n in (16, 32)],
        ["row_logprob_backward", "row_logprob_backward, entropy"],
    ),
]


def graph_microseconds(make: Callable[[], Op]) -> tuple[float, int]:
    """(median time of one call on the device, bytes it moves)."""
    run, size = make()
    runs = [run] + [make()[0] for _ in range(min(7, 400_000_000 // size))]
    return replayed_microseconds(runs, max(1, 8 // len(runs))), size


def host_microseconds(make: Callable[[], Op], calls: int = 30) -> float:
    """What one call costs the host: it returns before the device is done."""
    run, _ = make()
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def stream_rate() -> float:
    """GB/s of y = 2x over large tensors: what a kernel that only reads and writes reaches on this card."""
    x, y = half(1 << 28), half(1 << 28)
    us, size = graph_microseconds(lambda: (lambda: torch.mul(x, 2, out=y), 4 * x.numel()))
    return size / us / 1e3


def measure(name: str, stream: float) -> dict[str, Any]:
    us, size = graph_microseconds(OPS[name])
    with dispatch.use("reference"):
        plain, _ = graph_microseconds(OPS[name])
    rate = size / us / 1e3
    row = {
        "op": name,
        "microseconds": us,
        "gb_per_s": rate,
        "share_of_stream": rate / stream,
        "pytorch_microseconds": plain,
    }
    row["host_microseconds"] = host_microseconds(OPS[name])
    row = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
    print(
        f"{name:34}{us:9.1f} us {rate:7.0f} GB/s {rate / stream:6.0%} of streaming; PyTorch {plain:8.1f} us; host "
        f"{row['host_microseconds']:5.1f} us",
        flush=True,
    )
    torch.cuda.empty_cache()
    return row


def sweep() -> list[dict[str, Any]]:
    rows = []
    for module, settings, names in SWEEP:
        for setting in settings:
            fixed = {name: getattr(module, name) for name in setting}
            for name, value in setting.items():
                setattr(module, name, value)
            for op in names:
                us, size = graph_microseconds(OPS[op])
                rows.append({"op": op, **setting, "gb_per_s": round(size / us / 1e3)})
                print(op, setting, rows[-1]["gb_per_s"], "GB/s", flush=True)
            for name, value in fixed.items():
                setattr(module, name, value)
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other block sizes and warps too")
    parser.add_argument("--out", type=Path, default=RESULT, help="JSON file to write")
    parser.add_argument("--commit", help="commit to record, where the sources lie outside a git checkout")
    options = parser.parse_args()
    torch.manual_seed(0)
    stream = stream_rate()
    print(f"streaming {stream:.0f} GB/s", flush=True)
    result: dict[str, Any] = {
        "machine": {
            **describe(),
            **({"commit": options.commit} if options.commit else {}),
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "stream_gb_per_s": round(stream),
        "ops": [],
    }
    for name in OPS:
        result["ops"].append(measure(name, stream))
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.sweep:
        result["sweep"] = sweep()
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
