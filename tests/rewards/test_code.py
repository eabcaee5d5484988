"""Code rewards pay for right code, and for nothing else."""

# ruff: noqa: E501 - a candidate, one line
from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from longreach.rewards import (
    FunctionTask,
    InfrastructureError,
    Policy,
    ProgramTask,
    Relation,
    RewardResult,
    Sandbox,
    Tier,
    code_reward,
    policy_reward,
    to_rewards,
)
from longreach.rewards.code import CodeReward, _plan_function
from longreach.rewards.compare import matches, same_output
from longreach.rewards.extraction import extract_code
from longreach.rewards.tasks import task_from_column


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\n"


def some_list(rng: random.Random) -> Sequence[Any]:
    return ([rng.randint(-50, 50) for _ in range(rng.randint(0, 12))],)


def shuffled(rng: random.Random, args: Sequence[Any]) -> Sequence[Any]:
    return (rng.sample(args[0], len(args[0])),)


def same_answer(_args: Any, value: Any, _other_args: Any, other: Any) -> bool:
    return bool(value == other)


SORT = FunctionTask(
    "srt",
    generate=some_list,
    reference=sorted,
    relations=[Relation("order of the input", shuffled, same_answer)],
    cases=[(([3, 1, 2],), [1, 2, 3])],
)
DOUBLE = ProgramTask(cases=[("3\n", "6\n"), ("10\n", "20\n"), ("0\n", "0\n")])


@pytest.fixture(scope="module")
def reward(box: Sandbox) -> Iterator[CodeReward]:
    with code_reward(SORT, sandbox=box) as reward:
        yield reward


# -- whole answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ("def f(): pass", "no Python code block"),
        ("```python\nx = 1\n", "not closed"),
        ("```python\nx = 1\n```\nor\n```python\nx = 2\n```", "2 different"),
        ("<think>```python\nx = 1\n```", "never closed"),
        ("<think>a</think><think>b</think>```\nx = 1\n```", "more than once"),
        ("```python\nx = 1\n```<think>hm</think>", "text before"),
        ("```json\n{}\n```", "no Python code block"),
        ("```python\n\n```", "no Python code block"),
    ],
)
def test_no_answer(completion: str, problem: str) -> None:
    found = extract_code(completion)
    assert found.text == "" and problem in found.problem


def test_one_answer() -> None:
    assert extract_code("<think>```python\nx = 1\n```</think>Now:\n```py\nx = 2\n```\nDone").text == "x = 2\n"
    assert extract_code("reasoning</think>\n```\nx = 2\n```").text == "x = 2\n"
    assert extract_code("```python\nx = 2\n```\nRun it:\n```bash\npython x.py\n```").text == "x = 2\n"
    assert extract_code("```python\nx = 1\n```\n```python\nx = 2\n```", blocks="last").text == "x = 2\n"
    assert extract_code('````python\ns = """\n```\n"""\n````').text == 's = """\n```\n"""\n'


# -- comparison -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (1, 1, True), (1, True, False), (True, 1, False), (2, 2.0, True), (0.3, 0.1 + 0.2, True), (1, 1.0001, False),
        (10**30, 10**30 + 1, False), (float("nan"), float("nan"), True), (1.0, float("nan"), False), (1.0, float("inf"), False),
        ("a", "a", True), ("a", b"a", False), (None, None, True), (None, 0, False), ([1, (2, 3)], (1, [2, 3]), True),
        ([1], [1, 2], False), ({"a": 1}, {"a": 1.0}, True), ({"a": 1}, {"a": 1, "b": 2}, False), ({1, 2}, {2, 1}, True),
        ({1}, {True}, False), ({1: "x"}, {True: "x"}, False), (1 + 1j, 1 + 1j, True), ("1", 1, False), ([], "", False),
    ],
)  # fmt: skip
def test_values_match(expected: Any, got: Any, same: bool) -> None:
    assert matches(expected, got) is same


def test_deep_values_do_not_match() -> None:
    deep: list = []
    for _ in range(500):
        deep = [deep]
    assert not matches(deep, deep)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("1\n2\n", b"1\n2", True), ("1\n2\n", b"1\n", False), ("1\n", b"1\n2\n", False), ("1", b"1  \r\n\n\n", True),
        ("a b", b"a  b", False), ("", b"", True), ("x", b"\xff", False),
    ],
)  # fmt: skip
def test_whole_outputs_are_compared(expected: str, got: bytes, same: bool) -> None:
    assert same_output(expected, got) is same


