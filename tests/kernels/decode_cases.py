"""Every decoding op on random inputs, as in `cases`: a case is a function (device, dtype) -> list of results."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.kernels.decode_attention import DecodePlan, decode_attention
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
) -> Case:
    """Rows of the groups are dealt out in turn, so that a group's rows do not lie side by side."""
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
        "attention-many-splits": attention(groups=[(1100, [600, 2])], heads=(2, 2), page=64, steps=2),
        "attention-window-in-a-split": attention(groups=[(700, [1, 300])], heads=(2, 1), window=500, page=32),
        "attention-many-rows": attention(groups=[(40, [1] * 19)], heads=(8, 1), size=64),
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
