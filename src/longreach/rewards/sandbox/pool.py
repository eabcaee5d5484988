"""`Sandbox`: a few zygotes, lent to callers one at a time; back-pressure, replacement of dead ones, counters."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from longreach.rewards.result import InfrastructureError, Tier
from longreach.rewards.sandbox.outcome import CallOutcome, IsolationError, Limits, ProgramOutcome, SuiteOutcome, Usage
from longreach.rewards.sandbox.process import Packages, TierUnavailable, Zygote, ZygoteDied
from longreach.rewards.sandbox.program import run_program
from longreach.rewards.sandbox.session import CandidateFailed, Session
from longreach.rewards.sandbox.suite import Suite, run_suite

T = TypeVar("T")
R = TypeVar("R")
AUTO = (Tier.ns, Tier.lsm, Tier.rlimit)
ATTEMPTS = 3  # runs of one completion when zygotes die under it


class Sandbox:
    """Runs code that nobody trusts, one process per completion.

    tier      ``"auto"``: the strongest that this machine offers; or a tier's name, which is then reached or refused
    min_tier  below it, `IsolationError` is raised; lower it only for code that you would run yourself
    limits    for every completion; calls may bring their own
    workers   zygotes, and so completions that run at a time
    packages  installed top-level packages that candidates may import; nothing else outside the standard library can
    be read python    interpreter of the candidates (3.11 or later); this one unless given

    Usable from any number of threads: a call waits until a zygote is free. The ``*_async`` methods are for event
    loops, `map` for long streams; both keep a bounded number of completions in flight. Close it, or use it as a
    context manager. A pickled sandbox is its configuration; it starts its own zygotes where it is unpickled.

    Raises InfrastructureError when zygotes keep dying, never because of what a completion did to itself.
    """

    def __init__(
        self,
        tier: str | Tier = "auto",
        *,
        min_tier: str | Tier = Tier.lsm,
        limits: Limits | None = None,
        workers: int = 2,
        packages: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; at least 1 is needed")
        if isinstance(packages, str):
            raise TypeError(f"packages is {packages!r}; it must be a sequence of names")
        self._wanted = None if tier == "auto" else Tier.parse(tier)
        self.min_tier = Tier.parse(min_tier, field="min_tier")
        if self._wanted is Tier.vm:
            raise IsolationError(
                "tier is 'vm'; the sandbox does not start virtual machines: run the grader in one, with tier 'ns'"
            )
        self.limits = limits or Limits()
        self.workers = workers
        self.python = python or sys.executable
        self.packages = Packages.locate(packages)
        self.facts: dict[str, Any] = {}
        self.notes: tuple[str, ...] = ()
        self._reset()
        self.tier = Tier.none
        first = self._first_zygote()
        self._free.put(first)
        self._running = 1

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._free: queue.LifoQueue[Zygote | None] = queue.LifoQueue()
        self._running = 0
        self._closed = False
        self._threads: ThreadPoolExecutor | None = None
        self._counters: collections.Counter[str] = collections.Counter()
        self._all: set[Zygote] = set()

    # -- starting zygotes --------------------------------------------------------------------------------------

    def _first_zygote(self) -> Zygote:
        """Find the tier, by reaching it. Raises IsolationError."""
        if self._wanted is not None:
            choices: tuple[Tier, ...] = (self._wanted,)
        else:
            choices = AUTO if sys.platform == "linux" else (Tier.rlimit,)
        if choices[0] < self.min_tier or (sys.platform != "linux" and self.min_tier > Tier.rlimit):
            raise IsolationError(self._refusal(choices[0] if sys.platform == "linux" else Tier.rlimit, []))
        reasons: list[str] = []
        for tier in choices:
            if tier < self.min_tier:
                break
            try:
                zygote = self._start(tier)
            except TierUnavailable as error:
                reasons.append(f"{tier.name}: {error}")
                continue
            except ZygoteDied as error:
                reasons.append(f"{tier.name}: {error}")
                continue
            self.tier, self.facts, self.notes = tier, dict(zygote.facts), tuple(reasons)
            if tier < Tier.lsm:
                warnings.warn(
                    f"untrusted code will run at isolation tier {tier.name!r}: it can read this user's files "
                    "and use the network",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return zygote
        raise IsolationError(self._refusal(None, reasons))

    def _refusal(self, reached: Tier | None, reasons: list[str]) -> str:
        found = f"this machine offers {reached.name!r}" if reached is not None else "; ".join(reasons)
        return (
            f"the sandbox cannot reach min_tier {self.min_tier.name!r} ({found}). Run on Linux 5.13 or later with "
            "Landlock and seccomp, or pass a lower min_tier for code that you would run without a sandbox"
        )

    def _start(self, tier: Tier) -> Zygote:
        zygote = Zygote(tier, self.packages, self.python)
        with self._lock:
            self._all.add(zygote)
        return zygote

    def _retire(self, zygote: Zygote) -> None:
        with self._lock:
            self._all.discard(zygote)
        with contextlib.suppress(OSError):
            zygote.close()

    @contextlib.contextmanager
    def _lend(self) -> Iterator[Zygote]:
        """A zygote for this thread alone. One that fails is replaced by the next borrower."""
        if self._owner != os.getpid():  # after a fork the zygotes belong to the parent
            self._reset()
        if self._closed:
            raise RuntimeError("the sandbox is closed")
        zygote = self._borrow()
        try:
            if zygote is None:
                zygote = self._start(self.tier)
            yield zygote
        except ZygoteDied:
            if zygote is not None:
                self._retire(zygote)
                zygote = None
            with self._lock:
                self._counters["zygotes_replaced"] += 1
            raise
        finally:
            if self._closed and zygote is not None:
                self._retire(zygote)
            else:
                self._free.put(zygote)

    def _borrow(self) -> Zygote | None:
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        with self._lock:
            if self._running < self.workers:
                self._running += 1
                return None  # a place for a new one
        return self._free.get()

    # -- running completions -----------------------------------------------------------------------------------

    def session(self, zygote: Zygote, limits: Limits | None = None) -> Session:
        """A process on a borrowed zygote, for callers that time single calls (see `lend`)."""
        return Session(zygote, limits or self.limits)

    def lend(self) -> contextlib.AbstractContextManager[Zygote]:
        """Borrow a zygote: ``with box.lend() as zygote: ...`` on one thread."""
        return self._lend()

    def call(
        self, source: str, function: str, inputs: Iterable[Sequence[Any]], *, limits: Limits | None = None
    ) -> CallOutcome:
        """Call ``function`` (``"f"`` or ``"Class.method"``) once for each tuple of arguments, in one process.

        Each input is released only after the answer to the one before; ``inputs`` may be a generator that makes
        them as it goes.
        """
        cases = list(inputs)
        limits = limits or self.limits
        if too_long := self._too_long(source, limits):
            return CallOutcome((), "load", too_long, self.tier)
        return self._retried(lambda zygote: self._calls(zygote, source, function, cases, limits))

    def _calls(
        self, zygote: Zygote, source: str, function: str, inputs: Sequence[Sequence[Any]], limits: Limits
    ) -> CallOutcome:
        values: list[Any] = []
        failure = error = ""
        with Session(zygote, limits) as session:
            try:
                session.load(source, function)
                for args in inputs:
                    value, _ = session.call(function, args)
                    values.append(value)
            except CandidateFailed as failed:
                failure, error = failed.failure, failed.error
        return CallOutcome(tuple(values), failure, error, zygote.tier, session.usage)

    def run_program(self, source: str, stdin: bytes | str = b"", *, limits: Limits | None = None) -> ProgramOutcome:
        """Run a program with these bytes on its standard input."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        limits = limits or self.limits
        if too_long := self._too_long(source, limits):
            return ProgramOutcome(b"", b"", 1, "load", too_long, self.tier)
        return self._retried(lambda zygote: run_program(zygote, source, data, limits))

    def run_suite(self, source: str, suite: Suite, *, limits: Limits | None = None) -> SuiteOutcome:
        """Run unit tests against the module ``source``, the tests in a process of their own."""
        limits = limits or self.limits
        if too_long := self._too_long(source, limits):
            return SuiteOutcome((), "load", too_long, self.tier)
        # the tests wait while the candidate works: their clocks must outlast its clock
        patience = 2 * limits.wall_s + 1
        patient = replace(
            limits, wall_s=patience, cpu_s=limits.cpu_s + patience, output_bytes=max(limits.output_bytes, 1 << 22)
        )
        return self._retried(lambda zygote: run_suite(zygote, source, suite, limits, patient))

    @staticmethod
    def _too_long(source: str, limits: Limits) -> str:
        if len(source) > limits.source_bytes:
            return f"the source has {len(source)} characters; at most {limits.source_bytes} are run"
        return ""

    def _retried(self, run: Callable[[Zygote], R]) -> R:
        for attempt in itertools.count(1):
            try:
                with self._lend() as zygote:
                    outcome = run(zygote)
            except ZygoteDied as error:
                if attempt == ATTEMPTS:
                    raise InfrastructureError(
                        f"the sandbox failed {ATTEMPTS} times on one completion: {error}"
                    ) from error
                continue
            self._count(outcome)
            return outcome
        raise AssertionError("unreachable")

    def _count(self, outcome: Any) -> None:
        usage: Usage = outcome.usage
        with self._lock:
            self._counters["completions"] += 1
            if outcome.failure:
                self._counters[f"failed_{outcome.failure}"] += 1
            for name, count in usage.denials.items():
                self._counters["denials"] += count
                self._counters[f"denied_{name}"] += count

    @property
    def telemetry(self) -> dict[str, int]:
        """Counts since the start: completions, failures by kind, refused system calls, zygotes replaced."""
        with self._lock:
            return dict(self._counters)

    # -- many at a time ----------------------------------------------------------------------------------------

    def _executor(self) -> ThreadPoolExecutor:
        if self._owner != os.getpid():
            self._reset()
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")
            return self._threads

    async def call_async(
        self, source: str, function: str, inputs: Iterable[Sequence[Any]], *, limits: Limits | None = None
    ) -> CallOutcome:
        """`call`, for event loops."""
        cases = list(inputs)
        return await asyncio.wrap_future(self._executor().submit(self.call, source, function, cases, limits=limits))

    async def run_program_async(
        self, source: str, stdin: bytes | str = b"", *, limits: Limits | None = None
    ) -> ProgramOutcome:
        """`run_program`, for event loops."""
        return await asyncio.wrap_future(self._executor().submit(self.run_program, source, stdin, limits=limits))

    async def run_suite_async(self, source: str, suite: Suite, *, limits: Limits | None = None) -> SuiteOutcome:
        """`run_suite`, for event loops."""
        return await asyncio.wrap_future(self._executor().submit(self.run_suite, source, suite, limits=limits))

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """``function`` over ``items`` on the sandbox's threads, results in order; takes items only as fast as they
        are worked off.
        """
        waiting: collections.deque[Future[R]] = collections.deque()
        executor = self._executor()
        try:
            for item in items:
                if len(waiting) >= 2 * self.workers:
                    yield waiting.popleft().result()
                waiting.append(executor.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every zygote and every candidate."""
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for zygote in list(self._all):
            self._retire(zygote)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self._wanted, self.min_tier, self.limits, self.workers, self.packages.names, self.python))


def _restore(
    wanted: Tier | None, min_tier: Tier, limits: Limits, workers: int, packages: tuple[str, ...], python: str
) -> Sandbox:
    tier = "auto" if wanted is None else wanted
    return Sandbox(tier, min_tier=min_tier, limits=limits, workers=workers, packages=packages, python=python)