def test_numbers_in_outputs() -> None:
    assert same_output("0.3333 x", b"0.33330000001 x", rel_tol=1e-6)
    assert not same_output("0.3333", b"nan", rel_tol=1e-6) and not same_output("0.3333", b"inf", rel_tol=1e-6)


# -- functions --------------------------------------------------------------------------------------------------------

WRONG_FUNCTIONS = {
    "identity": "def srt(x): return x",
    "constant": "def srt(x): return []",
    "learnt by heart": "def srt(x): return [1, 2, 3]",
    "equals everything": "class E(list):\n    def __eq__(s, o): return True\ndef srt(x): return E()",
    "not a number": "def srt(x): return float('nan')",
    "none": "def srt(x): pass",
    "exits": "import os\ndef srt(x): os._exit(0)",
    "exits at load": "raise SystemExit(0)",
    "raises": "def srt(x): raise AssertionError",
    "object": "def srt(x): return object()",
    "reads frames": "import sys\ndef srt(x):\n    f = sys._getframe()\n    while f:\n        if 'expected' in f.f_locals: return f.f_locals['expected']\n        f = f.f_back",
    "forged": "import os\nos.write(3, b'\\x00' * 21)\ndef srt(x): return sorted(x)",
    "other order": "def srt(x): return sorted(x)[::-1]",
    "strings": "def srt(x): return [str(v) for v in sorted(x)]",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_wrong_functions_are_not_paid(reward: CodeReward, name: str) -> None:
    (result,) = reward.grade(None, [fenced(WRONG_FUNCTIONS[name])])
    assert result.status == "wrong" and result.reward == 0.0 and result.reason


@pytest.mark.parametrize(
    "source",
    [
        "def srt(x): return sorted(x)",
        "srt = sorted",
        "def srt(x):\n    x.sort()\n    return tuple(x)",
        "import heapq\ndef srt(x):\n    heapq.heapify(x)\n    return [heapq.heappop(x) for _ in range(len(x))]",
        "def srt(x):\n    print('debugging')\n    return x if len(x) < 2 else srt([v for v in x[1:] if v < x[0]]) + [x[0]] + srt([v for v in x[1:] if v >= x[0]])",
    ],
)  # fmt: skip
def test_right_functions_are_paid(reward: CodeReward, source: str) -> None:
    (result,) = reward.grade(None, [fenced(source)])
    assert result.status == "ok" and result.reward == 1.0
    assert result.checks_passed == result.checks_total == 41
    assert result.tier >= Tier.lsm


def test_one_completion_cannot_harm_another(reward: CodeReward) -> None:
    good = fenced("def srt(x): return sorted(x)")
    saboteur = fenced(
        "import builtins, os, gc\nbuiltins.sorted = lambda x: []\ndef srt(x):\n"
        "    for o in gc.get_objects():\n        if type(o) is list: o.clear()\n    os.kill(os.getpid(), 9)"
    )
    rewards = reward(prompts=["p"] * 6, completions=[good, saboteur, good, saboteur, good, good])
    assert rewards == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]


def test_conversations_and_logging(reward: CodeReward) -> None:
    turns = [{"role": "user", "content": "sort"}, {"role": "assistant", "content": fenced("srt = sorted")}]
    logged: dict[str, float] = {}
    assert reward(prompts=[turns[:1]], completions=[turns], log_metric=logged.__setitem__) == [1.0]
    assert logged == {
        "code_reward/ok": 1.0,
        "code_reward/wrong": 0.0,
        "code_reward/quarantined": 0.0,
        "code_reward/denials": 0.0,
    }
    assert reward.__name__ == "code_reward"


