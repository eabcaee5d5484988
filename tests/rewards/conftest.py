"""Sandboxes shared by the tests, and ways to run a script as somebody else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import longreach.rewards
from longreach.rewards.sandbox import IsolationError, Sandbox

NOBODY = 65534
TESTS = Path(__file__).parent


def best_sandbox(**options: object) -> Sandbox:
    try:
        return Sandbox(**options)  # type: ignore[arg-type]
    except IsolationError as error:
        pytest.skip(f"no isolation to be had here: {error}")


@pytest.fixture(scope="session")
def make_sandbox() -> Callable[..., Sandbox]:
    """Makes the strongest sandbox that this machine offers; the test is skipped where there is none."""
    return best_sandbox


@pytest.fixture(scope="session")
def box() -> Iterator[Sandbox]:
    """The strongest sandbox that this machine offers."""
    with best_sandbox(workers=2) as sandbox:
        yield sandbox


def _python_for_everybody() -> str | None:
    """An interpreter of at least 3.11 that an unprivileged user can start."""
    for python in (os.path.realpath(sys.executable), shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""):
        check = "import sys; sys.exit(sys.version_info < (3, 11))"
        if (
            python
            and subprocess.run(["setpriv", *_AS_NOBODY, "env", python, "-c", check], capture_output=True).returncode
            == 0
        ):
            return python
    return None


_AS_NOBODY = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


@pytest.fixture(scope="session")
def as_nobody() -> Iterator[Callable[[list[str]], list[str]]]:
    """Makes of a script's arguments a command line that runs it as an unprivileged user."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a script as another user; run the suite as root too")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed")
    python = _python_for_everybody()
    if python is None:
        pytest.skip("no Python of 3.11 or later that an unprivileged user can start")
    with tempfile.TemporaryDirectory() as place:  # a copy that everybody can read
        package = Path(longreach.rewards.__file__).parent
        shutil.copytree(package, Path(place) / "longreach" / "rewards", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(place) / "longreach" / "__init__.py").write_text("")
        for script in ("attacks.py", "battery.py"):
            shutil.copy(TESTS / script, place)
        os.chmod(place, 0o755)
        subprocess.run(["chmod", "-R", "a+rX", place], check=True)
        yield lambda script: ["setpriv", *_AS_NOBODY, "env", f"PYTHONPATH={place}", "HOME=/", python, "-B", *script]
