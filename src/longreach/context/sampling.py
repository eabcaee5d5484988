"""What sampling takes beside the weights: the cache of keys and values, and a prefill chunk or a decode step.

Sampling and the training step do not overlap: both see the weights, adapters and optimizer states; gradients and what the step
holds are gone when sampling begins, and the cache is gone when the step begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .choice import card_bytes
from .limits import HOST_PROCESS, Limits
from .memory import LIBRARIES, Memory, expert_scratch, resident
from .policy import LARGEST, Policy
from .work import FLOAT, ChunkShape, Work, packs_linears
from .workspace import ChunkSizes

PAGE = 64  # tokens of a page
OVERRUN = 2  # tokens that a row may run past its end before the host has seen that it ended


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Attributes:
        rows: completions decoded at a time.
        prompts: distinct prompts held at a time.
        shared: a prompt's keys and values are stored once for all its completions, in pages; else once for each.
        on_host: prompts' keys of layers with full attention lie in host memory, and two layers' at a time on the device.
    """

    rows: int
    prompts: int = 1
    shared: bool = True
    on_host: bool = False


def sampling_memory(work: Work, sampling: Sampling) -> Memory:
    """Peak of sampling, as `torch.cuda.max_memory_allocated` counts it, at the longest prompt and completion."""
    shape, b = work.shape, work.itemsize
    per_token = 2 * shape.keys * b
    full = sum(window is None for window in shape.windows) if sampling.on_host else 0
    cached = sum(_cached(work, sampling, window) for window in shape.windows)
    staged = sampling.prompts * _pages(max(1, work.prompt - 1)) * PAGE
    cache = (cached - max(0, full - 2) * staged) * per_token
    chunk = ChunkSizes.of(work, Policy(LARGEST, "none"), shape.windows, _prefill_chunk(work))
    linears = shape.linear_matrices * b if packs_linears(shape, work.weights) else 0
    rows = sampling.rows
    # A decode step's activations, and its logits: in the compute dtype, in fp32, and one copy while they are sampled from.
    wide = 4 * shape.hidden + 3 * shape.query + 4 * shape.keys + 4 * shape.mlp * max(1, shape.active)
    decode = rows * (wide * b + shape.vocab * (b + 2 * FLOAT))
    # Transformers' cache grows by joining: the longest layer stands twice for a moment.
    joined = 0 if sampling.shared else rows * work.context * per_token
    parts = resident(replace(work, standing=0)) | {
        "cache of keys and values": cache,
        "adapters' copies": adapter_copies(work) if sampling.shared else 0,
        "prefill or decode": max(chunk.forward(), decode) + joined,
        "dequantized weights": expert_scratch(work) + linears,
        "kernel libraries": LIBRARIES,
    }
    host = {"prompts' keys and values": full * staged * per_token} if full else {}
    return Memory({name: size for name, size in parts.items() if size}, host, "sampling")


def adapter_copies(work: Work) -> int:
    """Bytes of the adapters in the compute dtype, as the rollout engine copies them for its steps."""
    return work.trained * work.itemsize if work.adapted else 0


def _prefill_chunk(work: Work) -> ChunkShape:
    rows = max(1, min(LARGEST, work.prompt))
    return ChunkShape(rows, max(0, work.prompt - rows))


def _cached(work: Work, sampling: Sampling, window: int | None) -> int:
    """Tokens whose keys one layer holds."""
    if not sampling.shared:
        return sampling.rows * work.context if window is None else sampling.rows * min(work.context, window)
    own, prompt = _pages(work.completion + OVERRUN), _pages(max(1, work.prompt - 1))
    if window is not None:
        own, prompt = min(own, _pages(window) + 1), min(prompt, _pages(window) + 1) + 1
    return (sampling.rows * own + sampling.prompts * prompt + 1) * PAGE


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def samples(work: Work, limits: Limits, sampling: Sampling) -> bool:
    """Whether sampling fits."""
    memory = sampling_memory(work, sampling)
    return limits.fit(card_bytes(memory), memory.host + HOST_PROCESS if memory.host else 0)


def fitting_rows(work: Work, limits: Limits, wanted: int, prompts: int | None = None) -> Sampling | None:
    """The most completions that may be decoded at a time on a card, at most `wanted`; None if not even a single one.

    Args:
        work: the largest prompt and completion, and the group size.
        prompts: distinct prompts in all; None for many.

    Returns:
        Rows: `wanted`, or that halved until it fits; the prompts that they need at a time.
    """
    rows = wanted
    while True:
        # One prompt more than the rows fill: the next is computed while the last completions of another still run.
        held = -(-rows // work.group) + (work.group > 1)
        found = Sampling(rows, max(1, min(rows, held, prompts or held)))
        if samples(work, limits, found):
            return found
        if rows == 1:
            return None
        rows = (rows + 1) // 2
