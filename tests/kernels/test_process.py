"""The kernels through Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["test_interpreted.py", "test_decode_interpreted.py"])
def test_interpreted_kernels(name: str) -> None:
    pytest.importorskip("triton", reason="triton isn't installed: there are no kernels to interpret")
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__).parent / name),
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout
