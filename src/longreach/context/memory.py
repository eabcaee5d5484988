"""Peak bytes of a training step in closed form, term by term from what `layer.py`, `fused.py`, `op.py` and `logprob.py` allocate.

A step is one forward and backward over one token tree of G rows that share a prompt. Its peak is the largest of a few moments:
inside a layer's forward, in the head, inside the backward of the last layer and of the one below it. Every moment is
what waits (layer inputs, hidden row, keys, values and what they are owed) plus the workspace of one chunk.

Letters: T packed tokens, R labelled tokens, C tokens of a chunk, N keys of one attention call, M hidden size, Q width of all
query heads, K width of all key heads, F MLP width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from .offload import aligned, slab_bytes
from .shape import QK_NORM, ModelShape
from .tree import KEY_BLOCK

# Bytes of a weight in a matrix of a decoder layer; embedding, head and norms are stored in the compute dtype beside it.
FORMATS: dict[str, tuple[float, int]] = {"bf16": (2, 2), "fp16": (2, 2), "fp32": (4, 4)}
FLOAT = 4  # adapters (PEFT's default), sums of gradients, lse
ADAM = 2  # states per trained parameter, in the parameter's dtype
MIB = 2**20
PLACES = {"none": "kept on GPU", "host": "inputs on host"}  # the offload policies, the preferred one first
Windows = tuple[int | None, ...]
# cuBLAS workspaces of the forward's and the backward's thread and the allocator's rounding: the constant part of the difference
# between tensors and `max_memory_allocated` on an H200, the same at 16K, 32K, 128K and for groups.
LIBRARIES = 152 * MIB


@dataclass(frozen=True)
class Policy:
    """How the engine is asked to run; the arguments of `longreach.enable`."""

    chunk: int
    offload: str
    save_attention: bool = False

    def __str__(self) -> str:
        return f"{PLACES[self.offload]}, chunk {self.chunk}" + (", attention saved" if self.save_attention else "")


@dataclass(frozen=True)
class Work:
    """One training step.

    Attributes:
        context: tokens of one row, prompt and completion.
        completion: tokens of a row that carry a loss.
        group: rows that share the prompt.
        ranks: adapter rank per linear layer, empty when all parameters are trained.
    """

    shape: ModelShape
    context: int
    completion: int
    group: int
    weights: str
    ranks: Mapping[str, int]

    @property
    def prompt(self) -> int:
        return self.context - self.completion

    @property
    def tokens(self) -> int:
        """Packed: the prompt without its last token once, and that token before each completion."""
        return self.prompt - 1 + self.group * (self.completion + 1)

    @property
    def labelled(self) -> int:
        return self.group * self.completion

    def chunks(self, chunk: int) -> list[tuple[int, int]]:
        """(rows, earlier keys they see) of the largest chunk, and of the one that sees most, of prompt and completions."""
        root = self.prompt - 1
        found = _cut(root, 0, chunk)
        leaf = self.completion + 1
        bundled = min(self.group, max(1, chunk // leaf)) * leaf
        return found + (_cut(leaf, root, chunk) if leaf > chunk else [(bundled, root)])

    def labelled_chunks(self, chunk: int) -> list[tuple[int, int]]:
        """The same of the last layer, where tokens without a label are cut off."""
        return _cut(self.completion, self.prompt - 1, chunk)

    @property
    def layer_adapter(self) -> int:
        """Adapter weights of one layer."""
        return sum(self.ranks[name] * (i + o) for name, (i, o) in self.shape.linears.items() if name in self.ranks)

    @property
    def trained(self) -> int:
        return self.shape.layers * self.layer_adapter if self.ranks else self.shape.parameters

    @property
    def itemsize(self) -> int:
        return FORMATS[self.weights][1]


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
        loaded = ("weights", "adapters", "optimizer states")
        return sum(size for name, size in self.parts.items() if name not in loaded)


def _cut(length: int, before: int, chunk: int) -> list[tuple[int, int]]:
    """(rows, earlier keys) of the last whole chunk of a segment and of the rest after it."""
    whole, rest = divmod(length, chunk)
    found = [(chunk, before + (whole - 1) * chunk)] if whole else []
    return found + ([(rest, before + whole * chunk)] if rest else [])


def weight_bytes(shape: ModelShape, weights: str) -> int:
    """The model itself."""
    per_matrix, itemsize = FORMATS[weights]
    matrices = shape.layers * shape.layer_matrices
    return math.ceil(matrices * per_matrix) + (shape.parameters - matrices) * itemsize


def step_memory(work: Work, policy: Policy) -> Memory:
    """Peak of a step with AdamW, as `torch.cuda.max_memory_allocated` counts it, and the host memory it pins.

    Gradients of everything trained count from the start, as an earlier micro-batch leaves them.
    """
    trained = work.trained * (FLOAT if work.ranks else work.itemsize)
    fixed = {
        "weights": weight_bytes(work.shape, work.weights),
        "adapters": trained if work.ranks else 0,
        "optimizer states": ADAM * trained,
    }
    name, moment = max(_moments(work, policy).items(), key=lambda item: sum(item[1].values()))
    parts = fixed | {"gradients": trained} | moment | {"kernel libraries": LIBRARIES}
    return Memory({k: v for k, v in parts.items() if v}, _host(work, policy), name)


def _host(work: Work, policy: Policy) -> dict[str, int]:
    if policy.offload == "none":
        return {}
    takes = [_input_bytes(work)]
    if policy.save_attention:
        lse = work.tokens * work.shape.heads * FLOAT
        takes += [_attention_bytes(work) - lse, lse]
    layers = work.shape.layers
    found = {"layer inputs": layers * takes[0], "saved attention": layers * sum(takes[1:])}
    return {k: v for k, v in found.items() if v} | {"slack of the pool": _pool(takes * layers) - layers * sum(takes)}


def _pool(takes: list[int]) -> int:
    """Bytes of the slabs that `offload.Lease.take` makes for these tensors: none lies in two slabs."""
    total = room = 0
    for size in takes:
        if size > room:
            room = slab_bytes(size)
            total += room
        room -= aligned(size)
    return total


def _input_bytes(work: Work) -> int:
    return work.tokens * work.shape.hidden * work.itemsize


def _attention_bytes(work: Work) -> int:
    """Attention output and lse of one layer."""
    return work.tokens * (work.shape.query * work.itemsize + work.shape.heads * FLOAT)


def _moments(work: Work, policy: Policy) -> dict[str, dict[str, int]]:
    shape, T, b = work.shape, work.tokens, work.itemsize
    row = _input_bytes(work)
    on_gpu = policy.offload == "none"
    saved = _attention_bytes(work) if policy.save_attention and on_gpu else 0
    rotary_kinds = 2 if len(set(shape.windows)) > 1 and shape.sandwich else 1
    always = {
        "keys and values": 2 * T * shape.keys * b,
        "rotary tables and ids": rotary_kinds * 2 * T * shape.head_dim * b + 3 * T * 8,
    }
    owed = {"gradients of keys and values": 2 * T * shape.keys * FLOAT}
    L = shape.layers

    def at(inputs: int, rows: int, **rest: int) -> dict[str, int]:
        kept = {"layer inputs": inputs * row, "saved attention": min(inputs, L - 1) * saved} if on_gpu else {}
        return (
            kept | {"hidden and gradient rows": rows * row, "chunk workspace": rest.pop("workspace", 0)} | always | rest
        )

    inner, top = shape.windows[:-1] or shape.windows, shape.windows[-1:]
    sizes = [ChunkSizes.of(work, policy, inner, *chunk) for chunk in work.chunks(policy.chunk)]
    last = [ChunkSizes.of(work, policy, top, *chunk) for chunk in work.labelled_chunks(policy.chunk)]
    keys_only = max(size.keys_only() for size in sizes)
    compact = work.labelled * shape.hidden * b
    return {
        "a layer's forward": at(L - 1, 1, workspace=max(size.forward() for size in sizes)),
        "the last layer's forward": at(
            L, 0 if on_gpu else 1, workspace=max(keys_only, *(size.forward() for size in last)) + compact
        ),
        "the head": at(L, 0, head=_head(work) + 4 * compact),
        "the last layer's backward": at(
            L, 1, workspace=max(keys_only, *(size.backward() for size in last)) + compact
        ) | owed,
        "a layer's backward": at(L - 1, 1, workspace=max(size.backward() for size in sizes)) | owed,
    }  # fmt: skip


def _head(work: Work) -> int:
    from .logprob import LOGITS_AT_ONCE  # here, because it brings Transformers along

    rows = min(work.labelled, max(1, LOGITS_AT_ONCE[True] // work.shape.vocab))
    logits = rows * work.shape.vocab * work.itemsize  # their gradient is written over them
    if work.ranks:
        return logits
    # The head's own gradient: one slice's in the model's dtype, and while the second joins it, both sums in fp32.
    slices = work.labelled > rows
    return logits + work.shape.table * (2 * (FLOAT + work.itemsize) if slices else work.itemsize)


@dataclass(frozen=True)
class ChunkSizes:
    """Workspace of one chunk of one layer; widths are bytes of all its rows.

    M, Q, K, F: a tensor of that width in the compute dtype. `wide` is what a factor of fp32 costs beside it.
    """

    M: int
    Q: int
    K: int
    F: int
    wide: float
    lse: int
    adapter: int
    calls: tuple[int, ...]  # keys (or values) of each attention call, bytes
    grouped: bool
    fused: bool
    sandwich: bool
    qk_norm: bool
    fetched: int
    saved: bool

    @classmethod
    def of(cls, work: Work, policy: Policy, windows: Windows, rows: int, reach: int) -> ChunkSizes:
        """Of a chunk of `rows` tokens that may see `reach` earlier keys, in the costliest of layers with these windows."""
        shape, b = work.shape, work.itemsize
        ranks = sum(work.ranks.values())
        adapter = rows * ranks * b * 2 + work.layer_adapter * (2 * FLOAT + b)
        if not work.ranks:
            adapter = (shape.layer_matrices + shape.layer_vectors) * (FLOAT + b)
        on_host = policy.offload != "none"
        fetched = rows * shape.hidden * b * 2 if on_host else 0
        if policy.save_attention and on_host:
            fetched += 2 * rows * (shape.query * b + shape.heads * FLOAT)
        return cls(
            M=rows * shape.hidden * b, Q=rows * shape.query * b, K=rows * shape.keys * b,
            F=rows * shape.mlp * max(1, shape.active) * b, wide=FLOAT / b, lse=2 * rows * shape.heads * FLOAT,
            adapter=adapter, calls=tuple(n * shape.keys * b for n in _calls(windows, rows, reach)),
            grouped=shape.heads != shape.kv_heads, fused=shape.fused, sandwich=shape.sandwich,
            qk_norm=shape.kind in QK_NORM, fetched=fetched, saved=policy.save_attention,
        )  # fmt: skip

    def _attended(self) -> float:
        """Outputs of the attention calls while they merge: in fp32 from the third call on."""
        if len(self.calls) == 1:
            return self.Q
        return 2 * self.Q if len(self.calls) == 2 else (self.wide + 2) * self.Q

    def forward(self) -> int:
        """The layer without gradients."""
        projected = self.M + 2 * self.Q + 3 * self.K
        attention = projected + self._attended()
        mlp: float = self.Q + 2 * self.M + 3 * self.F + (2 * self.M if self.sandwich else 0)
        if not self.fused:
            attention, mlp = attention + 2 * self.wide * (self.M + self.Q), mlp + 2 * self.wide * self.M
        return math.ceil(max(attention, mlp)) + self.lse + self.adapter // 2

    def keys_only(self) -> int:
        return math.ceil((self.M + 3 * self.K) * (1 if self.fused else 1 + self.wide))

    def backward(self) -> int:
        """Recompute and gradients of the chunk."""
        if not self.fused:
            return self._autograd()
        # Saved attention is handed in, and the MLP's part then comes before q, k and v are made.
        projected = self.M + (2 if self.saved else 3) * self.Q + 3 * self.K
        mlp = 2 * self.M + 3 * self.F + (4 * self.M if self.sandwich else 0) + (0 if self.saved else projected)
        recompute = 0.0 if self.saved else projected - self.Q + self._attended()
        peak = max(mlp, recompute, projected + self._attention_backward())
        return math.ceil(peak) + self.fetched + self.lse + self.adapter

    def _attention_backward(self) -> float:
        """dout; dq in fp32 and of the last call; dk, dv of a call and of the one before it; a flash kernel's fp32 sums."""
        dq = self.Q + (self.wide * self.Q if len(self.calls) > 1 else 0)
        grouped = 2 * self.wide if self.grouped else 0
        running = max(2 * (a + b) + grouped * b for a, b in itertools.pairwise((0, *self.calls)))
        after = 2 * self.calls[-1] + self.Q + 2 * self.K
        return self.Q + dq + max(running + self.wide * self.Q, after)

    def _autograd(self) -> int:
        """A module run by autograd: what its forward keeps (norms and rotary in fp32, every projection's input and output)."""
        norms = (4 if self.sandwich else 2) * (1 + self.wide) * self.M
        heads = (3 + (2 * self.wide if self.qk_norm else 0)) * (self.Q + self.K)
        held = norms + heads + 2 * self.Q + 3 * self.M + 5 * self.F + self.fetched
        return math.ceil(max(held + 2 * self.F, held + self._attention_backward())) + self.lse + self.adapter


def _calls(windows: Windows, rows: int, reach: int) -> list[int]:
    """Keys of each attention call of a chunk: its own, then blocks of those before it; a window takes one call."""
    if None not in windows:
        return [rows + min(reach, max(window or 0 for window in windows))]
    return [rows, *(min(KEY_BLOCK, reach - at) for at in range(0, reach, KEY_BLOCK))]
