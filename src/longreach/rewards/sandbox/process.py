"""The trainer's side of one zygote: start it, have it fork, kill and report."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from longreach.rewards.result import InfrastructureError, Tier
from longreach.rewards.sandbox.child.wire import LENGTH, send_message

START_S, ANSWER_S = 60.0, 10.0
_SCM_CREDENTIALS, _SO_PASSCRED = 2, 16
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from child.zygote import main; sys.path.pop(0); main()"
# One thread per numerical library; a fixed hash seed, so that a completion is graded alike by every zygote.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class ZygoteDied(InfrastructureError):
    """The zygote ended or stopped answering; start another."""


class TierUnavailable(InfrastructureError):
    """The zygote could not reach the tier it was started for."""


@dataclass(frozen=True)
class Packages:
    """Installed packages that candidates may import: their names, where they are found, and all that may be read."""

    names: tuple[str, ...]
    roots: tuple[str, ...]
    readable: tuple[str, ...]

    @classmethod
    def locate(cls, names: Sequence[str]) -> Packages:
        """Find top-level packages by name, without importing them. Raises ValueError for one that is not installed."""
        roots: list[str] = []
        readable: list[str] = []
        for name in names:
            spec = find_spec(name) if name.isidentifier() else None
            if spec is None or not (spec.submodule_search_locations or spec.origin):
                raise ValueError(f"packages contains {name!r}; no top-level package of that name is installed")
            place = os.path.realpath(next(iter(spec.submodule_search_locations or [spec.origin or ""])))
            readable.append(place)
            root = os.path.dirname(place)
            libraries = os.path.join(root, f"{name}.libs")  # shared libraries that wheels bring along
            if os.path.isdir(libraries):
                readable.append(libraries)
            if root not in roots:
                roots.append(root)
        return cls(tuple(names), tuple(roots), tuple(readable))


@dataclass
class Exit:
    """How a child ended, as its parent saw it."""

    code: int
    cpu_s: float
    max_rss_bytes: int
    denials: dict[str, int]
    killed_for: str


class Zygote:
    """One zygote process. Not for use by two threads at once; `Sandbox` lends it to one at a time."""

    def __init__(self, tier: Tier, packages: Packages, python: str) -> None:
        self.tier = tier
        self._next = 0
        self._exits: dict[int, Exit] = {}
        self._pids: dict[int, int] = {}
        self._refused: dict[int, str] = {}
        self._control, theirs = socket.socketpair()
        if sys.platform == "linux":
            self._control.setsockopt(socket.SOL_SOCKET, _SO_PASSCRED, 1)
        environment = dict(_ENVIRONMENT)
        if "LD_LIBRARY_PATH" in os.environ:  # some interpreters do not start without it
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        with theirs:
            self._process = subprocess.Popen(
                [
                    python,
                    "-s",
                    "-S",
                    "-P",
                    "-B",
                    "-c",
                    _BOOT,
                    os.path.dirname(os.path.abspath(__file__)),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            config = {
                "tier": tier.name,
                "roots": packages.roots,
                "packages": packages.names,
                "readable": packages.readable,
            }
            self._send(config)
            hello = self._receive(time.monotonic() + START_S)
            if hello["event"] != "hello":
                raise TierUnavailable(hello.get("why", "no reason given"))
        except BaseException:
            self.close()
            raise
        self.facts = {key: value for key, value in hello.items() if key != "event"}

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(self, kind: str, limits: dict[str, int], fds: Sequence[int]) -> int:
        """Ask for a child with these descriptors (channel first); returns its id. The descriptors stay the caller's
        to close.
        """
        self._next += 1
        self._send({"op": "spawn", "id": self._next, "kind": kind, "limits": limits}, tuple(fds))
        return self._next

    def pid_of(self, ident: int) -> int:
        """The child's process number in the trainer's own table."""
        deadline = time.monotonic() + ANSWER_S
        while ident not in self._pids:
            if ident in self._refused:
                raise InfrastructureError(f"the sandbox could not start a process: {self._refused.pop(ident)}")
            self._take(deadline)
        return self._pids[ident]

    def kill(self, ident: int, why: str) -> None:
        """Kill a child; harmless when it has ended."""
        self._send({"op": "kill", "id": ident, "why": why})

    def wait(self, ident: int, deadline: float) -> Exit | None:
        """Its end, or None when it still runs at ``deadline`` (time.monotonic seconds). Raises ZygoteDied."""
        while ident not in self._exits:
            if ident in self._refused:
                raise InfrastructureError(f"the sandbox could not start a process: {self._refused.pop(ident)}")
            if not self._take(deadline, or_none=True):
                return None
        self._pids.pop(ident, None)
        exit_ = self._exits.pop(ident)
        if exit_.killed_for.startswith("setup: "):
            raise InfrastructureError(f"a sandboxed process could not be set up: {exit_.killed_for[7:]}")
        return exit_

    def fileno(self) -> int:
        """Readable when a child has started or ended."""
        return self._control.fileno()

    def _take(self, deadline: float, or_none: bool = False) -> bool:
        try:
            message = self._receive(deadline)
        except TimeoutError:
            if or_none:
                return False
            raise ZygoteDied("the zygote did not answer in time") from None
        event, ident = message.pop("event"), message.pop("id")
        if event == "started":
            self._pids[ident] = message["pid"]
        elif event == "failed":
            raise ZygoteDied(f"the zygote failed: {message['why']}")
        elif event == "refused":
            self._refused[ident] = message["why"]
        else:
            self._exits[ident] = Exit(**message)
        return True

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        self._control.settimeout(ANSWER_S)
        try:
            send_message(self._control, message, fds)
        except OSError as error:
            raise ZygoteDied(f"the zygote is gone: {error}") from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        head, pid = self._read(LENGTH.size, deadline)
        body, _ = self._read(LENGTH.unpack(head)[0], deadline + ANSWER_S)
        message: dict[str, Any] = json.loads(body)
        if message.get("event") == "started" and self.tier >= Tier.ns:
            message["pid"] = pid  # as the kernel translated it; the zygote only knows its own table's number
        return message

    def _read(self, count: int, deadline: float) -> tuple[bytes, int]:
        data, pid = b"", 0
        while len(data) < count:
            self._control.settimeout(max(1e-4, deadline - time.monotonic()))
            try:
                chunk, ancillary, _, _ = self._control.recvmsg(count - len(data), socket.CMSG_SPACE(12))
            except TimeoutError:
                if data:
                    raise ZygoteDied("the zygote stopped in the middle of a message") from None
                raise
            except OSError as error:
                raise ZygoteDied(f"the zygote is gone: {error}") from None
            if not chunk:
                raise ZygoteDied("the zygote ended")
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == _SCM_CREDENTIALS:
                    (pid,) = struct.unpack_from("i", raw)
            data += chunk
        return data, pid

    def close(self) -> None:
        """End the zygote and with it every child."""
        self._control.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
