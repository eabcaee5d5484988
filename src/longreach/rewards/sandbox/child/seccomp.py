"""The system call allowlist: a classic BPF program, installed through ctypes.

What a pure computation needs is allowed. Calls that runtimes make on their own account are refused quietly.
Everything else is refused with EPERM and counted by the zygote, through seccomp's user notification where the
kernel has it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from .syscalls import AUDIT_ARCH, NUMBERS

_ALLOWED_TEXT = """
read write readv writev pread64 pwrite64 lseek close fstat newfstatat statx stat lstat access faccessat faccessat2
readlink readlinkat getdents64 getcwd dup dup2 dup3 pipe pipe2 poll ppoll select pselect6
mmap mprotect munmap mremap madvise brk
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall
alarm setitimer getitimer pause nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid
getrlimit getrusage sysinfo uname umask sched_yield sched_getaffinity getcpu
futex set_robust_list set_tid_address rseq getrandom exit exit_group
"""
ALLOWED = tuple(_ALLOWED_TEXT.split())

# Refused without being counted: the runtime asks on its own account, and does without.
QUIET = {
    "clone3": errno.ENOSYS,  # libc then tries clone, which is counted
    "openat2": errno.ENOSYS,
    "membarrier": errno.ENOSYS,
    "prctl": errno.EPERM,
    "arch_prctl": errno.EPERM,
    "sched_setaffinity": errno.EPERM,
    "statfs": errno.EPERM,
    "fstatfs": errno.EPERM,
}

# Nothing is writable anyway; refused here so that an attempt is counted. O_PATH would get around Landlock.
O_REFUSED = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0x200000
# F_SETOWN, F_SETSIG and O_ASYNC would let a process have signals sent to others; F_SETLEASE and F_NOTIFY likewise.
FCNTL_COMMANDS = (0, 1, 2, 3, 5, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_DUPFD_CLOEXEC
F_SETFL = 4
TCGETS, FIONBIO, FIONCLEX, FIOCLEX = 0x5401, 0x5421, 0x5450, 0x5451

ALLOW, ERRNO, KILL_PROCESS, USER_NOTIF = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
LD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06
OFFSET_NUMBER, OFFSET_ARCH = 0, 4

SECCOMP_SET_MODE_FILTER, FLAG_NEW_LISTENER = 1, 1 << 3
# ioctl numbers of the listener: struct seccomp_notif is 80 bytes, seccomp_notif_resp 24
NOTIF_RECV, NOTIF_SEND = 0xC0502100, 0xC0182101


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction))]


Code = list[tuple[int, int, int, int]]


def machine() -> str:
    """The architecture's name in our tables. Raises OSError on one that has none."""
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if name not in NUMBERS:
        raise OSError(errno.ENOTSUP, f"no system call table for {name!r}; there are tables for {', '.join(NUMBERS)}")
    return name


def _argument(index: int, high: bool = False) -> tuple[int, int, int, int]:
    return (LD, 0, 0, 16 + 8 * index + (4 if high else 0))  # both architectures are little-endian


def _guarded(number: int, body: Code) -> Code:
    """``body`` for that call alone; it must end in returns. Other calls jump over it."""
    if len(body) > 255:
        raise ValueError("a guarded block of the filter is longer than a BPF jump")
    return [(JEQ, 0, len(body), number), *body]


def _allow_values(index: int, values: tuple[int, ...], otherwise: int) -> Code:
    """Allow when the low word of an argument is one of ``values`` (for 32-bit arguments)."""
    body: Code = [_argument(index)]
    for value in values:
        body += [(JEQ, 0, 1, value & 0xFFFFFFFF), (RET, 0, 0, ALLOW)]
    return [*body, (RET, 0, 0, otherwise)]


