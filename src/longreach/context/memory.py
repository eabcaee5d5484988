"""Peak bytes of a training step in closed form, term by term from what `layer.py`, `fused.py`, `op.py` and `logprob.py` allocate.

A step is one forward and backward over one token tree: P prompts, each with G rows. Its peak is the largest of a few moments:
inside a layer's forward, in the head, inside the backward of the last layer and of the one below it, in the optimizer. Every
moment is what waits (layer inputs, hidden row, keys, values and what they are owed) plus one chunk's workspace (`workspace.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..quant.experts import EXPERT_SCRATCH
from ..quant.linear import FEW_TOKENS
from .offload import aligned, slab_bytes
from .policy import Policy
from .work import FLOAT, OPTIMIZERS, ChunkShape, Work, packs_linears
from .workspace import ChunkSizes, head_bytes, key_counts

MIB = 2**20
# cuBLAS workspaces of the forward's and the backward's thread and the allocator's rounding: the constant part of the difference
# between tensors and `max_memory_allocated` on an H200, the same at 16K, 32K, 128K and for groups.
LIBRARIES = 152 * MIB
# Parts that stand before a step begins.
LOADED = ("weights", "reference model", "adapters", "optimizer states", "rollout's cache")


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for; `gpu` and `host` are the sums at the peak."""

    parts: Mapping[str, int]
    host_parts: Mapping[str, int]
    moment: str

    @property
    def gpu(self) -> int:
        return sum(self.parts.values())

    @property
    def host(self) -> int:
        return sum(self.host_parts.values())

    @property
    def above_weights(self) -> int:
        """What a step adds to the loaded model: without weights, adapters and optimizer states."""
        return sum(size for name, size in self.parts.items() if name not in LOADED)


def resident(work: Work) -> dict[str, int]:
    """Bytes on the GPU through the whole run, by what they are for."""
    optimizer = OPTIMIZERS[work.optimizer]
    states = work.states
    if optimizer.host:
        states = states * optimizer.layers * work.layer_trained // max(1, work.trained)
    return {
        "weights": work.weight_bytes,
        "reference model": work.weight_bytes if work.reference else 0,
        "adapters": work.trained * work.trained_itemsize if work.ranks else 0,
        "optimizer states": states,
        "rollout's cache": work.standing,
    }


def step_memory(work: Work, policy: Policy) -> Memory:
    """Peak of a step, as `torch.cuda.max_memory_allocated` counts it, and the host memory it pins.

    Gradients of everything trained count from the start, as an earlier micro-batch leaves them; with several processes also the
    buckets in which they are exchanged.
    """
    gradients = _gradients(work)
    name, moment = max(_moments(work, policy).items(), key=lambda item: sum(item[1].values()))
    parts = resident(work) | {"gradients": gradients} | moment | {"kernel libraries": LIBRARIES}
    return Memory({k: v for k, v in parts.items() if v}, _host(work, policy), name)


def scoring_memory(work: Work, policy: Policy) -> Memory:
    """Peak of a forward that records nothing: an evaluation, or log-probs of the reference model."""
    found = _moments(work, policy)
    forward = {name: found[name] for name in ("a layer's forward", "the last layer's forward", "the head")}
    kept = ("layer inputs", "saved attention")
    moments = {name: {k: v for k, v in parts.items() if k not in kept} for name, parts in forward.items()}
    name, moment = max(moments.items(), key=lambda item: sum(item[1].values()))
    parts = resident(work) | moment | {"kernel libraries": LIBRARIES}
    return Memory({k: v for k, v in parts.items() if v}, {}, name)


def _gradients(work: Work) -> int:
    trained = work.trained
    if work.released:  # one layer's, and those of the tables: the head's come first, and a tied embedding's last
        trained = min(trained, work.layer_trained + (0 if work.ranks else work.shape.table))
    return trained * work.trained_itemsize * (1 if work.replicas == 1 else 2)


def _host(work: Work, policy: Policy) -> dict[str, int]:
    layers = work.shape.layers
    found = {"optimizer states": work.states if OPTIMIZERS[work.optimizer].host else 0}
    if policy.on_host:
        inputs = kept_inputs(layers, policy.keep_every)
        if policy.rows_on_host and work.embeds_by_chunk:
            inputs -= 1  # the embedding's rows are computed where they are needed
        lse = work.tokens * work.shape.heads * FLOAT
        attended = [_attention_bytes(work) - lse, lse] if policy.save_attention else []
        takes = [
            size for i in range(max(inputs, layers)) for size in [_row(work)] * (i < inputs) + attended * (i < layers)
        ]
        found |= {"layer inputs": inputs * _row(work), "saved attention": layers * sum(attended)}
        found["slack of the pool"] = _pool(takes) - sum(takes)
    if policy.rows_on_host:
        found["gradient row"] = _row(work)
    if policy.keys_on_host:
        keys = work.tokens * work.shape.keys
        found["keys, values and gradients"] = 2 * keys * (work.itemsize + FLOAT)
    return {k: v for k, v in found.items() if v}


