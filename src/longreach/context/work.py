"""What a step is: its rows, the form of the weights, what trains and with which optimizer. The planner's input, all of it static.

Letters: T packed tokens, R labelled tokens, G rows of a group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .shape import ModelShape
from .support import PLAIN_EMBEDDING
from .tree import CUT_ABOVE

FLOAT = 4  # adapters (PEFT's default), sums of gradients, lse


@dataclass(frozen=True)
class Format:
    """How weights are stored.

    Attributes:
        matrix: bytes of a weight in a linear layer of a decoder layer, with its share of scales.
        expert: the same of a weight of an expert.
        itemsize: bytes of a number in the compute dtype, in which embedding, head and norms are stored too.
        residual: bytes of a number of the hidden state between layers.
    """

    matrix: float
    expert: float
    itemsize: int
    residual: int

    @property
    def packed(self) -> bool:
        """Whether weights are dequantized before they are used."""
        return self.expert < self.itemsize


NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # codes; 8-bit scales of 64 weights; fp32 scales of 256 of those
MXFP4 = 0.5 + 1 / 32  # codes; 8-bit exponents of 32 weights
FORMATS: dict[str, Format] = {
    "bf16": Format(2, 2, 2, 2),
    "fp16": Format(2, 2, 2, 4),
    "fp32": Format(4, 4, 4, 4),
    "fp64": Format(8, 8, 8, 8),
    "nf4": Format(NF4, NF4, 2, 2),
    "mxfp4": Format(MXFP4, MXFP4, 2, 2),
}


@dataclass(frozen=True)
class Optimizer:
    """Memory of an optimizer, per trained parameter.

    Attributes:
        states: how many numbers it keeps.
        itemsize: bytes of one; None for the parameter's own dtype.
        host: they lie in host memory.
        work: numbers in the parameter's dtype that its step needs for a moment.
        layers: whose states are on the device at once while they lie on the host.
    """

    states: float
    itemsize: float | None = None
    host: bool = False
    work: float = 0.0
    layers: int = 0


EIGHT_BITS = 1 + 4 / 256  # a byte, and an fp32 scale of 256
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(2),
    "adamw_foreach": Optimizer(2, work=1.0),
    "adamw_8bit": Optimizer(2, EIGHT_BITS),
    "paged_adamw": Optimizer(2, FLOAT, host=True),
    "paged_adamw_8bit": Optimizer(2, EIGHT_BITS, host=True),
    "host_adamw": Optimizer(2, FLOAT, host=True, layers=2),
    "lion": Optimizer(1),
    "lion_8bit": Optimizer(1, EIGHT_BITS),
    "adafactor": Optimizer(0.01, FLOAT, work=1.0),
    "rmsprop": Optimizer(1),
    "sgd": Optimizer(0),
}


def optimizer_kind(optim: str) -> str:
    """The kind of `OPTIMIZERS` that a value of Transformers' `optim` comes nearest to; what is not known counts as AdamW."""
    name = optim.lower()
    eight, paged = "8bit" in name, name.startswith("paged")
    if "lion" in name:
        return "lion_8bit" if eight and not paged else "lion" if not paged else "paged_adamw_8bit"
    if "adafactor" in name or "adalomo" in name or name == "lomo":
        return "adafactor"
    if name in ("sgd", "schedule_free_sgd"):
        return "sgd"
    if "rmsprop" in name or name == "adagrad":
        return "rmsprop"
    if paged:
        return "paged_adamw_8bit" if eight else "paged_adamw"
    if eight or "4bit" in name:
        return "adamw_8bit"
    return "adamw_foreach" if name == "adamw_torch" else "adamw"


class ChunkShape(NamedTuple):
    """Tokens of a chunk, the earlier keys that they see, and how many segments lie in it."""

    rows: int
    reach: int
    pieces: int = 1


