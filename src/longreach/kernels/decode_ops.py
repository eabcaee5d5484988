"""What a decoding step does between its matrix products, a layer in a few launches, and the choice of the next token.

A matrix product gives the columns [y | t]: y the outputs of base layers side by side, t = x A' of their adapters, r columns each.
The ops here add t B', the scale of the adapter folded into B, before they use y.

Shape suffixes: B rows, N columns of a product's result, O output features, r rank, H query heads, K key heads, D head size,
R rotary width, S positions, P tokens of a page, F MLP width, M hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import decode_reference
from .dispatch import check_rows, check_shape, implementation
from .swiglu import ACTIVATIONS


def decode_qkv(
    y_BN: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    cos_SR: Tensor,
    sin_SR: Tensor,
    position_B: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    own_pages_BN: Tensor,
    own_length_B: Tensor,
    lora_b_Or: Tensor | None = None,
    bias_O: Tensor | None = None,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> Tensor:
    """Queries, keys and values of a step: adapters and bias added, heads normed and rotated, keys and values put into pages.

    Norm and rotation as `qk_norm_rope`. Row b's key and value go to page own_pages[b, (n - 1) // P], token (n - 1) % P, n its
    own length, the current token included; a row with n = 0 writes nothing.

    Args:
        y_BN: columns [q | k | v | t_q | t_k | t_v], (H + 2K) D and 3r of them; any stride along B.
        cos_SR, sin_SR: tables by position, any float dtype.
        position_B: int32 or int64, of each row's token.
        k_pages, v_pages: [N, P, K, D], of the layer; any stride but along the last axis.
        own_pages_BN, own_length_B: int32, as in `DecodePlan`.
        lora_b_Or: [(H + 2K) D, r], rows as the columns of y, the scale folded in.
        bias_O: of the three base layers, side by side.
        q_norm_D, k_norm_D: both or neither.

    Returns:
        q [B, H, D] in y's dtype.
    """
    op = "decode_qkv"
    features = (heads + 2 * kv_heads) * head_dim
    B = _check_low_rank(op, y_BN, features, 3, lora_b_Or, bias_O)
    width = cos_SR.shape[-1]
    if width % 2 or not 0 < width <= head_dim:
        raise ValueError(
            f"{op}: cos is {width} wide; the rotary width must be even and at most the head size, {head_dim}"
        )
    check_shape(op, "sin", sin_SR, tuple(cos_SR.shape), "cos")
    for name, x in (("position", position_B), ("own_length", own_length_B)):
        check_shape(op, name, x, (B,), "y")
    check_shape(op, "own_pages", own_pages_BN, (B, own_pages_BN.shape[-1]), "y")
    pages = (len(k_pages), k_pages.shape[1], kv_heads, head_dim)
    check_shape(op, "k_pages", k_pages, pages, "the heads")
    check_shape(op, "v_pages", v_pages, pages, "the heads")
    if (q_norm_D is None) != (k_norm_D is None):
        raise ValueError(f"{op}: {'q' if q_norm_D is None else 'k'}_norm is None; give both weights or neither")
    for name, weight in (("q_norm", q_norm_D), ("k_norm", k_norm_D)):
        if weight is not None:
            check_shape(op, name, weight, (head_dim,), "the heads")
    check_rows(op, y=y_BN, cos=cos_SR, sin=sin_SR, k_pages=k_pages, v_pages=v_pages, own_pages=own_pages_BN)
    return implementation(y_BN, "decode_ops", decode_reference).decode_qkv(
        y_BN, heads, kv_heads, head_dim, cos_SR, sin_SR, position_B, k_pages, v_pages, own_pages_BN, own_length_B,
        lora_b_Or, bias_O, q_norm_D, k_norm_D, eps, unit_offset,
    )  # fmt: skip


def decode_swiglu(
    y_BN: Tensor, *, lora_b_Or: Tensor | None = None, bias_O: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """act(gate) * up as `swiglu`, adapters and bias added to gate and up first.

    Args:
        y_BN: columns [gate | up | t_gate | t_up], 2F and 2r of them and no more; any stride along B.
        lora_b_Or: [2F, r].
        bias_O: [2F].

    Returns:
        [B, F] in y's dtype.
    """
    op = "decode_swiglu"
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    features = y_BN.shape[-1] // 2 - (0 if lora_b_Or is None else lora_b_Or.shape[-1])
    _check_low_rank(op, y_BN, 2 * features, 2, lora_b_Or, bias_O)
    return implementation(y_BN, "decode_ops", decode_reference).decode_swiglu(
        y_BN, features, lora_b_Or, bias_O, activation
    )


def decode_add_norm(
    h_BM: Tensor,
    y_BN: Tensor,
    weight_M: Tensor,
    eps: float,
    *,
    lora_b_Or: Tensor | None = None,
    bias_M: Tensor | None = None,
    post_weight_M: Tensor | None = None,
    unit_offset: bool = False,
) -> Tensor:
    """h += y, adapter and bias added to y first, and the RMS norm of that (`rms_norm`).

    Args:
        h_BM: the residual, contiguous, of y's dtype or fp32; changed in place.
        y_BN: columns [y | t], M and r of them; any stride along B; its first M columns are overwritten where there is an adapter.
        lora_b_Or: [M, r].
        bias_M: of the base layer.
        post_weight_M: y goes through a norm of its own, with this weight, before it is added (Gemma 2 and 3).

    Returns:
        norm(h) [B, M] in y's dtype.
    """
    op = "decode_add_norm"
    M = h_BM.shape[-1]
    B = _check_low_rank(op, y_BN, M, 1, lora_b_Or, bias_M)
    check_shape(op, "h", h_BM, (B, M), "y")
    if h_BM.dtype not in (y_BN.dtype, torch.float32) or not h_BM.is_contiguous():
        raise ValueError(
            f"{op}: h is {h_BM.dtype} with strides {h_BM.stride()}; expected contiguous {y_BN.dtype} or torch.float32"
        )
    check_shape(op, "weight", weight_M, (M,), "h")
    if post_weight_M is not None:
        check_shape(op, "post_weight", post_weight_M, (M,), "h")
    return implementation(y_BN, "decode_ops", decode_reference).decode_add_norm(
        h_BM, y_BN, weight_M, eps, lora_b_Or, bias_M, post_weight_M, unit_offset
    )


def decode_sample(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
    """A token of softmax(logits / temperature) for each row, and its log-prob there, in one pass over the vocabulary.

    argmax(logits / temperature + g), g = -log(-log(1 - x)), x = (word + 1/2) / 2^32, word number token % 4 of Philox4x32-10 with
    the key `seed` and the counter (token // 4, count, 0, 0): a row's token does not depend on the others. Where temperature is
    0, the token with the largest logit, and its log-prob at temperature 1. Of equal tokens the first is taken.

    Args:
        logits_BV: any float dtype, any stride along B; -inf rules a token out.
        temperature_B: fp32, at least 0.
        seed_B, count_B: int64; count in [0, 2^32).

    Returns:
        ids [B] int64, logprob [B] fp32 (fp64 for fp64 logits).
    """
    op = "decode_sample"
    if logits_BV.dim() != 2:
        raise ValueError(f"{op}: logits has shape {tuple(logits_BV.shape)}; expected two axes [rows, vocabulary]")
    for name, x, dtype in (
        ("temperature", temperature_B, torch.float32), ("seed", seed_B, torch.int64), ("count", count_B, torch.int64)
    ):  # fmt: skip
        check_shape(op, name, x, logits_BV.shape[:1], "logits")
        if x.dtype != dtype:
            raise ValueError(f"{op}: {name} is {x.dtype}; expected {dtype}")
    check_rows(op, logits=logits_BV, temperature=temperature_B, seed=seed_B, count=count_B)
    return implementation(logits_BV, "decode_ops", decode_reference).decode_sample(
        logits_BV, temperature_B, seed_B, count_B
    )


def _check_low_rank(
    op: str, y_BN: Tensor, features: int, layers: int, lora_b_Or: Tensor | None, bias_O: Tensor | None
) -> int:
    """Number of rows of y, which must hold `features` columns and those of `layers` adapters."""
    rank = 0 if lora_b_Or is None else lora_b_Or.shape[-1]
    if y_BN.dim() != 2 or y_BN.shape[1] < features + layers * rank:
        raise ValueError(
            f"{op}: y has shape {tuple(y_BN.shape)}; expected two axes, {features} columns and {layers} times the rank {rank}"
        )
    if lora_b_Or is not None:
        check_shape(op, "lora_b", lora_b_Or, (features, rank), "y")
        if not lora_b_Or.is_contiguous() or lora_b_Or.dtype != y_BN.dtype:
            raise ValueError(
                f"{op}: lora_b is {lora_b_Or.dtype}, strides {lora_b_Or.stride()}; expected contiguous {y_BN.dtype}"
            )
    if bias_O is not None:
        check_shape(op, "bias", bias_O, (features,), "y")
    check_rows(op, y=y_BN, bias=bias_O)
    return len(y_BN)