def test_inputs_are_fresh_each_time_unless_seeded(box: Sandbox) -> None:
    seen: list[Any] = []

    def spy(rng: random.Random) -> Sequence[Any]:
        seen.append(some_list(rng)[0])
        return (seen[-1],)

    task = FunctionTask("srt", generate=spy, reference=sorted, fresh=5)
    source = "srt = sorted"
    for seed in (None, 7):
        seen.clear()
        with code_reward(task, sandbox=box, seed=seed) as reward:
            reward.grade_source(source, task)
            reward.grade_source(source, task)
        assert (seen[:5] == seen[5:]) is (seed is not None)


def test_fixed_cases_and_related_inputs_hide_among_the_others() -> None:
    orders = set()
    for seed in range(5):
        inputs, checks = _plan_function(SORT, random.Random(seed))
        assert len(inputs) == 1 + 20 + 20 * 2 and len(checks) == 41
        orders.add(inputs.index(([3, 1, 2],)))
        pairs = [needs for needs, _ in checks if len(needs) == 2]
        assert sum(abs(a - b) == 1 for a, b in pairs) < 10
    assert len(orders) > 2


def test_checks_of_properties(box: Sandbox) -> None:
    task = FunctionTask(
        "root", generate=lambda rng: (rng.uniform(1, 100),), check=lambda args, v: abs(v * v - args[0]) < 1e-6
    )
    with code_reward(task, sandbox=box) as reward:
        assert reward.grade_source("def root(x): return -x ** 0.5", task).reward == 1.0
        for value in ("None", "'x'", "[]", "10 ** 400", "float('nan')"):
            assert reward.grade_source(f"def root(x): return {value}", task).status == "wrong"


def test_a_broken_task_is_the_graders_failure(box: Sandbox) -> None:
    broken = FunctionTask("f", generate=lambda rng: (1,), reference=lambda x: 1 / 0)
    with code_reward(broken, sandbox=box) as reward:
        (result,) = reward.grade(None, [fenced("def f(x): return 1")])
        assert result.status == "infrastructure_error" and result.reward is None
        with pytest.raises(InfrastructureError, match="reference raised ZeroDivisionError"):
            reward(completions=[fenced("def f(x): return 1")])

    def odd_check(args: Any, value: Any) -> bool:
        raise RuntimeError("a bug in the check")

    with code_reward(FunctionTask("f", generate=lambda rng: (1,), check=odd_check), sandbox=box) as reward:
        assert reward(completions=[fenced("def f(x): return 1")]) == [None]


def test_partial_credit_stays_below_half(box: Sandbox) -> None:
    task = FunctionTask("f", cases=[((n,), n % 2) for n in range(10)])
    with code_reward(task, sandbox=box, partial=True, correct=2.0, wrong=-1.0) as reward:
        result = reward.grade_source("def f(n): return 0", task)
        assert result.status == "wrong" and result.checks_passed == 5
        assert result.reward == pytest.approx(-1 + 0.5 * 3 / 2)
        assert reward.grade_source("def f(n): return n % 2", task).reward == 2.0
        assert reward.grade_source("def f(n): return 5", task).reward == -1.0


def test_tampering(box: Sandbox) -> None:
    task = FunctionTask("f", cases=[((1,), 1), ((2,), 2)])
    nosy = "import socket\ntry: socket.socket()\nexcept OSError: pass\ndef f(x): return x"
    with code_reward(task, sandbox=box) as reward:
        result = reward.grade_source(nosy, task)
        assert result.reward == 1.0 and result.telemetry["denials"] == {"socket": 1}
    with code_reward(task, sandbox=box, tampering="quarantine") as reward:
        assert reward.grade_source(nosy, task).status == "quarantined"
        forged = reward.grade_source("import os\nos.write(3, bytes(21))\ndef f(x): return x", task)
        assert forged.status == "quarantined" and to_rewards([forged]) == [None]
        assert reward.grade_source("def f(x): return 0", task).status == "wrong"


