"""Kernels of a decoding step on a CUDA device: microseconds, GB/s and share of the card's bandwidth.

    python -m bench.decode_kernels                      # writes bench/results/decode_kernels.json
    python -m bench.decode_kernels --only fourbit --sweep   # tries other tile sizes too: how the fixed ones were chosen

Calls are captured into a CUDA graph over several sets of tensors, more than the L2 cache holds together, and the graph is
replayed; the median of the replays over the number of calls is reported, gaps between kernels included. GB/s counts what must be
read and written once. The share is of what a copy reaches on this card in the same run, reads and writes both counted.
Shapes: Qwen3-4B (hidden 2,560, MLP 9,728, 32 query and 8 key heads of 128) and gpt-oss-20b (64 and 8 heads of 64); adapters of
rank 32 on every linear layer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.measure import provenance, replayed_microseconds
from torch import Tensor

from longreach.kernels import rms_norm
from longreach.kernels.decode_attention import DecodePlan, decode_attention
from longreach.kernels.decode_experts import decode_experts
from longreach.kernels.decode_ops import decode_add_norm, decode_qkv, decode_sample, decode_swiglu
from longreach.kernels.few_row_matmul import few_row_matmul
from longreach.kernels.fourbit_matmul import FourBitRows, fourbit_matmul

RESULT = Path(__file__).parent / "results" / "decode_kernels.json"
HIDDEN, MLP, HEADS, KEYS, SIZE, VOCABULARY, RANK, PAGE = 2560, 9728, 32, 8, 128, 151_936, 32, 64
GROUPS = {
    "qkv": ((HEADS * SIZE, KEYS * SIZE, KEYS * SIZE), HIDDEN),
    "o": ((HIDDEN,), HEADS * SIZE),
    "gate_up": ((MLP, MLP), HIDDEN),
    "down": ((HIDDEN,), MLP),
}
SETS_BYTES = 200_000_000  # four times the L2 cache
CALLS = 16

Op = tuple[Callable[[], Any], int]  # one call, and the bytes it must move
device = "cuda"


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def integers(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


# --- the ops ------------------------------------------------------------------------------------------------------


def attention_op(
    rows: int, own: int, prefix: int = 0, group: int = 1, *, shared: bool = True,
    heads: tuple[int, int, int] = (HEADS, KEYS, SIZE), window: int | None = None,
) -> Op:  # fmt: skip
    """`rows` rows with `own` keys each, in groups over prefixes; `shared` False reads the prefix once for every row."""
    H, K, D = heads
    groups = rows // group if prefix else 0
    own_n, prefix_n = -(-own // PAGE), -(-prefix // PAGE)
    pages = rows * own_n + groups * prefix_n
    k, v = (half(pages, K, PAGE, D).transpose(1, 2) for _ in range(2))
    order = torch.randperm(pages, device=device).to(torch.int32)
    own_pages = order[: rows * own_n].view(rows, own_n).contiguous()
    prefix_pages = order[rows * own_n :].view(groups, prefix_n).contiguous()
    members = torch.arange(rows, device=device, dtype=torch.int32).view(-1, group)[:groups]
    of = torch.arange(rows, device=device, dtype=torch.int32) // group if groups else integers([-1] * rows)
    if groups and not shared:
        prefix_pages, members = prefix_pages.repeat_interleave(group, 0), members.reshape(-1, 1)
        of = torch.arange(rows, device=device, dtype=torch.int32)
    plan = DecodePlan(
        own_pages, integers([own] * rows), of, prefix_pages, integers([prefix] * len(prefix_pages)), members.contiguous(),
        heads=H, kv_heads=K, head_dim=D, page=PAGE, window=window,
    )  # fmt: skip
    plan.update()
    q = half(rows, H, D)
    seen_own = own if window is None else min(own, window)
    seen = rows * seen_own + (groups * prefix if window is None else 0)
    return lambda: decode_attention(q, k, v, plan, scale=D**-0.5), 4 * seen * K * D + 4 * q.numel()


def plan_op(rows: int) -> Op:
    own_pages, none = integers([[0] * 64] * rows), integers([-1] * rows)
    empty = torch.empty(0, 1, dtype=torch.int32, device=device)
    plan = DecodePlan(
        own_pages,
        integers([2000] * rows),
        none,
        empty,
        integers([]),
        empty,
        heads=HEADS,
        kv_heads=KEYS,
        head_dim=SIZE,
        page=PAGE,
    )
    return plan.update, 4 * rows


def nf4(rows: int, columns: int) -> FourBitRows:
    blocks = rows * columns // 64
    codes = torch.randint(256, (rows * columns // 2,), dtype=torch.uint8, device=device)
    absmax = torch.randint(256, (blocks,), dtype=torch.uint8, device=device)
    nested = (
        torch.rand(-(-blocks // 256), device=device),
        torch.rand(256, device=device),
        torch.rand((), device=device),
    )
    return FourBitRows("nf4", rows, columns, codes, absmax, 64, nested)


def mxfp4(rows: int, columns: int) -> FourBitRows:
    codes = torch.randint(256, (rows, columns // 32, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(115, 124, (rows, columns // 32), dtype=torch.uint8, device=device)
    return FourBitRows("mxfp4", rows, columns, codes, scales, 32)


def fourbit_op(rows: int, group: str, form: Callable[[int, int], FourBitRows] = nf4) -> Op:
    features, columns = GROUPS[group]
    parts = [form(n, columns) for n in features]
    a = half(RANK * len(features), columns)
    x, out = half(rows, columns), half(rows, sum(features) + len(a))
    size = sum(p.codes.nbytes + p.scales.nbytes for p in parts) + a.nbytes + x.nbytes + out.nbytes
    return lambda: fourbit_matmul(x, parts, out, a_RI=a), size


def dense_op(rows: int, group: str, *, own: bool = False) -> Op:
    """The same product with bf16 weights, adapters' first matrices below them; by cuBLAS or by our own kernel."""
    features, columns = GROUPS[group]
    weight, x = half(sum(features) + RANK * len(features), columns), half(rows, columns)
    out = half(rows, len(weight))
    size = weight.nbytes + x.nbytes + out.nbytes
    if own:
        return lambda: few_row_matmul(x, weight, out=out), size
    return lambda: torch.matmul(x, weight.t(), out=out), size


