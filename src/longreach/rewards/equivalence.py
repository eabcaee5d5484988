"""Equality of symbolic answers, decided by math-verify in a process of its own with limits.

math-verify (Apache-2.0) reads LaTeX with a grammar and compares with sympy. Both can be made to run for ever or to
exhaust memory by a few characters of input, and math-verify's own time limit works only on the main thread; here the
limits are the operating system's.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from longreach.rewards.result import InfrastructureError

_WORKER = Path(__file__).with_name("math_worker.py")
_START_SECONDS = 60.0  # importing sympy on a loaded machine
_CACHE = 4096


@dataclass(frozen=True)
class Verdict:
    """``verdict`` is ``equal``, ``different``, ``limit`` (of time or memory) or ``unreadable`` (the reference)."""

    verdict: str
    detail: str = ""


class Comparator:
    """A persistent comparison process; safe to call from several threads, and after a fork of the trainer.

    Args:
        seconds: wall-clock and CPU limit of one comparison.
        memory: address-space limit of one comparison, in bytes.
    """

    def __init__(self, *, seconds: float = 2.0, memory: int = 2 << 30) -> None:
        if not 0 < seconds <= 600:
            raise ValueError(f"seconds: got {seconds}; it must be in (0, 600]")
        if memory < 256 << 20:
            raise ValueError(f"memory: got {memory} bytes; sympy needs at least {256 << 20}")
        self.seconds, self.memory = seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Verdict] = OrderedDict()

    def compare(self, gold: str, answer: str) -> Verdict:
        """Whether ``answer`` equals ``gold``, both LaTeX.

        Raises:
            InfrastructureError: if the comparison process cannot be started or twice fails to reply.
        """
        key = (gold, answer)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            for attempt in (0, 1):
                try:
                    verdict = self._ask(gold, answer)
                    break
                except (OSError, EOFError, TimeoutError, ValueError) as error:
                    self._stop()
                    if attempt:
                        raise InfrastructureError(f"the maths comparison process failed twice: {error}") from error
            self._cache[key] = verdict
            if len(self._cache) > _CACHE:
                self._cache.popitem(last=False)
            return verdict

    def close(self) -> None:
        """End the process; a later comparison starts a new one."""
        with self._lock:
            self._stop()

    def _ask(self, gold: str, answer: str) -> Verdict:
        if self._owner != os.getpid():  # a forked trainer must not share its parent's pipes
            self._process = None
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        process.stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
        process.stdin.flush()
        reply = json.loads(_read_line(process, self.seconds + 30))
        return Verdict(reply["verdict"], reply["detail"])

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER), str(self.seconds), str(self.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1"},
        )
        self._owner = os.getpid()
        atexit.register(self.close)
        _read_line(self._process, _START_SECONDS)

    def _stop(self) -> None:
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unsent bytes of a process that is gone
                    pipe.close()


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    assert process.stdout is not None
    descriptor, data, deadline = process.stdout.fileno(), b"", time.monotonic() + seconds
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no reply within {seconds:.0f} s")
        piece = os.read(descriptor, 65536)
        if not piece:
            raise EOFError(f"it ended with status {process.poll()}")
        data += piece
    return data
