"""Attention of one decoding step in Triton: one kernel cuts the work, one attends, one merges.

A fixed number of programs takes the work items that the first kernel wrote, so that a CUDA graph serves every length. Lengths
never take part in specialization. Shape suffixes: B rows, H query heads, K key heads, D head size of queries and keys, W of
values, G prefixes, M rows of a prefix, R query heads of a key head, T a tile's rows, C keys of a step, Q prefixes and rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..decode_attention import DecodePlan
from ..decode_reference import AttentionCall
from . import padded
from .early_start import launch, wait_for_inputs

JOINED = 4096  # numbers of partials merged at a time
PROGRAMS = 2112  # at most: sixteen a multiprocessor of the largest cards; beyond that a program takes several items
FIELDS = tl.constexpr(8)  # of an item
LOG2_E = tl.constexpr(1.4426950408889634)
_FAR = tl.constexpr(2**30)


# --- cutting ------------------------------------------------------------------------------------------------------


@triton.jit
def _cut(first, end, at, items_ptr, splits_ptr, piece, base, tiles, min_split, most,
         WINDOW: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Write the splits of the keys [first, end) of each piece; borders lie at multiples of a size that `end` alone gives."""
    reach = end
    if WINDOW > 0:
        reach = tl.minimum(end, WINDOW)
    size = tl.maximum(min_split, (reach + SPLITS - 1) // SPLITS)
    size = (size + 63) // 64 * 64
    split = first // size
    count = tl.where(first < end, (end + size - 1) // size - split, 0)
    item = base + (tl.cumsum(count, 0) - count) * tiles
    tl.store(splits_ptr + piece, count, mask=at)
    for i in range(most):
        for tile in range(tiles):
            to = items_ptr + (item + i * tiles + tile) * FIELDS
            mask = at & (i < count)
            tl.store(to, piece, mask=mask)
            tl.store(to + 1, 0 * piece + i, mask=mask)
            tl.store(to + 2, 0 * piece + tile, mask=mask)
            tl.store(to + 3, first, mask=mask)
            tl.store(to + 4, tl.maximum((split + i) * size, first), mask=mask)
            tl.store(to + 5, tl.minimum((split + i + 1) * size, end), mask=mask)
    return tl.sum(count, 0) * tiles


@triton.jit(do_not_specialize=["B", "G", "M", "tiles", "min_split", "own", "prefix"])
def _plan_kernel(
    own_length_ptr, prefix_length_ptr, members_ptr, awake_ptr, items_ptr, splits_ptr, total_ptr,
    B, G, M, tiles, min_split, own, prefix,
    PREFIXES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    total = 0
    if PREFIXES:
        g = tl.arange(0, BLOCK_G)
        at = g < G
        p = tl.load(prefix_length_ptr + g, mask=at, other=0)
        first = tl.full([BLOCK_G], _FAR, tl.int32)
        for m in range(M):
            member = tl.load(members_ptr + g * M + m, mask=at, other=-1)
            n = tl.load(own_length_ptr + member, mask=member >= 0, other=0)
            tl.store(awake_ptr + g * M + m, tl.where(n > 0, member, -1), mask=at)
            start = 0 * n
            if WINDOW > 0:
                start = tl.maximum(p + n - WINDOW, 0)
            first = tl.minimum(first, tl.where(n > 0, start, _FAR))
        total = _cut(first, p, at, items_ptr, splits_ptr, g, 0, tiles, min_split, prefix, WINDOW, SPLITS)
    b = tl.arange(0, BLOCK_B)
    at = b < B
    n = tl.load(own_length_ptr + b, mask=at, other=0)
    first = 0 * n
    if WINDOW > 0:
        first = tl.maximum(n - WINDOW, 0)
    rows = _cut(first, n, at, items_ptr, splits_ptr, G + b, total, 1, min_split, own, WINDOW, SPLITS)
    tl.store(total_ptr, total + rows)


def update_plan(plan: DecodePlan) -> None:
    B, (G, M) = len(plan.own_length_B), plan.members_GM.shape
    launch(
        _plan_kernel, (1,), plan.own_length_B, plan.prefix_length_G, plan.members_GM, plan.awake_GM, plan.items_8,
        plan.splits_Q, plan.total, B, G, M, plan.tiles, plan.min_split, plan.own_splits, plan.prefix_splits,
        PREFIXES=G > 0, BLOCK_B=padded(B), BLOCK_G=padded(max(G, 1)), WINDOW=plan.window or 0, SPLITS=plan.splits, num_warps=4,
    )  # fmt: skip


# --- attending ----------------------------------------------------------------------------------------------------


@triton.jit
def _step(
    q_TD, m_T, l_T, acc_TW, sees_T, c, from_, end, page_ptr, k_ptr, v_ptr, scale, softcap,
    k_page, k_token, v_page, v_token, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    P: tl.constexpr, BLOCK_C: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take in the keys from c on; those before `from_` and from `end` on are not read."""
    c_C = c + tl.arange(0, BLOCK_C)
    d_D = tl.arange(0, BLOCK_D)
    w_W = tl.arange(0, BLOCK_W)
    read_C = (c_C >= from_) & (c_C < end)
    if P >= BLOCK_C:  # all on one page, of which one key at least is read
        page = tl.load(page_ptr + c // P).to(tl.int64)
        k_C = page * k_page + (c_C % P) * k_token
        v_C = page * v_page + (c_C % P) * v_token
    else:
        page_C = tl.load(page_ptr + c_C // P, mask=read_C, other=0).to(tl.int64)
        k_C = page_C * k_page + (c_C % P) * k_token
        v_C = page_C * v_page + (c_C % P) * v_token
    k_mask = read_C[:, None]
    if BLOCK_D != D:
        k_mask = k_mask & (d_D < D)[None, :]
    v_mask = read_C[:, None]
    if BLOCK_W != W:
        v_mask = v_mask & (w_W < W)[None, :]
    k_CD = tl.load(k_ptr + k_C[:, None] + d_D[None, :], mask=k_mask, other=0.0)
    v_CW = tl.load(v_ptr + v_C[:, None] + w_W[None, :], mask=v_mask, other=0.0)
    s_TC = tl.dot(q_TD, tl.trans(k_CD), input_precision=PRECISION)
    if SOFTCAP:
        s_TC = softcap * (2.0 * tl.sigmoid(2.0 * (s_TC * scale) / softcap) - 1.0) * LOG2_E
    else:
        s_TC = s_TC * (scale * LOG2_E)
    s_TC = tl.where(read_C[None, :] & (c_C[None, :] >= sees_T[:, None]), s_TC, float("-inf"))
    top_T = tl.maximum(m_T, tl.max(s_TC, 1))
    base_T = tl.where(top_T == float("-inf"), 0.0, top_T)
    p_TC = tl.exp2(s_TC - base_T[:, None])
    old_T = tl.exp2(m_T - base_T)
    l_T = l_T * old_T + tl.sum(p_TC, 1)
    acc_TW = tl.dot(p_TC.to(v_CW.dtype), v_CW, acc=acc_TW * old_T[:, None], input_precision=PRECISION)
    return top_T, l_T, acc_TW


@triton.jit
def _attend(
    b_T, head_T, inside_T, sees_T, partial, partials, from_, start, end, q_ptr, page_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    scale, softcap, q_row, q_head, k_page, k_token, v_page, v_token,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, P: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys [start, end) for one tile of rows and heads: writes out and log-sum-exp (base 2) as partial number `partial`."""
    d_D = tl.arange(0, BLOCK_D)
    w_W = tl.arange(0, BLOCK_W)
    q_at = q_ptr + b_T.to(tl.int64)[:, None] * q_row + head_T[:, None] * q_head + d_D[None, :]
    q_TD = tl.load(q_at, mask=inside_T[:, None] & (d_D < D)[None, :], other=0.0)
    m_T = tl.full([BLOCK_T], float("-inf"), tl.float32)
    l_T = tl.zeros([BLOCK_T], tl.float32)
    acc_TW = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    # Steps lie at multiples of their width, whatever is read: sums are then the same for every row of the tile.
    for c in tl.range(start // BLOCK_C * BLOCK_C, end, BLOCK_C, num_stages=STAGES):
        m_T, l_T, acc_TW = _step(
            q_TD, m_T, l_T, acc_TW, sees_T, c, from_, end, page_ptr, k_ptr, v_ptr, scale, softcap,
            k_page, k_token, v_page, v_token, D, W, BLOCK_D, BLOCK_W, P, BLOCK_C, SOFTCAP, PRECISION,
        )  # fmt: skip
    seen_T = l_T > 0
    acc_TW = tl.where(seen_T[:, None], acc_TW / tl.where(seen_T, l_T, 1.0)[:, None], 0.0)
    row_T = (b_T.to(tl.int64) * partials + partial) * H + head_T
    mask = inside_T[:, None] & (w_W < W)[None, :]
    tl.store(out_ptr + row_T[:, None] * W + w_W[None, :], acc_TW, mask=mask)
    tl.store(lse_ptr + row_T, tl.where(seen_T, m_T + tl.log2(tl.where(seen_T, l_T, 1.0)), float("-inf")), mask=inside_T)


@triton.jit
def _item(items_ptr, number):
    """The fields of an item: piece, split, tile, first visible key, first key, end."""
    at = items_ptr + number * FIELDS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit(do_not_specialize=["G", "M", "own_row", "prefix_row", "own_splits", "partials", "most_items"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, prefix_k_ptr, prefix_v_ptr, own_pages_ptr, own_length_ptr, prefix_pages_ptr, prefix_length_ptr,
    awake_ptr, items_ptr, total_ptr, out_ptr, lse_ptr, scale, softcap, q_row, q_head,
    k_page, k_token, k_head, v_page, v_token, v_head, pk_page, pk_token, pk_head, pv_page, pv_token, pv_head,
    G, M, own_row, prefix_row, own_splits, partials, most_items,
    PREFIXES: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    R: tl.constexpr = H // K
    # Fetched ahead: what an item says is the first of a chain of reads.
    piece, split, tile, first, start, end = _item(items_ptr, tl.program_id(0) // K)
    total = tl.load(total_ptr) * K
    for work in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        head = work % K
        if PREFIXES and piece < G:
            row_T = tile * BLOCK_T + tl.arange(0, BLOCK_T)
            b_T = tl.load(awake_ptr + piece * M + row_T // R, mask=row_T < M * R, other=-1)
            sees_T = 0 * b_T
            if WINDOW > 0:
                n_T = tl.load(own_length_ptr + b_T, mask=b_T >= 0, other=0)
                sees_T = tl.load(prefix_length_ptr + piece) + n_T - WINDOW
            _attend(
                b_T, head * R + row_T % R, b_T >= 0, sees_T, own_splits + split, partials, first, start, end,
                q_ptr, prefix_pages_ptr + piece.to(tl.int64) * prefix_row,
                prefix_k_ptr + head.to(tl.int64) * pk_head, prefix_v_ptr + head.to(tl.int64) * pv_head, out_ptr, lse_ptr,
                scale, softcap, q_row, q_head, pk_page, pk_token, pv_page, pv_token,
                H, D, W, BLOCK_D, BLOCK_W, P, BLOCK_T, BLOCK_C, STAGES, SOFTCAP, PRECISION,
            )  # fmt: skip
        else:
            b = piece - G
            row_R = tl.arange(0, BLOCK_R)
            _attend(
                b + 0 * row_R, head * R + row_R, row_R < R, first + 0 * row_R, split, partials, first, start, end,
                q_ptr, own_pages_ptr + b.to(tl.int64) * own_row,
                k_ptr + head.to(tl.int64) * k_head, v_ptr + head.to(tl.int64) * v_head, out_ptr, lse_ptr,
                scale, softcap, q_row, q_head, k_page, k_token, v_page, v_token,
                H, D, W, BLOCK_D, BLOCK_W, P, BLOCK_R, BLOCK_C, STAGES, SOFTCAP, PRECISION,
            )  # fmt: skip
        following = tl.minimum((work + tl.num_programs(0)) // K, most_items - 1)
        piece, split, tile, first, start, end = _item(items_ptr, following)


# --- merging ------------------------------------------------------------------------------------------------------


@triton.jit
def _merge_part(acc_W, total, top, at, count, lse_ptr, part_ptr, H: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr,
                JOIN: tl.constexpr):  # fmt: skip
    """Add partials [at, at + count), JOIN at a time, each weighted by 2^(lse - top)."""
    j_J = tl.arange(0, JOIN)
    w_W = tl.arange(0, BLOCK_W)
    for j in range(0, count, JOIN):
        inside_J = j + j_J < count
        row_J = (at + j + j_J) * H
        lse_J = tl.load(lse_ptr + row_J, mask=inside_J, other=float("-inf"))
        weight_J = tl.exp2(lse_J - top)
        part_JW = tl.load(
            part_ptr + row_J[:, None] * W + w_W[None, :], mask=inside_J[:, None] & (w_W < W)[None, :], other=0.0
        )
        acc_W += tl.sum(part_JW * weight_J[:, None], 0)
        total += tl.sum(weight_J, 0)
    return acc_W, total


@triton.jit(do_not_specialize=["G", "own_splits", "partials"])
def _merge_kernel(
    out_ptr, part_ptr, lse_ptr, sinks_ptr, prefix_of_ptr, splits_ptr, out_row, out_head,
    G, own_splits, partials, PREFIXES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_OWN: tl.constexpr, BLOCK_PREFIX: tl.constexpr, JOIN: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    of_row = tl.load(splits_ptr + G + b)
    lse_ptr += b * partials * H + head
    part_ptr += (b * partials * H + head) * W
    j = tl.arange(0, BLOCK_OWN)
    top = tl.max(tl.load(lse_ptr + j * H, mask=j < of_row, other=float("-inf")), 0)
    of_prefix = 0
    if PREFIXES:
        g = tl.load(prefix_of_ptr + b)
        # An idle row's prefix may be another's by now.
        of_prefix = tl.load(splits_ptr + g, mask=(g >= 0) & (of_row > 0), other=0)
        j = tl.arange(0, BLOCK_PREFIX)
        top = tl.maximum(
            top, tl.max(tl.load(lse_ptr + (own_splits + j) * H, mask=j < of_prefix, other=float("-inf")), 0)
        )
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    acc_W = tl.zeros([BLOCK_W], tl.float32)
    total = 0.0
    if SINKS:
        total += tl.exp2(sink - top)
    if PREFIXES:
        acc_W, total = _merge_part(acc_W, total, top, own_splits, of_prefix, lse_ptr, part_ptr, H, W, BLOCK_W, JOIN)
    acc_W, total = _merge_part(acc_W, total, top, 0, of_row, lse_ptr, part_ptr, H, W, BLOCK_W, JOIN)
    w_W = tl.arange(0, BLOCK_W)
    acc_W = tl.where(of_row > 0, acc_W / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(out_ptr + b * out_row + head * out_head + w_W, acc_W.to(out_ptr.dtype.element_ty), mask=w_W < W)


def _tile(plan: DecodePlan, dtype: torch.dtype, D: int) -> dict[str, int]:
    """Sizes of the tiles: rows of a prefix, rows of a key head, keys of a step, steps in flight."""
    width = max(padded(D), padded(plan.head_dim), 16)
    single = dtype == torch.float32
    return {
        "BLOCK_T": plan.tile_rows,
        "BLOCK_R": max(16, padded(plan.heads // plan.kv_heads)),
        "BLOCK_C": 64 if width <= 128 and not single else 32,
        "STAGES": 1 if single else (3 if width <= 128 else 2),
        "num_warps": 4,
    }


def decode_attention(call: AttentionCall) -> None:
    q_BHD, k_NPKD, v_NPKW, prefix_k, prefix_v, plan, out, scale, softcap, sinks_H = call
    B, H, D = q_BHD.shape
    (G, M), K, W = plan.members_GM.shape, plan.kv_heads, plan.head_dim
    partials, block_w = plan.own_splits + plan.prefix_splits, max(16, padded(W))
    launch(
        _attention_kernel, (min(plan.most_items * K, PROGRAMS),), q_BHD, k_NPKD, v_NPKW, prefix_k, prefix_v,
        plan.own_pages_BN, plan.own_length_B, plan.prefix_pages_GN, plan.prefix_length_G, plan.awake_GM,
        plan.items_8, plan.total, plan.partial, plan.partial_lse, scale, softcap or 0.0, *q_BHD.stride()[:2],
        *k_NPKD.stride()[:3], *v_NPKW.stride()[:3], *prefix_k.stride()[:3], *prefix_v.stride()[:3],
        G, M, plan.own_pages_BN.shape[1], plan.prefix_pages_GN.shape[1], plan.own_splits, partials, plan.most_items,
        PREFIXES=G > 0, H=H, K=K, D=D, W=W, BLOCK_D=max(16, padded(D)), BLOCK_W=block_w, P=plan.page,
        WINDOW=plan.window or 0, SOFTCAP=softcap is not None,
        PRECISION="ieee" if q_BHD.dtype == torch.float32 else "tf32", **_tile(plan, q_BHD.dtype, D),
    )  # fmt: skip
    launch(
        _merge_kernel, (B, H), out, plan.partial, plan.partial_lse, out if sinks_H is None else sinks_H, plan.prefix_of_B,
        plan.splits_Q, *out.stride()[:2], G, plan.own_splits, partials, PREFIXES=G > 0, H=H, W=W, BLOCK_W=block_w,
        BLOCK_OWN=padded(plan.own_splits), BLOCK_PREFIX=padded(max(plan.prefix_splits, 1)), JOIN=max(4, JOINED // block_w),
        SINKS=sinks_H is not None, num_warps=4,
    )  # fmt: skip
