"""Values across the process boundary: restricted JSON with raw blobs. Nothing that decoding could execute.

A value is None, bool, int, float, str, bytes, complex, or a list, tuple, set or dict of such; NumPy arrays and
numbers too where NumPy is loaded. Layout: u32 length of the JSON text, the text, the blobs. JSON objects with the
key "$" are tags:

    {"$": "f8", "at": offset, "shape": [n] or [n, m]}   a list (or list of lists) of floats, as float64 in the blobs
    {"$": "nd", "at": offset, "shape": [...], "dtype": "<f4"}   a NumPy array
    {"$": "int", "v": "0x..."}  {"$": "float", "v": "nan"}  {"$": "bytes", "v": hex}  {"$": "complex", "v": [re, im]}
    {"$": "tuple", "v": [...]}  {"$": "set", "v": [...]}  {"$": "dict", "v": [[key, value], ...]}
    {"$": "obj", "v": id, "class": name}   an object that stays in its process (only where the caller allows it)
"""

from __future__ import annotations

import array
import json
import struct
import sys
from collections.abc import Callable
from typing import Any

BLOB_FROM = 16  # shorter lists of floats are written as JSON
_INT_AS_JSON = 1 << 62
_NUMERIC_DTYPES = frozenset(
    order + kind
    for order in "<|"
    for kind in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)


_BASES: tuple[Any, ...] = (int, float, str, bytes, list, tuple, dict, set, frozenset, complex)


class CodecError(ValueError):
    """The value cannot cross, or the bytes are not what an encoder writes."""