def allowlist(own_pid: int, *, default: int, native_code: bool = True, arch: str | None = None) -> Code:
    """The filter for a process whose pid, as it sees it, is ``own_pid``; ``default`` is the action for everything
    else.
    """
    arch = arch or machine()
    numbers = NUMBERS[arch]
    code: Code = [(LD, 0, 0, OFFSET_ARCH), (JEQ, 1, 0, AUDIT_ARCH[arch]), (RET, 0, 0, KILL_PROCESS)]
    code.append((LD, 0, 0, OFFSET_NUMBER))
    if arch == "x86_64":
        code += [(JGE, 0, 1, 0x40000000), (RET, 0, 0, KILL_PROCESS)]  # the x32 calls, under the same AUDIT_ARCH
    if not native_code:
        for name in ("mmap", "mprotect"):
            executable: Code = [_argument(2), (JSET, 0, 1, 4), (RET, 0, 0, default), (RET, 0, 0, ALLOW)]  # PROT_EXEC
            code += _guarded(numbers[name], executable)
    for name in ALLOWED:
        if name in numbers:
            code += [(JEQ, 0, 1, numbers[name]), (RET, 0, 0, ALLOW)]
    for name, number in QUIET.items():
        if name in numbers:
            code += [(JEQ, 0, 1, numbers[name]), (RET, 0, 0, ERRNO | number)]
    for name, index in (("open", 1), ("openat", 2)):
        if name in numbers:
            body: Code = [_argument(index), (JSET, 1, 0, O_REFUSED), (RET, 0, 0, ALLOW), (RET, 0, 0, default)]
            code += _guarded(numbers[name], body)
    set_flags: Code = [_argument(2), (JSET, 0, 1, 0x2000), (RET, 0, 0, default), (RET, 0, 0, ALLOW)]  # O_ASYNC
    fcntl: Code = [
        _argument(1),
        (JEQ, 0, len(set_flags), F_SETFL),
        *set_flags,
        *_allow_values(1, FCNTL_COMMANDS, default),
    ]
    code += _guarded(numbers["fcntl"], fcntl)
    terminal: Code = [_argument(1), (JEQ, 0, 1, TCGETS), (RET, 0, 0, ERRNO | errno.ENOTTY)]
    code += _guarded(numbers["ioctl"], [*terminal, *_allow_values(1, (FIONBIO, FIONCLEX, FIOCLEX), default)])
    code += _guarded(numbers["prlimit64"], _allow_values(0, (0,), default))  # its own limits, never another's
    for name in ("kill", "tgkill"):
        code += _guarded(numbers[name], _allow_values(0, (own_pid,), default))
    code.append((RET, 0, 0, default))
    return code


def only_refuse(names: tuple[str, ...]) -> Code:
    """A second filter that refuses some calls and leaves the rest to the first."""
    code: Code = [(LD, 0, 0, OFFSET_NUMBER)]
    for name in names:
        code += [(JEQ, 0, 1, NUMBERS[machine()][name]), (RET, 0, 0, ERRNO | errno.EPERM)]
    return [*code, (RET, 0, 0, ALLOW)]


def permitting(code: Code, name: str) -> Code:
    """``code`` with one more call allowed (until a second filter takes it away)."""
    at = code.index((LD, 0, 0, OFFSET_NUMBER)) + 1
    return [*code[:at], (JEQ, 0, 1, NUMBERS[machine()][name]), (RET, 0, 0, ALLOW), *code[at:]]


class Filter:
    """A filter ready to install; made once, so that a new process only has to fill in its own number.

    Raises OSError from `install`; no_new_privs must be set.
    """

    _libc = ctypes.CDLL(None, use_errno=True)
    _OWN_PID = 0x7FFFFFF1  # stands for the process's number until it is known

    def __init__(self, code: Code) -> None:
        self._array = (_Instruction * len(code))(*[_Instruction(*instruction) for instruction in code])
        self._program = _Program(len(code), self._array)
        self._places = [at for at, (_, _, _, k) in enumerate(code) if k == self._OWN_PID]
        self._number = NUMBERS[machine()]["seccomp"]

    @classmethod
    def for_candidates(cls, *, default: int, native_code: bool) -> Filter:
        """The allowlist, with ``sendmsg`` and ``seccomp`` open until `only_refuse` closes them."""
        code = allowlist(cls._OWN_PID, default=default, native_code=native_code)
        return cls(permitting(permitting(code, "sendmsg"), "seccomp"))

    def install(self, *, listener: bool = False) -> int:
        """Put this process under the filter. Returns the listener's descriptor, or 0."""
        pid = os.getpid()
        for place in self._places:
            self._array[place].k = pid
        flags = FLAG_NEW_LISTENER if listener else 0
        result = self._libc.syscall(self._number, SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(self._program))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"seccomp: {os.strerror(code)}")
        return int(result)


def refuse_next(listener: int) -> int:
    """Answer one pending notification with EPERM; returns the call's number.

    Raises OSError (ENOENT) when the caller died while it waited.
    """
    import fcntl

    notification = bytearray(80)
    fcntl.ioctl(listener, NOTIF_RECV, notification)
    ident, _pid, _flags, number = struct.unpack_from("=QIIi", notification)
    fcntl.ioctl(listener, NOTIF_SEND, bytearray(struct.pack("=QqiI", ident, 0, -errno.EPERM, 0)))
    return int(number)
