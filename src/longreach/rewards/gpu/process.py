"""The trainer's side of one kernel process: requests with a deadline, and an end for the whole process group."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from longreach.rewards.sandbox.child import codec
from longreach.rewards.sandbox.child.wire import HEADER, LENGTH, NONCE_BYTES, OK
from longreach.rewards.sandbox.session import clip

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
# What a CUDA process needs of the environment; tokens, paths of data and the like stay behind.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "LANG")


class KernelFailed(Exception):
    """The process raised, died, was too slow or broke the protocol; ``failure`` says which."""

    def __init__(self, failure: str, error: str) -> None:
        super().__init__(error)
        self.failure, self.error = failure, error


class KernelProcess:
    """A worker with a directory, a session and a cleaned environment of its own. Always `close` it."""

    def __init__(self, device: str, *, start_s: float = 120.0, output_bytes: int = 1 << 28) -> None:
        self.directory = tempfile.mkdtemp(prefix="kernel-")
        self.output_bytes = output_bytes
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment |= {"HOME": self.directory, "TRITON_CACHE_DIR": os.path.join(self.directory, "triton")}
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", _WORKER, str(theirs.fileno()), device],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self.directory,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        with contextlib.suppress(ProcessLookupError, AttributeError):  # macOS has no prlimit
            resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        self._patience = start_s  # the first answer includes the start

    def ask(self, request: dict[str, Any], seconds: float) -> tuple[Any, int]:
        """(answer, nanoseconds from the request's first byte to the answer's last). Raises KernelFailed."""
        payload, nonce = codec.encode(request), secrets.token_bytes(NONCE_BYTES)
        deadline = time.monotonic() + seconds + self._patience
        self._patience = 0.0
        begin = time.perf_counter_ns()
        try:
            self._sock.settimeout(max(0.01, deadline - time.monotonic()))
            self._sock.sendall(nonce + LENGTH.pack(len(payload)) + payload)
            echoed, status, length = HEADER.unpack(self._read(HEADER.size, deadline))
            if echoed != nonce or length > self.output_bytes:
                raise KernelFailed("protocol", "an answer that belongs to no request, or is too long")
            body = self._read(length, deadline)
        except TimeoutError:
            raise KernelFailed("wall", f"no answer within {seconds:.0f} s") from None
        except OSError as error:
            raise KernelFailed("died", f"the process ended: {error}") from None
        took = time.perf_counter_ns() - begin
        try:
            answer = codec.decode(body)
        except codec.CodecError as error:
            raise KernelFailed("protocol", f"the reply is not a value: {error}") from None
        if status != OK:
            said = answer.get("error") if isinstance(answer, dict) else None
            raise KernelFailed("exception", clip(str(said)))
        return answer, took

    def _read(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            self._sock.settimeout(max(0.01, deadline - time.monotonic()))
            chunk = self._sock.recv_into(view[got:])
            if chunk == 0:
                raise KernelFailed("died", f"the process ended (code {self._process.poll()})")
            got += chunk
        return data

    def close(self) -> None:
        """Kill everything that the process has started."""
        self._sock.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        shutil.rmtree(self.directory, ignore_errors=True)
