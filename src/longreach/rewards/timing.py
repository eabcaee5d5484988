"""Measuring how much faster one process is than another, with an honest error bar.

Both answer the same unpredictable inputs in random order on the same CPU. The clock runs from the release of an
input to the last byte of the answer, and the answers are what gets verified. The time of a call is the process's
CPU time as read from outside (it cannot start another process, and preemption by others does not count); the wall
clock must agree.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longreach.rewards.sandbox.session import Timing


@dataclass(frozen=True)
class Ratio:
    """A speed-up as paired log-ratios: the median, and a distribution-free confidence interval of it (natural logs)."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def speedup(self) -> float:
        return math.exp(self.median)


def order_index(count: int, confidence: float) -> int:
    """How many of ``count`` sorted samples to leave out at each end, for an interval that holds the median so often.

    From the binomial distribution of the number of samples below the median. Raises ValueError when there are too few.
    """
    tail, below = (1 - confidence) / 2, 0.0
    for index in range(count):
        below += math.comb(count, index) / 2**count
        if below > tail:
            if index == 0:
                raise ValueError(f"{count} rounds are too few for a {confidence:.1%} interval")
            return index - 1
    raise AssertionError("unreachable")


def median_ratio(log_ratios: Sequence[float], confidence: float) -> Ratio:
    values = sorted(log_ratios)
    cut = order_index(len(values), confidence)
    return Ratio(statistics.median(values), values[cut], values[len(values) - 1 - cut], len(values))


def compare(
    baseline: Sequence[Timing], candidate: Sequence[Timing], *, overhead: Timing, charge_ns: float, confidence: float
) -> tuple[Ratio, Ratio]:
    """(by CPU time, by wall time): how much faster the candidate is, round by round.

    overhead   what a call costs that does nothing but receive its input and send an answer; taken off both
    charge_ns  added to each of the candidate's calls: its share of work that was moved to where no clock runs
    """
    by_clock = []
    for clock in ("cpu_ns", "wall_ns"):
        rest = getattr(overhead, clock)
        logs = []
        for ours, theirs in zip(baseline, candidate, strict=True):
            base = max(getattr(ours, clock) - rest, 1000)
            cand = max(getattr(theirs, clock) - rest, 1000) + charge_ns
            logs.append(math.log(base / cand))
        by_clock.append(median_ratio(logs, confidence))
    return by_clock[0], by_clock[1]


def median_timing(timings: Sequence[Timing]) -> Timing:
    return Timing(
        int(statistics.median(timing.wall_ns for timing in timings)),
        int(statistics.median(timing.cpu_ns for timing in timings)),
    )


def pick_cpu(cpu: int | None) -> int:
    """The CPU to time on: the given one, or the last that this process may use (the first ones serve interrupts)."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    if cpu is None:
        return max(allowed)
    if cpu not in allowed:
        raise ValueError(f"cpu is {cpu}; this process may use {sorted(allowed)}")
    return cpu


@contextlib.contextmanager
def sole_use(cpu: int) -> Iterator[None]:
    """Only one measurement at a time on a CPU, also between the processes of a distributed run."""
    path = os.path.join(tempfile.gettempdir(), f"longreach-timing-{os.getuid()}-cpu{cpu}.lock")
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class DeadZone:
    """How large a speed-up the baseline shows against itself: below that, none is paid.

    Fed with A/A measurements; the zone is the largest of ``floor`` and four robust standard deviations of the
    recent ones.
    """

    KEEP = 64

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._errors: list[float] = []

    def add(self, ratio: Ratio) -> None:
        self._errors = [*self._errors, ratio.median][-self.KEEP :]

    @property
    def count(self) -> int:
        return len(self._errors)

    @property
    def log_width(self) -> float:
        """In natural logs of the ratio."""
        if not self._errors:
            return self.floor
        centre = statistics.median(self._errors)
        spread = 1.4826 * statistics.median(abs(error - centre) for error in self._errors)
        return max(self.floor, abs(centre) + 4 * spread)