def head_op(rows: int) -> Op:
    weight, x = half(VOCABULARY, HIDDEN), half(rows, HIDDEN)
    out = half(rows, VOCABULARY)
    return lambda: torch.matmul(x, weight.t(), out=out), weight.nbytes + x.nbytes + out.nbytes


def qkv_op(rows: int) -> Op:
    features = (HEADS + 2 * KEYS) * SIZE
    y, lora, w = half(rows, features + 3 * RANK), half(features, RANK), half(SIZE)
    cos, sin = half(rows, SIZE), half(rows, SIZE)
    k, v = (half(rows, KEYS, PAGE, SIZE).transpose(1, 2) for _ in range(2))
    pages, length = integers(range(rows))[:, None].contiguous(), integers([5] * rows)
    position = integers(range(rows))
    size = y.nbytes + lora.nbytes + y.nbytes
    return lambda: decode_qkv(
        y, HEADS, KEYS, SIZE, cos_SR=cos, sin_SR=sin, position_B=position, k_pages=k, v_pages=v, own_pages_BN=pages,
        own_length_B=length, lora_b_Or=lora, q_norm_D=w, k_norm_D=w,
    ), size  # fmt: skip


def swiglu_op(rows: int) -> Op:
    y, lora = half(rows, 2 * MLP + 2 * RANK), half(2 * MLP, RANK)
    return lambda: decode_swiglu(y, lora_b_Or=lora), y.nbytes + lora.nbytes + y.nbytes // 2


