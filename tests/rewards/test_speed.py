"""Speed rewards: what is faster is paid for being faster, everything else is worth no more than it is."""

# ruff: noqa: E501 - a candidate, one line
from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from longreach.rewards import InfrastructureError, Limits, Sandbox, Tier, TimingPlan, speed_reward
from longreach.rewards.recipes import PYTHON_MATMUL, RECIPES, SpeedRecipe, verify_distances, verify_matmul
from longreach.rewards.sandbox.session import Timing
from longreach.rewards.speed import Measurement, SpeedReward, log2_pay
from longreach.rewards.timing import DeadZone, Ratio, compare, median_ratio, order_index, pick_cpu, sole_use

QUICK = TimingPlan(rounds=11, max_rounds=21, calibrations=4, edge_checks=4)
FAST = """
def matmul(A, B):
    from operator import mul
    columns = list(zip(*B))
    return [[sum(map(mul, row, column)) for column in columns] for row in A]
"""


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


@pytest.fixture(scope="module")
def box(make_sandbox: Callable[..., Sandbox]) -> Iterator[Sandbox]:
    """Patient, because other tests may want the same CPU."""
    with make_sandbox(workers=1, limits=Limits(cpu_s=20, wall_s=60, output_bytes=1 << 22)) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def reward(box: Sandbox) -> Iterator[SpeedReward]:
    with speed_reward("python_matmul", sandbox=box, plan=QUICK) as reward:
        yield reward


# -- statistics -------------------------------------------------------------------------------------------------------


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    assert order_index(15, 0.99) == 2  # 2 * (C(15,0) + C(15,1)) / 2**15 = 0.00098; with C(15,2) it is 0.0074
    rng = random.Random(5)
    held = 0
    for _ in range(2000):
        ratio = median_ratio([rng.lognormvariate(0, 0.7) for _ in range(15)], 0.9)
        held += ratio.low <= 1.0 <= ratio.high
    assert 0.9 <= held / 2000 <= 0.97
    with pytest.raises(ValueError, match="too few"):
        order_index(5, 0.99)


def test_overhead_is_taken_off_both_and_charges_are_added() -> None:
    base, cand = [Timing(2100, 21_000)] * 11, [Timing(2100, 11_000)] * 11
    cpu, wall = compare(base, cand, overhead=Timing(100, 1000), charge_ns=0, confidence=0.99)
    assert cpu.speedup == pytest.approx(2.0) and wall.speedup == pytest.approx(1.0)
    charged, _ = compare(base, cand, overhead=Timing(100, 1000), charge_ns=10_000, confidence=0.99)
    assert charged.speedup == pytest.approx(1.0)


def test_the_dead_zone_grows_with_the_noise() -> None:
    zone = DeadZone(0.03)
    assert zone.log_width == 0.03
    rng = random.Random(1)
    for _ in range(40):
        zone.add(Ratio(rng.gauss(0, 0.05), 0, 0, 15))
    assert 0.1 < zone.log_width < 0.35


def test_the_clock_is_chosen_and_locked(box: Sandbox) -> None:
    cpu = pick_cpu(None)
    assert pick_cpu(cpu) == cpu
    with pytest.raises(ValueError, match="cpu is 4096"):
        pick_cpu(4096)
    with sole_use(cpu):
        pass


@pytest.mark.parametrize(
    "arguments", [{"rounds": 3}, {"rounds": 30, "max_rounds": 20}, {"confidence": 1.0}, {"calibrations": 0}]
)
def test_bad_plans(arguments: dict) -> None:
    with pytest.raises(ValueError):
        TimingPlan(**arguments)


# -- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_baselines_pass_their_own_checks(name: str) -> None:
    recipe, rng = RECIPES[name], random.Random(3)
    scope: dict = {}
    exec(recipe.baseline, scope)
    for make in (recipe.edge, recipe.edge, recipe.edge, recipe.generate):
        args = make(rng)
        value = scope[recipe.function](*args)
        assert recipe.verify(args, value, value) == ""
        assert recipe.verify(args, value, value[::-1]) or len(value) == 1


