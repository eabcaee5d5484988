"""Checkpoints with 4-bit weights: what they hold, checked before anything is loaded, and the names bitsandbytes gives it.

bitsandbytes keeps a weight `X.weight` as uint8 codes of that name and, beside it, `X.weight.absmax`, `.quant_map`, for double
quantization `.nested_absmax` and `.nested_quant_map`, and what are no tensors as JSON in `.quant_state.bitsandbytes__nf4`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.dequant import NESTED_BLOCK, NF4_VALUES
from .formats import NF4, FormatError, Packed, Shape

STATE = "quant_state.bitsandbytes__nf4"
SUFFIXES = ("nested_absmax", "nested_quant_map", "quant_map", "absmax", STATE, "quant_state.bitsandbytes__fp4")
ITEMSIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file: where it is and what it claims to be."""

    file: Path
    dtype: str
    shape: Shape
    start: int
    stop: int

    def read(self) -> bytes:
        with self.file.open("rb") as f:
            f.seek(self.start)
            return f.read(self.stop - self.start)


def read_header(path: str | Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name. Raises FormatError naming the file, and the tensor where there is one."""
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as f:
        lead = f.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise FormatError(
                f"{path}: no safetensors file, or cut off in its header ({size:,} bytes); download it again"
            )
        try:
            header = json.loads(f.read(length))
            found = {
                name: Stored(
                    path, entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"])
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path}: its safetensors header can't be read ({error}); download it again") from None
    for name, tensor in found.items():
        if tensor.stop > size:
            raise FormatError(
                f"{path}: cut off inside {name!r}: the header places it up to byte {tensor.stop:,}, the file has {size:,}; "
                "download it again"
            )
        claimed = math.prod(tensor.shape) * ITEMSIZE.get(tensor.dtype, 0)
        if tensor.dtype in ITEMSIZE and claimed != tensor.stop - tensor.start:
            raise FormatError(
                f"{path}: {name!r} of {tensor.dtype} {list(tensor.shape)} takes {claimed:,} bytes, but the header gives it "
                f"{tensor.stop - tensor.start:,}"
            )
    return found


def read_headers(paths: Iterable[str | Path]) -> dict[str, Stored]:
    """All tensors of a checkpoint's safetensors files."""
    found: dict[str, Stored] = {}
    for path in paths:
        if str(path).endswith(".safetensors"):
            found |= read_header(path)
    return found


def stored_name(name: str, stored: Mapping[str, Stored], prefix: str) -> str:
    """A parameter's name in the checkpoint, which may have the base model's prefix or not; itself if it is not there."""
    for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if candidate in stored:
            return candidate
    return name


def check_tensor(name: str, expected: Tensor, stored: Mapping[str, Stored]) -> None:
    """Raise FormatError, naming the tensor, unless the checkpoint holds it with this shape and, if uint8, this dtype."""
    if name not in stored:
        raise FormatError(
            f"{name} is missing from the checkpoint; the model needs it with shape {list(expected.shape)}"
        )
    found = stored[name]
    codes = expected.dtype == torch.uint8
    if found.shape != tuple(expected.shape) or codes != (found.dtype == "U8"):
        raise FormatError(
            f"{name}: {found.dtype} {list(found.shape)} in the checkpoint; the model has {str(expected.dtype)[6:]} "
            f"{list(expected.shape)} there"
        )


def check_nf4(name: str, shape: Shape, stored: Mapping[str, Stored]) -> None:
    """Raise FormatError, naming the tensor, unless a checkpoint holds a bitsandbytes NF4 weight `name` of this shape."""
    if f"{name}.quant_state.bitsandbytes__fp4" in stored:
        raise FormatError(f"{name}: stored as bitsandbytes fp4, which is not supported; nf4 is")
    if name not in stored:
        raise FormatError(f"{name} is missing from the checkpoint")
    weight = stored[name]
    if f"{name}.{STATE}" not in stored:
        raise FormatError(
            f"{name}: {weight.dtype} {list(weight.shape)} without {name}.{STATE}; the checkpoint's quantization config says "
            "that it is in 4 bits, but its scales are missing"
        )
    tensors = {suffix: stored[f"{name}.{suffix}"] for suffix in SUFFIXES if f"{name}.{suffix}" in stored}
    format, _ = parse_state(name, shape, tensors[STATE].read(), nested="nested_absmax" in tensors)
    layout = format.layout(shape)
    names = {"absmax": "absmax", "nested_absmax": "nested_absmax", "nested_map": "nested_quant_map"}
    wanted = {"weight": layout["codes"], **{names[p]: layout[p] for p in names if p in layout}}
    for suffix, (expected, dtype) in wanted.items():
        full = name if suffix == "weight" else f"{name}.{suffix}"
        if full not in stored:
            raise FormatError(f"{full} is missing from the checkpoint; {name} is stored with {', '.join(wanted)}")
        kind = "U8" if dtype == torch.uint8 else "F32"
        found = stored[full]
        if math.prod(found.shape) != math.prod(expected) or found.dtype != kind:
            raise FormatError(
                f"{full}: {found.dtype} {list(found.shape)} in the checkpoint; a weight of shape {list(shape)} in nf4 has "
                f"{kind} {list(expected)} there"
            )


def parse_state(name: str, shape: Shape, state: bytes, *, nested: bool) -> tuple[NF4, float]:
    """Format and nested offset from the JSON part of a weight."""
    try:
        values: dict[str, Any] = json.loads(state.decode("utf-8"))
        kind, block, stored = values["quant_type"], int(values["blocksize"]), tuple(values["shape"])
        offset = float(values["nested_offset"]) if nested else 0.0
        outer = int(values["nested_blocksize"]) if nested else NESTED_BLOCK
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{name}.{STATE}: can't be read ({type(error).__name__}: {error})") from None
    if kind != "nf4" or outer != NESTED_BLOCK:
        raise FormatError(
            f"{name}.{STATE}: quant_type={kind!r}, nested_blocksize={outer}; supported: 'nf4', {NESTED_BLOCK}"
        )
    if stored != shape:
        raise FormatError(f"{name}.{STATE}: shape={list(stored)}; the model has {list(shape)}")
    try:
        return NF4(block=block, double=nested), offset
    except ValueError as error:
        raise FormatError(f"{name}.{STATE}: blocksize={block}: {error}") from None


def from_bitsandbytes(name: str, shape: Shape, tensors: Mapping[str, Tensor]) -> Packed:
    """A weight from its tensors by bitsandbytes' suffixes ("" for the codes)."""
    if STATE not in tensors:
        raise FormatError(f"{name}: {name}.{STATE} is missing from the checkpoint")
    nested = "nested_absmax" in tensors
    format, offset = parse_state(name, shape, bytes(tensors[STATE].cpu().numpy()), nested=nested)
    absmax = tensors["absmax"]
    parts = {"codes": tensors[""].reshape(-1, 1), "absmax": absmax}
    if nested:
        parts["nested_absmax"] = tensors["nested_absmax"]
        parts["nested_map"] = tensors["nested_quant_map"]
        parts["nested_offset"] = torch.tensor(offset, dtype=torch.float32, device=absmax.device)
    return Packed(format, shape, parts).check(name)


def to_bitsandbytes(packed: Packed, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors by bitsandbytes' suffixes; `dtype` is what it dequantizes to."""
    assert isinstance(packed.format, NF4)
    tensors = packed.tensors
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": packed.format.block,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(packed.shape),
    }
    found = {"": tensors["codes"], "absmax": tensors["absmax"], "quant_map": torch.tensor(NF4_VALUES)}
    if packed.format.double:
        found["nested_absmax"] = tensors["nested_absmax"]
        found["nested_quant_map"] = tensors["nested_map"].clone()
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        state["nested_offset"] = tensors["nested_offset"].item()
    found[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return found
