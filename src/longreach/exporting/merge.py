"""Merged weights as a stream of tensors: base + scale · B A, added in fp32 and rounded once, a slice at a time.

The stream has the names and layout of the architecture's checkpoints: where those differ from the model's parameters (experts
stored one by one), Transformers' own conversion is run backwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import Changes, LowRank
from .errors import ExportError
from .weights import BaseWeights, Entry

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
SLICE_BYTES = 256 * 1024**2  # of fp32 work space


@dataclass(frozen=True)
class Part:
    """A tensor of the merged checkpoint, not yet computed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def merged_parts(
    structure: nn.Module, base: BaseWeights, changes: Changes, dtype: torch.dtype, *, keep_packed: bool = False
) -> Iterator[Part]:
    """All tensors of the merged checkpoint, in the order of the base's.

    Args:
        structure: the PeftModel or plain model; only its class, configuration and conversions are used.
        dtype: of floating-point tensors; those that the model insists on in fp32 stay so.
        keep_packed: leave packed MXFP4 weights that no adapter touches as they are.

    Raises:
        ExportError: a change for which the checkpoint holds no tensor.
    """
    root: Any = structure
    model: Any = _without_quantizer(root.get_base_model() if hasattr(root, "peft_config") else root)
    fp32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) + tuple(
        getattr(model, "_keep_in_fp32_modules", None) or ()
    )
    if base.in_checkpoint_names:
        changes = checkpoint_changes(model, changes, {e.name for e in base.entries()})
    used: set[str] = set()
    for entry in base.entries():
        used.add(entry.name)
        if entry.packed and keep_packed and not changes.touches(entry.name):
            for name, tensor in base.read_packed(entry):
                yield Part(name, tensor.dtype, tuple(tensor.shape), _one(tensor))
            continue
        out = dtype if entry.dtype.is_floating_point and not any(key in entry.name for key in fp32) else entry.dtype
        if base.in_checkpoint_names or not _is_converted(model, entry):
            yield Part(entry.name, out, entry.shape, partial(_pieces, base, entry, changes))
        else:
            yield from _converted(model, base, entry, changes, out)
    if unties(root.config, changes) and HEAD not in used:
        # One tensor in the base, two once merged.
        embedding = next(entry for entry in base.entries() if entry.name.endswith(EMBEDDING))
        yield Part(HEAD, dtype, embedding.shape, partial(_pieces, base, embedding, changes, HEAD))
        used.add(HEAD)
    unused = (set(changes.added) | set(changes.replaced)) - used
    if unused:
        raise ExportError(f"the base checkpoint holds no tensor {min(unused)!r}, which the adapter changes")


def checkpoint_changes(model: Any, changes: Changes, stored: set[str]) -> Changes:
    """Changes by the names of the checkpoint's tensors instead of the model's parameters.

    Args:
        stored: names of the checkpoint's tensors.
    """
    return _Reverted(_without_quantizer(model), changes, stored).by_checkpoint_name()


def _without_quantizer(model: Any) -> Any:
    """A model whose conversions are the architecture's alone; one that was quantized while loading has its own among them."""
    if getattr(model, "hf_quantizer", None) is None:
        return model
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(model)(config)


def _one(tensor: Tensor) -> Callable[[], Iterator[Tensor]]:
    return lambda: iter((tensor,))


def unties(config: Any, changes: Changes) -> bool:
    """Whether embedding and head, one tensor in the base, differ once merged."""
    if not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return False
    return any(name.endswith((HEAD, EMBEDDING)) for name in (*changes.added, *changes.replaced))