def test_any_order_of_summation_passes_and_lower_precision_does_not() -> None:
    rng = random.Random(4)
    a = [[rng.uniform(-10, 10) for _ in range(40)] for _ in range(6)]
    b = [[rng.uniform(-10, 10) for _ in range(6)] for _ in range(40)]
    columns = list(zip(*b))
    exact = [[math.fsum(x * y for x, y in zip(row, column)) for column in columns] for row in a]
    back = [[sum(x * y for x, y in list(zip(row, column))[::-1]) for column in columns] for row in a]
    assert verify_matmul((a, b), exact, back) == ""
    import struct

    def single(x: float) -> float:
        return struct.unpack("f", struct.pack("f", x))[0]

    assert "off by more" in verify_matmul((a, b), exact, [[single(x) for x in row] for row in exact])
    tiny = [[x * 1e-200 for x in row] for row in a]
    assert verify_matmul((tiny, b), [[x * 1e-200 for x in row] for row in exact], [[0.0] * 6] * 6), (
        "a bound of fixed size would pass zeros"
    )
    for value in (
        None,
        [],
        [[0.0] * 5] * 6,
        [[float("nan")] * 6] * 6,
        [[float("inf")] * 6] * 6,
        [["0"] * 6] * 6,
        [(0.0,) * 6] * 6,
        [[True] * 6] * 6,
    ):
        assert verify_matmul((a, b), exact, value)


def test_the_expanded_form_of_distances_passes() -> None:
    rng = random.Random(6)
    x, y = ([[rng.uniform(-1, 1) for _ in range(24)] for _ in range(5)] for _ in range(2))
    plain = [[sum((a - b) ** 2 for a, b in zip(p, q)) for q in y] for p in x]
    expanded = [
        [sum(a * a for a in p) + sum(b * b for b in q) - 2 * sum(a * b for a, b in zip(p, q)) for q in y] for p in x
    ]
    assert verify_distances((x, y), plain, expanded) == ""
    assert verify_distances((x, y), plain, [[v * (1 + 1e-9) for v in row] for row in plain])


# -- verdicts, without a clock ----------------------------------------------------------------------------------------


def _verdict(
    reward: SpeedReward, median: float, low: float, high: float, *, wall: float | None = None, idle: float = 0.0
):
    cpu = Ratio(median, low, high, 15)
    on_wall = Ratio(wall, wall - 0.05, wall + 0.05, 15) if wall is not None else cpu
    return reward._verdict(Measurement(cpu, on_wall, idle, 0.0, 20), Tier.lsm)


def test_only_what_is_beyond_chance_is_paid(reward: SpeedReward) -> None:
    assert _verdict(reward, 0.01, -0.01, 0.02).reward == 1.0
    assert _verdict(reward, 0.5, -0.01, 1.0).reward == 1.0, "the lower end of the interval must clear the zone"
    assert _verdict(reward, math.log(2), 0.6, 0.7).reward == pytest.approx(2.0)
    assert _verdict(reward, -math.log(2), -0.7, -0.6).reward == pytest.approx(0.0)
    assert log2_pay(1e-9) == 0.0


def test_the_implausible_is_quarantined(reward: SpeedReward) -> None:
    assert "implausible" in _verdict(reward, math.log(50), 3.8, 4.0).reason
    assert "wall clock" in _verdict(reward, math.log(3), 1.0, 1.2, wall=0.0).reason
    assert "while it should wait" in _verdict(reward, 0.3, 0.25, 0.35, idle=0.9).reason
    for result in (_verdict(reward, math.log(50), 3.8, 4.0), _verdict(reward, 0.3, 0.25, 0.35, idle=0.9)):
        assert result.status == "quarantined" and result.reward is None


# -- whole measurements -----------------------------------------------------------------------------------------------

