"""``longreach train`` from the command line: whole runs of a tiny model, Ctrl-C, resuming, and wrong input."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longreach.cli import app
from longreach.report import read_log


def train(path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["train", str(path), *options])


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_grpo_run_leaves_a_log_a_page_and_a_model(project: Any) -> None:
    done = train(project(lora={"r": 4, "target_modules": ["q_proj", "v_proj"]}))
    assert done.exit_code == 0, done.output
    folder = Path("runs/run")
    assert (folder / "adapter_model.safetensors").is_file() and (folder / "report.html").stat().st_size > 1_000_000
    kinds = [row["type"] for row in rows(folder)]
    assert kinds == ["header", "eval", "step", "step", "eval", "step", "step", "eval", "footer"]
    log = read_log(folder)
    assert log.header["versions"].keys() >= {"python", "torch", "transformers", "trl", "longreach"}
    assert log.header["device"]["kind"] == "cpu" and log.header["config"]["training"]["learning_rate"] == "1e-3"
    for row in log.steps:
        assert row["total_steps"] == 4 and row["memory"]["host"] > 1e8 and row["tokens_per_second"] > 0
        assert row["reward"] == pytest.approx(row["rewards"]["score"] + row["rewards"]["short"], abs=1e-6)
        assert 1 <= row["length"]["mean"] <= 6 and 0 <= row["groups_without_signal"] <= 1 and row["grad_norm"] >= 0
        for sample in row["completions"]:
            assert sample["prompt"].startswith("Log of one day") and set(sample["rewards"]) == {"score", "short"}
            assert sample["rewards"]["short"] == pytest.approx(-0.01 * sample["tokens"])
    assert [row["step"] for row in log.evals] == [0, 2, 4] and log.evals[0]["completions"]
    assert re.search(r"step 4/4  reward -?\d\.\d{3}  length \d+  [\d,]+ tok/s  \d\.\d\d GB  eta 0:00", done.output)
    assert re.search(r"held-out reward\s+-?\d\.\d+ at step 0  →  -?\d\.\d+ at step 4", done.output)


def test_an_sft_run(project: Any) -> None:
    path = project(
        method="sft",
        reward=None,
        data="text.jsonl",
        num_generations=None,
        max_completion_length=None,
        eval_strategy="no",
        eval_steps=None,
        eval_on_start=None,
        output_dir="out",
        packing=False,
    )
    lines = [json.dumps({"text": f"Log of one day : {n} {n + 1}"}) + "\n" for n in range(10, 30)]
    Path("text.jsonl").write_text("".join(lines), encoding="utf-8")
    done = train(path)
    assert done.exit_code == 0, done.output
    log = read_log("out")
    assert log.status == "finished" and len(log.steps) == 4 and Path("out/model.safetensors").is_file()
    assert all(row["loss"] > 0 and "reward" not in row for row in log.steps)
    assert log.steps[-1]["loss"] < log.steps[0]["loss"]
    assert re.search(r"step 4/4  loss \d\.\d{4}", done.output)


def test_ctrl_c_saves_and_resume_gives_the_same_numbers(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project(output_dir="whole")
    assert train(path).exit_code == 0
    interrupting = (
        Path("reward.py")
        .read_text(encoding="utf-8")
        .replace(
            "def score(prompts, completions, answer, **columns):",
            "def score(prompts, completions, answer, trainer_state, **columns):\n"
            "    import os, signal\n"
            "    if trainer_state.global_step == 1 and not os.path.exists('again'):\n"
            "        open('again', 'w').close()\n"
            "        signal.raise_signal(signal.SIGINT)\n",
        )
    )
    Path("reward.py").write_text(interrupting, encoding="utf-8")
    handler = signal.getsignal(signal.SIGINT)
    path = project(output_dir="parts")
    stopped = train(path)
    assert stopped.exit_code == 130, stopped.output
    assert "checkpoint saved: parts/checkpoint-2" in stopped.output
    assert f"to go on: longreach train {path} --resume" in stopped.output
    assert read_log("parts").status == "interrupted" and signal.getsignal(signal.SIGINT) is handler
    assert "holds a run already; add --resume" in train(path).output
    resumed = train(path, "--resume")
    assert resumed.exit_code == 0, resumed.output
    whole, parts = read_log("whole"), read_log("parts")
    assert [row["step"] for row in parts.steps] == [1, 2, 3, 4] and parts.status == "finished"
    for key in ("reward", "loss", "grad_norm", "entropy", "tokens"):
        assert [row[key] for row in parts.steps] == [row[key] for row in whole.steps], key


def test_a_finished_run_is_not_resumed(project: Any) -> None:
    path = project(save_steps=1, max_steps=1)
    assert train(path).exit_code == 0
    done = train(path, "--resume")
    assert done.exit_code == 2 and "raise max_steps" in done.output
    assert [row["step"] for row in read_log("runs/run").steps] == [1]


def test_a_damaged_checkpoint_is_refused_at_once(project: Any) -> None:
    path = project(save_steps=2, max_steps=2)
    assert train(path).exit_code == 0
    weights = Path("runs/run/checkpoint-2/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    done = train(path, "--resume")
    assert done.exit_code == 2 and "model.safetensors can't be read" in done.output


def test_overwrite_starts_anew(project: Any) -> None:
    path = project(save_steps=1, max_steps=3)
    assert train(path).exit_code == 0
    project(max_steps=1)
    assert train(path, "--overwrite").exit_code == 0
    assert [row["step"] for row in read_log("runs/run").steps] == [1]
    assert sorted(p.name for p in Path("runs/run").glob("checkpoint-*")) == ["checkpoint-1"]


def test_check_loads_no_model_and_writes_nothing(project: Any) -> None:
    done = train(project(model="no-such/model-anywhere"), "--check")
    assert done.exit_code == 0 and "all checks passed" in done.output and not Path("runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generation": 4}, "unknown key 'num_generation'; did you mean 'num_generations'?"),
        ({"packing": True}, "unknown key 'packing': it belongs to method sft"),
        ({"lora": {"rank": 4}}, "unknown key 'lora.rank'"),
        ({"learning_rate": "quick"}, "learning_rate='quick': input should be a valid number"),
        ({"chunk": "big"}, "chunk='big'"),
        ({"max_length": 6}, "max_length=6 leaves no room for a prompt"),
        ({"reward": "reward.py:scores"}, "reward.py has no function 'scores'; did you mean 'score'?"),
        ({"reward": "gone.py:score"}, "no such file"),
        ({"data": "gone.jsonl"}, "data.train='gone.jsonl': no such file or folder"),
        ({"data": "empty.jsonl"}, "data.train='empty.jsonl': the file is empty"),
        ({"model": "./nowhere"}, "model='./nowhere': no such folder"),
        ({"model": "."}, "model='.': the folder holds no config.json"),
        ({"method": "dpo"}, "method='dpo' is unknown"),
        ({"num_generations": 0}, "num_generations=0 is out of range; use a positive whole number"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 is out of range"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps=-1 is out of range"),
        ({"temperature": 0.0}, "temperature=0.0 is out of range"),
        ({"top_p": 2.0}, "top_p=2.0 is out of range"),
        ({"accelerator_config": "gone.json"}, "gone.json"),
        ({"output_dir": ""}, "output_dir='': name the folder"),
        ({"output_dir": "empty.jsonl/run"}, "empty.jsonl is a file; name a folder"),
        ({"data": {"train": "reward.py", "split": "test"}}, "data.train: 'reward.py' has no split 'test'"),
        ({"reward": "longreach.rewards:math_reward"}, "write reward = math_reward() into a file"),
        ({"max_length": 8}, "prompt"),
    ],
)
def test_wrong_input_is_one_clear_line_and_exit_status_2(project: Any, changes: dict[str, Any], message: str) -> None:
    path = project(**changes)
    Path("empty.jsonl").touch()
    done = train(path)
    assert done.exit_code == 2, done.output
    assert message in done.output and "Traceback" not in done.output


def test_a_reward_that_fails_in_the_run_ends_it_with_its_error_in_the_log(project: Any) -> None:
    Path("reward.py").write_text(
        "def score(completions, trainer_state, **columns):\n"
        "    if trainer_state.global_step == 1:\n        raise RuntimeError('judge is gone')\n"
        "    return [1.0] * len(completions)\n",
        encoding="utf-8",
    )
    done = train(project(reward="reward.py:score", eval_on_start=False))
    assert isinstance(done.exception, RuntimeError)
    log = read_log("runs/run")
    assert log.status == "failed" and "judge is gone" in log.footer["error"] and len(log.steps) == 1
    assert "judge is gone" in Path("runs/run/report.html").read_text(encoding="utf-8")