class _Encoder:
    def __init__(self, keep: Callable[[Any], int] | None) -> None:
        self.blobs = bytearray()
        self.keep = keep  # stores an object of an unknown class and returns its id

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_INT_AS_JSON < value < _INT_AS_JSON else {"$": "int", "v": hex(value)}
        if kind is float:
            return value if value - value == 0 else {"$": "float", "v": repr(value)}
        if kind is list:
            return self._list(value)
        if kind is tuple:
            return {"$": "tuple", "v": [self.plain(item) for item in value]}
        if kind is dict:
            return self._dict(value)
        if kind is bytes or kind is bytearray:
            return {"$": "bytes", "v": value.hex()}
        if kind is set or kind is frozenset:
            return {"$": "set", "v": [self.plain(item) for item in value]}
        if kind is complex:
            return {"$": "complex", "v": [self.plain(value.real), self.plain(value.imag)]}
        return self._other(value)

    def _dict(self, value: dict[Any, Any]) -> dict[str, Any]:
        if "$" not in value and all(type(key) is str for key in value):
            return {key: self.plain(item) for key, item in value.items()}
        return {"$": "dict", "v": [[self.plain(key), self.plain(item)] for key, item in value.items()]}

    def _list(self, value: list[Any]) -> Any:
        if value and type(value[0]) is list:
            width = len(value[0])
            if width * len(value) >= BLOB_FROM and all(type(row) is list and len(row) == width for row in value):
                flat = [item for row in value for item in row]
                if set(map(type, flat)) == {float}:
                    return self._blob("f8", [len(value), width], array.array("d", flat).tobytes())
        elif len(value) >= BLOB_FROM and set(map(type, value)) == {float}:
            return self._blob("f8", [len(value)], array.array("d", value).tobytes())
        return [self.plain(item) for item in value]

    def _blob(self, tag: str, shape: list[int], raw: bytes, **more: str) -> dict[str, Any]:
        at = len(self.blobs)
        self.blobs += raw
        return {"$": tag, "at": at, "shape": shape, **more}

    def _other(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            array_ = numpy.ascontiguousarray(value).reshape(value.shape)
            dtype = array_.dtype.newbyteorder("<")
            if dtype.str not in _NUMERIC_DTYPES:
                raise CodecError(f"an array of dtype {dtype.str} cannot cross")
            return self._blob("nd", list(value.shape), array_.astype(dtype, copy=False).tobytes(), dtype=dtype.str)
        if numpy is not None and isinstance(value, numpy.generic):
            return self.plain(value.item())
        for base in _BASES:  # subclasses lose their class here
            if isinstance(value, base):
                return self.plain(base(value))
        if self.keep is not None:
            return {"$": "obj", "v": self.keep(value), "class": type(value).__name__}
        raise CodecError(f"a value of type {type(value).__name__} cannot cross the process boundary")


def encode(value: Any, *, keep: Callable[[Any], int] | None = None) -> bytes:
    """The value as bytes. Raises CodecError for types that cannot cross (and RecursionError when it is nested too
    deeply).
    """
    encoder = _Encoder(keep)
    text = json.dumps(encoder.plain(value), separators=(",", ":"), allow_nan=False, check_circular=False).encode()
    return struct.pack("<I", len(text)) + text + bytes(encoder.blobs)


class _Decoder:
    def __init__(self, blobs: memoryview, resolve: Callable[[int, str], Any] | None) -> None:
        self.blobs = blobs
        self.resolve = resolve

    def hook(self, value: dict[str, Any]) -> Any:
        tag = value.get("$")
        if tag is None:
            return value
        try:
            return self._tagged(tag, value)
        except CodecError:
            raise
        except Exception as error:
            raise CodecError(f"malformed {str(tag)[:20]!r}: {type(error).__name__}") from None

    def _tagged(self, tag: str, value: dict[str, Any]) -> Any:
        content = value.get("v")
        if tag == "f8" or tag == "nd":
            return self._array(tag, value)
        if tag == "obj":
            if self.resolve is None or type(content) is not int:
                raise CodecError("an object reference where none is allowed")
            return self.resolve(content, str(value.get("class", "object")))
        if tag in ("int", "float", "bytes"):
            if type(content) is not str:
                raise CodecError(f"malformed {tag}")
            if tag == "float":
                return float({"nan": "nan", "inf": "inf", "-inf": "-inf"}[content])
            return int(content, 16) if tag == "int" else bytes.fromhex(content)
        if type(content) is not list:
            raise CodecError(f"malformed {tag}")
        if tag == "complex":
            return complex(*(float(part) for part in content))
        if tag == "tuple":
            return tuple(content)
        if tag == "set":
            _refuse_collisions(content)
            return set(content)
        if tag == "dict":
            _refuse_collisions([key for key, _ in content])
            return {key: item for key, item in content}
        raise CodecError("unknown tag")

    def _array(self, tag: str, value: dict[str, Any]) -> Any:
        shape, at = value["shape"], value["at"]
        if not all(type(number) is int and number >= 0 for number in (at, *shape)):
            raise CodecError("malformed array")
        count = 1
        for number in shape:
            count *= number
        if tag == "nd":
            import numpy

            dtype = value["dtype"]
            if dtype not in _NUMERIC_DTYPES or len(shape) > 16:
                raise CodecError("malformed array")
            size = count * numpy.dtype(dtype).itemsize
            raw = self._slice(at, size)
            return numpy.frombuffer(raw, dtype=dtype).reshape(shape).copy()
        flat = array.array("d")
        flat.frombytes(self._slice(at, 8 * count))
        if len(shape) == 1:
            return flat.tolist()
        rows, width = shape
        if rows > count:
            raise CodecError("malformed array")  # rows of no width would cost memory without costing bytes
        items = flat.tolist()
        return [items[row * width : (row + 1) * width] for row in range(rows)]

    def _slice(self, at: int, size: int) -> memoryview:
        if at + size > len(self.blobs):
            raise CodecError("an array reaches past the end of the message")
        return self.blobs[at : at + size]


def _refuse_collisions(keys: list[Any]) -> None:
    """Integers chosen to share a hash would make building the table quadratic."""
    if len(keys) > 64 and 2 * len(set(map(hash, keys))) < len(keys):
        raise CodecError("set or dict keys with colliding hashes")


def _no_constant(name: str) -> Any:
    raise CodecError(f"bare {name}")


def decode(data: bytes | bytearray | memoryview, *, resolve: Callable[[int, str], Any] | None = None) -> Any:
    """The value that was encoded. Safe on hostile bytes: raises CodecError, and costs time and memory linear in
    their number.
    """
    if len(data) < 4:
        raise CodecError("message too short")
    (length,) = struct.unpack_from("<I", data)
    if 4 + length > len(data):
        raise CodecError("message shorter than it says")
    view = memoryview(data)
    decoder = _Decoder(view[4 + length :], resolve)
    try:
        text = str(view[4 : 4 + length], "utf-8")
        return json.loads(text, object_hook=decoder.hook, parse_constant=_no_constant)
    except CodecError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise CodecError(f"not a value: {type(error).__name__}") from None
