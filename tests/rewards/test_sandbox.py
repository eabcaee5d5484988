"""The sandbox does what honest code needs, and says truly what happened."""

# ruff: noqa: E501 - a candidate, one line
from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from longreach.rewards import InfrastructureError, IsolationError, Limits, Sandbox, Tier
from longreach.rewards.sandbox import process as process_module
from longreach.rewards.sandbox.child import codec, seccomp, syscalls, wire

ADD = "def add(a, b):\n    return a + b\n"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


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
    outcome = box.run_program(source, limits=Limits(wall_s=0.7, output_bytes=5000, denials=20))
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


# -- tiers ------------------------------------------------------------------------------------------------------------


def test_too_little_isolation_is_refused() -> None:
    with pytest.raises(IsolationError, match="min_tier"):
        Sandbox("rlimit")
    with pytest.raises(IsolationError, match="virtual machines"):
        Sandbox("vm")
    with pytest.warns(RuntimeWarning, match="'rlimit'"), Sandbox("rlimit", min_tier="rlimit", workers=1) as weak:
        assert weak.call(ADD, "add", [(1, 2)]).tier is Tier.rlimit


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(IsolationError, match="this machine offers 'rlimit'"):
        Sandbox()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tier": "strong"}, "tier is 'strong'"),
        ({"min_tier": "x"}, "min_tier is 'x'"),
        ({"workers": 0}, "workers is 0"),
        ({"packages": ("no_such_package",)}, "no_such_package"),
        ({"packages": ("os.path",)}, "os.path"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sandbox(**arguments)
    with pytest.raises(ValueError, match=r"Limits\.wall_s is 0"):
        Limits(wall_s=0)


def test_system_call_tables_agree_with_the_headers() -> None:
    import re

    headers = {
        "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
        "aarch64": "/usr/include/asm-generic/unistd.h",
    }
    checked = 0
    for machine, path in headers.items():
        if not Path(path).exists():
            continue
        pattern = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", re.M)
        known = {name: int(number) for name, number in pattern.findall(Path(path).read_text())}
        for name, number in syscalls.NUMBERS[machine].items():
            if name != "newfstatat" or machine == "x86_64":  # the generic header calls it fstatat
                assert known[name] == number, (machine, name)
                checked += 1
    if not checked:
        pytest.skip("the kernel's headers are not installed")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_a_valid_program(machine: str) -> None:
    """Interpreted here, for both architectures: what is allowed is allowed, everything else is refused."""
    code = seccomp.allowlist(77, default=seccomp.ERRNO | 1, arch=machine, native_code=False)
    numbers = syscalls.NUMBERS[machine]

    def verdict(name: str, *arguments: int, arch: int | None = None) -> int:
        data = {0: numbers[name], 4: arch if arch is not None else syscalls.AUDIT_ARCH[machine]}
        for index in range(6):
            value = arguments[index] if index < len(arguments) else 0
            data[16 + 8 * index], data[20 + 8 * index] = value & 0xFFFFFFFF, value >> 32
        return _interpret(code, data)

    for name in seccomp.ALLOWED:
        if name in numbers and name not in ("mmap", "mprotect"):
            assert verdict(name) == seccomp.ALLOW, name
    special = {"open", "openat", "fcntl", "ioctl", "prlimit64", "kill", "tgkill", "mmap", "mprotect"}
    for name in numbers:
        if name not in seccomp.ALLOWED and name not in special:
            assert verdict(name) & 0xFFFF0000 == seccomp.ERRNO, name
    assert verdict("read", arch=0x40000003) == seccomp.KILL_PROCESS
    assert verdict("openat", 0, 0, os.O_CLOEXEC) == seccomp.ALLOW
    assert (
        verdict("openat", 0, 0, os.O_WRONLY) != seccomp.ALLOW and verdict("openat", 0, 0, os.O_CREAT) != seccomp.ALLOW
    )
    assert verdict("fcntl", 3, 8) != seccomp.ALLOW and verdict("fcntl", 3, 4, os.O_NONBLOCK) == seccomp.ALLOW
    assert verdict("fcntl", 3, 4, os.O_ASYNC) != seccomp.ALLOW and verdict("fcntl", 3, 1030) == seccomp.ALLOW
    assert verdict("kill", 77, 9) == seccomp.ALLOW and verdict("kill", 78, 9) != seccomp.ALLOW
    assert verdict("kill", 2**32 - 1, 9) != seccomp.ALLOW and verdict("tgkill", 1, 77) != seccomp.ALLOW
    assert verdict("prlimit64", 0) == seccomp.ALLOW and verdict("prlimit64", 5) != seccomp.ALLOW
    assert verdict("mmap", 0, 1, 3) == seccomp.ALLOW and verdict("mmap", 0, 1, 5) != seccomp.ALLOW
    assert verdict("ioctl", 0, 0x5401) == seccomp.ERRNO | 25


def _interpret(code: seccomp.Code, data: dict[int, int]) -> int:
    register, at = 0, 0
    while True:
        op, jump_true, jump_false, k = code[at]
        at += 1
        if op == seccomp.LD:
            register = data[k]
        elif op == seccomp.RET:
            return k
        else:
            taken = {seccomp.JEQ: register == k, seccomp.JGE: register >= k, seccomp.JSET: register & k != 0}[op]
            at += jump_true if taken else jump_false


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_many_threads_share_a_sandbox(box: Sandbox) -> None:
    results: list[tuple] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(box.call(ADD, "add", [(n, k) for k in range(3)]).values))
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [(n, n + 1, n + 2) for n in range(12)]


