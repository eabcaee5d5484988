"""Attention of one decoding step: every row has one query, keys of its own in pages, and a prefix that it shares with others.

The rows of a group (the completions of one prompt) and the query heads of one key head are folded into one tile, so that a
prompt's keys and values are read once for all of them. Prefix and own keys are cut into splits that run side by side; what
they give is merged through its log-sum-exp (FlashAttention, arXiv 2205.14135; "split KV", as in FlashDecoding).

Shape suffixes: B rows, H query heads, K key heads, D head size of queries and keys, W of values, N pages of a row, P tokens of a
page, G prefixes, M rows of a prefix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import decode_cpu, decode_reference
from .decode_reference import AttentionCall
from .dispatch import check_rows, check_shape, implementation

MIN_SPLIT = 256  # tokens
MOST_ROWS = 64  # members of a prefix


class DecodePlan:
    """Where the rows of a decoding step find their keys, and how the work is cut.

    Made once for tensors that stay where they are; `update` is called once a step, after the lengths were set and before the
    first layer, and may be captured in a CUDA graph. All layers with the same window share a plan.

    A row b with prefix g = prefix_of[b] has p = prefix_length[g] shared keys (0 where g is -1) and n = own_length[b] of its own,
    the current token's among them; its query stands at p + n - 1 and sees the keys from p + n - window on. A row with n = 0
    is idle: nothing is read for it and its output is zero.

    How keys are cut depends on the length of that prefix or of that row and on the number of rows of the plan: a row's bits don't
    depend on what the others are.

    Args:
        own_pages_BN: int32, the page of tokens [iP, (i + 1)P) of a row; entries that hold no visible key are never read.
        own_length_B: int32.
        prefix_of_B: int32, -1 for none.
        prefix_pages_GN: int32; G may be 0.
        prefix_length_G: int32.
        members_GM: int32, the rows of a prefix, -1 where there are fewer than M; a larger group is given as several prefixes
            with the same pages.
        heads, kv_heads, head_dim: of the queries and of the cache; head_dim is that of the values.
        page: tokens of a page, a power of two from 16 up; 64 is the fastest.
        window: keys that a query sees, itself among them; None for all.
    """

    def __init__(
        self,
        own_pages_BN: Tensor,
        own_length_B: Tensor,
        prefix_of_B: Tensor,
        prefix_pages_GN: Tensor,
        prefix_length_G: Tensor,
        members_GM: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page: int,
        window: int | None = None,
    ) -> None:
        B, G = len(own_length_B), len(prefix_length_G)
        for name, x in (
            ("own_pages", own_pages_BN), ("own_length", own_length_B), ("prefix_of", prefix_of_B),
            ("prefix_pages", prefix_pages_GN), ("prefix_length", prefix_length_G), ("members", members_GM),
        ):  # fmt: skip
            if x.dtype != torch.int32 or not x.is_contiguous():
                raise ValueError(
                    f"DecodePlan: {name} is {x.dtype} with strides {x.stride()}; expected contiguous torch.int32"
                )
        if own_pages_BN.dim() != 2 or prefix_pages_GN.dim() != 2 or members_GM.dim() != 2:
            raise ValueError("DecodePlan: own_pages, prefix_pages and members have two axes [rows, pages or members]")
        check_shape("DecodePlan", "own_pages", own_pages_BN, (B, own_pages_BN.shape[1]), "own_length")
        check_shape("DecodePlan", "prefix_of", prefix_of_B, (B,), "own_length")
        check_shape("DecodePlan", "prefix_pages", prefix_pages_GN, (G, prefix_pages_GN.shape[1]), "prefix_length")
        check_shape("DecodePlan", "members", members_GM, (G, members_GM.shape[1]), "prefix_length")
        if members_GM.shape[1] > MOST_ROWS:
            raise ValueError(f"DecodePlan: members has {members_GM.shape[1]} columns; expected at most {MOST_ROWS}")
        if page < 16 or page & (page - 1):
            raise ValueError(f"DecodePlan: page={page}: expected a power of two from 16 up")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"DecodePlan: heads={heads}: expected a multiple of kv_heads={kv_heads}")
        if window is not None and window < 1:
            raise ValueError(f"DecodePlan: window={window}: expected None or at least 1")
        self.own_pages_BN, self.own_length_B, self.prefix_of_B = own_pages_BN, own_length_B, prefix_of_B
        self.prefix_pages_GN, self.prefix_length_G, self.members_GM = prefix_pages_GN, prefix_length_G, members_GM
        self.heads, self.kv_heads, self.head_dim, self.page, self.window = heads, kv_heads, head_dim, page, window
        # Splits that a long prefix or row is cut into: a key head with many of them fills the card alone. The shortest are
        # shorter where there are few rows to fill it.
        self.splits = min(64, max(16, 256 // kv_heads))
        self.min_split = MIN_SPLIT if B * kv_heads > 64 else MIN_SPLIT // 2 if B * kv_heads > 16 else MIN_SPLIT // 4
        self.own_splits = self._most(own_pages_BN.shape[1] * page)
        self.prefix_splits = self._most(prefix_pages_GN.shape[1] * page) if G else 0
        # Rows of a tile: as many of a prefix's rows and heads as one program can hold.
        widest = 128 if head_dim <= 64 else 64
        rows = members_GM.shape[1] * (heads // kv_heads)
        self.tile_rows = min(widest, max(16, 1 << max(rows - 1, 1).bit_length()))
        self.tiles = -(-rows // self.tile_rows)
        self.most_items = G * self.prefix_splits * self.tiles + B * self.own_splits
        self._make_buffers(B, G, own_length_B.device)

    def _most(self, tokens: int) -> int:
        """Splits that a prefix or row of up to `tokens` keys may have; a window may begin inside one."""
        if self.window is not None:
            tokens = min(tokens, self.window)
        return min(self.splits, max(1, math.ceil(tokens / self.min_split))) + (self.window is not None)

    def _make_buffers(self, B: int, G: int, device: torch.device) -> None:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        # An item: prefix, or G + row; number of its split; tile of the prefix's rows; first visible key; first key and end.
        self.items_8 = integers(self.most_items, 8)
        self.total = integers(1)  # items
        self.splits_Q = integers(G + B)  # of each prefix and row
        self.awake_GM = torch.full_like(self.members_GM, -1)  # members with keys
        partials = (B, self.own_splits + self.prefix_splits, self.heads)
        self.partial = torch.empty(*partials, self.head_dim, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(partials, dtype=torch.float32, device=device)

    def update(self) -> None:
        """Cut the work anew, from the lengths as they are on the device now."""
        implementation(self.own_length_B, "decode_attention", decode_reference).update_plan(self)


def decode_attention(
    q_BHD: Tensor,
    k_NPKD: Tensor,
    v_NPKW: Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
    prefix_k_pages: Tensor | None = None,
    prefix_v_pages: Tensor | None = None,
) -> Tensor:
    """softmax(softcap(scale * q k')) v of one query a row, over its prefix and its own keys; splits are merged in a fixed order.

    Args:
        q_BHD: any stride along rows and heads.
        k_NPKD, v_NPKW: the layer's pages; any stride but along the last axis. Fastest where one head's page is one run of
            memory: storage [N, K, P, D], permuted.
        plan: `update`d in this step.
        scale: of the scores.
        softcap: cap * tanh(score / cap) before the mask (Gemma 2); None for none.
        sinks_H: one more key a head with this logit and value zero (gpt-oss).
        out: [B, H, W]; None for a new tensor.
        prefix_k_pages, prefix_v_pages: pages of the prefixes, where they lie in a pool of their own.

    Returns:
        out [B, H, W] in q's dtype; zero for idle rows.
    """
    op = "decode_attention"
    B, H, K = len(plan.own_length_B), plan.heads, plan.kv_heads
    if q_BHD.dim() != 3 or k_NPKD.dim() != 4:
        raise ValueError(
            f"{op}: q has shape {tuple(q_BHD.shape)}, k {tuple(k_NPKD.shape)}; expected [rows, heads, size] and "
            "[pages, tokens, heads, size]"
        )
    D, W = q_BHD.shape[-1], plan.head_dim
    check_shape(op, "q", q_BHD, (B, H, D), "the plan")
    check_shape(op, "k", k_NPKD, (len(k_NPKD), plan.page, K, D), "the plan")
    check_shape(op, "v", v_NPKW, (len(k_NPKD), plan.page, K, W), "the plan")
    prefix_k = k_NPKD if prefix_k_pages is None else prefix_k_pages
    prefix_v = v_NPKW if prefix_v_pages is None else prefix_v_pages
    check_shape(op, "prefix_k", prefix_k, (len(prefix_k), plan.page, K, D), "the plan")
    check_shape(op, "prefix_v", prefix_v, (len(prefix_k), plan.page, K, W), "the plan")
    if sinks_H is not None:
        check_shape(op, "sinks", sinks_H, (H,), "the plan")
    out = torch.empty(B, H, W, dtype=q_BHD.dtype, device=q_BHD.device) if out is None else out
    check_shape(op, "out", out, (B, H, W), "q and v")
    check_rows(op, q=q_BHD, k=k_NPKD, v=v_NPKW, prefix_k=prefix_k, prefix_v=prefix_v, sinks=sinks_H, out=out)
    twin = decode_reference if q_BHD.is_cuda or q_BHD.dtype == torch.float64 else decode_cpu
    call = AttentionCall(q_BHD, k_NPKD, v_NPKW, prefix_k, prefix_v, plan, out, scale, softcap, sinks_H)
    implementation(q_BHD, "decode_attention", twin).decode_attention(call)
    return out
