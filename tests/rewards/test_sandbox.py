"""The sandbox does what honest code needs, and says truly what happened."""

# ruff: noqa: E501 - a candidate, one line
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from longreach.rewards import Limits, Sandbox, Tier
from longreach.rewards.sandbox.child import codec, wire

ADD = "def add(a, b):\n    return a + b\n"


def test_importing_rewards_brings_no_torch() -> None:
    check = "any(name.split('.')[0] in ('torch', 'transformers', 'trl') for name in sys.modules)"
    code = f"import sys, longreach.rewards; sys.exit({check})"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_calls(box: Sandbox) -> None:
    outcome = box.call(ADD, "add", [(1, 2), ("a", "b"), ([1.5] * 20, [2])])
    assert outcome.ok and outcome.values == (3, "ab", [1.5] * 20 + [2])
    assert outcome.tier is box.tier >= Tier.lsm
    assert outcome.usage.cpu_s > 0 and outcome.usage.max_rss_bytes > 1 << 20


def test_a_class_and_its_methods(box: Sandbox) -> None:
    source = "class Solution:\n    def twice(self, x):\n        return 2 * x\n    @staticmethod\n    def three():\n        return 3\n"
    assert box.call(source, "Solution.twice", [(4,)]).values == (8,)
    assert box.call(source, "Solution.three", [()]).values == (3,)


def test_honest_code_has_the_standard_library(box: Sandbox) -> None:
    source = """
import asyncio, bisect, collections, contextlib, copy, dataclasses, datetime, decimal, enum, fractions, functools
import hashlib, heapq, inspect, io, itertools, json, logging, math, operator, os, pathlib, random, re, signal, statistics, string, struct
import sys, tempfile, textwrap, threading, time, timeit, typing, unicodedata, zoneinfo, xml.dom, html, csv, colorsys, cmd

@dataclasses.dataclass(order=True)
class P:
    x: int

def f(n):
    sys.setrecursionlimit(100_000)
    def down(k): return 0 if k == 0 else 1 + down(k - 1)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print("hello")
    time.sleep(0.001)
    lock = threading.Lock()
    with lock:
        pass
    match n:
        case int():
            kind = "int"
    return [down(20_000), out.getvalue(), kind, max(P(1), P(2)).x, str(decimal.Decimal(1) / 3)[:6],
            functools.reduce(operator.mul, range(1, 30)), random.random() < 1, os.path.join("a", "b"), sorted({3, 1})]
"""
    outcome = box.call(source, "f", [(1,)])
    assert outcome.ok, outcome
    assert outcome.values[0] == [
        20_000,
        "hello\n",
        "int",
        2,
        "0.3333",
        8841761993739701954543616000000,
        True,
        "a/b",
        [1, 3],
    ]