def _pieces(base: BaseWeights, entry: Entry, changes: Changes, name: str | None = None) -> Iterator[Tensor]:
    """Slices of a merged tensor. `name`: whose changes to apply, if not the entry's own."""
    added = changes.added.get(name or entry.name, [])
    replaced = changes.replaced.get(name or entry.name)
    if not entry.shape:
        yield base.read(entry, slice(None)) if replaced is None else replaced
        return
    per_row = 4 * max(1, torch.Size(entry.shape[1:]).numel())
    step = max(1, SLICE_BYTES // per_row)
    for start in range(0, entry.shape[0], step):
        rows = slice(start, min(start + step, entry.shape[0]))
        weight = base.read(entry, rows) if replaced is None else replaced[rows]
        yield _sum(weight, added, rows) if added else weight


def _sum(weight: Tensor, added: list[LowRank], rows: slice) -> Tensor:
    total = weight.to(torch.float32, copy=True)
    for change in added:
        change.add_to(total, rows)
    return total


def _is_converted(model: Any, entry: Entry) -> bool:
    """Whether checkpoints hold this parameter under another name or in several tensors."""
    return set(_reverted(model, entry.name, torch.empty(entry.shape, device="meta"))) != {entry.name}


def _converted(model: Any, base: BaseWeights, entry: Entry, changes: Changes, dtype: torch.dtype) -> Iterator[Part]:
    """The tensors of one parameter as checkpoints hold it."""
    whole = torch.cat([piece.to(dtype) for piece in _pieces(base, entry, changes)])
    for name, tensor in _reverted(model, entry.name, whole).items():
        yield Part(name, dtype, tuple(tensor.shape), _one(tensor))


def _reverted(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: tensor})


class _Reverted:
    """Changes by checkpoint name. A change to a parameter that checkpoints hold in parts becomes one change for each part."""

    def __init__(self, model: Any, changes: Changes, stored: set[str]) -> None:
        self.model, self.changes, self.stored = model, changes, stored

    def by_checkpoint_name(self) -> Changes:
        added: dict[str, list[LowRank]] = {}
        for name, low_ranks in self.changes.added.items():
            for change in low_ranks:
                for part, value in self._split(name, change):
                    added.setdefault(part, []).append(value)
        replaced: dict[str, Tensor] = {}
        for name, tensor in self.changes.replaced.items():
            parts = {name: tensor} if name in self.stored else _reverted(self.model, name, tensor)
            replaced |= {self._stored_name(part): value for part, value in parts.items()}
        return Changes(added, replaced, self.changes.assigned)

    def _split(self, name: str, change: LowRank) -> Iterator[tuple[str, LowRank]]:
        if name in self.stored:
            yield name, change
            return
        # Conversions pick, stack and transpose rows. Where the rows of each part come from is found by running the conversion
        # on row numbers (one column wide); the factors' rows follow.
        experts, rows, columns = change.left_EMr.shape[0], change.left_EMr.shape[1], change.right_ErN.shape[2]
        narrow = (experts, rows, 1) if change.by_expert else (rows, 1)
        numbers = torch.arange(experts * rows, dtype=torch.int64).reshape(narrow)
        wide = _reverted(self.model, name, torch.empty(change.shape, device="meta"))
        for part, picked in _reverted(self.model, name, numbers).items():
            yield self._stored_name(part), _picked(part, change, picked, wide.get(part), columns)

    def _stored_name(self, name: str) -> str:
        """The checkpoint's own name: the same, or with another prefix (a text model inside a multimodal checkpoint)."""
        if name in self.stored:
            return name
        ends = [n for n in self.stored if n.endswith("." + name) or n.endswith("." + name.removeprefix("model."))]
        return ends[0] if len(ends) == 1 else name


def _picked(part: str, change: LowRank, numbers: Tensor, wide: Tensor | None, columns: int) -> LowRank:
    """The factors of one part, whose rows (or, transposed, columns) are the rows `numbers` of the whole change."""
    rows = change.left_EMr.shape[1]
    picked = numbers.reshape(-1)
    upright = tuple(numbers.shape) == (len(picked), 1)
    shape = (len(picked), columns) if upright else (columns, len(picked))
    experts = torch.unique(picked // rows)
    if numbers.dim() != 2 or 1 not in numbers.shape or wide is None or tuple(wide.shape) != shape or len(experts) != 1:
        raise ExportError(f"{part!r}: the checkpoint's layout of this weight is not known here")
    expert = int(experts[0])
    left, right = change.left_EMr[expert, picked % rows], change.right_ErN[expert]
    if not upright:
        left, right = right.t(), left.t()
    return LowRank(left[None], right[None], change.scale, by_expert=False)
