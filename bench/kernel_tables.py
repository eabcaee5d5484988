"""Tables of the attention backends and of the fused kernels, for the page that `make_tables.py` writes."""

from __future__ import annotations

from typing import Any

from bench.markdown import table


def attention(result: Any) -> list[str]:
    """TFLOP/s of each backend on each shape."""
    if not result:
        return []
    rows = []
    for r in result["rows"]:
        if "left_out" in r:
            continue
        price = r.get("deterministic_backward_over_default")
        first = r["first_forward_s"] + r["first_backward_s"]
        rows.append(
            [r["shape"], r["backend"], f"{r['forward_tflops']:.0f}", f"{r['backward_tflops']:.0f}",
             "" if price is None else f"{price:.2f}×", f"{first:.1f} s"]
        )  # fmt: skip
    versions = ", ".join(
        f"{name} {result['versions'][name]}"
        for name in ("torch", "flash-attn-4", "cudnn")
        if name in result["versions"]
    )
    text = f"TFLOP/s in bf16 on {result['card']} (commit {result['machine']['commit']}, {versions}); `bench/attention.py`. "
    text += "What was left out is in the results with its reason."
    header = ["shape", "backend", "forward", "backward", "price of a deterministic backward", "first call"]
    return ["## Attention backends", "", text, "", *table(header, rows)]


def kernels(result: Any) -> list[str]:
    """Time and bandwidth of each fused op beside plain PyTorch."""
    if not result:
        return []
    machine = result["machine"]
    versions = machine["versions"]
    text = f"Microseconds on {machine['card']} (commit {machine['commit']}, torch {versions['torch']}, Triton "
    text += f"{versions['triton']}); `bench/kernels.py`. Plain PyTorch is the reference of the same op, step by step."
    rows = [
        [r["op"], f"{r['microseconds']:.0f}", f"{r['gb_per_s']:,.0f}", f"{r['pytorch_microseconds']:,.0f}",
         f"{r['pytorch_microseconds'] / r['microseconds']:.0f}×"]
        for r in result["ops"]
    ]  # fmt: skip
    return ["## Fused kernels", "", text, "", *table(["op", "µs", "GB/s", "plain PyTorch µs", "faster"], rows)]


def decode_kernels(result: Any) -> list[str]:
    """Time and bandwidth of the kernels of a decoding step."""
    if not result:
        return []
    machine = result["machine"]
    text = (
        f"Microseconds on {machine['card']} (commit {machine['commit']}, torch {machine['versions']['torch']}, Triton "
    )
    text += f"{machine['versions']['triton']}) inside a CUDA graph, gaps between kernels included. "
    text += "`bench/decode_kernels.py` says what each line is."
    text += f" {result['note']}" if "note" in result else ""
    rows = [[r["op"], f"{r['microseconds']:.1f}", f"{r['gb_per_s']:,}"] for r in result["ops"]]
    return ["## Kernels of a decoding step", "", text, "", *table(["op", "µs", "GB/s"], rows)]