@dataclass(frozen=True)
class Work:
    """One training step.

    Attributes:
        context: tokens of one row, prompt and completion.
        completion: tokens of a row that carry a loss.
        group: rows that share a prompt.
        weights: a name of `FORMATS`.
        ranks: adapter rank per linear layer, empty when all parameters are trained.
        prompts: groups of the step, each with a prompt of its own.
        optimizer: a name of `OPTIMIZERS`.
        compact: the last layer returns labelled rows only, as in GRPO and `token_logprobs`; not in a plain call of the model.
        reference: a second model of the same size scores the completions (KL term without an adapter).
        released: a layer's gradients go into the optimizer's step as soon as they exist.
        replicas: processes that exchange gradients.
        loaded: bytes of the model as it was loaded, adapters not counted; None to derive them from `weights`.
        trained_bytes, trained_count: of the parameters that train, as they were made; None to derive them from `ranks`.
        eight_bit_tables: embedding and head are stored in 8 bits.
        standing: bytes of a rollout's cache that stay on the device during the step.
    """

    shape: ModelShape
    context: int
    completion: int
    group: int
    weights: str
    ranks: Mapping[str, int]
    prompts: int = 1
    optimizer: str = "adamw"
    compact: bool = True
    reference: bool = False
    released: bool = False
    replicas: int = 1
    loaded: int | None = None
    trained_bytes: int | None = None
    trained_count: int | None = None
    eight_bit_tables: bool = False
    standing: int = 0

    @property
    def prompt(self) -> int:
        return self.context - self.completion

    @functools.cached_property
    def tokens(self) -> int:
        """Packed: a prompt without its last token once, and that token before each completion."""
        return self.prompts * (self.prompt - 1 + self.group * (self.completion + 1))

    @property
    def labelled(self) -> int:
        return self.prompts * self.group * self.completion

    def chunks(self, chunk: int) -> list[ChunkShape]:
        """The largest chunk, and the one that sees most, of prompts and of completions."""
        root = self.prompt - 1
        found = _cut(root, 0, chunk) if root > chunk else []
        if 0 < root <= chunk:
            found = [ChunkShape(min(self.prompts, chunk // root) * root, 0, min(self.prompts, chunk // root))]
        return found + self._leaves(self.completion + 1, chunk)

    def labelled_chunks(self, chunk: int) -> list[ChunkShape]:
        """The same of the last layer, where tokens without a label are cut off; what is cut does not share a chunk."""
        if not self.compact:
            return self.chunks(chunk)
        if self.completion < CUT_ABOVE:
            return self._leaves(self.completion + 1, chunk)
        return _cut(self.completion, self.prompt - 1, chunk)

    def _leaves(self, length: int, chunk: int) -> list[ChunkShape]:
        root = self.prompt - 1
        if length > chunk:
            return _cut(length, root, chunk)
        pieces = min(self.prompts * self.group, chunk // length)
        # The prompts of one bundle lie side by side, so that one call sees them all.
        return [ChunkShape(pieces * length, root * math.ceil(pieces / self.group), pieces)]

    @functools.cached_property
    def layer_adapter(self) -> int:
        """Adapter weights of one layer."""
        return self.shape.adapter(self.ranks)

    @property
    def adapted(self) -> bool:
        return bool(self.ranks)

    @functools.cached_property
    def trained(self) -> int:
        """Parameters that train."""
        if self.trained_count is not None:
            return self.trained_count
        return self.shape.layers * self.layer_adapter if self.ranks else self.shape.parameters

    @property
    def trained_itemsize(self) -> int:
        if self.trained_bytes and self.trained_count:
            return round(self.trained_bytes / self.trained_count)
        return FLOAT if self.ranks else self.itemsize

    @property
    def format(self) -> Format:
        return FORMATS[self.weights]

    @property
    def itemsize(self) -> int:
        return self.format.itemsize

    @property
    def embeds_by_chunk(self) -> bool:
        """Whether the first layer's input is computed where it is needed, when rows are on the host."""
        return self.adapted and self.shape.kind in PLAIN_EMBEDDING

    @property
    def layer_trained(self) -> int:
        """Parameters of one layer that train."""
        return self.layer_adapter if self.ranks else self.shape.layer_matrices + self.shape.layer_vectors

    @functools.cached_property
    def states(self) -> int:
        """Bytes of the optimizer's states, wherever they lie."""
        kind = OPTIMIZERS[self.optimizer]
        each = FLOAT if kind.host and kind.itemsize is None else kind.itemsize or self.trained_itemsize
        found = int(kind.states * self.trained * each)
        if self.ranks or each != EIGHT_BITS:
            return found
        return found + int(kind.states * self.shape.table * (FLOAT - each))  # an embedding's are never in 8 bits

    @functools.cached_property
    def weight_bytes(self) -> int:
        """The model itself."""
        return weight_bytes(self.shape, self.weights, self.eight_bit_tables) if self.loaded is None else self.loaded


def _cut(length: int, before: int, chunk: int) -> list[ChunkShape]:
    """The last whole chunk of a segment and the rest after it."""
    whole, rest = divmod(length, chunk)
    found = [ChunkShape(chunk, before + (whole - 1) * chunk)] if whole else []
    return found + ([ChunkShape(rest, before + whole * chunk)] if rest else [])


def packs_linears(shape: ModelShape, weights: str) -> bool:
    """Whether a format stores the linear layers packed; gpt-oss's own leaves those of attention as they are."""
    return FORMATS[weights].packed and not (shape.kind == "gpt_oss" and weights == "mxfp4")


def weight_bytes(shape: ModelShape, weights: str, eight_bit_tables: bool = False) -> int:
    """A model with its linear layers in a format of `FORMATS`; embedding and head in the compute dtype, or in 8 bits."""
    form = FORMATS[weights]
    experts, linears = shape.layers * shape.expert_matrices, shape.layers * shape.linear_matrices
    per_linear = form.matrix if packs_linears(shape, weights) else form.itemsize
    tables = shape.table * (1 if shape.tied else 2)
    rest = shape.parameters - experts - linears - tables
    per_table = 1 + FLOAT / shape.hidden if eight_bit_tables else form.itemsize
    return math.ceil(experts * form.expert + linears * per_linear + tables * per_table + rest * form.itemsize)
