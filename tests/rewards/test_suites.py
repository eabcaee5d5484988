"""Rewards of test suites: right modules pass, wrong ones and those that meddle with the tests don't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longreach.rewards import Limits, Sandbox, Suite, SuiteTask, code_reward
from longreach.rewards.code import CodeReward
from longreach.rewards.sandbox import SuiteError

STACK = SuiteTask(
    Suite(
        files={
            "tests/test_stack.py": """
import unittest
from solution import Stack, twice
def test_twice():
    assert twice(4) == 8
    assert abs(twice(0.5) - 1.0) < 1e-9
    assert 6 in [twice(3), 0]
class TestStack(unittest.TestCase):
    def test_push_pop(self):
        s = Stack(); s.push(4); s.push(5)
        self.assertEqual(len(s), 2)
        self.assertEqual(s.pop(), 5)
    def test_empty(self):
        with self.assertRaises(IndexError):
            Stack().pop()
"""
        }
    )
)
HONEST_STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self):
        return self.items.pop()
    def __len__(self): return len(self.items)
def twice(x): return 2 * x
"""


@pytest.fixture(scope="module")
def reward(box: Sandbox) -> Iterator[CodeReward]:
    with code_reward(STACK, sandbox=box) as reward:
        yield reward


WRONG_STACKS = {
    "exit": "import os\n" + HONEST_STACK + "def twice(x): os._exit(0)",
    "exit at import": "import sys\nsys.exit(0)",
    "skip": "import unittest\n" + HONEST_STACK + "def twice(x): raise unittest.SkipTest",
    "patch unittest": "import unittest\nunittest.TestCase.run = lambda *a, **k: None\n"
    + HONEST_STACK.replace("2 * x", "0"),
    "patch assert": "import builtins\nbuiltins.AssertionError = ValueError\n" + HONEST_STACK.replace("2 * x", "0"),
    "equals everything": HONEST_STACK + "class E:\n    def __eq__(s, o): return True\ndef twice(x): return E()",
    "subtracts to nothing": HONEST_STACK
    + "class E:\n    def __sub__(s, o): return 0.0\n    def __eq__(s, o): return True\n    def __abs__(s): return 0\n"
    "    def __lt__(s, o): return True\n    def __contains__(s, o): return True\ndef twice(x): return E()",
    "missing": "def twice(x): return 2 * x",
    "true everywhere": HONEST_STACK.replace("2 * x", "True"),
    "forged record": "import os, json\nos.write(3, json.dumps({'records': []}).encode())\n" + HONEST_STACK,
    "raises everywhere": HONEST_STACK.replace("return 2 * x", "raise IndexError"),
}


@pytest.mark.parametrize("name", WRONG_STACKS)
def test_suites_do_not_pass_wrong_modules(reward: CodeReward, name: str) -> None:
    result = reward.grade_source(WRONG_STACKS[name], STACK)
    assert result.status == "wrong" and result.reason, result


def test_suites_pass_right_modules(reward: CodeReward) -> None:
    result = reward.grade_source(HONEST_STACK, STACK)
    assert (result.status, result.checks_passed, result.checks_total) == ("ok", 3, 3), result
    snippets = SuiteTask(Suite(snippets=["assert twice(2) == 4", "s = Stack()\ns.push(1)\nassert s.pop() == 1"]))
    assert reward.grade_source(HONEST_STACK, snippets).checks_passed == 2
    human = SuiteTask(Suite(snippets=["def check(candidate):\n    assert candidate(3) == 6\ncheck(twice)"]))
    assert reward.grade_source(HONEST_STACK, human).status == "ok"
    assert reward.grade_source("def twice(x): return 0", human).status == "wrong"


def test_tests_of_changed_arguments(reward: CodeReward) -> None:
    snippet = "xs = [3, 1]\nf(xs)\nassert xs == [1, 3]"
    assert reward.grade_source("def f(x): x.sort()", SuiteTask(Suite([snippet], in_place=True))).status == "ok"
    assert reward.grade_source("def f(x): x.sort()", SuiteTask(Suite([snippet]))).status == "wrong"
    reads_again = SuiteTask(Suite(["xs = [3, 1]\nys = f(xs)\nassert ys == sorted(xs)"]))
    assert reward.grade_source("def f(x):\n    x.clear()\n    return []", reads_again).status == "wrong"


def test_a_candidate_cannot_break_the_suite(box: Sandbox) -> None:
    """What overwhelms the tests' process stops neither the run nor is it paid."""
    endless = "class E:\n    def __iter__(s): return s\n    def __next__(s): return 1\ndef f(): return E()"
    heavy = "def f(): return 'a' * 30 + 'b'"
    loops, backtracks = Suite(["assert sum(f()) == 3"]), Suite(["import re\nassert re.match('(a+)+$', f())"])
    with code_reward(STACK, sandbox=Sandbox(workers=1, limits=Limits(cpu_s=1, wall_s=1))) as reward:
        assert reward.grade_source(endless, SuiteTask(loops)).status == "wrong"
        assert reward.grade_source(heavy, SuiteTask(backtracks)).status == "quarantined"
        reward.sandbox.close()


def test_broken_suites_are_the_authors_failure(reward: CodeReward) -> None:
    callback = SuiteTask(Suite(["assert f(lambda x: x) == 1"]))
    with pytest.raises(SuiteError, match="cannot cross"):
        reward.grade_source("def f(g): return g(1)", callback)
    with pytest.raises(ValueError, match="fixtures are not supported"):
        Suite(files={"t.py": "def test_x(tmp_path): pass"})
    with pytest.raises(ValueError, match=r"snippets\[0\] is not Python"):
        Suite(["assert ("])
    with pytest.raises(ValueError, match="no check"):
        Suite(files={"t.py": "x = 1"})
