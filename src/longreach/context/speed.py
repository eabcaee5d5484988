"""Seconds of a training step, from its FLOP and what a card was measured or is estimated to reach.

FLOP are counted as 2 per multiply-add. A step passes every matrix three times (forward, recompute, gradient of the input; a
fourth time where weights are trained), and every pair of query and key once forward, again in the recompute unless its output
was saved, and 2.5 times in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..quant.experts import EXPERT_SCRATCH
from .policy import Policy
from .work import FLOAT, Work, packs_linears

GB = 10**9


@dataclass(frozen=True)
class Card:
    """A device and its rates.

    Attributes:
        total: bytes of memory by its data sheet (decimal).
        gemm, attention, attention_backward: FLOP per second in bf16 (fp16 where there is no bf16), at the shapes of a layer.
        bandwidth: of device memory, bytes per second read and written.
        link: bytes per second to the host, each way.
        measured: by this project's benchmarks; the others are estimates from data sheets at a usual share of the peak.
    """

    name: str
    total: int
    gemm: float
    attention: float
    attention_backward: float
    bandwidth: float
    link: float
    measured: bool = False


T = 1e12
# Seconds that a layer takes per chunk beyond what its work would: launches and what does not overlap; forward and backward
# together, as measured on an H200 at 16K to 128K tokens. With experts there are more, and smaller ones.
PER_CHUNK, PER_CHUNK_OF_EXPERTS = 2.4e-3, 7.7e-3
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("H200", 141 * GB, 650 * T, 654 * T, 587 * T, 4.3 * T, 54 * GB, measured=True),
        Card("H100", 80 * GB, 700 * T, 600 * T, 500 * T, 2.9 * T, 54 * GB),
        Card("A100", 80 * GB, 260 * T, 200 * T, 170 * T, 1.7 * T, 25 * GB),
        Card("A100 40GB", 40 * GB, 260 * T, 200 * T, 170 * T, 1.4 * T, 25 * GB),
        Card("L40S", 48 * GB, 220 * T, 150 * T, 120 * T, 0.75 * T, 25 * GB),
        Card("RTX 4090", 24 * GB, 150 * T, 130 * T, 100 * T, 0.9 * T, 25 * GB),
        Card("RTX 3090", 24 * GB, 65 * T, 55 * T, 45 * T, 0.85 * T, 25 * GB),
        Card("T4", 16 * GB, 35 * T, 15 * T, 10 * T, 0.27 * T, 12 * GB),
        Card("CPU", 0, 0.3 * T, 0.15 * T, 0.12 * T, 0.04 * T, 20 * GB),
    )
}


def card_named(device_name: str) -> Card | None:
    """The card of the table that a driver's device name means, e.g. "NVIDIA H200" or "NVIDIA GeForce RTX 4090"."""
    wanted = device_name.lower().replace("-", " ")
    return next((card for name, card in CARDS.items() if f" {name.lower()}" in f" {wanted}"), None)


def card_of_size(gpu_bytes: int) -> Card:
    """The fastest card of the table with about this much memory, else the next smaller one."""
    cards = sorted((c for c in CARDS.values() if c.total), key=lambda c: (c.total, c.gemm))
    fitting = [c for c in cards if c.total <= 1.1 * gpu_bytes]
    return fitting[-1] if fitting else cards[0]


@dataclass(frozen=True)
class Flop:
    """FLOP of one step by kind; `model` is what a step without recomputation would take (the numerator of MFU)."""

    matrices: float
    attention: float
    attention_backward: float
    model: float


def attention_pairs(work: Work) -> float:
    """Query-key pairs that causal attention computes in all layers of the tree, the shared prompt once.

    In the last layer only tokens with a label are queries, unless the model is called for every row.
    """
    leaf, root = work.completion + 1, work.prompt - 1
    total = 0.0
    for window in work.shape.windows:
        total += _causal(0, root, window) + work.group * _causal(root, leaf, window)
    if work.compact:
        last = work.shape.windows[-1]
        total -= _causal(0, root, last) + work.group * (_causal(root, leaf, last) - _causal(root, leaf - 1, last))
    return work.prompts * total


