"""The monitor raises each alarm on what it stands for, and none on an honest run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from longreach.rewards import RewardResult
from longreach.rewards.changes import ChangePoint
from longreach.rewards.monitor import Alarm, Monitor, MonitorConfig


def step_of(rng: random.Random, groups: int = 4, size: int = 8, mean: float = 0.5) -> dict[str, Any]:
    """An honest step: different answers, noisy rewards."""
    prompts = [f"prompt {rng.random()}" for _ in range(groups) for _ in range(1)]
    rows = [prompt for prompt in prompts for _ in range(size)]
    texts = [f"```python\ndef f(x):\n    return {rng.random()} + x\n```" + " " * rng.randrange(200) for _ in rows]
    rewards = [min(1.0, max(0.0, rng.gauss(mean, 0.3))) for _ in rows]
    return {"prompts": rows, "completions": texts, "rewards": rewards}


def run(monitor: Monitor, steps: int, seed: int = 0, **changes: Any) -> list[Alarm]:
    rng = random.Random(seed)
    for step in range(steps):
        monitor.observe(step, **{**step_of(rng), **changes})
    return monitor.alarms


def kinds(monitor: Monitor) -> set[str]:
    return {alarm.kind for alarm in monitor.alarms}


@pytest.mark.parametrize("seed", range(3))
def test_an_honest_run_raises_nothing(seed: int) -> None:
    noise = random.Random(seed)
    monitor = Monitor(
        MonitorConfig(shadow_share=0.5), shadow=lambda prompts, completions, **_: [noise.random() for _ in prompts]
    )
    assert run(monitor, 150, seed) == []
    assert not monitor.should_pause


def test_shadow_gap_alarms_and_pauses() -> None:
    asked: list[int] = []

    def shadow(prompts: list, completions: list, answer: list, **_: Any) -> list[float | None]:
        asked.append(len(prompts))
        assert len(prompts) == len(completions) == len(answer)
        return [0.0] * len(prompts)

    monitor = Monitor(MonitorConfig(shadow_share=0.2, pause=True), shadow=shadow)
    rng = random.Random(0)
    for step in range(20):
        rows = step_of(rng, mean=0.9)
        monitor.observe(step, **rows, columns={"answer": rows["rewards"]})
    assert kinds(monitor) == {"shadow_gap"} and monitor.should_pause
    assert monitor.alarms[0].value > 0.6 and "shadow" in monitor.alarms[0].message
    assert 0.1 < sum(asked) / (20 * 32) < 0.3


def test_alarms_of_a_kind_are_not_repeated_at_once() -> None:
    monitor = Monitor(MonitorConfig(window=10))
    rng = random.Random(0)
    for step in range(25):
        rows = step_of(rng)
        monitor.observe(step, **{**rows, "rewards": [1.0] * 32}, canary=[index == 0 for index in range(32)])
    assert [alarm.step for alarm in monitor.alarms] == [0, 10, 20]


def test_paid_canaries() -> None:
    rows = step_of(random.Random(1))
    canary = [index < 4 for index in range(32)]
    for reward, expected in ((0.0, set()), (None, set()), (1.0, {"canary_paid"})):
        monitor = Monitor()
        monitor.observe(1, rows["prompts"], rows["completions"], [reward] * 4 + rows["rewards"][4:], canary=canary)
        assert kinds(monitor) - {"quarantine_share"} == expected


def test_denial_rate() -> None:
    quiet, nosy = RewardResult.ok(1.0), RewardResult.wrong("no", telemetry={"denials": {"socket": 2, "openat": 1}})
    monitor = Monitor()
    rng = random.Random(2)
    monitor.observe(0, **step_of(rng), results=[quiet] * 32)
    assert kinds(monitor) == set()
    monitor.observe(1, **step_of(rng), results=[quiet] * 31 + [nosy])
    assert kinds(monitor) == {"denials"}
    assert monitor.metrics()["monitor/denials_per_1000"] == pytest.approx(1000 * 3 / 64)


def test_duplicates_within_groups_and_across_prompts() -> None:
    rng = random.Random(3)
    collapsed = Monitor()
    for step in range(5):
        rows = step_of(rng)
        rows["completions"] = [f"the answer to {prompt} is this and only this" for prompt in rows["prompts"]]
        collapsed.observe(step, **rows)
    assert kinds(collapsed) == {"group_collapse"}
    everywhere = Monitor()
    rows = step_of(rng)
    trick = "```python\nimport os; os._exit(0)\n```"
    rows["completions"] = [trick if index % 2 else text for index, text in enumerate(rows["completions"])]
    everywhere.observe(0, **{**rows, "rewards": [0.0] * 32})
    assert kinds(everywhere) == set(), "unpaid duplicates are a matter for exploration, not for alarm"
    everywhere.observe(1, **rows)
    assert kinds(everywhere) == {"cross_prompt_duplicates"}


def test_component_dominance() -> None:
    rng = random.Random(4)
    for wide, expected in ((0.3, set()), (3.0, {"component_dominance"})):
        monitor = Monitor()
        for step in range(5):
            rows = step_of(rng)
            parts = {"right": [rng.gauss(0, 0.3) for _ in range(32)], "format": [rng.gauss(0, wide) for _ in range(32)]}
            monitor.observe(step, **rows, components=parts)
        assert kinds(monitor) == expected
    assert "not right, which is named first" in monitor.alarms[0].message
    led = Monitor()  # as it should be: what the first reward leaves undecided, a small price decides
    for step in range(5):
        parts = {"right": [1.0, 0.0] * 16, "price": [-0.01 * rng.randrange(1, 6) for _ in range(32)]}
        led.observe(step, **step_of(rng), components=parts)
    assert kinds(led) == set()
    single = Monitor()
    single.observe(0, **step_of(rng), components={"only": [1.0, 0.0] * 16})
    assert kinds(single) == set()


def test_a_reward_jump_needs_a_companion() -> None:
    def play(change: Any) -> Monitor:
        rng, monitor = random.Random(5), Monitor()
        for step in range(30):
            rows = step_of(rng, mean=0.2)
            if step >= 20:
                change(rows)
            monitor.observe(step, **rows)
        return monitor

    def better(rows: dict) -> None:
        rows["rewards"] = [0.95] * 32

    def better_and_imports(rows: dict) -> None:
        better(rows)
        rows["completions"] = [text.replace("def f", "import sys, gc\ndef f") for text in rows["completions"]]

    def longer(rows: dict) -> None:
        rows["completions"] = [text + "x" * 3000 for text in rows["completions"]]

    assert kinds(play(better)) == set()
    assert kinds(play(longer)) == set()
    jumped = play(better_and_imports)
    assert kinds(jumped) == {"reward_jump"} and "imports" in jumped.alarms[0].message and jumped.alarms[0].step == 20


def test_quarantined_shares() -> None:
    rows = step_of(random.Random(6))
    monitor = Monitor()
    monitor.observe(0, rows["prompts"], rows["completions"], [None, math.nan, *rows["rewards"][2:]])
    assert kinds(monitor) == set()
    monitor.observe(1, rows["prompts"], rows["completions"], [None] * 8 + rows["rewards"][8:])
    assert kinds(monitor) == {"quarantine_share"} and monitor.alarms[0].value == 0.25


def test_the_best_completions_are_archived(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "best.jsonl"
    monitor = Monitor(MonitorConfig(archive_every=5, archive_top=2), archive=str(path))
    for step in range(11):
        turns = [[{"role": "assistant", "content": f"answer {step} {i} \ud800"}] for i in range(4)]
        rewards = [float(step), step + 0.5, None, math.nan]
        monitor.observe(step, ["p"] * 4, turns, rewards, {"a": rewards})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["reward"]) for row in rows] == [
        (0, 0.5),
        (0, 0.0),
        (5, 5.5),
        (5, 5.0),
        (10, 10.5),
        (10, 10.0),
    ]
    assert len(monitor.archived) == 6 and rows[0]["completion"].startswith("answer 0 1")


def test_state_is_plain_json_and_can_be_taken_up() -> None:
    monitor = Monitor(MonitorConfig(pause=True))
    rows = step_of(random.Random(7))
    monitor.observe(3, rows["prompts"], rows["completions"], [1.0] * 32, canary=[True] * 32)
    again = Monitor(MonitorConfig(pause=True))
    again.restore(json.loads(json.dumps(monitor.state())))
    assert again.alarms == monitor.alarms and again.should_pause
    again.observe(4, rows["prompts"], rows["completions"], [1.0] * 32, canary=[True] * 32)
    assert len(again.alarms) == len(monitor.alarms)


def test_change_points_report_a_jump_once() -> None:
    point = ChangePoint(20, 4.0)
    distances = [point.add(value) for value in [1.0] * 10 + [2.0] * 10]
    assert distances[:10] == [0.0] * 10 and distances[10] > 4 and all(abs(d) < 4 for d in distances[11:])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="shadow_share is 2"):
        MonitorConfig(shadow_share=2)
    with pytest.raises(ValueError, match="window is 0"):
        MonitorConfig(window=0)
    with pytest.raises(ValueError, match="rewards has 1 entries; there are 2 completions"):
        Monitor().observe(0, ["p", "p"], ["a", "b"], [1.0])
    with pytest.raises(ValueError, match="components"):
        Monitor().observe(0, ["p"], ["a"], [1.0], {"x": []})
