"""Running a whole program: standard streams over pipes, everything bounded, the exit code from the process's parent."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time

from longreach.rewards.sandbox.child.wire import LENGTH, NONCE_BYTES
from longreach.rewards.sandbox.outcome import Limits, ProgramOutcome, Usage
from longreach.rewards.sandbox.process import ANSWER_S, Exit, Zygote, ZygoteDied
from longreach.rewards.sandbox.session import explain

STDERR_BYTES = 1 << 16
_CHUNK = 1 << 16


class _Streams:
    """Our ends of a program's pipes, served until it ends or a limit is reached."""

    def __init__(self, stdin: bytes, limits: Limits) -> None:
        self.limits = limits
        self.todo = memoryview(stdin)
        self.stdout, self.stderr = bytearray(), bytearray()
        in_child, self.stdin_fd = os.pipe()
        self.stdout_fd, out_child = os.pipe()
        self.stderr_fd, err_child = os.pipe()
        self.child_fds = [in_child, out_child, err_child]
        self.selector = selectors.DefaultSelector()
        self.open = {self.stdin_fd, self.stdout_fd, self.stderr_fd}
        for fd, events in (
            (self.stdin_fd, selectors.EVENT_WRITE),
            (self.stdout_fd, selectors.EVENT_READ),
            (self.stderr_fd, selectors.EVENT_READ),
        ):
            os.set_blocking(fd, False)
            self.selector.register(fd, events)

    def close_child_ends(self) -> None:
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds = []

    def _close(self, fd: int) -> None:
        if fd in self.open:
            self.open.discard(fd)
            self.selector.unregister(fd)
            os.close(fd)

    def close(self) -> None:
        self.close_child_ends()
        for fd in list(self.open):
            self._close(fd)
        self.selector.close()

    def serve(self, fd: int) -> bool:
        """Move some bytes. Returns False when standard output has grown past its limit."""
        if fd == self.stdin_fd:
            try:
                self.todo = self.todo[os.write(fd, self.todo[:_CHUNK]) :] if self.todo else self.todo
            except BlockingIOError:
                return True
            except OSError:  # it does not read any more
                self.todo = self.todo[:0]
            if not self.todo:
                self._close(fd)
            return True
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        if not chunk:
            self._close(fd)
        elif fd == self.stdout_fd:
            self.stdout += chunk
            return len(self.stdout) <= self.limits.output_bytes
        elif len(self.stderr) < STDERR_BYTES:
            self.stderr += chunk[: STDERR_BYTES - len(self.stderr)]
        return True

    def drain(self) -> bool:
        """What is still in the pipes of a program that has ended."""
        for fd in (self.stdout_fd, self.stderr_fd):
            while fd in self.open:
                before = len(self.stdout) + len(self.stderr)
                if not self.serve(fd):
                    return False
                if fd in self.open and len(self.stdout) + len(self.stderr) == before:
                    break  # nothing more, and no end of file
        return True


def run_program(zygote: Zygote, source: str, stdin: bytes, limits: Limits) -> ProgramOutcome:
    """Run ``source`` as ``__main__`` and feed it ``stdin``. Raises ZygoteDied."""
    started = time.monotonic()
    deadline = started + limits.wall_s
    streams = _Streams(stdin, limits)
    try:
        ident = _start(zygote, streams, source, limits)
        failure, exit_ = _attend(zygote, ident, streams, deadline)
        if exit_ is None:
            zygote.kill(ident, failure)
            exit_ = zygote.wait(ident, time.monotonic() + ANSWER_S)
        if exit_ is None:
            raise ZygoteDied("a killed process does not end")
    finally:
        streams.close()
    error = {
        "wall": f"not done after {limits.wall_s} s",
        "output": f"more than {limits.output_bytes} bytes on standard output",
    }.get(failure, "")
    if not failure and exit_.code < 0:
        failure, error = explain(exit_, limits)
    elif not failure and exit_.code == 1 and b"MemoryError" in streams.stderr[-200:]:
        failure, error = "memory", "MemoryError"
    usage = Usage(exit_.cpu_s, time.monotonic() - started, exit_.max_rss_bytes, exit_.denials)
    stdout = bytes(streams.stdout[: limits.output_bytes])
    return ProgramOutcome(stdout, bytes(streams.stderr), exit_.code, failure, error, zygote.tier, usage)


def _start(zygote: Zygote, streams: _Streams, source: str, limits: Limits) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ident = zygote.spawn("program", limits.for_process(), [theirs.fileno(), *streams.child_fds])
        streams.close_child_ends()
        payload = json.dumps({"source": source}).encode()
        ours.settimeout(ANSWER_S)
        try:
            theirs.close()
            ours.sendall(bytes(NONCE_BYTES) + LENGTH.pack(len(payload)) + payload)
        except OSError:
            pass  # it could not be set up: the zygote reports why
    return ident


def _attend(zygote: Zygote, ident: int, streams: _Streams, deadline: float) -> tuple[str, Exit | None]:
    """Serve the pipes until the program ends: (failure, its end if it has ended)."""
    streams.selector.register(zygote.fileno(), selectors.EVENT_READ)
    while (left := deadline - time.monotonic()) > 0:
        for key, _ in streams.selector.select(left):
            if key.fd == zygote.fileno():
                exit_ = zygote.wait(ident, time.monotonic())
                if exit_ is not None:
                    return ("" if streams.drain() else "output"), exit_
            elif key.fd in streams.open and not streams.serve(key.fd):
                return "output", None
    return "wall", None