def test_event_loops(box: Sandbox) -> None:
    async def main() -> list:
        calls = [box.call_async(ADD, "add", [(n, 1)]) for n in range(8)]
        programs = [box.run_program_async(f"print({n})") for n in range(4)]
        return await asyncio.gather(*calls, *programs)

    outcomes = asyncio.run(main())
    assert [outcome.values[0] for outcome in outcomes[:8]] == list(range(1, 9))
    assert [int(outcome.stdout) for outcome in outcomes[8:]] == [0, 1, 2, 3]


def test_map_takes_items_only_as_fast_as_they_are_worked_off(box: Sandbox) -> None:
    taken = []

    def items():
        for n in range(30):
            taken.append(n)
            yield n

    results = box.map(lambda n: box.call(ADD, "add", [(n, 1)]).values[0], items())
    assert next(results) == 1
    assert len(taken) <= 2 * box.workers + 1
    assert list(results) == list(range(2, 31))


def test_a_dead_zygote_is_replaced(box: Sandbox) -> None:
    with Sandbox(workers=1) as mine:
        before = mine.call(ADD, "add", [(1, 2)])
        (zygote,) = mine._all
        os.kill(zygote.pid, signal.SIGKILL)
        after = mine.call(ADD, "add", [(1, 2)])
        assert before.values == after.values == (3,)
        assert mine.telemetry["zygotes_replaced"] == 1


def test_failing_zygotes_are_an_infrastructure_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(workers=1) as mine:
        monkeypatch.setattr(
            process_module.Zygote, "spawn", lambda *_: (_ for _ in ()).throw(process_module.ZygoteDied("gone"))
        )
        with pytest.raises(InfrastructureError, match="failed 3 times"):
            mine.call(ADD, "add", [(1, 2)])


def test_a_broken_interpreter_is_reported() -> None:
    with pytest.raises(IsolationError, match=r"ended|gone"):
        Sandbox("lsm", python="/bin/true")


def test_a_wedged_neighbour_does_not_matter(box: Sandbox) -> None:
    wedged = threading.Thread(
        target=lambda: box.call("def f():\n    while True: pass", "f", [()], limits=Limits(wall_s=1.5))
    )
    wedged.start()
    begin = time.monotonic()
    for _ in range(5):
        assert box.call(ADD, "add", [(1, 2)]).ok
    assert time.monotonic() - begin < 1.4
    wedged.join(30)


def test_pickling_and_closing(box: Sandbox) -> None:
    with Sandbox(workers=1, limits=Limits(cpu_s=3)) as mine:
        text = pickle.dumps(mine)
    with pickle.loads(text) as copy:
        assert copy.limits == Limits(cpu_s=3) and copy.call(ADD, "add", [(1, 2)]).ok
    copy.close()
    with pytest.raises(RuntimeError, match="closed"):
        copy.call(ADD, "add", [(1, 2)])


def test_a_fork_of_the_trainer_has_zygotes_of_its_own(box: Sandbox) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if box.call(ADD, "add", [(20, 22)]).values == (42,) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert box.call(ADD, "add", [(1, 2)]).ok


def test_closing_leaves_no_process() -> None:
    mine = Sandbox(workers=1)
    (zygote,) = mine._all
    mine.call(ADD, "add", [(1, 2)])
    mine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(zygote.pid, 0)


def _leak(count: int) -> None:
    reads = Path("/proc/self/statm")
    with Sandbox(workers=2) as mine:
        source = "def f(x):\n    return [x] * 10\n"
        run = lambda n: mine.call(source, "f", [(n,)]).values[0][0]  # noqa: E731
        assert list(mine.map(run, range(200))) == list(range(200))
        gc.collect()
        files, pages = _open_files(), int(reads.read_text().split()[1])
        zygote_pages = [int(Path(f"/proc/{zygote.pid}/statm").read_text().split()[1]) for zygote in mine._all]
        children = _descendants(os.getpid())
        assert list(mine.map(run, range(count))) == list(range(count))
        gc.collect()
        assert _open_files() == files
        assert _descendants(os.getpid()) == children
        assert int(reads.read_text().split()[1]) - pages < 2000, "more than 8 MB grew in the trainer"
        after = [int(Path(f"/proc/{zygote.pid}/statm").read_text().split()[1]) for zygote in mine._all]
        assert max(after) - max(zygote_pages) < 1000, "more than 4 MB grew in a zygote"
        assert "zygotes_replaced" not in mine.telemetry


def _descendants(pid: int) -> int:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found, todo = 0, [pid]
    while todo:
        children = [child for child, parent in parents.items() if parent == todo[-1]]
        todo.pop()
        found += len(children)
        todo += children
    return found


def test_nothing_leaks_over_a_thousand_completions() -> None:
    _leak(1000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_leaks_over_ten_thousand_completions() -> None:
    _leak(10_000)
