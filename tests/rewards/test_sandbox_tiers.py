"""Which isolation is accepted, and the filter of system calls behind it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from longreach.rewards import IsolationError, Limits, Sandbox, Tier
from longreach.rewards.sandbox.child import seccomp, syscalls

ADD = "def add(a, b):\n    return a + b\n"


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
