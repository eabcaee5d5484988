"""Values cross unchanged; hostile bytes do no harm."""

from __future__ import annotations

import json
import math
import struct
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest

from longreach.rewards.sandbox.child.codec import CodecError, decode, encode

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**62, -(2**70), 10**5000, 0.1, -0.0, 1e308, "", "é\ud800\n", b"\x00\xff", 3 - 2j,
    [], [[]], [[], []], (1, (2, "x")), {"a": [1]}, {1: "one", (2, 3): None}, {"$": "int"}, {1, 2}, set(),
    [1.5] * 40, [[float(i + j) for i in range(9)] for j in range(7)], [1.0] * 15 + [1], [[1.0] * 20, [2.0] * 19],
    [True] * 20, [0] * 30,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_values_cross_unchanged(value: Any) -> None:
    got = decode(encode(value))
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [math.nan] * 20])
def test_floats_that_are_not_finite(value: Any) -> None:
    assert repr(decode(encode(value))) == repr(value)


def test_types_inside_lists_are_kept() -> None:
    got = decode(encode([1, 1.0, True, (1,), [1]]))
    assert [type(item) for item in got] == [int, float, bool, tuple, list]


def test_subclasses_lose_their_class() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    Point = namedtuple("Point", "x y")
    values = [Sly(3), OrderedDict(a=1), defaultdict(int, b=2), Counter("aab"), Point(1, 2)]
    got = [decode(encode(value)) for value in values]
    assert [type(item) for item in got] == [int, dict, dict, dict, tuple]
    assert got[0] != 4 and got[3] == {"a": 2, "b": 1}


@pytest.mark.parametrize("value", [object(), lambda: 0, range(3), (i for i in ()), [{"x": object()}], type])
def test_other_objects_cannot_cross(value: Any) -> None:
    with pytest.raises(CodecError, match="cannot cross"):
        encode(value)


def test_arrays_cross_where_numpy_is_loaded() -> None:
    numpy = pytest.importorskip("numpy")
    for array in (
        numpy.arange(6, dtype="int32").reshape(2, 3),
        numpy.float32(2.5),
        numpy.zeros((0, 3)),
        numpy.array(1 + 2j),
    ):
        got = decode(encode(array))
        assert numpy.array_equal(got, array)
    transposed = numpy.arange(6.0).reshape(2, 3).T
    assert numpy.array_equal(decode(encode(transposed)), transposed)
    with pytest.raises(CodecError, match="dtype"):
        encode(numpy.array([object()]))


def _message(text: str, blobs: bytes = b"") -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode() + blobs


HOSTILE = [
    b"",
    b"\x01",
    struct.pack("<I", 1 << 31) + b"{}",
    _message("{"),
    _message("NaN"),
    _message("[" * 100_000),
    _message("9" * 100_000),
    _message('{"$": "int", "v": 3}'),
    _message('{"$": "int", "v": "zz"}'),
    _message('{"$": "float", "v": "1_0"}'),
    _message('{"$": "pickle", "v": "x"}'),
    _message('{"$": ["a"], "v": [1]}'),
    _message('{"$": "obj", "v": 1, "class": "int"}'),
    _message('{"$": "dict", "v": [[[], 1]]}'),
    _message('{"$": "dict", "v": [1, 2]}'),
    _message('{"$": "set", "v": [[1]]}'),
    _message('{"$": "complex", "v": [1, 2, 3]}'),
    _message('{"$": "f8", "at": 0, "shape": [4]}', bytes(31)),
    _message('{"$": "f8", "at": -8, "shape": [1]}', bytes(8)),
    _message('{"$": "f8", "at": 0, "shape": [1000000000000, 0]}'),
    _message('{"$": "f8", "at": 0, "shape": [true]}', bytes(8)),
    _message('{"$": "f8", "at": 0, "shape": [1, 1, 1]}', bytes(8)),
    _message('{"$": "nd", "at": 0, "shape": [1], "dtype": "O"}', bytes(8)),
    _message('{"$": "nd", "at": 0, "shape": [1], "dtype": ["f8"]}', bytes(8)),
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[4:44]))
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)


def test_colliding_keys_cost_no_time() -> None:
    keys = [str(index * (2**61 - 1)) for index in range(20_000)]
    data = _message(json.dumps({"$": "set", "v": "@"}).replace('"@"', "[" + ",".join(keys) + "]"))
    begin = time.monotonic()
    with pytest.raises(CodecError, match="colliding"):
        decode(data)
    assert time.monotonic() - begin < 2
