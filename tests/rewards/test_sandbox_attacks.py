"""No attack succeeds: at each tier, as root and as an ordinary user, with namespaces and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks import attacks

from longreach.rewards.sandbox import IsolationError, Sandbox

BATTERY = str(Path(__file__).parent / "battery.py")
SOURCES = str(Path(__file__).parents[2] / "src")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the isolation tiers above rlimit are Linux's")


def _run(command: list[str], cwd: str | None = None) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _as_we_are(*arguments: str) -> dict[str, Any]:
    path = os.pathsep.join([SOURCES, str(Path(__file__).parent)])
    return _run(["env", f"PYTHONPATH={path}", sys.executable, BATTERY, *arguments])


def _assert_held(report: dict[str, Any], tier: str) -> None:
    assert report["tier"] == tier, report["notes"]
    assert report["findings"] == {}
    assert report["attacks"] >= 80
    assert report["replaced"] == 0, "an attack took the zygote down"
    if report["facts"]["counts_denials"]:
        assert report["denials"]["denials"] > 100


def test_battery_covers_every_kind() -> None:
    kinds = {attack.kind for attack in attacks("x86_64")}
    assert kinds >= {
        "files",
        "proc",
        "signals",
        "network",
        "processes",
        "debugging",
        "kernel",
        "secrets",
        "limits",
        "forgery",
    }
    assert len({attack.name for attack in attacks("aarch64")}) >= 25


@linux
@pytest.mark.parametrize("tier", ["lsm", "ns"])
def test_attacks_as_this_user(tier: str) -> None:
    try:
        Sandbox(tier, workers=1).close()
    except IsolationError as error:
        pytest.skip(f"this machine does not offer {tier}: {error}")
    _assert_held(_as_we_are(tier), tier)


@linux
def test_attacks_where_namespaces_are_forbidden() -> None:
    _assert_held(_as_we_are("auto", "forbid"), "lsm")


@linux
@pytest.mark.parametrize("flags", [[], ["forbid"]], ids=["namespaces", "forbidden"])
def test_attacks_as_an_ordinary_user(as_nobody: Callable[[list[str]], list[str]], flags: list[str]) -> None:
    probe = subprocess.run(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "unshare", "-Ur", "true"])
    expected = "lsm" if flags or probe.returncode else "ns"
    report = _run(as_nobody(["battery.py", "auto", *flags]), cwd=_place(as_nobody))
    assert report["uid"] == 65534
    _assert_held(report, expected)


def _place(as_nobody: Callable[[list[str]], list[str]]) -> str:
    return next(word.removeprefix("PYTHONPATH=") for word in as_nobody([]) if word.startswith("PYTHONPATH="))


@pytest.mark.parametrize("tier", ["none", "rlimit"])
def test_the_battery_finds_holes_where_there_are_some(tier: str) -> None:
    """Without the layers the same attacks do succeed: the battery can fail."""
    holes = ("read /etc/passwd", "thread", "socket pair", "fork")
    found = set()
    with pytest.warns(RuntimeWarning, match=tier), Sandbox(tier, min_tier="none", workers=1) as box:
        target = {"secret": "/etc/passwd", "writable": "/tmp", "hint": "no such text"}
        for attack in attacks("none"):
            if attack.name in holes:
                outcome = box.call(attack.source, "f", [(target,)])
                if any(str(value).startswith("breached") for value in outcome.values):
                    found.add(attack.name)
    assert found >= {"read /etc/passwd", "socket pair"}


@pytest.mark.parametrize("name", ["memory bomb", "CPU bomb", "sleep", "output bomb", "descriptor bomb"])
def test_rlimit_alone_stops_bombs(name: str) -> None:
    (attack,) = [attack for attack in attacks("none") if attack.name == name]
    with pytest.warns(RuntimeWarning), Sandbox("rlimit", min_tier="none", workers=1, limits=attack.limits) as box:
        outcome = box.call(attack.source, "f", [({},)])
        assert outcome.failure in attack.ends
        assert not any(str(value).startswith("breached") for value in outcome.values)
