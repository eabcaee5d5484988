"""What the zygote prepares once, and what each child gives up before a candidate's first line runs."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

from . import codec, runner

_PRELOADED_TEXT = """
abc array ast base64 bisect bz2 calendar cmath collections contextlib copy csv dataclasses datetime decimal difflib
enum fractions functools graphlib hashlib heapq io itertools json keyword lzma math numbers operator pprint queue
random re secrets statistics string struct textwrap time traceback types typing unicodedata unittest uuid zlib
"""
PRELOADED = tuple(_PRELOADED_TEXT.split())
CHANNEL, READY = 3, 4  # the child's descriptors: its own channel, and the way to hand its listener over


def _virtual_memory() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30  # no /proc: allow for a large interpreter


def _nobody_can_read(directory: str) -> bool:
    """Whether an unprivileged user reaches the library; tried in a process of its own, because giving up root is
    for good.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os.listdir(directory)
            os.close(os.open(os.__file__, os.O_RDONLY))
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


class Jail:
    """The isolation of a tier. ``control`` and the ready sockets are here because a child must let go of them."""

    def __init__(self, control: socket.socket, tier: str) -> None:
        self.control = control
        self.tier = tier
        self.ready, self.ready_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.memory_in_use = 0
        self.ruleset = -1
        self.process_table = -1  # namespace fd of the zygote's own process table
        self.kept_capabilities = 0
        self.counts_denials = False
        self.filters: dict[tuple[bool, bool], Any] = {}  # (counts denials, native code) -> a filter
        self.last_filter: Any = None

    # -- once, before any candidate exists ----------------------------------------------------------------------

    def preload(self, roots: list[str], packages: list[str]) -> None:
        for name in PRELOADED:
            with contextlib.suppress(ImportError):  # some builds of Python leave modules out
                importlib.import_module(name)
        sys.path[:0] = roots
        for name in packages:
            importlib.import_module(name)
        stdlib = os.path.dirname(os.__file__)
        sys.path[:] = [path for path in sys.path if path in (stdlib, os.path.join(stdlib, "lib-dynload"))]
        importlib.invalidate_caches()
        with contextlib.suppress(ImportError):
            importlib.import_module("no_such_module")  # fills the finders' caches while directories can be listed
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # short of memory, the system ends us before the trainer
        self.memory_in_use = _virtual_memory()

    def isolate(self, readable: list[str]) -> dict[str, Any]:
        """Prepare what children inherit. Returns facts for the trainer. Raises OSError when the tier is out of reach."""
        facts: dict[str, Any] = {"tier": self.tier, "landlock_abi": 0, "as_root": os.geteuid() == 0}
        if self.tier not in ("none", "rlimit"):
            from . import kernel, seccomp

            seccomp.machine()
            facts["landlock_abi"] = kernel.landlock_abi()
            stdlib = os.path.dirname(os.__file__)
            site = [os.path.join(stdlib, name) for name in ("site-packages", "dist-packages")]
            library = [os.path.join(stdlib, name) for name in os.listdir(stdlib)]
            if self.tier == "ns":
                self._enter_namespaces([stdlib], [path for path in site if os.path.isdir(path)], readable)
            elif os.geteuid() == 0 and not _nobody_can_read(stdlib):
                self.kept_capabilities = 1 << kernel.CAP_DAC_READ_SEARCH  # Landlock allows the library alone
            shown = [path for path in library if path not in site and os.path.exists(path)]
            self.ruleset = kernel.landlock_ruleset([*shown, *readable], [stdlib])
            kernel.drop_bounding_set()
            self._warm_up(seccomp)
        gc.collect()
        gc.freeze()
        return facts

    def _warm_up(self, seccomp: Any) -> None:
        """Build once what every child needs, and run once what every child runs: fork shares the result."""
        for counts in (True, False):
            for native in (True, False):
                default = seccomp.USER_NOTIF if counts else seccomp.ERRNO | 1
                self.filters[counts, native] = seccomp.Filter.for_candidates(default=default, native_code=native)
        self.last_filter = seccomp.Filter(seccomp.only_refuse(("sendmsg", "seccomp")))
        codec.decode(codec.encode(("f", "call", [1, "x", [1.5] * 20], {})))
        runner.load("def f():\n    return 1\n", "solution")

    def _enter_namespaces(self, visible: list[str], hidden: list[str], packages: list[str]) -> None:
        """Continue in a child that is the first process of its own process table; this process only waits for it."""
        from . import kernel

        kernel.enter_namespaces()
        pid = os.fork()
        if pid:
            self.control.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _, status = os.waitpid(pid, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        self.process_table = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        kernel.enter_tree(visible, hidden, packages)

    # -- in every child -----------------------------------------------------------------------------------------

    def lock_down(self, ident: int, limits: dict[str, int], fds: list[int]) -> None:
        """Give up everything a computation does not need; the order matters, each step needs what the next one
        takes away.
        """
        locked = self.tier in ("lsm", "ns")
        os.setsid()
        if limits["cpu"] >= 0 and sys.platform == "linux":
            os.sched_setaffinity(0, {limits["cpu"]})
        if locked:
            from . import kernel

            if self.process_table >= 0:
                kernel.unshare("ipc")
            kernel.become_nobody(self.kept_capabilities)
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which resets it
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
            kernel.landlock_enforce(self.ruleset)
        self._keep_only(fds)
        if self.tier != "none":
            self._set_limits(limits)
        report = struct.pack("<q", ident)
        if not locked:
            os.write(READY, report)
        else:
            ready = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM, 0, READY
            )  # made now: it asks what the filter refuses
            first = self.filters[self.counts_denials, bool(limits["native_code"])]
            listener = first.install(listener=self.counts_denials)
            socket.send_fds(ready, [report], [listener] if self.counts_denials else [])
            ready.detach()
            if self.counts_denials:
                os.close(listener)
            self.last_filter.install()
        os.close(READY)

    def _keep_only(self, fds: list[int]) -> None:
        """The channel, the ready socket and, for programs, the standard streams; every other descriptor is closed."""
        self.control.detach()
        self.ready.detach()
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (fds[0], self.ready_child.detach(), *fds[1:])]
        for copy, place in zip(copies, (CHANNEL, READY, 0, 1, 2)):
            os.dup2(copy, place, inheritable=False)
        os.closerange(READY + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def _set_limits(self, limits: dict[str, int]) -> None:
        values = {
            "RLIMIT_CPU": (limits["cpu_s"],) * 2,  # SIGKILL at once: the first process of its table ignores SIGXCPU
            "RLIMIT_AS": (self.memory_in_use + limits["memory_bytes"],) * 2,
            "RLIMIT_STACK": (limits["stack_bytes"],) * 2,
            "RLIMIT_FSIZE": (0, 0),
            "RLIMIT_NOFILE": (limits["open_files"],) * 2,
            "RLIMIT_CORE": (0, 0),
            "RLIMIT_NPROC": (0, 0),
            "RLIMIT_MSGQUEUE": (0, 0),
            "RLIMIT_MEMLOCK": (0, 0),
        }
        for name, (soft, hard) in values.items():
            if (which := getattr(resource, name, None)) is not None:  # macOS lacks some
                ceiling = resource.getrlimit(which)[1]
                if ceiling != resource.RLIM_INFINITY:
                    soft, hard = min(soft, ceiling), min(hard, ceiling)
                resource.setrlimit(which, (soft, hard))