CHEATS = {
    "not a number": "def matmul(A, B): return [[float('nan')] * len(B[0]) for _ in A]",
    "numpy": "def matmul(A, B):\n    import numpy\n    return (numpy.array(A) @ numpy.array(B)).tolist()",
    "numpy by another name": "def matmul(A, B):\n    n = __import__('numpy')\n    return (n.array(A) @ n.array(B)).tolist()",
    "raises at once": "def matmul(A, B): raise ZeroDivisionError",
    "exits": "import os\ndef matmul(A, B): os._exit(0)",
    "minus a billion": "def matmul(A, B): return [[-1e9] * len(B[0]) for _ in A]",
    "zeroes its inputs": "def matmul(A, B):\n    for row in A: row[:] = [0.0] * len(row)\n    return [[0.0] * len(B[0]) for _ in A]",
    "remembers the first": FAST + "\nfirst = []\nreal = matmul\ndef matmul(A, B):\n    first.append(real(A, B)) if not first else 0\n    return first[0]",
    "half the rows": FAST + "\nreal = matmul\ndef matmul(A, B):\n    C = real(A[::2], B)\n    return [C[i // 2] for i in range(len(A))]",
    "a thread": "import threading\n" + FAST + "\nreal = matmul\ndef matmul(A, B):\n    threading.Thread(target=real, args=(A, B)).start()\n    return real(A, B)",
    "a lazy list": "class Lazy(list):\n    def __eq__(s, o): return True\n    def __len__(s): return 44\ndef matmul(A, B): return Lazy()",
    "rounds": FAST + "\nreal = matmul\ndef matmul(A, B): return [[round(x, 9) for x in r] for r in real(A, B)]",
    "forges an answer": "import os\ndef matmul(A, B):\n    os.write(3, bytes(21))\n    return []",
    "machine code": "import ctypes, mmap\nmmap.mmap(-1, 4096, prot=7)\n" + FAST,
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_wrong(reward: SpeedReward, name: str) -> None:
    (result,) = reward.grade(None, [fenced(CHEATS[name])])
    assert (result.status, result.reward) == ("wrong", 0.0), result


WORTHLESS = {
    "constant clock": "import time\nfor n in ('time', 'perf_counter', 'perf_counter_ns', 'process_time', 'monotonic'): setattr(time, n, lambda: 0)\n",
    "slow clock": "import time\nreal_clock = time.perf_counter\ntime.perf_counter = lambda: real_clock() / 1000\n",
    "cache by content": "import builtins\nbuiltins.cache = {}\n",
    "garbage collector off": "import gc\ngc.disable()\n",
}


@pytest.mark.parametrize("name", WORTHLESS)
def test_tricks_earn_no_more_than_the_same_code_honestly(reward: SpeedReward, name: str) -> None:
    source = WORTHLESS[name] + PYTHON_MATMUL.baseline
    if name == "cache by content":
        source += "\nreal = matmul\ndef matmul(A, B):\n    key = repr(A[0][:2])\n    if key not in cache: cache[key] = real(A, B)\n    return cache[key]"
    result = reward.grade_source(source)
    assert result.status == "ok" and result.reward is not None, result
    assert result.reward <= 1.0 + math.log2(1 + result.telemetry["dead_zone"]) + 0.05


def test_a_faster_kernel_is_paid_for_its_speed(reward: SpeedReward) -> None:
    result = reward.grade_source(FAST)
    assert result.status == "ok" and result.telemetry["speedup"] > 1.3
    assert result.reward == pytest.approx(1 + math.log2(result.telemetry["speedup"]))
    assert result.checks_passed == result.checks_total >= 15
    assert result.tier >= Tier.lsm and result.components["speed"] > 0


# The same work done 19 times and 10 times: 1.9 times faster by construction, whatever the machine.
_LOOP = "def work(n, x):\n    total = 0.0\n    for _ in range({times}):\n        for i in range(n):\n            total = total * 0.5 + x\n    return total\n"
COUNTED = SpeedRecipe(
    name="counted",
    function="work",
    baseline=_LOOP.format(times=19),
    idle="def work(n, x): return 0.0\n",
    generate=lambda rng: (3000 + rng.randrange(50), rng.uniform(1, 2)),
    edge=lambda rng: (rng.randrange(5, 100), rng.uniform(1, 2)),
    verify=lambda args, expected, value: "" if type(value) is float and abs(value - expected) < 1e-6 else "wrong",
)


def test_a_speed_up_of_1_9_is_measured_as_1_9(box: Sandbox) -> None:
    with speed_reward(COUNTED, sandbox=box, plan=replace(QUICK, edge_checks=0)) as reward:
        measured = reward.measure(_LOOP.format(times=10))
    assert isinstance(measured, Measurement)
    assert measured.cpu.speedup == pytest.approx(1.9, rel=0.1)


# After each answer it spins until the next question comes, on the CPU on which the baseline is being timed.
SPINNER = (
    FAST
    + """
import select, sys
frame = sys._getframe()
while "_reply" not in frame.f_globals:
    frame = frame.f_back
answer = frame.f_globals["_reply"]
def spin(*arguments):
    answer(*arguments)
    poll = select.poll()
    poll.register(3, select.POLLIN)
    while not poll.poll(0):
        pass
frame.f_globals["_reply"] = spin
"""
)


def test_working_while_waiting_is_noticed(reward: SpeedReward) -> None:
    measured = reward.measure(SPINNER)
    assert isinstance(measured, Measurement), measured
    assert measured.idle_share > reward.plan.idle_share
    assert reward._verdict(measured, Tier.ns).status == "quarantined"


def test_precomputing_at_import_is_charged(box: Sandbox) -> None:
    lazy = "table = [i * i for i in range(2_000_000)]\n" + FAST
    with speed_reward("python_matmul", sandbox=box, plan=QUICK) as reward:
        plain, charged = reward.measure(FAST), reward.measure(lazy)
    assert isinstance(plain, Measurement) and isinstance(charged, Measurement)
    assert charged.charge_ns > 1_000_000 and charged.cpu.speedup < plain.cpu.speedup


def test_a_candidate_that_stalls_is_not_the_graders_failure(box: Sandbox) -> None:
    stall = "import time\ncalls = 0\ndef work(n, x):\n    global calls\n    calls += 1\n    time.sleep(1.05 if calls > 1 else 0)\n    return 0.0\n"
    recipe = replace(COUNTED, verify=lambda args, expected, value: "")
    with speed_reward(recipe, sandbox=box, plan=replace(QUICK, edge_checks=0)) as reward:
        reward.limits = replace(reward.limits, wall_s=1.0)
        failure, error, _ = reward.measure(stall)  # type: ignore[misc]
    assert failure == "wall" and "1.0 s" in error


def test_a_broken_recipe_is_the_graders_failure(box: Sandbox) -> None:
    broken = replace(COUNTED, baseline="def work(n, x): return 1 / 0")
    with (
        speed_reward(broken, sandbox=box, plan=QUICK) as reward,
        pytest.raises(InfrastructureError, match="baseline of counted"),
    ):
        reward(completions=[fenced("def work(n, x): return 0.0")])
    with pytest.raises(ValueError, match="recipe is 'nothing'"):
        speed_reward("nothing")
    with pytest.raises(ValueError, match="max_speedup"):
        replace(COUNTED, max_speedup=1.0)


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(InfrastructureError, match="needs Linux"):
        speed_reward("python_matmul")


def test_pickling() -> None:
    with speed_reward("vector_distances", plan=QUICK) as reward:
        text = pickle.dumps(reward)
    copy = pickle.loads(text)
    assert copy.recipe.name == "vector_distances" and copy.plan == QUICK
    assert copy(completions=["no code"]) == [0.0]
    copy.close()
