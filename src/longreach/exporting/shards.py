"""Safetensors shards written as a stream: no tensor waits in memory for its shard to be complete.

The format (eight bytes of header length, a JSON header that may end in spaces, then the data) lets the header be written last:
its place is kept free at the start of each file. `safetensors` itself serialises whole shards from memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

MAX_SHARD_BYTES = 4 * 1024**3
_HEADER_BYTES = 64 * 1024
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64"}


class ShardWriter:
    """Writes tensors one after the other into ``model.safetensors`` or numbered shards with an index.

    Use as a context manager; the files have their final names once the block ends without an error.
    """

    def __init__(self, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.total_bytes = 0
        self._shards: list[dict[str, dict[str, object]]] = []
        self._file: IO[bytes] | None = None
        self._header_bytes = self._data_bytes = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._close_shard()
        if kind is None:
            self._name_shards()

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[Tensor]) -> None:
        """Append one tensor, given as pieces along its first dimension."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        entry_bytes = len(name) + 120
        full = self._data_bytes and self._data_bytes + size > self.max_shard_bytes
        if self._file is None or full or self._header_bytes + entry_bytes > _HEADER_BYTES:
            self._open_shard()
        assert self._file is not None
        written = 0
        for piece in pieces:
            data = piece.detach().to(device="cpu", dtype=dtype).contiguous()
            # A zero-dimensional tensor has no last dimension to view as bytes.
            written += self._file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        if written != size:
            raise AssertionError(f"{name}: wrote {written} bytes for shape {shape} of {dtype}")
        self._shards[-1][name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [self._data_bytes, self._data_bytes + size],
        }
        self._data_bytes += size
        self._header_bytes += entry_bytes
        self.total_bytes += size

    def _open_shard(self) -> None:
        self._close_shard()
        self._shards.append({})
        self._file = open(self._part(len(self._shards)), "wb")  # noqa: SIM115 (closed by `_close_shard`)
        self._file.seek(8 + _HEADER_BYTES)
        self._header_bytes = self._data_bytes = 0

    def _close_shard(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._shards[-1]}).encode()
        self._file.seek(0)
        self._file.write(_HEADER_BYTES.to_bytes(8, "little") + header.ljust(_HEADER_BYTES))
        self._file.close()
        self._file = None

    def _part(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.part"

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            self._part(1).rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards, 1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / name)
            weight_map |= dict.fromkeys(shard, name)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
