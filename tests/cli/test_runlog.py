"""Records of the run log, and what the recorder sees through wrapped rewards."""

import asyncio
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from longreach.cli.display import LineDisplay, clock, facts
from longreach.cli.recorder import Recorder
from longreach.cli.runlog import LogWriter, from_metrics, shortened
from longreach.cli.terminal import console
from longreach.rewards.monitor import Monitor


def test_metrics_find_their_places() -> None:
    record = from_metrics(
        {
            "loss": 0.1,
            "reward": 0.5,
            "rewards/exact/mean": 0.4,
            "rewards/exact/std": 0.2,
            "rewards/a/b/mean": 0.3,
            "completions/mean_length": 12.0,
            "completions/clipped_ratio": 0.25,
            "frac_reward_zero_std": 0.5,
            "num_tokens": 1000.0,
            "clip_ratio/region_mean": 0.0,
            "epoch": 0.1,
        }
    )
    assert record == {
        "loss": 0.1,
        "reward": 0.5,
        "rewards": {"exact": 0.4, "a/b": 0.3},
        "length": {"mean": 12.0, "clipped": 0.25},
        "groups_without_signal": 0.5,
        "tokens": 1000.0,
        "other": {"rewards/exact/std": 0.2, "clip_ratio/region_mean": 0.0},
    }
    assert from_metrics({"eval_reward": 0.7, "eval_runtime": 3.0}, "eval_") == {
        "reward": 0.7,
        "other": {"runtime": 3.0},
    }


def test_every_value_becomes_json(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "a" / "b")
    log.write(
        {
            "a": float("nan"),
            "b": torch.tensor(2.5),
            "c": np.float32(1.5),
            "d": Path("x"),
            "e": (1, None),
            "f": True,
            3: "é",
        }
    )
    log.write({"g": float("-inf")})
    first, second = (json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines())
    assert first == {"a": None, "b": 2.5, "c": 1.5, "d": "x", "e": [1, None], "f": True, "3": "é"}
    assert second == {"g": None}
    assert LogWriter(tmp_path / "a" / "b", fresh=False).path.exists()
    assert not LogWriter(tmp_path / "a" / "b", fresh=True).path.exists()


def test_long_prompts_keep_both_ends() -> None:
    text = "a" * 5000 + "b" * 5000
    short = shortened(text, 10, 20)
    assert short == "a" * 10 + " […9,970 characters…] " + "b" * 20
    assert shortened([{"role": "user", "content": text}], 10, 20) == [{"role": "user", "content": short}]
    assert shortened("short", 10, 20) == "short"


class Score:
    async def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None if text == "skip" else float(len(text)) for text in completions]


def test_rewards_are_seen_together_and_keep_their_names(tmp_path: Path) -> None:
    recorder = Recorder(LogWriter(tmp_path), LineDisplay(console()))
    model = torch.nn.Linear(1, 1)
    watched = recorder.watch([length, functools.partial(length, extra=1), Score(), model])
    assert [getattr(reward, "__name__", None) for reward in watched] == ["length", "length", "Score", None]
    assert watched[3] is model
    call: dict[str, Any] = {
        "prompts": ["p", "p", "q"],
        "completions": ["a", "skip", "abc"],
        "completion_ids": [[1], [2], [3, 4]],
    }
    assert watched[0](**call) == [1.0, None, 3.0]
    assert asyncio.run(watched[2](**call)) == [0.5, 0.5, 0.5]
    state: Any = SimpleNamespace(global_step=1, max_steps=2, is_world_process_zero=True, num_input_tokens_seen=0)
    control: Any = SimpleNamespace()
    arguments: Any = SimpleNamespace()
    recorder.on_step_begin(arguments, state, control)
    recorder.on_step_end(arguments, state, control)
    recorder.on_log(arguments, state, control, logs={"loss": 0.0, "num_tokens": 50})
    (record,) = recorder.steps
    assert [(item["completion"], item["rewards"], item["tokens"]) for item in record["completions"]] == [
        ("abc", {"length": 3.0, "Score": 0.5}, 2),
        ("skip", {"length": None, "Score": 0.5}, 1),
    ]
    # What is seen during an evaluation belongs to the evaluation, not to the next step.
    watched[0](**{**call, "completions": ["held", "out", "x"]})
    recorder.on_prediction_step(arguments, state, control)
    recorder.on_log(arguments, state, control, logs={"eval_reward": 1.0})
    assert [item["completion"] for item in recorder.evals[0]["completions"]] == ["held", "out", "x"]
    recorder.on_log(arguments, state, control, logs={"loss": 0.0, "num_tokens": 60})
    assert "completions" not in recorder.steps[1]


def test_alarms_of_the_monitor_are_logged_and_said(tmp_path: Path, capsys: Any) -> None:
    recorder = Recorder(LogWriter(tmp_path), LineDisplay(console()), Monitor())
    (watched,) = recorder.watch([length])
    watched(prompts=["p", "q", "r", "s"], completions=["the very same long answer"] * 4, completion_ids=[[1]] * 4)
    state: Any = SimpleNamespace(global_step=3, max_steps=4, is_world_process_zero=True, num_input_tokens_seen=0)
    none: Any = SimpleNamespace()
    recorder.on_step_end(none, state, none)
    recorder.on_log(none, state, none, logs={"loss": 0.0})
    (alarm,) = recorder.steps[0]["alarms"]
    assert recorder.alarms == [alarm] and (alarm["step"], alarm["kind"]) == (3, "cross_prompt_duplicates")
    assert f"alarm at step 3: {alarm['message']}" in capsys.readouterr().out


def test_lines_say_only_what_is_known() -> None:
    assert [clock(x) for x in (None, 5, 245, 3723)] == ["-:--", "0:05", "4:05", "1:02:03"]
    assert facts({}) == ""
    assert facts({"loss": 0.5, "memory": {"host": 2e9, "device": 1e9}}) == "loss 0.5000  1.00 GB"