def norm_op(rows: int, rank: int = RANK) -> Op:
    h, y, w = half(rows, HIDDEN), half(rows, HIDDEN + rank), half(HIDDEN)
    lora = half(HIDDEN, rank) if rank else None
    return lambda: decode_add_norm(h, y, w, 1e-6, lora_b_Or=lora), 4 * h.nbytes + 2 * HIDDEN * rank


def sample_op(rows: int) -> Op:
    logits = half(rows, VOCABULARY)
    temperature, seed = torch.full((rows,), 0.9, device=device), torch.arange(rows, device=device)
    return lambda: decode_sample(logits, temperature, seed, seed), logits.nbytes


def experts_op(rows: int, experts: int = 32, choices: int = 4, hidden: int = 2880, rank: int = 0) -> Op:
    """gpt-oss-20b's experts, with adapters of a rank; tokens choose at random."""
    up, down = mxfp4(experts * 2 * hidden, hidden), mxfp4(experts * hidden, hidden)
    chosen = torch.stack([torch.randperm(experts, device=device)[:choices] for _ in range(rows)])
    x, weight = half(rows, hidden), torch.rand(rows, choices, device=device)
    bias, bias_down = half(experts, 2 * hidden), half(experts, hidden)

    def shaped(part: FourBitRows) -> tuple[Tensor, Tensor]:
        return part.codes.view(experts, -1, hidden // 32, 16), part.scales.view(experts, -1, hidden // 32)

    (up_codes, up_scales), (down_codes, down_scales) = shaped(up), shaped(down)
    low = [(half(experts, rank, hidden), half(experts, rank, n * hidden)) if rank else None for n in (2, 1)]
    tensors = [t for w in (up, down) for t in (w.codes, w.scales)] + [t for pair in low if pair for t in pair]
    size = int(len(chosen.unique()) / experts * sum(t.nbytes for t in tensors))
    return lambda: decode_experts(
        x, chosen, weight, gate_up_codes=up_codes, gate_up_scales=up_scales, down_codes=down_codes, down_scales=down_scales,
        gate_up_bias=bias, down_bias=bias_down, gate_up_low=low[0], down_low=low[1],
    ), size  # fmt: skip


def plain_norm_op(rows: int) -> Op:
    x, w = half(rows, HIDDEN), half(HIDDEN)
    return lambda: rms_norm(x, w, 1e-6), 2 * x.nbytes


OSS = (64, 8, 64)
OPS: dict[str, Callable[[], Op]] = {
    "attention, 1 x 2K": lambda: attention_op(1, 2048),
    "attention, 32 x 2K": lambda: attention_op(32, 2048),
    "attention, 128 x 2K": lambda: attention_op(128, 2048),
    "attention, 1 x 128K": lambda: attention_op(1, 64, 131072),
    "attention, group of 16 on 128K, own 512": lambda: attention_op(16, 512, 131072, 16),
    "attention, the same, prefix not shared": lambda: attention_op(16, 512, 131072, 16, shared=False),
    "attention, 8 groups of 8 on 2K, own 512": lambda: attention_op(64, 512, 2048, 8),
    "attention, gpt-oss heads, 32 x 2K": lambda: attention_op(32, 2048, heads=OSS),
    "attention, gpt-oss heads, window 128, 32 x 2K": lambda: attention_op(32, 2048, heads=OSS, window=128),
    **{f"experts gpt-oss, {b} rows": (lambda b=b: experts_op(b)) for b in (1, 2, 4, 8, 32, 64, 128)},
    **{f"experts gpt-oss with adapters, {b} rows": (lambda b=b: experts_op(b, rank=RANK)) for b in (1, 8, 32, 128)},
    "plan, 128 rows": lambda: plan_op(128),
    **{f"fourbit nf4 {g}, {b} rows": (lambda g=g, b=b: fourbit_op(b, g)) for b in (1, 2, 4, 8, 16, 32, 64) for g in GROUPS},
    **{f"fourbit mxfp4 {g}, {b} rows": (lambda g=g, b=b: fourbit_op(b, g, mxfp4)) for b in (1, 32) for g in GROUPS},
    **{f"cublas bf16 {g}, {b} rows": (lambda g=g, b=b: dense_op(b, g)) for b in (1, 4, 16, 64) for g in GROUPS},
    **{
        f"few_row bf16 {g}, {b} rows": (lambda g=g, b=b: dense_op(b, g, own=True))
        for b in (1, 2, 4, 8, 16, 32, 64) for g in GROUPS
    },
    **{f"cublas bf16 head, {b} rows": (lambda b=b: head_op(b)) for b in (1, 8, 32, 128)},
    **{f"decode_qkv, {b} rows": (lambda b=b: qkv_op(b)) for b in (1, 32, 128)},
    **{f"decode_swiglu, {b} rows": (lambda b=b: swiglu_op(b)) for b in (1, 32, 128)},
    **{f"decode_add_norm, {b} rows": (lambda b=b: norm_op(b)) for b in (1, 32, 128)},
    "decode_add_norm without adapter, 1 rows": lambda: norm_op(1, 0),
    "rms_norm, 1 rows": lambda: plain_norm_op(1),
    **{f"decode_sample, {b} rows": (lambda b=b: sample_op(b)) for b in (1, 32, 128)},
}  # fmt: skip


# --- timing -------------------------------------------------------------------------------------------------------


def graph_microseconds(make: Callable[[], Op], calls: int = CALLS) -> tuple[float, int]:
    """(median time of one call on the device, bytes it moves)."""
    run, size = make()
    sets = max(1, min(calls, SETS_BYTES // max(size, 1)))
    runs = [run] + [make()[0] for _ in range(sets - 1)]
    return replayed_microseconds(runs, max(1, calls // len(runs))), size


def copy_rate() -> float:
    """GB/s of y = 2x on large tensors, reads and writes counted."""
    x, y = half(1 << 28), half(1 << 28)
    us, size = graph_microseconds(lambda: (lambda: torch.mul(x, 2, out=y), 4 * x.numel()), 4)
    return size / us / 1e3


def measure(name: str, copy: float, make: Callable[[], Op] | None = None) -> dict[str, Any]:
    us, size = graph_microseconds(make or OPS[name])
    row = {
        "op": name, "microseconds": round(us, 2), "bytes": size, "gb_per_s": round(size / us / 1e3),
        "share_of_copy": round(size / us / 1e3 / copy, 3),
    }  # fmt: skip
    print(f"{name:56}{us:9.2f} us {row['gb_per_s']:6} GB/s {row['share_of_copy']:6.0%}", flush=True)
    torch.cuda.empty_cache()
    return row


# --- sweep --------------------------------------------------------------------------------------------------------


def sweep(copy: float, which: str) -> list[dict[str, Any]]:
    """Other tile sizes of products, experts and attention."""
    from longreach.kernels.jit import decode_attention as attention_jit
    from longreach.kernels.jit import decode_experts as experts_jit
    from longreach.kernels.jit import few_row_matmul as dense_jit
    from longreach.kernels.jit import fourbit_matmul as fourbit_jit

    rows = []

    def attempt(name: str, setting: Any, make: Callable[[], Op]) -> None:
        try:
            rows.append({"setting": setting, **measure(f"{name} {setting}", copy, make)})
        except Exception as error:  # a setting that a card cannot run is a result of the sweep
            print(name, setting, "failed:", str(error).splitlines()[-1][:200], flush=True)

    if "fourbit" in which:
        base = dict(fourbit_jit._vector_sizes(HIDDEN, HIDDEN, 8))
        for block_o, warps in ((4, 2), (4, 4), (8, 2), (8, 4), (16, 2), (16, 4), (4, 8)):
            setting = {**base, "BLOCK_O": block_o, "BLOCK_G": 4 * warps, "num_warps": warps}
            fourbit_jit._vector_sizes = lambda *_, setting=setting: setting
            for group in GROUPS:
                attempt(f"1 row {group}", (block_o, warps), lambda group=group: fourbit_op(1, group))
    if "matrix" in which:
        for rows_n in (16, 64):
            plain = fourbit_jit._matrix_sizes(rows_n, 8, torch.bfloat16)
            for block_o, block_g, stages, warps in (
                (64, 2, 3, 4), (64, 1, 4, 4), (64, 2, 4, 4), (128, 2, 3, 8), (128, 1, 4, 4), (32, 2, 4, 2), (32, 4, 3, 4)
            ):  # fmt: skip
                setting = {**plain, "BLOCK_O": block_o, "BLOCK_G": block_g, "STAGES": stages, "num_warps": warps}
                fourbit_jit._matrix_sizes = lambda *_, setting=setting: setting
                for group in ("qkv", "down"):
                    attempt(
                        f"{rows_n} rows {group}",
                        (block_o, block_g, stages, warps),
                        lambda g=group, n=rows_n: fourbit_op(n, g),
                    )
    if "dense" in which:
        plain = dense_jit._vector_sizes
        for block_o, block_i, warps in (
            (8, 512, 4), (4, 512, 4), (4, 1024, 4), (8, 1024, 8), (2, 2048, 4), (16, 256, 4), (8, 256, 2), (2, 512, 2),
        ):  # fmt: skip
            setting = {"BLOCK_O": block_o, "BLOCK_I": block_i, "num_warps": warps}
            dense_jit._vector_sizes = lambda *_, setting=setting: setting
            for group in GROUPS:
                attempt(f"1 row {group}", tuple(setting.values()), lambda group=group: dense_op(1, group, own=True))
        dense_jit._vector_sizes = plain
    if "experts" in which:
        plain = experts_jit._tile_sizes
        for block_o, block_g, stages, warps in (
            (64, 4, 3, 4), (64, 4, 2, 4), (64, 8, 2, 4), (64, 2, 4, 4), (128, 4, 3, 8), (128, 4, 3, 4), (32, 4, 3, 4),
            (32, 8, 3, 4),
        ):  # fmt: skip
            setting = {"BLOCK_O": block_o, "BLOCK_G": block_g, "STAGES": stages, "num_warps": warps}
            experts_jit._tile_sizes = lambda *_, setting=setting: setting
            for rows_n in (8, 32, 128):
                attempt(f"experts {rows_n} rows", tuple(setting.values()), lambda n=rows_n: experts_op(n))
        experts_jit._tile_sizes = plain
    if "attention" in which:
        tile = attention_jit._tile
        for change in (
            {"STAGES": 2}, {"STAGES": 4}, {"num_warps": 8}, {"BLOCK_C": 128, "STAGES": 2}, {"BLOCK_C": 32, "STAGES": 4},
            {"BLOCK_T": 32},
        ):  # fmt: skip
            attention_jit._tile = lambda *a, change=change: {**tile(*a), **change}
            for name in ("attention, 128 x 2K", "attention, group of 16 on 128K, own 512"):
                attempt(name, change, OPS[name])
        attention_jit._tile = tile
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ops whose name contains one of these, comma-separated")
    parser.add_argument(
        "--sweep", default="", help="fourbit, matrix, dense, experts, attention: try other tile sizes of these"
    )
    parser.add_argument("--out", type=Path, default=RESULT, help="JSON file to write")
    parser.add_argument("--commit", help="commit to record, where the sources lie outside a git checkout")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_rate()
    print(f"copy {copy:.0f} GB/s", flush=True)
    result: dict[str, Any] = {"machine": provenance(options.commit), "copy_gb_per_s": round(copy), "ops": []}
    wanted = [part.strip() for part in options.only.split(",") if part.strip()]
    for name in OPS:
        if not wanted or any(part in name for part in wanted):
            result["ops"].append(measure(name, copy))
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.sweep:
        result["sweep"] = sweep(copy, options.sweep)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
