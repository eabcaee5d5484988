"""The `monitor` section: a shadow grader, canaries without weight, and a pause with a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longreach.cli import app
from longreach.report import read_log

REWARD = """
def score(prompts, completions, answer, **columns):
    return [float(len(text) % 7) / 7 for text in completions]


def gullible(prompts, completions, **columns):
    return [1.0 for _ in completions]


def strict(prompts, completions, answer, **columns):
    assert len(answer) == len(completions)
    return [0.0 for _ in completions]
"""


def train(path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["train", str(path), *options])


@pytest.fixture
def watched(project: Any) -> Any:
    """A project without evaluation, whose data has every other row as a canary."""
    rows = [
        {"prompt": f"Log of one day : {n} {n + 1}", "answer": str(n), "impossible": n % 2 == 0} for n in range(10, 18)
    ]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Path("reward.py").write_text(REWARD, encoding="utf-8")
    quiet = {"data": "train.jsonl", "eval_strategy": "no", "eval_steps": None, "eval_on_start": None}
    return lambda **changes: project(**quiet, **changes)


def test_paid_canaries_raise_an_alarm_and_pause_the_run(watched: Any) -> None:
    done = train(watched(reward="reward.py:gullible", monitor={"canary": "impossible", "pause": True}))
    assert done.exit_code == 130, done.output
    log = read_log("runs/run")
    assert log.status == "interrupted" and len(log.steps) < 4
    assert log.steps[0]["alarms"][0]["kind"] == "canary_paid"
    assert "paused by the monitor" in done.output and "--resume" in done.output
    assert list(Path("runs/run").glob("checkpoint-*"))


def test_canaries_have_no_weight(watched: Any) -> None:
    """Their reward is watched, and the trainer is told that there is none."""
    done = train(watched(reward="reward.py:score", monitor={"canary": "impossible"}, max_steps=2))
    assert done.exit_code == 0, done.output
    from longreach.cli.display import display_for
    from longreach.cli.recorder import Recorder
    from longreach.cli.runlog import LogWriter
    from longreach.cli.terminal import console

    recorder = Recorder(LogWriter(Path("other"), fresh=True), display_for(console()), None, "impossible")
    (reward,) = recorder.watch([lambda completions, **columns: [1.0 for _ in completions]])
    assert reward(prompts=["a", "b"], completions=["x", "y"], impossible=[True, False]) == [None, 1.0]
    assert recorder._batches[0].rewards["<lambda>"] == [1.0, 1.0]


def test_a_shadow_that_disagrees(watched: Any) -> None:
    monitor = {"shadow": "reward.py:strict", "shadow_share": 1.0}
    done = train(watched(reward="reward.py:gullible", monitor=monitor, max_steps=3))
    assert done.exit_code == 0, done.output
    kinds = [alarm["kind"] for row in read_log("runs/run").steps for alarm in row.get("alarms", [])]
    assert "shadow_gap" in kinds


@pytest.mark.parametrize(
    ("monitor", "words"),
    [
        ({"canary": "imposible"}, "did you mean 'impossible'"),
        ({"canary": "answer"}, "must hold true or false"),
        ({"shadow": "reward.py:strickt"}, "did you mean 'strict'"),
        ({"shadow_share": 2}, "monitor.shadow_share=2"),
        ({"pauze": True}, "did you mean 'pause'"),
    ],
)
def test_bad_settings(watched: Any, monitor: dict[str, Any], words: str) -> None:
    done = train(watched(reward="reward.py:score", monitor=monitor), "--check")
    assert done.exit_code == 2 and words in done.output.replace("\n", " "), done.output
