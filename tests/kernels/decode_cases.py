"""Every decoding op on random inputs, as in `cases`: a case is a function (device, dtype) -> list of results."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.kernels.decode_attention import DecodePlan, decode_attention
from longreach.kernels.decode_experts import choose_experts, decode_experts
from longreach.kernels.decode_ops import decode_add_norm, decode_qkv, decode_sample, decode_swiglu
from longreach.kernels.few_row_matmul import few_row_matmul
from longreach.kernels.fourbit_matmul import FourBitRows, fourbit_matmul

from .cases import Case, Maker

UNUSED = 2**20  # a page that no pool has: what entries without visible keys hold


class Pool:
    """Pages handed out in a shuffled order, so that none is where its number in the table would suggest."""

    def __init__(self, pages: int, seed: int) -> None:
        self.free = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()

    def table(self, lengths: list[int], page: int, width: int, first: list[int]) -> Tensor:
        rows = torch.full((len(lengths), width), UNUSED, dtype=torch.int32)
        for row, length, start in zip(rows, lengths, first):
            for i in range(start // page, -(-length // page)):
                row[i] = self.free.pop()
        return rows


def attention(
    *,
    groups: list[tuple[int, list[int]]],  # (prefix length, own lengths of its members)
    alone: tuple[int, ...] = (),  # own lengths of rows without a prefix; 0 is idle
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    value_size: int | None = None,
    page: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    scale: float | None = None,
    steps: int = 1,
    per_row: bool = False,
) -> Case:
    """Rows of the groups are dealt out in turn, so that a group's rows do not lie side by side.

    With `per_row`, keys, values and queries of a row or prefix depend on its place and length alone.
    """
    value_size = value_size or size

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        (H, K), G = heads, len(groups)
        M = max([len(own) for _, own in groups], default=0)
        own, prefix_of, members = [], [], torch.full((G, M), -1, dtype=torch.int32)
        for m in range(M):
            for g, (_, lengths) in enumerate(groups):
                if m < len(lengths):
                    members[g, m] = len(own)
                    own.append(lengths[m])
                    prefix_of.append(g)
        own += alone
        prefix_of += [-1] * len(alone)
        longest = max(own) + steps
        prefix = [p for p, _ in groups]
        first_own = [0 if window is None else max(0, n - window) for n in own]
        first_prefix = [
            0 if window is None else min([max(0, p + n - window) for n in lengths], default=0) for p, lengths in groups
        ]
        pages = 3 + sum(-(-(n + steps) // page) for n in own) + sum(-(-p // page) for p in prefix)
        pool = Pool(pages, 1)
        width = -(-longest // page)
        own_pages = pool.table([n + steps if n else 0 for n in own], page, width, first_own)
        prefix_pages = pool.table(prefix, page, max([-(-p // page) for p in prefix], default=0), first_prefix)
        # One head's page in one run; what no row may see is poisoned.
        k = make(pages, K, page, size).transpose(1, 2)
        v = make(pages, K, page, value_size).transpose(1, 2)
        k[pool.free], v[pool.free] = torch.nan, torch.nan
        q = make(len(own), H, size)
        if per_row:
            for tables, lengths_of in ((own_pages, own), (prefix_pages, prefix)):
                for i, (pages_of, n) in enumerate(zip(tables, lengths_of)):
                    used = pages_of[pages_of != UNUSED].long()
                    row = Maker(device, dtype, seed=1000 * i + n)
                    k[used], v[used] = row(len(used), page, K, size), row(len(used), page, K, value_size)
            q = torch.stack([Maker(device, dtype, seed=b)(H, size) for b in range(len(own))])
        lengths = torch.tensor(own, dtype=torch.int32, device=device)
        plan = DecodePlan(
            own_pages.to(device), lengths, torch.tensor(prefix_of, dtype=torch.int32, device=device),
            prefix_pages.to(device), torch.tensor(prefix, dtype=torch.int32, device=device), members.to(device),
            heads=H, kv_heads=K, head_dim=value_size, page=page, window=window,
        )  # fmt: skip
        sinks_H = make(H) if sinks else None
        results = []
        for _ in range(steps):
            plan.update()
            out = decode_attention(q, k, v, plan, scale=scale or size**-0.5, softcap=softcap, sinks_H=sinks_H)
            results.append(out)
            lengths += (lengths > 0).to(lengths.dtype)
        return results

    return run


def small_attention() -> dict[str, Case]:
    return {
        "attention-own-only": attention(groups=[], alone=(1, 70, 0, 33), size=64),
        "attention-group": attention(groups=[(131, [1, 17, 40])], alone=(5,), heads=(8, 2), size=80, steps=2),
        "attention-two-groups": attention(groups=[(300, [3, 1, 30]), (16, [64])], heads=(6, 2), size=96, page=32),
        "attention-one-head-a-key": attention(groups=[(20, [2, 9])], heads=(3, 3), size=128, page=64),
        "attention-big-heads": attention(groups=[(70, [4, 1])], heads=(4, 2), size=256, softcap=20.0, scale=0.5),
        "attention-sinks-window": attention(
            groups=[(300, [1, 60, 140]), (40, [100, 3])], alone=(200,), heads=(8, 2), window=128, sinks=True
        ),
        "attention-sinks": attention(groups=[(100, [5, 0, 6])], alone=(0, 1), heads=(16, 1), sinks=True),
        "attention-many-splits": attention(groups=[(400, [200, 2])], heads=(2, 2), page=64, steps=2),
        "attention-window-in-a-split": attention(groups=[(300, [1, 150])], heads=(2, 1), window=200, page=32),
        "attention-many-rows": attention(groups=[(20, [1] * 17)], heads=(8, 1), size=64),
        "attention-values-of-other-size": attention(groups=[(40, [3, 4])], size=96, value_size=64),
    }


def fourbit(
    B: int, rows: tuple[int, ...], columns: int, kind: str, *, block: int = 64, nested: bool = True, ranks: int = 0
) -> Case:
    """Products of one group of linear layers; results lie inside a wider tensor, whose other columns must stay."""

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        x = make(B, 2 * columns)[:, :columns]
        parts = [fourbit_rows(kind, n, columns, block, nested, seed=i, device=device) for i, n in enumerate(rows)]
        a = make(ranks, columns) if ranks else None
        out = torch.full((B, sum(rows) + ranks + 3), 7.0, device=device, dtype=dtype)
        assert fourbit_matmul(x, parts, out, a_RI=a) is out
        assert bool((out[:, -3:] == 7).all())
        return [out[:, :-3]]

    return run


def fourbit_rows(kind: str, rows: int, columns: int, block: int, nested: bool, seed: int, device: str) -> FourBitRows:
    """Random codes and scales as a quantizer of small weights leaves them."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.uint8).to(device)

    codes, blocks = integers(256, rows * columns // 2, 1), rows * columns // block
    if kind == "mxfp4":
        scales = 115 + integers(10, rows, columns // 32)
        return FourBitRows(kind, rows, columns, codes.view(rows, columns // 32, 16), scales, 32)
    if not nested:
        return FourBitRows(kind, rows, columns, codes, torch.rand(blocks, generator=generator).to(device) / 8, block)
    outer = (torch.rand(-(-blocks // 256), generator=generator) / 16).to(device)
    table = torch.linspace(-1, 1, 256).to(device)
    offset = torch.tensor(0.07 + seed / 100, device=device)
    return FourBitRows(kind, rows, columns, codes, integers(256, blocks), block, (outer, table, offset))


def few_rows(B: int, rows: int, columns: int) -> Case:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        x, weight = make(B, columns + 8)[:, :columns], make(rows, columns, scale=0.2)
        out = torch.full((B, rows + 3), 7.0, device=device, dtype=dtype)
        few_row_matmul(x, weight, out=out[:, :rows])
        assert bool((out[:, rows:] == 7).all())
        return [out[:, :rows]]

    return run


def small_few_rows() -> dict[str, Case]:
    return {
        "few-rows-1": few_rows(1, 37, 600),
        "few-rows-2": few_rows(2, 64, 64),
        "few-rows-3": few_rows(3, 70, 2600),
        "few-rows-33": few_rows(33, 130, 160),
    }


def small_fourbit() -> dict[str, Case]:
    return {
        "fourbit-one-row": fourbit(1, (48, 20, 20), 192, "nf4", ranks=6),
        "fourbit-one-row-single": fourbit(1, (40,), 64, "nf4", nested=False),
        "fourbit-one-row-mxfp4": fourbit(1, (37,), 96, "mxfp4"),
        "fourbit-three-rows": fourbit(3, (40, 33), 320, "nf4", ranks=3, block=32),
        "fourbit-four-rows-mxfp4": fourbit(4, (40, 33), 320, "mxfp4", ranks=3),
        "fourbit-five-rows": fourbit(5, (70, 9, 8), 640, "nf4", ranks=20),
        "fourbit-split-sum": fourbit(17, (70,), 2560, "mxfp4", ranks=8),
        "fourbit-wide-blocks": fourbit(33, (16, 100), 768, "nf4", block=256),
        "fourbit-wide-blocks-two-rows": fourbit(2, (16, 10), 768, "nf4", block=128),
    }


def qkv(B: int, heads: tuple[int, int], D: int, R: int, *, rank: int = 0, bias: bool = False, norm: bool = True,
        unit_offset: bool = False) -> Case:  # fmt: skip
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        H, K = heads
        features, page, S = (H + 2 * K) * D, 16, 50
        y = make(B, features + 3 * rank + 5)
        cos, sin = make.wide(S, R), make.wide(S, R)
        storage = make(B + 2, K, page, 2 * D)
        k, v = storage[..., :D].transpose(1, 2), storage[..., D:].transpose(1, 2)
        lengths = [1 + 7 * b % 16 for b in range(B)]
        if B > 1:
            lengths[B // 2] = 0
        position = torch.arange(B, dtype=torch.int32, device=device) * 3 % S
        pages = torch.arange(B + 1, 1, -1, dtype=torch.int32, device=device)[:, None].contiguous()
        q = decode_qkv(
            y, H, K, D, cos_SR=cos, sin_SR=sin, position_B=position, k_pages=k, v_pages=v, own_pages_BN=pages,
            own_length_B=torch.tensor(lengths, dtype=torch.int32, device=device),
            lora_b_Or=make(features, rank, scale=0.3) if rank else None, bias_O=make(features) if bias else None,
            q_norm_D=make(D) if norm else None, k_norm_D=make(D) if norm else None, eps=1e-5, unit_offset=unit_offset,
        )  # fmt: skip
        return [q, storage]

    return run


def step_swiglu(B: int, F: int, rank: int, *, bias: bool = False, activation: str = "silu") -> Case:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        y = make(B, 2 * F + 2 * rank)
        lora, b = make(2 * F, rank, scale=0.3) if rank else None, make(2 * F) if bias else None
        return [decode_swiglu(y, lora_b_Or=lora, bias_O=b, activation=activation)]

    return run


def step_norm(B: int, M: int, rank: int, *, bias: bool = False, post: bool = False, wide: bool = False) -> Case:
    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        h = make.wide(B, M) if wide else make(B, M)
        y, weight = make(B, M + rank + 2), make(M)
        x = decode_add_norm(
            h, y, weight, 1e-5, lora_b_Or=make(M, rank, scale=0.3) if rank else None, bias_M=make(M) if bias else None,
            post_weight_M=make(M) if post else None, unit_offset=post,
        )  # fmt: skip
        return [h, x]

    return run


def sample(B: int, V: int) -> Case:
    """Token numbers are compared as numbers: one that differs is far off."""

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        logits = make(B, V + 3, scale=2.0)[:, :V]
        logits[:, V // 2] = -torch.inf
        temperature = torch.tensor([(0.0, 0.7, 1.3)[b % 3] for b in range(B)], device=device)
        seed = torch.tensor([(-(2**63), 12345678912345, 7)[b % 3] + b for b in range(B)], device=device)
        count = torch.tensor([b * 1000003 % 2**32 for b in range(B)], device=device)
        ids, logprob = decode_sample(logits, temperature, seed, count)
        assert ids.dtype == torch.int64
        return [ids.to(logprob.dtype), logprob]

    return run


def small_ops() -> dict[str, Case]:
    return {
        "qkv": qkv(3, (4, 2), 64, 64, rank=8),
        "qkv-no-norm": qkv(17, (2, 1), 80, 32, bias=True, norm=False),
        "qkv-gemma": qkv(2, (2, 2), 96, 96, rank=5, bias=True, unit_offset=True),
        "qkv-partial": qkv(1, (4, 1), 128, 96, rank=32),
        "step-swiglu": step_swiglu(3, 200, 8),
        "step-swiglu-narrow": step_swiglu(17, 40, 0, bias=True, activation="gelu_tanh"),
        "step-norm": step_norm(3, 200, 8),
        "step-norm-plain": step_norm(2, 2560, 0, bias=True, wide=True),
        "step-norm-gemma": step_norm(17, 80, 16, bias=True, post=True),
        "sample": sample(4, 9000),
        "sample-few": sample(3, 50),
    }


def large() -> dict[str, Case]:
    """Real shapes, for a GPU."""
    qwen, oss = {"heads": (32, 8), "size": 128, "page": 64}, {"heads": (64, 8), "size": 64, "page": 64, "sinks": True}
    return {
        "attention-qwen-group": attention(groups=[(5000, [700 + 37 * i for i in range(16)])], **qwen),
        "attention-qwen-ragged": attention(groups=[(900, [1, 80]), (64, [5] * 3)], alone=(2100, 0, 63), **qwen),
        "attention-oss": attention(groups=[(3000, [100, 1000, 3, 64])] * 3, **oss),
        "attention-oss-window": attention(groups=[(3000, [100, 1000, 3, 64])] * 3, window=128, **oss),
        "attention-gemma": attention(
            groups=[(1500, [300, 2])], alone=(700,), heads=(16, 8), size=256, page=64, window=1024, softcap=50.0
        ),
        "attention-phi": attention(groups=[(800, [90] * 5)], heads=(32, 32), size=96, page=32),
        "fourbit-qwen-qkv-1": fourbit(1, (4096, 1024, 1024), 2560, "nf4", ranks=96),
        "fourbit-qwen-down-1": fourbit(1, (2560,), 9728, "nf4", ranks=32),
        "fourbit-qwen-gate-up-4": fourbit(4, (9728, 9728), 2560, "nf4", ranks=64),
        "fourbit-qwen-down-16": fourbit(16, (2560,), 9728, "nf4", ranks=32),
        "fourbit-qwen-gate-up-64": fourbit(64, (9728, 9728), 2560, "nf4", ranks=64),
        "few-rows-qkv-1": few_rows(1, 6240, 2560),
        "few-rows-down-1": few_rows(1, 2592, 9728),
        "few-rows-down-16": few_rows(16, 2592, 9728),
        "few-rows-gate-up-64": few_rows(64, 19520, 2560),
        "fourbit-mxfp4-1": fourbit(1, (2880,), 2880, "mxfp4"),
        "experts-oss-1": experts(1, 4, 32, 2880, 2880),
        "experts-oss-adapter-3": experts(3, 4, 32, 2880, 2880, rank=32),
        "experts-oss-adapter-96": experts(96, 4, 32, 2880, 2880, rank=32),
        "experts-oss-33": experts(33, 4, 32, 2880, 2880),
        "fourbit-mxfp4-33": fourbit(33, (2880,), 2880, "mxfp4"),
        "qkv-qwen": qkv(33, (32, 8), 128, 128, rank=32),
        "step-swiglu-qwen": step_swiglu(33, 9728, 32),
        "step-norm-qwen": step_norm(33, 2560, 32),
        "sample-qwen": sample(33, 151_936),
    }


def experts(
    B: int, k: int, E: int, M: int, F: int, *, bias: bool = True, one: int | None = None, rank: int = 0
) -> Case:
    """`one`: every token chooses this expert first."""

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        make = Maker(device, dtype)
        generator = torch.Generator().manual_seed(3)
        chosen = torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(B)])
        if one is not None:
            chosen[:, 0] = one
        weights = [
            fourbit_rows("mxfp4", n, c, 32, False, seed, device)
            for seed, (n, c) in enumerate([(E * 2 * F, M), (E * M, F)])
        ]
        up, down = ((w.codes.view(E, -1, w.columns // 32, 16), w.scales.view(E, -1, w.columns // 32)) for w in weights)
        out = decode_experts(
            make(B, M), chosen.to(device), make(B, k), gate_up_codes=up[0], gate_up_scales=up[1], down_codes=down[0],
            down_scales=down[1], gate_up_bias=make(E, 2 * F) if bias else None, down_bias=make(E, M) if bias else None,
            gate_up_low=(make(E, rank, M), make(E, rank, 2 * F, scale=0.1)) if rank else None,
            down_low=(make(E, rank, F), make(E, rank, M, scale=0.1)) if rank else None,
        )  # fmt: skip
        return [out]

    return run


def choice(B: int, E: int, k: int) -> Case:
    """Coarse logits, so that many are equal."""

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        logits = (Maker(device, dtype)(B, E + 1, scale=2.0)[:, :E] * 4).round() / 4
        expert, weight = choose_experts(logits, k)
        assert expert.dtype == torch.int64
        return [expert.to(weight.dtype), weight]

    return run


def small_experts() -> dict[str, Case]:
    return {
        "choice": choice(5, 32, 4),
        "choice-odd": choice(3, 9, 3),
        "experts-one-token": experts(1, 2, 5, 64, 32),
        "experts-one-token-adapter": experts(1, 2, 5, 64, 32, rank=8),
        "experts-adapter": experts(9, 2, 5, 64, 96, rank=16, one=1),
        "experts-adapter-crowded": experts(31, 2, 6, 64, 96, rank=24, one=3),
        "experts-two-tokens": experts(2, 1, 3, 64, 32, bias=False),
        "experts-crowded": experts(21, 2, 6, 64, 96, one=3),
        "experts-sparse": experts(3, 3, 40, 160, 64, bias=False),
    }


def small() -> dict[str, Case]:
    """Cases small enough for Triton's interpreter."""
    return {**small_attention(), **small_few_rows(), **small_fourbit(), **small_ops(), **small_experts()}
