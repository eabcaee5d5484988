"""One completion's process, seen from the grader: release an input, start the clock, wait for the whole answer,
stop it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.rewards.sandbox.child import codec
from longreach.rewards.sandbox.child.wire import FAILED, HEADER, LENGTH, NONCE_BYTES, OK
from longreach.rewards.sandbox.outcome import Limits, Usage
from longreach.rewards.sandbox.process import ANSWER_S, Exit, Zygote, ZygoteDied


class CandidateFailed(Exception):
    """This completion's process cannot go on. ``failure`` is one of ``outcome.FAILURES``."""

    def __init__(self, failure: str, error: str) -> None:
        super().__init__(error)
        self.failure, self.error = failure, error


@dataclass(frozen=True)
class Timing:
    """Nanoseconds from the release of an input to the last byte of the answer: on the wall, and of the process's
    CPU.
    """

    wall_ns: int
    cpu_ns: int


def clip(text: str, length: int = 200) -> str:
    """One printable line of text that a candidate had a hand in."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * length])
    return line if len(line) <= length else line[: length - 1] + "…"


class Session:
    """A process that has loaded the candidate's source and answers calls, one at a time.

    Raises CandidateFailed from every method when the process died, was killed or broke the protocol. Always `close` it.
    """

    def __init__(self, zygote: Zygote, limits: Limits, kind: str = "call") -> None:
        self.zygote, self.limits = zygote, limits
        self.started = time.monotonic()
        self.deadline = self.started + limits.wall_s
        self.usage = Usage()
        self._exit: Exit | None = None
        self._closed = False
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                self._ident = zygote.spawn(kind, limits.for_process(), [theirs.fileno()])
            except BaseException:
                self._sock.close()
                raise
        self._clock = 0

    # -- messages ----------------------------------------------------------------------------------------------

    def load(self, source: str, function: str, *, objects: bool = False) -> None:
        """Run the source. Raises CandidateFailed (``load``) when it raises or lacks the function."""
        head = {"source": source, "function": function, "objects": objects}
        status, payload, _ = self.exchange(json.dumps(head).encode())
        if status != OK:
            raise CandidateFailed(_memory(payload) or "load", describe(payload))

    def call(self, function: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, Timing]:
        """One call; the value as the grader may hold it, and the time it took."""
        request = codec.encode((function, "call", list(args), dict(kwargs or {})))
        status, payload, timing = self.exchange(request)
        if status != OK:
            raise CandidateFailed(_memory(payload) or "exception", describe(payload))
        try:
            return codec.decode(payload), timing
        except codec.CodecError as error:
            raise CandidateFailed("protocol", f"the reply is not a value: {error}") from None

    def exchange(self, payload: bytes, limit: int | None = None) -> tuple[int, bytes, Timing]:
        """Send a request, receive its answer: (status, payload, timing)."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        frame = nonce + LENGTH.pack(len(payload)) + payload
        cpu = self.cpu_ns()
        begin = time.perf_counter_ns()
        self.send(frame)
        status, answer = self.receive(nonce, limit=limit)
        end = time.perf_counter_ns()
        return status, answer, Timing(end - begin, self.cpu_ns() - cpu)

    def receive(self, *nonces: bytes, limit: int | None = None) -> tuple[int, bytes]:
        echoed, status, length = HEADER.unpack(self._read(HEADER.size))
        if echoed not in nonces:
            raise self.stop("protocol", "an answer that belongs to no request")
        if length > (limit or self.limits.output_bytes):
            raise self.stop(
                "output", f"an answer of {length} bytes; at most {limit or self.limits.output_bytes} are read"
            )
        return status, bytes(self._read(length))

    def send(self, frame: bytes) -> None:
        try:
            self._sock.settimeout(self._remaining())
            self._sock.sendall(frame)
        except TimeoutError:
            raise self.stop("wall", f"not done after {self.limits.wall_s} s") from None
        except OSError:
            raise self._died() from None

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            try:
                self._sock.settimeout(self._remaining())
                chunk = self._sock.recv_into(view[got:])
            except TimeoutError:
                raise self.stop("wall", f"not done after {self.limits.wall_s} s") from None
            except OSError:
                chunk = 0
            if chunk == 0:
                raise self._died()
            got += chunk
        return data

    def _remaining(self) -> float:
        return max(1e-4, self.deadline - time.monotonic())

    # -- clocks ------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.zygote.pid_of(self._ident)

    def measure_cpu(self) -> None:
        """From here on, timings carry the process's CPU time, read from outside; it cannot start another process."""
        self._clock = (~self.pid << 3) | 2
        time.clock_gettime_ns(self._clock)

    def cpu_ns(self) -> int:
        if not self._clock:
            return 0
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            raise self._died() from None

    # -- the end -----------------------------------------------------------------------------------------------

    def stop(self, failure: str, error: str) -> CandidateFailed:
        """Kill the process; returns the exception to raise."""
        self.close(failure)
        return CandidateFailed(failure, error)

    def _died(self) -> CandidateFailed:
        if self._exit is None:
            self.close("", patience=0.5)  # it closed its channel: let it end by itself, to learn how
        failure, error = explain(self._exit, self.limits)
        return CandidateFailed(failure, error)

    def close(self, why: str = "", patience: float = 0.0) -> None:
        """End the process and take its report; safe to call twice. Raises ZygoteDied."""
        if self._closed:
            return
        self._closed = True
        self._sock.close()
        wall = time.monotonic() - self.started
        if patience:
            self._exit = self.zygote.wait(self._ident, time.monotonic() + patience)
        if self._exit is None:
            self.zygote.kill(self._ident, why)
            self._exit = self.zygote.wait(self._ident, time.monotonic() + ANSWER_S)
        if self._exit is None:
            raise ZygoteDied("a killed process does not end")
        self.usage = Usage(self._exit.cpu_s, wall, self._exit.max_rss_bytes, self._exit.denials)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.close()
        else:
            with contextlib.suppress(ZygoteDied):  # the first error is the one to report
                self.close()


def _memory(payload: bytes) -> str:
    return "memory" if describe(payload).startswith("MemoryError") else ""


def describe(payload: bytes) -> str:
    """``ValueError: text`` from an error reply, clipped; the reply is the candidate's to forge."""
    try:
        said = json.loads(payload)
        return clip(f"{said['type']}: {said['message']}")
    except (ValueError, KeyError, TypeError, RecursionError):
        return "an error that could not be read"


def explain(exit_: Exit | None, limits: Limits) -> tuple[str, str]:
    """(failure, error) for a process that ended by itself or by a limit."""
    if exit_ is None:
        return "died", "the process ended"
    if exit_.killed_for == "denials":
        return "denials", f"killed after more than {limits.denials} refused system calls"
    # the kernel's limit counts ticks, the report runs a little behind it
    on_limit = exit_.cpu_s >= 0.7 * limits.for_process()["cpu_s"] and not exit_.killed_for
    if exit_.code == -signal.SIGXCPU or (exit_.code == -signal.SIGKILL and on_limit):
        return "cpu", f"more than {limits.for_process()['cpu_s']} s of CPU time"
    if exit_.killed_for:
        return exit_.killed_for, "killed"
    if exit_.code < 0:
        try:
            name = signal.Signals(-exit_.code).name
        except ValueError:
            name = str(-exit_.code)
        return "died", f"ended by {name}"
    return "died", f"the process exited with code {exit_.code} without an answer"


__all__ = ["FAILED", "CandidateFailed", "Session", "Timing", "clip", "describe", "explain"]