@pytest.mark.parametrize(
    ("source", "failure", "says"),
    [
        ("def f(:", "load", "SyntaxError"),
        ("x = 1", "load", "AttributeError"),
        ("1 / 0", "load", "ZeroDivisionError"),
        ("def f(): raise KeyError('k')", "exception", "KeyError: 'k'"),
        ("def f(): return object()", "exception", "cannot cross"),
        ("def f(a, b): pass", "exception", "TypeError"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\ndef f(): raise E", "exception", "E: "),
        ("def f(): raise Exception('\\x1b[31m' + 'x' * 10**6)", "exception", "xxx"),
    ],
)
def test_failures_are_told_apart(box: Sandbox, source: str, failure: str, says: str) -> None:
    outcome = box.call(source, "f", [()])
    assert outcome.failure == failure and says in outcome.error
    assert len(outcome.error) <= 200 and outcome.error.isprintable()


def test_values_before_a_failure_are_kept(box: Sandbox) -> None:
    outcome = box.call("def f(x): return 1 // x", "f", [(1,), (0,), (1,)])
    assert outcome.values == (1,) and "ZeroDivisionError" in outcome.error


def test_inputs_are_released_one_by_one(box: Sandbox) -> None:
    source = """
import os
def f(x):
    os.set_blocking(3, False)
    try:
        early = len(os.read(3, 99))
    except BlockingIOError:
        early = 0
    os.set_blocking(3, True)
    return early
"""
    assert box.call(source, "f", [(1,), (2,), (3,)]).values == (0, 0, 0)


def test_a_whole_answer_written_before_its_question_is_refused(box: Sandbox) -> None:
    value = codec.encode(42)
    forged = wire.HEADER.pack(bytes(wire.NONCE_BYTES), wire.OK, len(value)) + value
    early = f"import os\nos.write(3, {wire.HEADER.pack(bytes(16), 0, 0) + forged!r})\ndef f(x): return x\n"
    assert box.call(early, "f", [(1,), (2,)]).failure == "protocol"
    between = f"import os\ndef f(x):\n    if x == 1: os.write(3, {forged!r})\n    return x\n"
    outcome = box.call(between, "f", [(1,), (2,)])
    assert outcome.failure == "protocol" and 42 not in outcome.values


def test_programs(box: Sandbox) -> None:
    outcome = box.run_program(
        "import sys\nn = int(input())\nprint(n * 2)\nprint(sys.stdin.read(), end='')", "21\nrest\n"
    )
    assert outcome.ok and outcome.stdout == b"42\nrest\n" and outcome.exit_code == 0
    assert box.run_program("print(open(0).read().upper())", "abc").stdout == b"ABC\n"
    assert box.run_program("import sys\nsys.stdout.buffer.write(bytes([255]))").stdout == b"\xff"
    assert box.run_program("import sys\nsys.exit(3)").exit_code == 3
    failed = box.run_program("print('before')\n1 / 0")
    assert failed.exit_code == 1 and failed.stdout == b"before\n" and b"ZeroDivisionError" in failed.stderr
    assert box.run_program("import atexit\natexit.register(print, 'late')\nprint('x')").stdout == b"x\nlate\n"
    assert box.run_program("if __name__ == '__main__': print(1)").stdout == b"1\n"


def test_large_streams(box: Sandbox) -> None:
    data = os.urandom(300_000)
    echoed = box.run_program("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", data)
    assert echoed.stdout == data
    assert box.run_program("print(1)", data).ok, "input that is not read does no harm"


@pytest.mark.parametrize(
    ("source", "failure"),
    [
        ("while True: print('x' * 1000)", "output"),
        ("while True: pass", "wall"),
        ("import os\nos.close(1); os.close(2)\nwhile True: pass", "wall"),
        ("x = bytearray(1 << 40)", "memory"),
        ("import os\nos.kill(os.getpid(), 11)\nos.abort()", "died"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "denials"),
    ],
)
def test_programs_that_must_be_stopped(box: Sandbox, source: str, failure: str) -> None:
    wall_s = 0.7 if failure == "wall" else 30
    outcome = box.run_program(source, limits=Limits(wall_s=wall_s, output_bytes=5000, denials=20))
    assert outcome.failure == failure and not outcome.ok
    assert len(outcome.stdout) <= 5000


def test_the_cpu_limit_counts_cpu_time(box: Sandbox) -> None:
    ignoring = (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
    )
    for source in ("while True: pass", ignoring + "while True: pass"):
        outcome = box.run_program(source, limits=Limits(cpu_s=1, wall_s=60))
        assert outcome.failure == "cpu" and outcome.usage.cpu_s < 1.5
    outcome = box.call("def f():\n    while True: pass", "f", [()], limits=Limits(cpu_s=1, wall_s=60))
    assert outcome.failure == "cpu" and "1 s of CPU" in outcome.error


def test_standard_error_floods_are_clipped(box: Sandbox) -> None:
    outcome = box.run_program("import sys\nfor _ in range(300): sys.stderr.write('x' * 10000)\nprint('done')")
    assert outcome.ok and len(outcome.stderr) <= 1 << 16


def test_packages_are_visible_only_when_named(box: Sandbox) -> None:
    numpy = pytest.importorskip("numpy")
    source = "import numpy\ndef f(x): return numpy.fft.fft(numpy.asarray(x)).real + numpy.linalg.norm(x)"
    assert "ModuleNotFoundError" in box.call(source, "f", [([1.0, 2.0],)]).error
    with Sandbox(workers=1, packages=("numpy",)) as with_numpy:
        outcome = with_numpy.call(source, "f", [([1.0, 2.0],)])
        assert outcome.ok, outcome
        assert numpy.allclose(outcome.values[0], numpy.fft.fft([1.0, 2.0]).real + 5**0.5)
        assert "ModuleNotFoundError" in with_numpy.call("import torch", "f", [()]).error
        listing = (
            "import os, numpy\ndef f(): return open(os.path.dirname(numpy.__path__[0]) + '/pip/__init__.py').read()"
        )
        assert "Error" in with_numpy.call(listing, "f", [()]).error


def test_native_code_can_be_switched_off(box: Sandbox) -> None:
    source = (
        "import mmap\ndef f(): return len(mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC))"
    )
    assert box.call(source, "f", [()]).values == (4096,)
    refused = box.call(source, "f", [()], limits=Limits(native_code=False))
    assert refused.failure and refused.denials == {"mmap": 1}
