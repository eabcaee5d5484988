"""Dequantization of 4-bit weights on a CUDA device: microseconds and share of the memory's bandwidth.

    python -m bench.dequant                # writes bench/results/dequant.json
    python -m bench.dequant --sweep        # also tries other block sizes and warps: how the fixed ones were chosen
    python -m bench.dequant --device cpu --tiny     # tests the script

The linear shapes of Qwen3-4B and larger ones. Calls are captured into a CUDA graph over several weights, more than the L2 cache
holds together; the median of the replays counts. Bytes are what must move: codes and scales read, results written; the share is
that of what a copy of the same size reaches on this card in the same run. bitsandbytes' kernel is timed beside it where it is
installed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import measure
from longreach.quant import MXFP4, NF4, Packed

SHAPES = {"k_proj": (1024, 2560), "q_proj": (4096, 2560), "down_proj": (2560, 9728), "large": (8192, 28672)}
FORMATS = {"nf4": NF4(), "nf4, single": NF4(double=False), "mxfp4": MXFP4()}
WORKING_SET = 400 * 2**20  # bytes: eight times the L2 cache of an H200
REPLAYS = 15


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(out=measure.RESULTS / "dequant.json")
    parser.add_argument("--sweep", action="store_true")
    options = measure.parse(parser, argv)
    found: dict[str, Any] = {"copy_GBps": copy_rate(options.device, options.tiny)}
    for shape_name, shape in SHAPES.items():
        shape = (shape[0] // 64, shape[1] // 16) if options.tiny else shape
        for name, format in FORMATS.items():
            for dtype in (torch.bfloat16, torch.float32) if name == "nf4" else (torch.bfloat16,):
                key = f"{shape_name} {name} {str(dtype)[6:]}"
                found[key] = rate(format, shape, dtype, options, found["copy_GBps"])
                print(key, found[key], flush=True)
    if options.sweep:
        sweep(options, found)
    if options.device == "cuda":
        bitsandbytes(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found | measure.provenance(options.commit), indent=1) + "\n", encoding="utf-8")


def seconds(calls: list[Callable[[], Any]], device: str) -> float:
    """Of one call, in a row of them."""
    began = time.perf_counter()
    for call in calls:
        call()
    if device != "cuda":
        return (time.perf_counter() - began) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(times)


def copy_rate(device: str, tiny: bool) -> float:
    """GB/s, read and written, of a copy of 200 MB."""
    size = 2**12 if tiny else 100 * 2**20
    pairs = [(torch.empty(size, dtype=torch.bfloat16, device=device), torch.empty(size, dtype=torch.bfloat16, device=device))
             for _ in range(2)]  # fmt: skip
    taken = seconds([lambda a=a, b=b: a.copy_(b) for a, b in pairs], device)
    return 4 * size / taken / 1e9


def weights(format: Any, shape: tuple[int, int], dtype: torch.dtype, device: str) -> list[tuple[Packed, torch.Tensor]]:
    count = max(2, min(64, WORKING_SET // (shape[0] * shape[1] * dtype.itemsize)))
    one = format.quantize(torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02)
    return [
        (
            Packed(format, shape, {k: v.clone() for k, v in one.tensors.items()}),
            torch.empty(shape, dtype=dtype, device=device),
        )
        for _ in range(count)
    ]


def rate(format: Any, shape: tuple[int, int], dtype: torch.dtype, options: Any, copy: float) -> dict[str, float]:
    sets = weights(format, shape, dtype, options.device)
    taken = seconds([lambda p=p, o=o: p.dequantize(dtype, o) for p, o in sets], options.device)
    moved = sets[0][0].nbytes + sets[0][1].nbytes
    return {
        "us": round(taken * 1e6, 2),
        "GBps": round(moved / taken / 1e9),
        "of_copy": round(moved / taken / 1e9 / copy, 3),
    }


def sweep(options: Any, found: dict[str, Any]) -> None:
    from longreach.kernels.jit import dequant

    kept = dequant.WEIGHTS, dequant.WARPS
    for per_thread in (8, 16, 32):
        for warps in (4, 8):
            dequant.WEIGHTS, dequant.WARPS = per_thread * 32 * warps, warps
            for name in ("nf4", "mxfp4"):
                key = f"sweep {name} {per_thread} a thread, {warps} warps"
                found[key] = rate(FORMATS[name], SHAPES["down_proj"], torch.bfloat16, options, found["copy_GBps"])
                print(key, found[key], flush=True)
    dequant.WEIGHTS, dequant.WARPS = kept


def bitsandbytes(found: dict[str, Any]) -> None:
    """Its kernel on the same weights, and whether the results are the same bits."""
    try:
        import bitsandbytes.functional as other
    except ImportError:
        return
    shape = SHAPES["down_proj"]
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
    codes, state = other.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    count = max(2, WORKING_SET // weight.nbytes)
    outs = [torch.empty_like(weight) for _ in range(count)]
    taken = seconds([lambda o=o: other.dequantize_4bit(codes, state, out=o) for o in outs], "cuda")
    ours = Packed(NF4(double=False), shape, {"codes": codes, "absmax": state.absmax}).dequantize(torch.bfloat16)
    found["bitsandbytes down_proj"] = {"us": round(taken * 1e6, 2), "same_bits": bool(torch.equal(ours, outs[0]))}
    print("bitsandbytes", found["bitsandbytes down_proj"], flush=True)


if __name__ == "__main__":
    main()