def test_weak_tasks_are_pointed_out() -> None:
    assert SORT.weaknesses() == []
    rare = FunctionTask("p", generate=lambda rng: (rng.getrandbits(64),), reference=lambda n: str(n) == str(n)[::-1])
    assert "constant False" in rare.weaknesses()[0]
    assert "learnt by heart" in FunctionTask("f", cases=[((1,), 1), ((2,), 2)]).weaknesses()[0]


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "right"),
    [
        ("print(int(input()) * 2)", True),
        ("import sys\nprint(2 * int(sys.stdin.readline()))\nsys.exit(0)", True),
        ("print(6)", False),
        ("print(int(input()) * 2); print('more')", False),
        ("print(int(input()) * 2, end=''); raise SystemExit(1)", False),
        ("print(int(input()) * 2); 1 / 0", False),
        ("import os; os._exit(0)", False),
        ("", False),
    ],
)
def test_programs(reward: CodeReward, source: str, right: bool) -> None:
    assert (reward.grade_source(source, DOUBLE).status == "ok") is right


def test_programs_with_fresh_inputs(box: Sandbox) -> None:
    task = ProgramTask(generate=lambda rng: f"{rng.randint(1, 10**9)}\n", reference=lambda text: f"{int(text) + 1}\n")
    with code_reward(task, sandbox=box) as reward:
        assert reward.grade_source("print(int(input()) + 1)", task).reward == 1.0
        assert reward.grade_source("print(int(input()))", task).reward == 0.0
    check = ProgramTask(
        generate=lambda rng: "5\n", check=lambda stdin, stdout: sum(map(int, stdout.split())) == int(stdin)
    )
    with code_reward(check, sandbox=box) as reward:
        assert reward.grade_source("print(2, 3)", check).reward == 1.0
        assert reward.grade_source("print('x')", check).reward == 0.0


# -- the reward as TRL meets it ---------------------------------------------------------------------------------------


def test_tasks_from_a_column(box: Sandbox) -> None:
    tasks = [
        {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]},
        '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}',
        ["assert f(1, 2) == 3"],
        {"tests": ["assert f(1, 2) == 3"], "inputs": None},
    ]
    function = fenced("def f(a, b): return a + b")
    program = fenced("print(sum(map(int, input().split())))")
    with code_reward(column="tests", sandbox=box) as reward:
        assert reward(completions=[function, program, function, function], tests=tasks) == [1.0] * 4
        with pytest.raises(ValueError, match="no column 'tests'"):
            reward(completions=[function])
        with pytest.raises(ValueError, match="1 completions came with 2 tasks"):
            reward(completions=[function], tests=tasks[:2])
    for bad in (3, "x", {"inputs": [1], "outputs": []}, [], {}):
        with pytest.raises(ValueError, match="task column"):
            task_from_column(bad)


def test_pickled_rewards_work(box: Sandbox) -> None:
    with code_reward(SORT, workers=1) as reward:
        text = pickle.dumps(reward)
    with pytest.raises(RuntimeError, match="closed"):
        reward(completions=[fenced("srt = sorted")])
    copy = pickle.loads(text)
    assert copy(completions=[fenced("srt = sorted")]) == [1.0]
    copy.close()


def test_policy_is_a_signal_of_its_own(box: Sandbox) -> None:
    policy = Policy(banned_imports=["numpy"], banned_names=["eval"], max_lines=5)
    source = "import numpy.linalg\ndef srt(x): return eval('sorted')(x)\n\n\n\n\n"
    assert len(policy.findings(source)) == 3 and policy.findings("srt = sorted") == []
    assert policy_reward(policy)(completions=[fenced(source), fenced("srt = sorted"), "none"]) == [-1.0, 0.0, -1.0]
    with code_reward(SORT, sandbox=box, policy=Policy(banned_names=["sorted"])) as reward:
        result = reward.grade_source("srt = sorted", SORT)
        assert result.status == "ok" and result.telemetry["policy"] == ["uses sorted"]


def test_results_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="needs a finite number"):
        RewardResult("ok", float("nan"))
    with pytest.raises(ValueError, match="has reward None"):
        RewardResult("quarantined", 0.0)
    with pytest.raises(ValueError, match="status is 'fine'"):
        RewardResult("fine", 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checks_passed is 2"):
        RewardResult.ok(1, checks_passed=2, checks_total=1)
    with pytest.raises(InfrastructureError, match="completion 1"):
        to_rewards([RewardResult.ok(1), RewardResult.infrastructure_error("disk full")])
    assert Tier.none < Tier.rlimit < Tier.lsm < Tier.ns < Tier.vm
    with pytest.raises(ValueError, match="must be worth more"):
        code_reward(SORT, correct=0.0)
