"""The clean parent of every candidate: exec'd with an empty environment, it forks one locked-down process per
completion.

It knows no secret: no prompt, no test, no expected value, not even the candidates' sources, which go straight to
their own process. It reaps its children, counts their refused system calls, kills on request, and ends when its
control socket closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from dataclasses import dataclass, field
from typing import Any

from . import codec, runner, tester
from .wire import LENGTH, receive_message, send_message

_PRELOADED_TEXT = """
abc array ast base64 bisect bz2 calendar cmath collections contextlib copy csv dataclasses datetime decimal difflib
enum fractions functools graphlib hashlib heapq io itertools json keyword lzma math numbers operator pprint queue
random re secrets statistics string struct textwrap time traceback types typing unicodedata unittest uuid zlib
"""
PRELOADED = tuple(_PRELOADED_TEXT.split())
SCM_CREDENTIALS = 2  # linux/socket.h; Python does not name it
_PROBE_LIMITS = {
    "cpu_s": 5,
    "memory_bytes": 256 << 20,
    "stack_bytes": 8 << 20,
    "open_files": 32,
    "denials": 0,
    "native_code": 1,
    "cpu": -1,
}
CHANNEL, READY = 3, 4  # the child's descriptors: its own channel, and the way to hand its listener over


@dataclass
class _Child:
    ident: int
    denial_limit: int
    listener: int = -1
    denials: dict[int, int] = field(default_factory=dict)
    killed_for: str = ""


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


class Zygote:
    """Serves spawn requests on ``control``; ``tier`` is the isolation every child gets."""

    def __init__(self, control: socket.socket, tier: str) -> None:
        self.control = control
        self.tier = tier
        self.children: dict[int, _Child] = {}
        self.memory_in_use = 0
        self.ruleset = -1
        self.process_table = -1  # namespace fd of the zygote's own process table
        self.kept_capabilities = 0
        self.counts_denials = False
        self.filters: dict[tuple[bool, bool], Any] = {}  # (counts denials, native code) -> a filter
        self.last_filter: Any = None
        self.poll = select.poll()
        self.ready, self.ready_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    # -- preparation, before any candidate exists ---------------------------------------------------------------

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

    def isolate(self, readable: list[str]) -> dict[str, Any]:
        """Prepare what children inherit. Returns facts for the trainer. Raises OSError when the tier is out of
        reach.
        """
        facts: dict[str, Any] = {
            "tier": self.tier,
            "landlock_abi": 0,
            "counts_denials": False,
            "as_root": os.geteuid() == 0,
        }
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
            self.counts_denials = facts["counts_denials"] = self._try_child()
        self.memory_in_use = self.memory_in_use or _virtual_memory()
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

        self.memory_in_use = _virtual_memory()
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

    def _try_child(self) -> bool:
        """Lock one child down for nothing, to learn now what would fail later. Returns whether denials can be
        counted.
        """
        for listener in (True, False):
            self.counts_denials = listener
            pid = self._fork(_Child(-1, 0), {"kind": "nothing", "limits": _PROBE_LIMITS}, [os.dup(0)])
            self.ready.settimeout(10)
            message = b""
            with contextlib.suppress(TimeoutError):
                message, fds, _, _ = socket.recv_fds(self.ready, 4096, 1)
                for fd in fds:
                    os.close(fd)  # from here on what would be counted fails with ENOSYS, so the child cannot hang
            if not message:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            self.ready.settimeout(None)
            if os.waitstatus_to_exitcode(status) == 0:
                return listener
        raise OSError(f"locking a process down failed: {message[8:].decode('utf-8', 'replace') or f'status {status}'}")

    # -- one child ---------------------------------------------------------------------------------------------

    def _fork(self, child: _Child, request: dict[str, Any], fds: list[int]) -> int:
        """Fork a candidate's process; closes ``fds`` here. Returns its pid as this process sees it."""
        if self.process_table >= 0:
            from . import kernel

            kernel.unshare("pid")
        pid = os.fork()
        if pid == 0:
            self._be_child(child.ident, request, fds)
        if self.process_table >= 0:
            kernel.setns(self.process_table, "pid")
        for fd in fds:
            os.close(fd)
        return pid

    def _be_child(self, ident: int, request: dict[str, Any], fds: list[int]) -> None:
        """Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                self._lock_down(ident, request["limits"], fds)
            except BaseException as error:
                os.write(READY, struct.pack("<q", ident) + f"{type(error).__name__}: {error}".encode())
                os._exit(1)
            kind = request["kind"]
            self.__dict__.clear()
            if kind == "call":
                runner.serve_calls(CHANNEL)
            elif kind == "tests":
                tester.serve_tests(CHANNEL)
            elif kind == "program":
                os._exit(runner.run_program(CHANNEL))
            code = 0
        except BaseException:
            pass  # the other end sees the channel close
        finally:
            os._exit(code)

    def _lock_down(self, ident: int, limits: dict[str, int], fds: list[int]) -> None:
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
            "RLIMIT_CPU": (limits["cpu_s"], limits["cpu_s"] + 1),  # SIGXCPU, then SIGKILL
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

    # -- the loop ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the control socket closes; then every child is killed."""
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for fd in (self.control.fileno(), self.ready.fileno(), woken):
            self.poll.register(fd, select.POLLIN)
        try:
            while True:
                for fd, event in self.poll.poll():
                    if fd == self.control.fileno():
                        if not self._control():
                            return
                    elif fd == self.ready.fileno():
                        self._child_ready()
                    elif fd == woken:
                        with contextlib.suppress(BlockingIOError):
                            os.read(woken, 4096)
                        self._reap()
                    else:
                        self._denied(fd, event)
        finally:
            for pid in self.children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _control(self) -> bool:
        message, fds = receive_message(self.control, max_fds=4)
        if message is None:
            return False
        if message["op"] == "spawn":
            child = _Child(message["id"], message["limits"]["denials"])
            try:
                pid = self._fork(child, message, fds)
            except OSError as error:  # no process to be had
                for fd in fds:
                    os.close(fd)
                send_message(self.control, {"event": "refused", "id": child.ident, "why": f"fork: {error}"})
                return True
            self.children[pid] = child
            self._announce(child, pid)
        else:
            for pid, child in self.children.items():
                if child.ident == message["id"]:
                    self._kill(pid, child, message["why"])
        return True

    def _announce(self, child: _Child, pid: int) -> None:
        """Tell the trainer the process's number; across process tables only the kernel can translate it."""
        message = {"event": "started", "id": child.ident, "pid": pid}
        if self.process_table < 0:
            send_message(self.control, message)
            return
        data = json.dumps(message).encode()
        credentials = struct.pack("3i", pid, os.getuid(), os.getgid())
        level = (socket.SOL_SOCKET, SCM_CREDENTIALS, credentials)
        self.control.sendmsg([LENGTH.pack(len(data)) + data], [level])

    @staticmethod
    def _kill(pid: int, child: _Child, why: str) -> None:
        child.killed_for = child.killed_for or why
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still this child's

    def _child_ready(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.ready, 4096, 1)
        (ident,) = struct.unpack_from("<q", data)
        child = next((child for child in self.children.values() if child.ident == ident), None)
        if child is None or len(data) > 8:
            for fd in fds:
                os.close(fd)
            if child is not None:
                child.killed_for = "setup: " + data[8:].decode("utf-8", "replace")
            return
        if fds:
            child.listener = fds[0]
            self.poll.register(fds[0], select.POLLIN)

    def _denied(self, listener: int, event: int) -> None:
        from . import seccomp

        pid, child = next((item for item in self.children.items() if item[1].listener == listener), (0, None))
        if child is None or not event & select.POLLIN:  # its process is gone
            with contextlib.suppress(KeyError):  # reaped since this event was polled
                self.poll.unregister(listener)
            return
        try:
            number = seccomp.refuse_next(listener)
        except OSError:
            return  # it died while it waited
        child.denials[number] = child.denials.get(number, 0) + 1
        if sum(child.denials.values()) > child.denial_limit:
            self._kill(pid, child, "denials")

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is None:
                continue
            if child.listener >= 0:
                with contextlib.suppress(KeyError):
                    self.poll.unregister(child.listener)
                os.close(child.listener)
            send_message(self.control, self._exit_report(child, status, usage))

    def _exit_report(self, child: _Child, status: int, usage: resource.struct_rusage) -> dict[str, Any]:
        denials: dict[str, int] = {}
        if child.denials:
            from . import seccomp, syscalls

            denials = {syscalls.name_of(n, seccomp.machine()): count for n, count in child.denials.items()}
        unit = 1 if sys.platform == "darwin" else 1024
        return {
            "event": "exited",
            "id": child.ident,
            "code": os.waitstatus_to_exitcode(status),
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "max_rss_bytes": usage.ru_maxrss * unit,
            "denials": denials,
            "killed_for": child.killed_for,
        }


def main() -> None:
    """Started as ``python -s -S -P -c ... FD`` with the configuration as the first message on that socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    config, _ = receive_message(control)
    if config is None:
        return
    if sys.platform == "linux":
        from . import kernel

        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is the trainer's to handle
    zygote = Zygote(control, config["tier"])
    try:
        zygote.preload(config["roots"], config["packages"])
        facts = zygote.isolate(config["readable"])
    except Exception as error:
        send_message(control, {"event": "failed", "why": f"{type(error).__name__}: {error}"})
        return
    send_message(zygote.control, {"event": "hello", "python": sys.version.split()[0], **facts})
    sys.argv = ["solution.py"]
    try:
        zygote.serve()
    except OSError as error:  # the trainer is gone, or this system is in trouble: either way there is nothing to serve
        send_message(zygote.control, {"event": "failed", "id": 0, "why": str(error)})
