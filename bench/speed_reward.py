"""How honest the speed reward's clock is: the baseline against itself, and a kernel that is faster by construction.

    python -m bench.speed_reward [--repeats 500] [--hogs 3] [--out bench/results/speed_reward.json]

With hogs, so many processes burn CPU on all cores while it measures. Rows of other numbers of hogs are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

from bench.machine import describe

from longreach.rewards.recipes import PYTHON_MATMUL, SpeedRecipe
from longreach.rewards.speed import SpeedReward, TimingPlan, speed_reward

# The same loop 19 times and 10 times: 1.9 times the work, on any machine.
LOOP = """
def work(n, x):
    total = 0.0
    for _ in range({times}):
        for i in range(n):
            total = total * 0.5 + x
    return total
"""
COUNTED = SpeedRecipe(
    name="counted_loop",
    function="work",
    baseline=LOOP.format(times=19),
    idle="def work(n, x):\n    return 0.0\n",
    generate=lambda rng: (3000 + rng.randrange(50), rng.uniform(1, 2)),
    edge=lambda rng: (rng.randrange(5, 100), rng.uniform(1, 2)),
    verify=lambda args, expected, value: "" if type(value) is float and abs(value - expected) < 1e-9 else "wrong",
)


def _burn() -> None:
    while True:
        sum(range(10_000))


def against_itself(reward: SpeedReward, repeats: int) -> dict[str, Any]:
    """The baseline as a candidate: what is paid is false."""
    speedups, wall, paid, milliseconds = [], [], 0, []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = reward.grade_source(reward.recipe.baseline)
        milliseconds.append((time.perf_counter() - begin) * 1e3)
        if result.status == "ok":
            speedups.append(result.telemetry["speedup"])
            wall.append(result.telemetry["speedup_wall"])
            paid += result.telemetry["speedup_paid"] > 1.0
    speedups.sort()
    return {
        "repeats": repeats,
        "judged": len(speedups),
        "median": round(statistics.median(speedups), 4),
        "p1": round(speedups[int(0.01 * len(speedups))], 4),
        "p99": round(speedups[min(len(speedups) - 1, int(0.99 * len(speedups)))], 4),
        "cv": round(statistics.stdev(speedups) / statistics.mean(speedups), 4),
        "wall_clock_cv": round(statistics.stdev(wall) / statistics.mean(wall), 4),
        "false_speedups_paid": paid,
        "dead_zone": round(math.exp(reward.dead_zone.log_width) - 1, 4),
        "ms_per_completion_p50": round(statistics.median(milliseconds), 1),
    }


def known_ratio(repeats: int) -> dict[str, Any]:
    found = []
    with speed_reward(COUNTED, plan=TimingPlan(edge_checks=1)) as reward:
        for _ in range(repeats):
            result = reward.grade_source(LOOP.format(times=10))
            if result.status == "ok":
                found.append(result.telemetry["speedup"])
    return {
        "truth": 1.9,
        "repeats": repeats,
        "judged": len(found),
        "median": round(statistics.median(found), 4),
        "least": round(min(found), 4),
        "most": round(max(found), 4),
        "within_10_percent": round(sum(abs(value / 1.9 - 1) <= 0.1 for value in found) / repeats, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--hogs", type=int, nargs="*", default=[0, 3])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "speed_reward.json")
    arguments = parser.parse_args()
    kept = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    rows = [row for row in kept if row["hogs"] not in arguments.hogs]
    for hogs in arguments.hogs:
        burning = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(hogs)]
        for process in burning:
            process.start()
        try:
            with speed_reward(PYTHON_MATMUL) as reward:
                reward.calibrate(reward.plan.calibrations)
                row = {"hogs": hogs, "machine": describe(), "against_itself": against_itself(reward, arguments.repeats)}
            row["known_ratio"] = known_ratio(max(20, arguments.repeats // 10))
        finally:
            for process in burning:
                process.terminate()
                process.join()
        print(json.dumps(row))
        rows.append(row)
    rows.sort(key=lambda row: row["hogs"])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
