"""The supervisor of GPU kernels, on the CPU: protocol, fresh inputs, poisoned memory, verdicts. Its GPU twin: tests/gpu."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from longreach.rewards import InfrastructureError, Tier
from longreach.rewards.gpu import KERNEL_RECIPES, KernelPlan, KernelRecipe, KernelReward, kernel_reward
from longreach.rewards.gpu.kernel_reward import error_problem
from longreach.rewards.gpu.process import KernelFailed, KernelProcess
from longreach.rewards.sandbox.session import Timing
from longreach.rewards.timing import Ratio

pytest.importorskip("torch", reason="kernels run in processes that need torch")

# On the CPU a softmax is done before the exchange is: the baseline repeats itself, so that there is something to time.
SMALL = replace(
    KERNEL_RECIPES["row_softmax"],
    baseline="import torch\ndef softmax(x):\n    for _ in range(12):\n        out = torch.softmax(x, dim=1)\n    return out\n",
    sizes={"rows": 64, "columns": 2048},
    edge_sizes=({"rows": 3, "columns": 17},),
    calls=3,
    max_speedup=1000.0,
)
PLAN = KernelPlan(rounds=11, calibrations=2, call_s=20.0)
RIGHT = "import torch\ndef softmax(x):\n    return torch.softmax(x, dim=1)\n"


@pytest.fixture(scope="module")
def reward() -> Iterator[KernelReward]:
    with kernel_reward(SMALL, device="cpu", plan=PLAN, min_tier="rlimit") as reward:
        for _ in range(PLAN.calibrations):  # the clock is not what is tested here
            reward.dead_zone.add(Ratio(0.0, 0.0, 0.0, 11))
        yield reward


def test_a_right_kernel_is_paid_and_stamped(reward: KernelReward) -> None:
    (result,) = reward.grade(None, [f"```python\n{RIGHT}```"])
    assert result.status == "ok" and result.reward is not None
    assert result.tier is Tier.rlimit, "less trusted, and it says so"
    assert result.checks_passed == result.checks_total == 2 + 12


CHEATS = {
    "nothing written": ("import torch\ndef softmax(x): return torch.empty_like(x)", "error|finite"),
    "lower precision": ("import torch\ndef softmax(x): return torch.softmax(x.bfloat16(), dim=1).float()", "error"),
    "other dtype": ("import torch\ndef softmax(x): return torch.softmax(x, dim=1).bfloat16()", "must be torch.float32"),
    "other shape": (
        "import torch\ndef softmax(x): return torch.softmax(x, dim=1)[:1]",
        r"must be torch.float32 \[3, 17\]",
    ),
    "constant": ("import torch\ndef softmax(x): return torch.full_like(x, 1 / x.shape[1])", "error"),
    "remembers": (
        RIGHT + "real, seen = softmax, {}\ndef softmax(x):\n    return seen.setdefault(x.shape, real(x))",
        "error",
    ),
    "remembers by address": (
        RIGHT
        + "real, seen = softmax, {}\ndef softmax(x):\n    return seen.setdefault((x.data_ptr(), x.shape), real(x))",
        "error",
    ),
    "zeroes its inputs": ("import torch\ndef softmax(x):\n    x.zero_()\n    return torch.zeros_like(x)", "error"),
    "not a tensor": ("def softmax(x): return 3", "exception"),
    "a subclass": (
        "import torch\nclass Lazy(torch.Tensor): pass\ndef softmax(x): return torch.empty_like(x).as_subclass(Lazy)",
        "exception|error|finite",
    ),
    "exits": ("import os\ndef softmax(x): os._exit(0)", "died"),
    "raises": ("def softmax(x): raise ValueError('no')", "ValueError: no"),
    "missing": ("x = 1", "AttributeError"),
    "patches the worker": (
        "import sys, torch\nmain = sys.modules['__main__']\nmain.mix = lambda outputs, seed: outputs[0]\n"
        "main.Worker.synchronize = lambda self: None\n" + RIGHT,
        "error",
    ),
    "forges a reply": (
        "import os, sys\ndef softmax(x):\n    os.write(int(sys.argv[1]), bytes(99))\n    return x",
        "protocol",
    ),
}


QUICK = ("nothing written", "forges a reply", "exits")  # every candidate starts a process that imports torch: seconds
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CHEATS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_cheats_are_wrong(reward: KernelReward, name: str) -> None:
    source, says = CHEATS[name]
    result = reward.grade_source(source)
    assert (result.status, result.reward) == ("wrong", 0.0), result
    assert re.search(says, result.reason), result.reason


def test_the_clock_is_the_graders(reward: KernelReward) -> None:
    """Patched clocks change nothing: three times the work is measured as such."""
    slow = RIGHT + (
        "import time\nfor name in ('time', 'perf_counter', 'perf_counter_ns', 'monotonic'): setattr(time, name, lambda: 0)\n"
        "real = softmax\ndef softmax(x):\n    for _ in range(36): out = real(x)\n    return out\n"
    )
    ratio, _ = reward.measure(slow)
    assert 0.15 < ratio.speedup < 0.7


def test_verdicts(reward: KernelReward) -> None:
    assert "implausible" in reward._verdict(Ratio(8.0, 7.9, 8.1, 15), 5).reason
    assert reward._verdict(Ratio(8.0, 7.9, 8.1, 15), 5).status == "quarantined"
    assert reward._verdict(Ratio(0.5, -0.1, 1.0, 15), 5).reward == 1.0
    assert reward._verdict(Ratio(0.6931, 0.6, 0.7, 15), 5).reward == pytest.approx(2.0, abs=1e-3)


def test_errors_are_measured_by_the_baselines_own() -> None:
    verdict: dict[str, Any] = {
        "problem": "",
        "scale": 1.0,
        "epsilon": 1e-3,
        "candidate": [1e-2, 5e-2],
        "baseline": [6e-3, 3e-2],
    }
    assert error_problem(verdict, 2.0) == ""
    assert "rms" in error_problem({**verdict, "candidate": [2e-2, 5e-2]}, 2.0)
    assert "largest" in error_problem({**verdict, "candidate": [1e-2, 9e-2]}, 2.0)
    assert error_problem({**verdict, "candidate": [float("nan"), 0.0]}, 2.0)


@pytest.mark.slow
def test_a_triton_source_is_loaded_from_a_file(tmp_path: Any) -> None:
    """Triton reads a kernel's source from its module's file; candidates get one."""
    worker = KernelProcess("cpu")
    try:
        worker.ask({"op": "setup", "inputs": SMALL.inputs}, 60)
        source = "import inspect\ndef g(): pass\ntext = inspect.getsource(g)\nimport torch\ndef softmax(x): return x\n"
        worker.ask({"op": "add", "role": "candidate", "source": source, "function": "softmax"}, 60)
        batch = {"seeds": [1], "sizes": {"rows": 2, "columns": 3}, "mix_seed": 0}
        first, _ = worker.ask({"op": "run", "role": "candidate", **batch}, 60)
        again, _ = worker.ask({"op": "run", "role": "candidate", **batch}, 60)
        other, _ = worker.ask({"op": "run", "role": "candidate", **{**batch, "seeds": [2]}}, 60)
        assert first["data"].tobytes() == again["data"].tobytes() != other["data"].tobytes()
        with pytest.raises(KernelFailed, match="KeyError"):
            worker.ask({"op": "run", "role": "truth", **batch}, 60)
    finally:
        worker.close()


def test_a_hanging_kernel_is_killed() -> None:
    worker = KernelProcess("cpu")
    try:
        worker.ask({"op": "setup", "inputs": SMALL.inputs}, 60)
        with pytest.raises(KernelFailed, match="no answer within"):
            worker.ask({"op": "add", "role": "candidate", "source": "while True: pass", "function": "f"}, 0.5)
    finally:
        worker.close()
    assert worker._process.poll() is not None


def test_it_must_be_wanted() -> None:
    with pytest.raises(InfrastructureError, match="min_tier='rlimit'"):
        kernel_reward("row_softmax")
    with pytest.raises(ValueError, match="recipe is 'none'"):
        kernel_reward("none", min_tier="rlimit")
    with pytest.raises(ValueError, match="calls is 1"):
        replace(SMALL, calls=1)
    with pytest.raises(ValueError, match="rounds is 3"):
        KernelPlan(rounds=3)


TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(x, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    exponentials = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + at, exponentials / tl.sum(exponentials, 0), mask=at < columns)

def softmax(x):
    out = torch.empty_like(x)
    kernel[(ROWS,)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "problem"), [("x.shape[0]", ""), ("x.shape[0] // 2", "never written|rms error")])
def test_triton_kernels_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, rows: str, problem: str) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    candidate, judge = KernelProcess("cpu"), KernelProcess("cpu")
    try:
        for process in (candidate, judge):
            process.ask({"op": "setup", "inputs": SMALL.inputs}, 60)
        sources = [(candidate, "candidate", TRITON.replace("ROWS", rows)), (judge, "baseline", SMALL.baseline)]
        for process, role, source in [*sources, (judge, "truth", SMALL.truth)]:
            process.ask({"op": "add", "role": role, "source": source, "function": "softmax"}, 60)
        batch = {"seeds": [1, 2], "sizes": {"rows": 6, "columns": 50}, "mix_seed": 3}
        said, _ = candidate.ask({"op": "run", "role": "candidate", **batch}, 60)
        verdict, _ = judge.ask({"op": "judge", "said": said, **batch}, 60)
    finally:
        candidate.close()
        judge.close()
    found = error_problem(verdict, 2.0)
    assert re.search(problem, found) and bool(problem) is bool(found)


@pytest.mark.slow
def test_a_broken_recipe_is_the_graders_failure() -> None:
    too_short = replace(SMALL, baseline=SMALL.idle)
    with kernel_reward(too_short, device="cpu", plan=PLAN, min_tier="rlimit") as reward:
        rounds = [{side: Timing(1000 + index, 0) for side in ("idle", "baseline", "candidate")} for index in range(11)]
        with pytest.raises(InfrastructureError, match="larger sizes or more calls"):
            reward._ratio(rounds)
    broken: KernelRecipe = replace(SMALL, truth="def softmax(x): raise RuntimeError('broken truth')")
    with kernel_reward(broken, device="cpu", plan=PLAN, min_tier="rlimit") as reward:
        with pytest.raises(InfrastructureError, match="broken truth"):
            reward.grade_source(RIGHT)
        assert pickle.loads(pickle.dumps(reward)).recipe == broken
