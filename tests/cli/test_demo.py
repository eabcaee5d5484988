"""``longreach demo``: a short run of the real thing, resuming it, and wrong options. Its full length is a slow test."""

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longreach.cli import app
from longreach.report import read_log


def demo(*options: str) -> Any:
    return CliRunner().invoke(app, ["demo", *options])


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_short_demo_leaves_a_log_and_a_page() -> None:
    done = demo("--steps", "1", "--length", "256", "--seed", "3")
    assert done.exit_code == 0, done.output
    (folder,) = Path("runs").glob("demo-*")
    log = read_log(folder)
    assert log.status == "finished" and log.header["config"]["seed"] == 3 and log.header["config"]["length"] == 256
    assert [row["step"] for row in log.evals] == [0, 1] and [row["step"] for row in log.steps] == [1]
    assert all(0 <= row["reward"] <= 1 for row in (*log.evals, *log.steps)) and log.evals[0]["completions"]
    assert (folder / "report.html").stat().st_size < 6_000_000 and (folder / "model.safetensors").is_file()
    assert re.search(r"held-out reward\s+\d\.\d{3} at step 0  →  \d\.\d{3} at step 1", done.output)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert demo("--steps", "1", "--length", "192", "--seed", seed, "--out", name).exit_code == 0
    a, b, c = (
        [(row["reward"], row.get("grad_norm")) for row in (*read_log(name).evals, *read_log(name).steps)]
        for name in "abc"
    )
    assert a == b != c


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "program_trac"], "--task 'program_trac': the zoo has no such task; did you mean 'program_trace'?"),
        (["--length", "10"], "--length 10: a prompt needs at least"),
        (["--out", "taken"], "--out 'taken': holds a run already"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "empty"], "'empty' holds no checkpoint"),
    ],
)
def test_wrong_options_are_one_clear_line(options: list[str], message: str) -> None:
    Path("taken").mkdir()
    Path("taken/log.jsonl").touch()
    done = demo(*options)
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_held_out_reward_rises_for_the_fixed_seed_and_for_most_others() -> None:
    ends = []
    for seed in range(6):
        assert demo("--seed", str(seed), "--out", str(seed)).exit_code == 0
        first, last = (row["reward"] for row in (read_log(str(seed)).evals[0], read_log(str(seed)).evals[-1]))
        assert first <= 0.45, (seed, first)
        ends.append(last)
    assert ends[0] >= 0.80 and sum(end >= 0.80 for end in ends[1:]) >= 4, ends
    assert statistics.mean(ends) >= 0.80
