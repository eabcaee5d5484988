"""What a sandboxed completion costs: time per completion and completions per second, for each tier, with and without NumPy.

python -m bench.sandbox [--completions 600] [--out bench/results/sandbox.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from bench.machine import describe

from longreach.rewards.sandbox import IsolationError, Sandbox

SOURCE = "def f(x, y):\n    return x + y\n"
WITH_NUMPY = "import numpy\ndef f(x, y):\n    return float(numpy.add(x, y))\n"
TIERS = ("rlimit", "lsm", "ns")


def one_by_one(box: Sandbox, source: str, count: int) -> dict[str, float]:
    """Milliseconds from a completion's text to its values, one at a time."""
    times, cpu = [], []
    for _ in range(count):
        begin = time.perf_counter()
        outcome = box.call(source, "f", [(1, 2)])
        times.append((time.perf_counter() - begin) * 1e3)
        cpu.append(outcome.usage.cpu_s * 1e3)
        assert outcome.values == (3,), outcome
    times.sort()
    return {
        "p50_ms": round(statistics.median(times), 2),
        "p90_ms": round(times[int(0.9 * count)], 2),
        "p99_ms": round(times[int(0.99 * count)], 2),
        "process_cpu_ms": round(statistics.median(cpu), 2),
    }


def all_at_once(box: Sandbox, source: str, count: int) -> float:
    """Completions per second with every worker busy."""
    begin = time.perf_counter()
    for values in box.map(lambda n: box.call(source, "f", [(n, 1)]).values, range(count)):
        assert len(values) == 1
    return round(count / (time.perf_counter() - begin), 1)


def measure(tier: str, packages: tuple[str, ...], count: int, workers: int) -> dict[str, Any]:
    source = WITH_NUMPY if packages else SOURCE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        box = Sandbox(tier, min_tier="none", packages=packages, workers=workers)
    with box:
        all_at_once(box, source, 50)
        row: dict[str, Any] = {"tier": tier, "packages": list(packages), **one_by_one(box, source, count)}
        row["per_second"] = all_at_once(box, source, count)
        row["workers"] = workers
        assert "zygotes_replaced" not in box.telemetry
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sandbox.json")
    arguments = parser.parse_args()
    rows = []
    for tier in TIERS:
        for packages in ((), ("numpy",)):
            try:
                rows.append(measure(tier, packages, arguments.completions, arguments.workers))
            except IsolationError as error:
                rows.append({"tier": tier, "packages": list(packages), "not_measured": str(error)})
            print(json.dumps(rows[-1]))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
