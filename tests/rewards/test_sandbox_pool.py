"""A sandbox's processes: shared by threads and event loops, replaced when they die, gone when it is closed."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
from pathlib import Path

import pytest

from longreach.rewards import InfrastructureError, IsolationError, Limits, Sandbox
from longreach.rewards.sandbox import process as process_module

ADD = "def add(a, b):\n    return a + b\n"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_threads_share_a_sandbox(box: Sandbox) -> None:
    results: list[tuple] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(box.call(ADD, "add", [(n, k) for k in range(3)]).values))
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [(n, n + 1, n + 2) for n in range(12)]


def test_event_loops(box: Sandbox) -> None:
    async def main() -> list:
        calls = [box.call_async(ADD, "add", [(n, 1)]) for n in range(8)]
        programs = [box.run_program_async(f"print({n})") for n in range(4)]
        return await asyncio.gather(*calls, *programs)

    outcomes = asyncio.run(main())
    assert [outcome.values[0] for outcome in outcomes[:8]] == list(range(1, 9))
    assert [int(outcome.stdout) for outcome in outcomes[8:]] == [0, 1, 2, 3]


def test_map_takes_items_only_as_fast_as_they_are_worked_off(box: Sandbox) -> None:
    taken = []

    def items():
        for n in range(30):
            taken.append(n)
            yield n

    results = box.map(lambda n: box.call(ADD, "add", [(n, 1)]).values[0], items())
    assert next(results) == 1
    assert len(taken) <= 2 * box.workers + 1
    assert list(results) == list(range(2, 31))


def test_a_dead_zygote_is_replaced(box: Sandbox) -> None:
    with Sandbox(workers=1) as mine:
        before = mine.call(ADD, "add", [(1, 2)])
        (zygote,) = mine._all
        os.kill(zygote.pid, signal.SIGKILL)
        after = mine.call(ADD, "add", [(1, 2)])
        assert before.values == after.values == (3,)
        assert mine.telemetry["zygotes_replaced"] == 1


def test_failing_zygotes_are_an_infrastructure_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(workers=1) as mine:
        monkeypatch.setattr(
            process_module.Zygote, "spawn", lambda *_: (_ for _ in ()).throw(process_module.ZygoteDied("gone"))
        )
        with pytest.raises(InfrastructureError, match="failed 3 times"):
            mine.call(ADD, "add", [(1, 2)])


def test_a_broken_interpreter_is_reported() -> None:
    with pytest.raises(IsolationError, match=r"ended|gone"):
        Sandbox("lsm", python="/bin/true")


def test_a_wedged_neighbour_does_not_matter(box: Sandbox) -> None:
    wedged = threading.Thread(
        target=lambda: box.call("def f():\n    while True: pass", "f", [()], limits=Limits(wall_s=3))
    )
    wedged.start()
    for _ in range(5):
        assert box.call(ADD, "add", [(1, 2)]).ok
    assert wedged.is_alive()
    wedged.join(30)


def test_pickling_and_closing(box: Sandbox) -> None:
    with Sandbox(workers=1, limits=Limits(cpu_s=3)) as mine:
        text = pickle.dumps(mine)
    with pickle.loads(text) as copy:
        assert copy.limits == Limits(cpu_s=3) and copy.call(ADD, "add", [(1, 2)]).ok
    copy.close()
    with pytest.raises(RuntimeError, match="closed"):
        copy.call(ADD, "add", [(1, 2)])


def test_a_fork_of_the_trainer_has_zygotes_of_its_own(box: Sandbox) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if box.call(ADD, "add", [(20, 22)]).values == (42,) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert box.call(ADD, "add", [(1, 2)]).ok


def test_closing_leaves_no_process() -> None:
    mine = Sandbox(workers=1)
    (zygote,) = mine._all
    mine.call(ADD, "add", [(1, 2)])
    mine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(zygote.pid, 0)


def _leak(count: int) -> None:
    reads = Path("/proc/self/statm")
    with Sandbox(workers=2) as mine:
        source = "def f(x):\n    return [x] * 10\n"
        run = lambda n: mine.call(source, "f", [(n,)]).values[0][0]  # noqa: E731
        assert list(mine.map(run, range(200))) == list(range(200))
        gc.collect()
        files, pages = _open_files(), int(reads.read_text().split()[1])
        zygote_pages = [int(Path(f"/proc/{zygote.pid}/statm").read_text().split()[1]) for zygote in mine._all]
        children = _descendants(os.getpid())
        assert list(mine.map(run, range(count))) == list(range(count))
        gc.collect()
        assert _open_files() == files
        assert _descendants(os.getpid()) == children
        assert int(reads.read_text().split()[1]) - pages < 2000, "more than 8 MB grew in the trainer"
        after = [int(Path(f"/proc/{zygote.pid}/statm").read_text().split()[1]) for zygote in mine._all]
        assert max(after) - max(zygote_pages) < 1000, "more than 4 MB grew in a zygote"
        assert "zygotes_replaced" not in mine.telemetry


def _descendants(pid: int) -> int:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found, todo = 0, [pid]
    while todo:
        children = [child for child, parent in parents.items() if parent == todo[-1]]
        todo.pop()
        found += len(children)
        todo += children
    return found


def test_nothing_leaks_over_a_thousand_completions() -> None:
    _leak(1000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_leaks_over_ten_thousand_completions() -> None:
    _leak(10_000)