def _causal(before: int, length: int, window: int | None) -> float:
    """Pairs of `length` queries that follow `before` keys."""
    if window is None or before + length <= window:
        return length * before + length * (length + 1) / 2
    ramp = max(0, min(length, window - before))  # queries that still see everything
    return ramp * before + ramp * (ramp + 1) / 2 + (length - ramp) * window


def step_flop(work: Work, policy: Policy) -> Flop:
    shape = work.shape
    per_pass = 2.0 * shape.layers * shape.layer_active * work.tokens
    if work.compact:  # the last layer computes keys and values only for tokens without a label
        unread = work.tokens - work.labelled
        per_pass -= 2.0 * unread * (shape.layer_active - 2 * shape.hidden * shape.keys)
    head = 2.0 * shape.table * work.labelled
    adapters = 2.0 * shape.layers * work.layer_adapter * work.tokens
    passes = 3 if work.ranks else 4
    again = 1 - 1 / policy.keep_every  # share of the layers that run forward once more
    pair = 4.0 * shape.query * attention_pairs(work)
    rebuild = 2.0 * shape.layers * work.tokens * 2 * shape.hidden * shape.keys
    matrices = passes * (per_pass + head) + again * per_pass + 4 * adapters + rebuild
    model = (passes - 1) * (per_pass + head) + 3 * adapters + 3.5 * pair
    return Flop(matrices, pair * (again + (1 if policy.save_attention else 2)), 2.5 * pair, model)


def step_seconds(work: Work, policy: Policy, card: Card) -> float:
    """Matrix products, attention, what streams through memory between them, and copies that nothing hides."""
    flop = step_flop(work, policy)
    compute = (
        flop.matrices / card.gemm + flop.attention / card.attention + flop.attention_backward / card.attention_backward
    )
    shape, b = work.shape, work.itemsize
    # Norms, rotary, activation and residuals read and write each width a few times in forward, recompute and backward.
    touched = 14 * shape.hidden + 12 * shape.query + 12 * shape.keys + 12 * shape.mlp * max(1, shape.active)
    stream = shape.layers * work.tokens * b * touched / card.bandwidth
    adam = 16 * work.trained * work.trained_itemsize / card.bandwidth
    visits = shape.layers * -(-work.tokens // policy.chunk)
    waits = visits * (PER_CHUNK_OF_EXPERTS if shape.experts else PER_CHUNK)
    seconds = compute + stream + adam + waits + _unpacking(work, policy, card)
    return max(seconds, _copied(work, policy) / card.link)


def _unpacking(work: Work, policy: Policy, card: Card) -> float:
    """Seconds to dequantize every weight once in the forward and once in the backward; experts that do not fit their scratch
    once for each chunk."""
    shape, b = work.shape, work.itemsize
    written = shape.linear_matrices * b if packs_linears(shape, work.weights) else 0
    if work.format.packed:
        experts = shape.expert_matrices * b
        written += experts * (1 if experts <= EXPERT_SCRATCH else -(-work.tokens // policy.chunk))
    return 2 * shape.layers * written * 1.3 / card.bandwidth


def _copied(work: Work, policy: Policy) -> float:
    """Bytes over the link in the busier direction: to the device."""
    if not policy.on_host:
        return 0.0
    shape, b, T = work.shape, work.itemsize, work.tokens
    row = shape.hidden * b * T
    per_layer = 2.0 * row  # for the rebuild and for the recompute
    if policy.save_attention:
        per_layer += (shape.query * b + shape.heads * FLOAT) * T
    if policy.rows_on_host:
        per_layer += 2.0 * row  # the hidden row in the forward, its gradient in the backward
    if policy.keys_on_host:
        seen = T / policy.chunk * T / 2  # earlier keys, over all chunks
        passes = 2 if policy.save_attention else 3
        per_layer += 2 * shape.keys * seen * (passes * b + FLOAT)
    return shape.layers * per_layer
