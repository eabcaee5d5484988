"""Calls a reward function in a process that may die, and says in how many ways it failed.

A named target is imported by a fresh interpreter, whose forks are the sessions (or which is the only session, if the
grader starts threads or processes while it is imported); a function object is carried over by fork. Either way the
process has a working folder, a session and an output of its own, and the audit kills its whole group when a call passes
the time limit.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longreach.audit.target import RewardFunction, TargetError, check_name
from longreach.audit.worker import receive, send, session


@dataclass(frozen=True)
class Outcome:
    """One call: ``rewards`` if it returned one value a completion, else ``failure`` (``crash``, ``hang``, ``error``,
    ``malformed``) with ``detail``. A value that is no finite number is a text in ``rewards``."""

    rewards: tuple[float | str | None, ...] = ()
    seconds: float = 0.0
    failure: str = ""
    detail: str = ""


class Prober:
    """A reward function in its process; a context manager.

    Args:
        target: a name (see `longreach.audit.target.resolve`) or a function.
        time_limit: longest accepted call, in seconds.
        memory: address-space limit of the process in bytes, 0 for none.
    """

    def __init__(self, target: str | RewardFunction, *, time_limit: float = 60.0, memory: int = 0) -> None:
        self.target, self.time_limit, self.memory = target, time_limit, memory
        self.restarts = 0
        self._channel: socket.socket | None = None
        self._pid = 0  # of the session
        self._session: subprocess.Popen[bytes] | None = None  # when it is an interpreter of its own
        self._server: subprocess.Popen[bytes] | None = None  # when sessions are forks of an interpreter
        self._control: socket.socket | None = None
        self._folder = ""

    def __enter__(self) -> Prober:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._end_server()

    def call(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> Outcome:
        """One call of the reward function; after a crash or hang the process is replaced."""
        request = {"op": "grade", "prompts": list(prompts), "completions": list(completions), "columns": dict(columns)}
        try:
            reply = self._ask(request)
        except TimeoutError:
            self.restart()
            return Outcome(failure="hang", detail=f"no reply within {self.time_limit:g} s")
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            self.restart()
            return Outcome(failure="crash", detail=f"{type(error).__name__}: {error}"[:300])
        if "error" in reply:
            return Outcome(failure="error", detail=str(reply["error"]))
        rewards = reply.get("rewards")
        if not isinstance(rewards, list) or len(rewards) != len(completions):
            count = len(rewards) if isinstance(rewards, list) else "no"
            return Outcome(failure="malformed", detail=f"{count} rewards for {len(completions)} completions")
        return Outcome(tuple(rewards), float(reply["seconds"]))

    def state(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        """What completions have left in the process: new builtins, files in its folder; and the tier it claims."""
        request = {"op": "state", "prompts": [prompt], "completions": [completion], "columns": dict(columns)}
        try:
            return self._ask(request)
        except (EOFError, OSError, ValueError):
            self.restart()
            return {"builtins": [], "files": [], "tier": None}

    def restart(self) -> None:
        """Replace the process by a fresh one."""
        self._stop()
        self.restarts += 1
        self._start()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._channel is not None
        nonce = secrets.token_hex(16)
        self._channel.settimeout(self.time_limit)
        send(self._channel, {**request, "nonce": nonce})
        reply = receive(self._channel)
        if not isinstance(reply, dict) or reply.pop("nonce", None) != nonce:
            raise ValueError("a reply that does not belong to the request")
        return reply

    # -- processes -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="longreach-audit-")
        if not isinstance(self.target, str):
            self._fork_here(self.target)
            return
        if self._server is None:
            self._launch(self.target)
        if self._server is not None:
            try:
                self._fork_there()
            except (OSError, EOFError, ValueError):  # an exploit has ended the server: start another
                self._end_server()
                self._launch(self.target)
                self._fork_there()

    def _launch(self, name: str) -> None:
        """Start an interpreter with the grader: a server of forks if the grader allows it, else the only session."""
        check_name(name)
        place, _, attribute = name.rpartition(":")
        if place.endswith(".py"):
            name = f"{Path(place).resolve()}:{attribute}"
        ours, theirs = socket.socketpair()
        # The folder of the caller stays importable although the process works elsewhere.
        kept = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV")
        environment = {key: value for key, value in os.environ.items() if key in kept}
        path = [os.getcwd(), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in path)
        environment["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(
            [sys.executable, "-m", "longreach.audit.worker", str(theirs.fileno()), str(self.memory), name],
            pass_fds=[theirs.fileno()],
            cwd=self._folder,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        ours.settimeout(max(self.time_limit, 120.0))  # imports of the grader's libraries
        try:
            ready = receive(ours)
        except (EOFError, OSError, ValueError) as error:
            ready = {"error": f"target: {name}: its process ended before it was ready ({error})"}
        if not ready.get("ready"):
            ours.close()
            process.kill()
            process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise TargetError(str(ready.get("error")))
        if ready["forks"]:
            self._server, self._control = process, ours
        else:
            self._session, self._pid, self._channel = process, process.pid, ours

    def _fork_there(self) -> None:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [self._folder.encode()], [theirs.fileno()])
        theirs.close()
        self._pid = int(receive(self._control)["pid"])
        self._channel = ours

    def _fork_here(self, reward: RewardFunction) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            session(reward, theirs, self._folder, self.memory, ours)
        theirs.close()
        self._pid, self._channel = pid, ours

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._pid:
            # A fresh fork may not lead its own group yet.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(self._pid, signal.SIGKILL)
            if self._session is not None:
                self._session.wait()
            elif self._server is None:
                os.waitpid(self._pid, 0)
        self._pid, self._session = 0, None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_server(self) -> None:
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()
        self._server, self._control = None, None
