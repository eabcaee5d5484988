"""Where a run happens: versions, commit, device, memory. Facts for the log's header and for ``longreach doctor``."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("longreach", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
OPTIONAL = ("triton", "flash-attn-4", "gguf")


def versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Python's version and that of each installed package in ``names``."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the repository this package runs from, with "+changes" if its files differ; None outside one."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(("git", *arguments), cwd=folder, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside somebody else's repository: ask whether git knows this very file.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}+changes" if head and git("status", "--porcelain", "--untracked-files=no", "..") else head


def cpu_name() -> str:
    """Model name of the processor where Linux tells it, else the architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def device() -> dict[str, Any]:
    """The accelerator torch sees, or the CPU: kind, name, memory in bytes, and the host's cores and memory."""
    import psutil
    import torch

    host = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(terse=True),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {
            "kind": "cuda",
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            **host,
        }
    if torch.backends.mps.is_available():
        return {"kind": "mps", "name": cpu_name(), **host}
    return {"kind": "cpu", "name": cpu_name(), **host}


def memory() -> dict[str, int]:
    """Bytes in use now: ``host`` resident; ``device`` the peak allocated since ``reset_peak``, on CUDA only."""
    import psutil
    import torch

    used = {"host": psutil.Process().memory_info().rss}
    if torch.cuda.is_available():
        used["device"] = torch.cuda.max_memory_allocated()
    return used


def reset_peak() -> None:
    """Start a new measurement of the device's peak."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
