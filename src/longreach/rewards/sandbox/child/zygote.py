"""The clean parent of every candidate: exec'd with an empty environment, it forks one locked-down process per
completion.

It knows no secret: no prompt, no test, no expected value, not even the candidates' sources, which go straight to
their own process. It reaps its children, counts their refused system calls, kills on request, and ends when its
control socket closes.
"""

from __future__ import annotations

import contextlib
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

from . import runner, tester
from .jail import CHANNEL, READY, Jail
from .wire import LENGTH, receive_message, send_message

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


@dataclass
class _Child:
    ident: int
    denial_limit: int
    listener: int = -1
    denials: dict[int, int] = field(default_factory=dict)
    killed_for: str = ""


class Zygote:
    """Serves spawn requests; every child gets the isolation of ``jail``."""

    def __init__(self, jail: Jail) -> None:
        self.jail = jail
        self.control, self.ready = jail.control, jail.ready
        self.children: dict[int, _Child] = {}
        self.poll = select.poll()

    def try_child(self) -> None:
        """Lock one child down for nothing, to learn now what would fail later, and whether denials can be counted.

        Raises OSError.
        """
        message, status = b"", 0
        for listener in (True, False) if self.jail.filters else (False,):
            self.jail.counts_denials = listener
            pid = self._fork(_Child(-1, 0), {"kind": "nothing", "limits": _PROBE_LIMITS}, [os.dup(0)])
            self.ready.settimeout(10)
            with contextlib.suppress(TimeoutError):
                message, fds, _, _ = socket.recv_fds(self.ready, 4096, 1)
                for fd in fds:
                    os.close(fd)  # from here on what would be counted fails with ENOSYS, so the child cannot hang
            if not message:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            self.ready.settimeout(None)
            if os.waitstatus_to_exitcode(status) == 0:
                return
        raise OSError(f"locking a process down failed: {message[8:].decode('utf-8', 'replace') or f'status {status}'}")

    # -- one child ---------------------------------------------------------------------------------------------

    def _fork(self, child: _Child, request: dict[str, Any], fds: list[int]) -> int:
        """Fork a candidate's process; closes ``fds`` here. Returns its pid as this process sees it."""
        if self.jail.process_table >= 0:
            from . import kernel

            kernel.unshare("pid")
        pid = os.fork()
        if pid == 0:
            self._be_child(child.ident, request, fds)
        if self.jail.process_table >= 0:
            kernel.setns(self.jail.process_table, "pid")
        for fd in fds:
            os.close(fd)
        return pid

    def _be_child(self, ident: int, request: dict[str, Any], fds: list[int]) -> None:
        """Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            kind, report_to = request["kind"], os.dup(self.jail.ready_child.fileno())
            try:
                self.jail.lock_down(ident, request["limits"], fds)
            except BaseException as error:
                # by either way: on one the descriptor is closed already, on the other not yet in its place
                for fd in (report_to, READY):
                    with contextlib.suppress(OSError):
                        os.write(fd, struct.pack("<q", ident) + f"{type(error).__name__}: {error}".encode())
                        break
                os._exit(1)
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
        if self.jail.process_table < 0:
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
    jail = Jail(control, config["tier"])
    try:
        jail.preload(config["roots"], config["packages"])
        facts = jail.isolate(config["readable"])
        zygote = Zygote(jail)
        zygote.try_child()
        facts["counts_denials"] = jail.counts_denials
    except Exception as error:
        send_message(control, {"event": "failed", "why": f"{type(error).__name__}: {error}"})
        return
    send_message(zygote.control, {"event": "hello", "python": sys.version.split()[0], **facts})
    sys.argv = ["solution.py"]
    try:
        zygote.serve()
    except OSError as error:  # the trainer is gone, or this system is in trouble: either way there is nothing to serve
        send_message(zygote.control, {"event": "failed", "id": 0, "why": str(error)})
