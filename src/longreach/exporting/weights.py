"""Base weights, one tensor at a time: out of a checkpoint on disk or out of a model in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .adapter import _is_adapter_tensor, bare_name
from .errors import ExportError

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8, "I64": torch.int64}
MXFP4_PARTS = ("_blocks", "_scales")  # a packed weight is two tensors in the checkpoint


@dataclass(frozen=True)
class Entry:
    """A tensor as the checkpoint will hold it: logical shape, that is after unpacking."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool = False


class BaseWeights(Protocol):
    """Where base weights come from. Names are the checkpoint's (on disk) or the model's parameters' (in memory)."""

    in_checkpoint_names: bool

    def entries(self) -> Sequence[Entry]: ...

    def read(self, entry: Entry, rows: slice) -> Tensor:
        """Part of a tensor along its first dimension, unpacked to `entry.dtype`, on the CPU."""
        ...

    def read_packed(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        """The tensors that make up a packed weight, as stored."""
        ...


class CheckpointWeights:
    """Safetensors of a model folder. Packed MXFP4 experts appear under the name they have once unpacked."""

    in_checkpoint_names = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._where = {name: file for file in _weight_files(folder) for name in self._open(file).keys()}  # noqa: SIM118

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(str(file), framework="pt"))
        return self._files[file]

    def entries(self) -> list[Entry]:
        found = []
        for name in self._where:
            if name.endswith("_scales") and name[:-7] + "_blocks" in self._where:
                continue
            view = self._slice(name)
            shape, kind = tuple(view.get_shape()), view.get_dtype()
            if name.endswith("_blocks") and name[:-7] + "_scales" in self._where:
                experts, outputs, groups, _ = shape
                found.append(Entry(name[:-7], (experts, groups * 32, outputs), torch.bfloat16, packed=True))
                continue
            if kind not in DTYPES:
                raise ExportError(f"{self.folder}: tensor {name!r} is of type {kind}; known are {', '.join(DTYPES)}")
            found.append(Entry(name, shape, DTYPES[kind]))
        return found

    def read(self, entry: Entry, rows: slice) -> Tensor:
        if not entry.packed:
            view = self._slice(entry.name)
            return view[rows] if entry.shape else self._open(self._where[entry.name]).get_tensor(entry.name)
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (self._slice(entry.name + part)[rows] for part in MXFP4_PARTS)
        return convert_moe_packed_tensors(blocks, scales, dtype=entry.dtype)

    def read_packed(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        for part in MXFP4_PARTS:
            name = entry.name + part
            yield name, self._open(self._where[name]).get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._open(self._where[name]).get_slice(name)

    def close(self) -> None:
        self._stack.close()


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, as its index lists them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ExportError(f"{folder}: the index names {missing[0]}, which is not there")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ExportError(f"{folder}: holds no model.safetensors and no index of shards")


class MemoryWeights:
    """The base weights of a model in memory, adapters left out; names are those of its parameters and buffers."""

    in_checkpoint_names = False

    def __init__(self, model: nn.Module) -> None:
        root: Any = model
        base: nn.Module = root.get_base_model() if hasattr(root, "peft_config") else root
        tied = set(getattr(base, "_tied_weights_keys", None) or ())
        shared: dict[tuple[int, tuple[int, ...]], str] = {}
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in base.state_dict(keep_vars=True).items():
            if _is_adapter_tensor("." + name):
                continue
            bare = bare_name(name)
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if bare in tied and key in shared:
                continue
            shared.setdefault(key, bare)
            self._tensors[bare] = tensor.detach()

    def entries(self) -> list[Entry]:
        return [Entry(name, tuple(t.shape), t.dtype) for name, t in self._tensors.items()]

    def read(self, entry: Entry, rows: slice) -> Tensor:
        tensor = self._tensors[entry.name]
        return (tensor[rows] if entry.shape else tensor).to("cpu")

    def read_packed(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("a model in memory shows its packed weights unpacked")
