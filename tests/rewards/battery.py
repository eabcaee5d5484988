"""Runs every attack against one sandbox and reports, as JSON on standard output, what each came to.

A script of its own, so that tests can start it as another user or with namespaces forbidden::

    python battery.py TIER [forbid] [user]
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from attacks import AMPLE, Attack, attacks

from longreach.rewards.sandbox import Sandbox
from longreach.rewards.sandbox.child import kernel, seccomp

SECRET = "the-expected-value-is-4711"
HONEST = "def f(x):\n    return x + 1\n"


def forbid_namespaces() -> None:
    """As a container's default profile does: no unshare, no mounts, no CAP_SYS_ADMIN."""
    capabilities = kernel.effective_capabilities() & ~(1 << kernel.CAP_SYS_ADMIN)
    kernel._libc.prctl(kernel.PR_CAPBSET_DROP, kernel.CAP_SYS_ADMIN, 0, 0, 0)  # else exec as root brings it back
    kernel.set_capabilities(capabilities)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.Filter(seccomp.only_refuse(("unshare", "setns", "mount", "pivot_root"))).install()


class Targets:
    """What there is to attack, and whether it was."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.secret = os.path.join(directory, "secret")
        with open(self.secret, "w", encoding="ascii") as file:
            file.write(SECRET)
        os.environ["SECRET_ANSWER"] = SECRET
        self.victim = subprocess.Popen(["sleep", "600"])
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.unix.bind(os.path.join(directory, "socket"))
        self.name = f"longreach-{os.getpid()}"
        self.abstract.bind("\0" + self.name)
        for sock in (self.unix, self.abstract, self.tcp):
            sock.listen()
            sock.setblocking(False)
        os.chmod(directory, 0o777)
        self.before = self._state()

    def describe(self, zygote: int) -> dict[str, Any]:
        return {
            "secret": self.secret,
            "writable": self.directory,
            "source": os.path.abspath(__file__),
            "grader": os.getpid(),
            "zygote": zygote,
            "victim": self.victim.pid,
            "port": self.tcp.getsockname()[1],
            "unix": os.path.join(self.directory, "socket"),
            "abstract": self.name,
            "hint": "the-expected-value",
        }

    def _state(self) -> Any:
        status = os.stat(self.secret)
        with open(self.secret, encoding="ascii") as file:
            text = file.read()
        limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in (os.getpid(), self.victim.pid)]
        affinity = [sorted(os.sched_getaffinity(pid)) for pid in (os.getpid(), self.victim.pid)]
        made = [path for path in ("/tmp/longreach-new", "/dev/shm/longreach-new") if os.path.exists(path)]
        return (
            text,
            status.st_mode,
            status.st_mtime,
            status.st_nlink,
            sorted(os.listdir(self.directory)),
            limits,
            affinity,
            made,
        )

    def harm(self) -> str:
        """ "" when nothing outside has changed."""
        if self.victim.poll() is not None:
            return "another process was killed"
        for sock in (self.tcp, self.unix, self.abstract):
            with contextlib.suppress(BlockingIOError):
                sock.accept()
                return "somebody connected"
        after = self._state()
        return "" if after == self.before else f"the outside changed: {self.before} -> {after}"

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for sock in (self.tcp, self.unix, self.abstract):
            sock.close()


def judge(box: Sandbox, attack: Attack, targets: Targets, zygote: int) -> str:
    """ "" when the attack failed as it should, else what it achieved."""
    outcome = box.call(
        attack.source, "f", [(targets.describe(zygote),), (targets.describe(zygote),)], limits=attack.limits
    )
    if harm := targets.harm():
        return harm
    if SECRET in repr(outcome) or any(str(value).startswith("breached") for value in outcome.values):
        return f"{outcome.values} {outcome.failure}"
    if outcome.failure not in attack.ends:
        return f"ended in {outcome.failure!r} ({outcome.error}), expected one of {attack.ends}"
    if attack.name == "object that equals everything" and [type(value) for value in outcome.values] != [int, int]:
        return f"an object crossed: {outcome.values}"
    return ""


def main() -> None:
    tier, *flags = sys.argv[1:]
    if "forbid" in flags:
        forbid_namespaces()
    with tempfile.TemporaryDirectory() as directory, Sandbox(tier, workers=1, limits=AMPLE) as box:
        targets = Targets(directory)
        findings, denials, slowest = {}, {}, {}
        zygote = next(iter(box._all)).pid
        try:
            for attack in attacks(os.uname().machine):
                begin = time.monotonic()
                found = judge(box, attack, targets, zygote)
                after = box.call(HONEST, "f", [(1,)])
                if not found and after.values != (2,):
                    found = f"the next completion suffered: {after}"
                if found:
                    findings[f"{attack.kind}: {attack.name}"] = found
                slowest[attack.name] = round(time.monotonic() - begin, 2)
            denials = {k: v for k, v in box.telemetry.items() if k.startswith("den")}
        finally:
            targets.close()
        report = {
            "tier": box.tier.name,
            "uid": os.getuid(),
            "facts": box.facts,
            "notes": box.notes,
            "attacks": len(slowest),
            "findings": findings,
            "replaced": box.telemetry.get("zygotes_replaced", 0),
            "denials": denials,
            "slowest": dict(sorted(slowest.items(), key=lambda item: -item[1])[:5]),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
