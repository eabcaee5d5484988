"""The process in which the audited reward function runs: it may be crashed, hung or corrupted without harm to the audit.

Started by `longreach.audit.prober`. Messages are JSON with a length in front, never pickles: what comes back may have
been written by an exploit that has taken the grader over.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import psutil

from longreach.audit.target import RewardFunction, TargetError, resolve

_HEADER = struct.Struct("<Q")
MAX_MESSAGE = 64 << 20


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one JSON message."""
    data = json.dumps(message).encode()
    channel.sendall(_HEADER.pack(len(data)) + data)


def receive(channel: socket.socket) -> Any:
    """Receive one JSON message; EOFError at the end of the stream, ValueError for anything but a message."""
    size = _HEADER.unpack(_exactly(channel, _HEADER.size))[0]
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_exactly(channel, size))


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(min(1 << 20, size - len(data)))
        if not piece:
            raise EOFError("the process ended")
        data += piece
    return bytes(data)


def serve(reward: RewardFunction, channel: socket.socket) -> None:
    """Answer requests until the other side closes."""
    before = set(dir(builtins))
    while True:
        try:
            request = receive(channel)
        except EOFError:
            return
        if request["op"] == "grade":
            reply = grade(reward, request)
        else:
            reply = {"builtins": sorted(set(dir(builtins)) - before), "files": _files(), "tier": _tier(reward, request)}
        send(channel, {"nonce": request["nonce"], **reply})


def grade(reward: RewardFunction, request: Mapping[str, Any]) -> dict[str, Any]:
    """Call the reward as TRL does and describe what it did: ``rewards`` (numbers, ``None`` or a text saying what else)."""
    columns = {name: list(values) for name, values in request["columns"].items()}
    start = time.perf_counter()
    try:
        values = reward(prompts=request["prompts"], completions=request["completions"], **columns)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-2000:]}
    seconds = time.perf_counter() - start
    try:
        return {"rewards": [_plain(value) for value in values], "seconds": seconds}
    except TypeError as error:
        return {"error": f"the reward returned {type(values).__name__}: {error}"[:500], "trace": ""}


def _plain(value: Any) -> float | str | None:
    """A reward as a JSON value; what is no finite number becomes a text."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return number if math.isfinite(number) else repr(number)


def _files() -> list[str]:
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names)[:100]


def _tier(reward: RewardFunction, request: Mapping[str, Any]) -> str | None:
    """The isolation a reward claims: its ``isolation_tier``, or what its ``grade`` stamps on the request's completion."""
    claimed = getattr(reward, "isolation_tier", None)
    if claimed is not None:
        return str(claimed)
    if not hasattr(reward, "grade"):
        return None
    try:
        (result,) = reward.grade(request["prompts"], request["completions"], **request["columns"])
        return str(result.tier.name)
    except Exception:
        return None


def isolate(memory: int) -> None:
    """A session of its own, no input, no core files, and a memory limit (bytes; 0 for none)."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def can_fork() -> bool:
    """Whether the imported grader may be forked: it has started no thread and no process while it was loaded."""
    return threading.active_count() == 1 and not psutil.Process().children()


def fork_sessions(reward: RewardFunction, control: socket.socket, memory: int) -> None:
    """Fork a process for each session asked for: a clean grader without importing its libraries again.

    A request is the working folder's name with the session's socket attached; the answer is the process id.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended sessions need no burial
    while True:
        folder, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not folder:
            return
        pid = os.fork()
        if pid == 0:
            session(reward, socket.socket(fileno=descriptors[0]), folder.decode(), memory, control)
        os.close(descriptors[0])
        send(control, {"pid": pid})


def session(reward: RewardFunction, channel: socket.socket, folder: str, memory: int, other: socket.socket) -> NoReturn:
    """Be the process of one session: leave the parent's session, folder and sockets, serve, end."""
    status = 1
    try:
        other.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.chdir(folder)
        isolate(memory)
        serve(reward, channel)
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    descriptor, memory, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    channel = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    try:
        reward = resolve(name)
    except BaseException as error:
        own = isinstance(error, TargetError)
        said = str(error) if own else f"target: {name} raises when it is loaded: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            send(channel, {"ready": False, "error": said})
        return
    sys.argv = ["audit"]
    forks = can_fork()
    send(channel, {"ready": True, "forks": forks})
    if forks:
        fork_sessions(reward, channel, memory)
    else:
        isolate(memory)
        serve(reward, channel)


if __name__ == "__main__":
    main()
