"""Base weights, one tensor at a time: out of a checkpoint on disk or out of a model in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..kernels.dequant import dequantize_mxfp4
from ..quant.experts import PRODUCTS, FourBitExperts
from ..quant.linear import FourBitLinear
from .adapter import bare_name, is_adapter_tensor
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
    """Safetensors of a model folder. Packed MXFP4 experts appear under the name they have once unpacked.

    Files are read, not mapped: what was read of a mapped file counts as the process's memory.
    """

    in_checkpoint_names = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: dict[str, _Stored] = {}
        for file in _weight_files(folder):
            self._stored |= _header(file)

    def entries(self) -> list[Entry]:
        found = []
        for name, stored in self._stored.items():
            if name.endswith("_scales") and name[:-7] + "_blocks" in self._stored:
                continue
            if name.endswith("_blocks") and name[:-7] + "_scales" in self._stored:
                experts, outputs, groups, _ = stored.shape
                found.append(Entry(name[:-7], (experts, groups * 32, outputs), torch.bfloat16, packed=True))
            else:
                found.append(Entry(name, stored.shape, stored.dtype))
        return found

    def read(self, entry: Entry, rows: slice) -> Tensor:
        if not entry.packed:
            return self._stored[entry.name].read(rows)
        blocks, scales = (self._stored[entry.name + part].read(rows) for part in MXFP4_PARTS)
        return unpacked(blocks, scales).transpose(1, 2)

    def read_packed(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        for part in MXFP4_PARTS:
            yield entry.name + part, self._stored[entry.name + part].read(slice(None))


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.bfloat16)
_SIXTEEN = torch.cat((_E2M1, -_E2M1))
_BYTE = torch.arange(256)
# Two bf16 values for each byte, as one integer.
_PAIRS = torch.stack((_SIXTEEN[_BYTE & 15], _SIXTEEN[_BYTE >> 4]), 1).contiguous().view(torch.int32).view(-1)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 to bf16 on the CPU, as `kernels.dequant.dequantize_mxfp4` and three times as fast: a table of bytes.

    Args:
        blocks: uint8 [..., G, 16]; scales: uint8 [..., G].

    Returns:
        bf16 [..., 32 G].
    """
    if bool(((scales == 0) | (scales == 255)).any()):  # not an ordinary power of two in bf16
        out = torch.empty(*scales.shape[:-1], scales.shape[-1] * 32, dtype=torch.bfloat16)
        return dequantize_mxfp4(blocks, scales, out)
    values = _PAIRS.index_select(0, blocks.reshape(-1).int()).view(torch.bfloat16).view(*scales.shape, 32)
    values.mul_((scales.to(torch.int16) << 7).view(torch.bfloat16)[..., None])
    return values.flatten(-2)


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies in a file."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, rows: slice) -> Tensor:
        first, last, _ = rows.indices(self.shape[0]) if self.shape else (0, 1, 1)
        shape = (last - first, *self.shape[1:]) if self.shape else ()
        row_bytes = self.dtype.itemsize * torch.Size(self.shape[1:]).numel()
        data = bytearray((last - first) * row_bytes)
        with self.file.open("rb") as file:
            file.seek(self.start + first * row_bytes)
            if file.readinto(data) != len(data):
                raise ExportError(f"{self.file}: cut short")
        return torch.frombuffer(data, dtype=self.dtype).view(shape) if data else torch.empty(shape, dtype=self.dtype)


def _header(file: Path) -> dict[str, _Stored]:
    """Names and places of a safetensors file's tensors."""
    with safe_open(str(file), framework="np"):  # checks sizes and offsets, and names what is wrong
        pass
    with file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(size))
    found = {}
    for name, said in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])[0]):
        if name == "__metadata__":
            continue
        if said["dtype"] not in DTYPES:
            raise ExportError(f"{file}: tensor {name!r} is of type {said['dtype']}; known are {', '.join(DTYPES)}")
        found[name] = _Stored(file, 8 + size + said["data_offsets"][0], tuple(said["shape"]), DTYPES[said["dtype"]])
    return found


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
    """The base weights of a model in memory, adapters left out; names are those of its parameters and buffers.

    Weights in four or eight bits appear unpacked, in the model's dtype: as they are used in training.
    """

    in_checkpoint_names = False

    def __init__(self, model: nn.Module) -> None:
        root: Any = model
        base: Any = root.get_base_model() if hasattr(root, "peft_config") else root
        tied = set(getattr(base, "_tied_weights_keys", None) or ())
        shared: set[tuple[int, tuple[int, ...]]] = set()
        self._entries: dict[str, Entry] = {}
        self._readers: dict[str, Callable[[slice], Tensor]] = {}
        for name, shape, dtype, pointer, read in _tensors(base):
            key = (pointer, shape)
            if name in tied and key in shared:
                continue
            shared.add(key)
            self._entries[name] = Entry(name, shape, dtype)
            self._readers[name] = read

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def read(self, entry: Entry, rows: slice) -> Tensor:
        return self._readers[entry.name](rows).to("cpu")

    def read_packed(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("a model in memory shows its packed weights unpacked")


Found = tuple[str, tuple[int, ...], torch.dtype, int, Callable[[slice], Tensor]]


def _tensors(base: Any) -> Iterator[Found]:
    """Name, shape, dtype, address and reader of every weight of the base model, in the order of its modules."""
    dtype = base.dtype
    for prefix, module in base.named_modules(remove_duplicate=False):
        prefix = prefix and prefix + "."
        if is_adapter_tensor(f".{prefix}"):
            continue
        packed: dict[str, tuple[tuple[int, ...], Any]] = {}
        if isinstance(module, FourBitExperts):
            packed = {n: (tuple(getattr(module, n).shape), partial(module.dequantize, n, dtype)) for n in PRODUCTS}
            own = {n: p for n, p in module._parameters.items() if p is not None and n.endswith("_bias")}
        elif hasattr(module, "dequantize") and isinstance(getattr(module, "weight", None), Tensor):
            packed = {"weight": (_unpacked_shape(module), partial(module.dequantize, dtype))}
            own = {"bias": module.bias} if getattr(module, "bias", None) is not None else {}
        else:
            persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
            own = {n: t for n, t in {**module._parameters, **persistent}.items() if t is not None}
        for name, (shape, make) in packed.items():
            pointer = module.weight.data_ptr() if name == "weight" else id(module)
            yield bare_name(prefix + name), shape, dtype, pointer, partial(_unpacked_rows, make)
        for name, tensor in own.items():
            yield bare_name(prefix + name), tuple(tensor.shape), tensor.dtype, tensor.data_ptr(), partial(_rows, tensor)


def _unpacked_shape(module: Any) -> tuple[int, ...]:
    if isinstance(module, FourBitLinear):
        return (module.out_features, module.in_features)
    return tuple(module.weight.shape)  # eight bits: one code each


def _unpacked_rows(make: Callable[[], Tensor], rows: slice) -> Tensor:
    return make()[rows]


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor.detach()[rows] if tensor.dim() else tensor.detach()
