"""Reward functions from files: found, imported and tried once before anything long begins."""

from pathlib import Path
from typing import Any

import pytest

from longreach.cli.reward_file import load_reward, load_rewards, try_rewards
from longreach.cli.terminal import ConfigError

ROWS = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}]
TALK = [{"prompt": [{"role": "user", "content": "one"}], "answer": "1"}]


def reward(folder: Path, body: str, function: str = "score") -> Any:
    (folder / "reward.py").write_text(body, encoding="utf-8")
    return load_reward(f"reward.py:{function}", folder)


def attempt(folder: Path, body: str, rows: list[dict[str, Any]] = ROWS) -> None:
    try_rewards([reward(folder, body)], ["reward.py:score"], rows)


def test_a_function_is_found_beside_the_config(tmp_path: Path) -> None:
    body = (
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\ndef score(completions): return [A().x]\n"
    )
    assert reward(tmp_path, body)(completions=["a"]) == [1]
    assert load_rewards(["zoo:log_facts", "json:loads"], tmp_path)[1].__name__ == "loads"


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        ("def score(): pass", "reward.py:scor", r"reward\.py has no function 'scor'; did you mean 'score'\?"),
        ("x = 1", "reward.py:score", r"has no function 'score'$"),
        ("score = 3", "reward.py:score", r"score is int, not a function"),
        (
            "import no_such_thing_here",
            "reward.py:score",
            r"raises when it is imported: ModuleNotFoundError: .*\(line 1: import no",
        ),
        (
            "x = 1\ny = x / 0",
            "reward.py:score",
            r"raises when it is imported: ZeroDivisionError: division by zero \(line 2: y = x / 0",
        ),
        ("def score(:\n", "reward.py:score", r"SyntaxError in line 1"),
        ("raise SystemExit(1)", "reward.py:score", r"raises when it is imported: SystemExit: 1"),
        ("", "rewards.py:score", r"no such file .*rewards\.py'; did you mean 'reward\.py'\?"),
        ("", "reward.py", r"must be path/to/file\.py:function"),
        ("", "no_such_module_here:score", r"no module 'no_such_module_here'; for a file write"),
        ("", "zoo:nothing", r"the zoo has no such task"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, body: str, name: str, message: str) -> None:
    (tmp_path / "reward.py").write_text(body, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_reward(name, tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        "def score(prompts, completions, answer, **columns):\n    return [a == c for a, c in zip(answer, completions)]",
        "def score(completions, **columns):\n    return [None] * len(completions)",
        "async def score(completions, **columns):\n    return [1 for _ in completions]",
        "class Score:\n    def __call__(self, completions, **columns):\n        return [0.5, 1]\nscore = Score()",
    ],
)
def test_good_rewards_pass_the_trial(tmp_path: Path, body: str) -> None:
    attempt(tmp_path, body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "def score(prompts, completions):\n    return [0] * 2",
            r"can't be called as .* def reward\(prompts",
        ),
        ("def score(completions, gold, **columns):\n    return [0] * 2", r"can't be called .*'gold'"),
        (
            "def score(completions, **columns):\n    return [0.0]",
            r"returned 1 values; it must return a list of 2 numbers",
        ),
        ("def score(completions, **columns):\n    return 1.0", r"returned 1\.0; it must return a list of 2"),
        ("def score(completions, **columns):\n    return ['a', 'b']", r"returned 'a' for completion 0"),
        (
            "def score(completions, **columns):\n    return [float('nan')] * 2",
            r"returned nan; it must be a finite number",
        ),
        ("def score(completions, **columns):\n    return [float('inf')] * 2", r"must be finite"),
        (
            "def score(completions, **columns):\n    return [c.split()[0] for c in completions]",
            r"raised on an empty completion: IndexError: list index out of range \(line 2",
        ),
    ],
)
def test_bad_rewards_fail_the_trial(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt(tmp_path, body)


def test_conversational_rows_get_conversational_completions(tmp_path: Path) -> None:
    attempt(
        tmp_path, "def score(completions, **c):\n    return [float(x[0]['content'] == '') for x in completions]", TALK
    )
