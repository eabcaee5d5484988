"""Speed of each attention backend, forward and backward, on the shapes of long-context training.

    python -m bench.attention             # about two minutes on an H200
    python -m bench.attention --quick     # a quarter of the lengths

Random normal data in bf16. TFLOP/s count two multiplications of each visible (query, key) pair in the forward and five in
the backward, as is usual; the backward recomputes nothing else. Each figure is the median of five calls after two. "first
call" holds the compilation of its kernels. The price of determinism is the backward's time with it over without.
Written to bench/results/attention.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bench.machine import describe

from longreach.attention import AttentionSpec, BlockCall, KeyValues, attention_backward, attention_forward
from longreach.attention.aten_cuda import CudnnAttention, EfficientAttention, FlashAttention2
from longreach.attention.flash4 import FlashAttention4
from longreach.cli.machine import OPTIONAL, PACKAGES, versions

RESULT = Path(__file__).parent / "results" / "attention.json"
CALLS = 5
EFFICIENT_FLOP = 1e12


@dataclass(frozen=True)
class Shape:
    name: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    causal: bool = True
    window: int | None = None
    pairs: int = 1
    sinks: bool = False

    def flop(self) -> float:
        """Of the forward: two products of 2 * size operations per visible pair of one query and one key."""
        visible = self.queries * self.keys - (self.queries**2 / 2 if self.causal else 0)
        if self.window is not None:
            visible = self.queries * self.window
        return 4.0 * self.heads * self.size * visible * self.pairs


SHAPES = (
    Shape("causal 64K, d 128", 65536, 65536, 32, 8, 128),
    Shape("causal 8K chunk, d 128", 8192, 8192, 32, 8, 128),
    Shape("8K chunk on 64K, d 128", 8192, 65536, 32, 8, 128, causal=False),
    Shape("causal 32K with sinks, d 64", 32768, 32768, 64, 8, 64, sinks=True),
    Shape("window 128 of 32K, d 64", 32768, 32768, 64, 8, 64, window=128),
    Shape("64 sequences of 1,280, d 128", 1280, 1280, 32, 8, 128, pairs=64),
)


def median_ms(call: Callable[[], Any]) -> float:
    call(), call()
    times = []
    for _ in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(kind: type, shape: Shape) -> dict[str, Any]:
    """Both passes of one backend on one shape, through the op that training uses."""
    q, k, v, dout = (
        torch.randn(n * shape.pairs, h, shape.size, device="cuda", dtype=torch.bfloat16)
        for n, h in (
            (shape.queries, shape.heads), (shape.keys, shape.kv_heads), (shape.keys, shape.kv_heads),
            (shape.queries, shape.heads),
        )
    )  # fmt: skip
    sinks = torch.randn(shape.heads, device="cuda") if shape.sinks else None
    kv = KeyValues(len(k))
    kv.write(0, k, v)
    cu_q, cu_k = (tuple(range(0, n * shape.pairs + 1, n)) for n in (shape.queries, shape.keys))
    call = BlockCall(0, len(q), ((0, len(k)),), cu_q, cu_k, shape.causal, shape.window)

    def spec(backend):
        return AttentionSpec(kv, len(k) - len(q), (call,), shape.size**-0.5, backend=backend)

    def forward(backend):
        return attention_forward(q, k[-len(q) :], v[-len(q) :], spec(backend), sinks)

    def backward(backend):
        return attention_backward(dout, q, out, lse, spec(backend), sinks)

    chosen = kind()
    result: dict[str, Any] = {"first_forward_s": round(seconds(lambda: forward(chosen)), 2)}
    out, lse = forward(chosen)
    forward_ms = median_ms(lambda: forward(chosen))
    result["first_backward_s"] = round(seconds(lambda: backward(chosen)), 2)
    backward_ms = median_ms(lambda: backward(chosen))
    result |= {
        "forward_ms": round(forward_ms, 3),
        "backward_ms": round(backward_ms, 3),
        "forward_tflops": round(shape.flop() / forward_ms / 1e9),
        "backward_tflops": round(2.5 * shape.flop() / backward_ms / 1e9),
    }
    if kind in (FlashAttention4, FlashAttention2):
        fixed, free = kind(deterministic=True), kind(deterministic=False)
        price = median_ms(lambda: backward(fixed)) / median_ms(lambda: backward(free))
        result["deterministic_backward_over_default"] = round(price, 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the lengths; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--commit", help="of the code measured, where it is no git checkout")
    arguments = parser.parse_args()
    rows = []
    for shape in SHAPES:
        if arguments.quick:
            shape = Shape(**{**vars(shape), "queries": shape.queries // 4, "keys": shape.keys // 4})
        for kind in (FlashAttention4, CudnnAttention, FlashAttention2, EfficientAttention):
            reason = kind().unsupported(
                device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=shape.size, value_dim=shape.size,
                windowed=shape.window is not None, varlen=shape.pairs > 1,
            )  # fmt: skip
            if kind is EfficientAttention and shape.flop() > EFFICIENT_FLOP:
                reason = "would take minutes here: made for cards of a tenth of this one's speed"
            figures = {"left_out": reason} if reason else measure(kind, shape)
            rows.append({"shape": shape.name, "backend": kind.name, **figures})
            print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    if not arguments.quick:
        record = {
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "card": torch.cuda.get_device_name(),
            "machine": describe() | ({"commit": arguments.commit} if arguments.commit else {}),
            "versions": versions(PACKAGES + OPTIONAL)
            | {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},
            "rows": rows,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