def kept_inputs(layers: int, every: int) -> int:
    """Layer inputs that wait at once: every so-many-th, and in the backward those between two of them."""
    return -(-layers // every) + every - 1


def _pool(takes: list[int]) -> int:
    """Bytes of the slabs that `offload.Lease.take` makes for these tensors: none lies in two slabs."""
    total = room = 0
    for size in takes:
        if size > room:
            room = slab_bytes(size)
            total += room
        room -= aligned(size)
    return total


def _row(work: Work) -> int:
    """The input of one layer."""
    return work.tokens * work.shape.hidden * work.format.residual


def _attention_bytes(work: Work) -> int:
    """Attention output and lse of one layer."""
    return work.tokens * (work.shape.query * work.itemsize + work.shape.heads * FLOAT)


def _scratch(work: Work, chunk: int) -> int:
    """Weights in the form in which chunks use them, where they are stored in another: a layer's, once for all its chunks; in
    a hand-written dense layer, for few tokens, one linear layer's at a time."""
    shape, form = work.shape, work.format
    linears = [i * o * form.itemsize for i, o in shape.linears.values()] if packs_linears(shape, work.weights) else []
    few = shape.fused and not shape.experts and work.tokens <= FEW_TOKENS
    found = (sum if work.tokens > chunk and not few else max)(linears) if linears else 0
    return found + expert_scratch(work)


def expert_scratch(work: Work) -> int:
    """Experts in the compute dtype, where they are stored in another: a few of a layer at a time."""
    form = work.format
    return min(work.shape.expert_matrices * form.itemsize, EXPERT_SCRATCH) if form.expert < form.itemsize else 0


def _keys(work: Work, policy: Policy) -> tuple[int, int]:
    """Bytes of one layer's keys and values, and of the fp32 sums of their gradients, on the GPU."""
    width, b = work.shape.keys, work.itemsize
    if not policy.keys_on_host:
        return 2 * work.tokens * width * b, 2 * work.tokens * width * FLOAT
    # Of earlier keys, those of one attention call and of the next one, which are on their way; a segment's last chunk is
    # visited first, when no earlier key is owed anything yet.
    chunks = work.chunks(policy.chunk)
    seen = max(_two_calls(chunk, policy.chunk) for chunk in chunks)
    owed = max(
        _two_calls(c._replace(reach=c.reach - c.rows) if c.reach > c.rows and c.pieces == 1 else c, policy.chunk)
        for c in chunks
    )
    own = min(policy.chunk, work.tokens)
    return 2 * seen * width * b, 2 * (owed + own) * width * FLOAT


def _two_calls(chunk: ChunkShape, size: int) -> int:
    return max(sum(pair) for pair in itertools.pairwise([0, 0, *key_counts((None,), chunk, size)[1:]]))


def _moments(work: Work, policy: Policy) -> dict[str, dict[str, int]]:
    shape, T, b, L = work.shape, work.tokens, work.itemsize, work.shape.layers
    row = _row(work)
    on_gpu = not policy.on_host
    saved = _attention_bytes(work) if policy.save_attention and on_gpu else 0
    rotary_kinds = 2 if len(set(shape.windows)) > 1 and shape.sandwich else 1
    keys, sums = _keys(work, policy)
    always = {"rotary tables and ids": rotary_kinds * 2 * T * shape.head_dim * b + 3 * T * 8}
    layer = {"keys and values": keys, "dequantized weights": _scratch(work, policy.chunk)}
    owed = {"gradients of keys and values": sums}

    def at(inputs: int, rows: int, **rest: int) -> dict[str, int]:
        saves = min(inputs, L - 1) * saved
        kept = (
            {"layer inputs": kept_inputs(inputs, policy.keep_every) * row, "saved attention": saves} if on_gpu else {}
        )
        rows = 0 if policy.rows_on_host and work.embeds_by_chunk else rows
        return (
            kept | {"hidden and gradient rows": rows * row, "chunk workspace": rest.pop("workspace", 0)} | always | rest
        )

    inner, top = shape.windows[:-1] or shape.windows, shape.windows[-1:]
    sizes = [ChunkSizes.of(work, policy, inner, chunk) for chunk in work.chunks(policy.chunk)]
    last = [ChunkSizes.of(work, policy, top, chunk) for chunk in work.labelled_chunks(policy.chunk)]
    keys_only = max(size.keys_only() for size in sizes)
    labelled = work.labelled * shape.hidden * work.format.residual
    # A plain call of the model gives back every row, and gets back its gradient.
    given = labelled if work.compact else row
    normed = (work.labelled if work.compact else T) * shape.hidden  # numbers in the final norm, a module under autograd
    optimizer = OPTIMIZERS[work.optimizer]
    return {
        "a layer's forward": at(L - 1, 1, workspace=max(size.forward() for size in sizes)) | layer,
        "the last layer's forward": at(
            L, 0 if on_gpu else 1, workspace=max(keys_only, *(size.forward() for size in last)) + given
        ) | layer,
        "the head": at(L, 0, head=head_bytes(work) + normed * (2 * FLOAT + 3 * b)) | {"keys and values": keys},
        "the final norm's backward": at(L, 0, head=normed * (4 * FLOAT + 4 * b)) | {"keys and values": keys},
        "the last layer's backward": at(
            L, 1, workspace=max(keys_only, *(size.backward() for size in last)) + given
        ) | layer | owed,
        "a layer's backward": at(L - 1, 1, workspace=max(size.backward() for size in sizes)) | layer | owed,
        "the optimizer's step": {"optimizer's workspace": int(optimizer.work * work.trained * work.trained_itemsize)},
    }  # fmt: skip
