"""The command itself: what it lists, how fast it starts, and the small commands."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longreach import __version__
from longreach.cli import COMMANDS, app


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from longreach.cli import app; app(prog_name='longreach')"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def test_help_lists_exactly_the_commands_that_exist() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    folder = Path(sys.modules["longreach.cli"].__file__ or "").parent
    for name in COMMANDS:
        assert (f" {name} " in text) == (folder / f"{name}.py").is_file(), name
    assert CliRunner().invoke(app, ["--version"]).output == f"longreach {__version__}\n"


def test_help_starts_fast_and_without_torch() -> None:
    code = (
        "import sys; from longreach.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'plotly', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    times = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        times.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
    assert min(times) < 1.0  # 0.2 s on an idle machine; the bound leaves room for a busy one


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["train"], "method: grpo\nmodell: zoo\n", "unknown key 'modell'; did you mean 'model'?"),
        (["train"], "method: grpo\nlerning_rate: 1\n", "unknown key 'lerning_rate'; did you mean 'learning_rate'?"),
        (
            ["train"],
            "method: grpo\nmodel: ./gone\nreward: zoo:log_facts\ndata: x.jsonl\n",
            "model='./gone': no such folder",
        ),
        (["train"], "method: grpo\nmodel: zoo\nreward: gone.py:f\ndata: x.jsonl\n", "reward='gone.py:f': no such file"),
        (["plan", "./gone"], None, "model='./gone': no such folder"),
        (["plan", "zoo", "--gpu", "lots"], None, "--gpu 'lots': give a size"),
        (["chat", "./gone"], None, "model='./gone': no such folder"),
        (["export", "./gone"], None, "model='./gone': no such folder"),
        (["audit", "gone.py:f"], None, "there is no file gone.py"),
    ],
)
def test_wrong_input_is_said_before_anything_heavy_is_imported(
    tmp_path: Path, arguments: list[str], settings: str | None, message: str
) -> None:
    if settings is not None:
        (tmp_path / "run.yaml").write_text(settings, encoding="utf-8")
        arguments = [*arguments, str(tmp_path / "run.yaml")]
    code = (
        "import sys; from longreach.cli import app\n"
        f"try: app({arguments!r})\nexcept SystemExit as end: assert end.code == 2, end.code\n"
        "heavy = {'torch', 'transformers', 'trl', 'peft', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and message in done.stderr, done.stderr


def test_report_needs_no_torch_and_writes_where_told(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(
        json.dumps({"type": "header", "format": 1, "run": "r", "method": "grpo"}) + "\n", encoding="utf-8"
    )
    code = (
        "import sys; from longreach.cli import app\n"
        f"try: app(['report', {str(tmp_path)!r}, '--out', {str(tmp_path / 'x.html')!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.html").stat().st_size > 1000


@pytest.mark.parametrize("name", ["nowhere", "empty.jsonl"])
def test_report_of_nothing_is_one_clear_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    done = run("report", str(tmp_path / name))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_train_without_its_file_is_one_clear_line(tmp_path: Path) -> None:
    done = run("train", str(tmp_path / "gone.yaml"))
    assert done.returncode == 2 and "no such file" in done.stderr and "Traceback" not in done.stderr


def test_doctor_tells_versions_backend_and_passes_its_self_test() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    for word in ("torch", "transformers", "trl", "device", "memory", "float32, head size 128", "exact to rounding"):
        assert word in done.output, word


def test_doctor_names_attention_that_is_wrong_for_gpt_oss() -> None:
    """SDPA knows no sinks: output and gradients are off, and the sinks get none. Eager and ours are right."""
    import torch

    from longreach.context.implementations import check_implementations

    found = {finding.name: finding for finding in check_implementations(torch.device("cpu"))}
    for name in ("longreach", "eager"):
        assert found[name].absent is None and not found[name].wrong and max(found[name].errors.values()) < 1e-5
    assert "no gradient for the sinks" in str(found["sdpa"]) and "WRONG" in str(found["sdpa"])
    assert len(found["sdpa"].wrong) == 6
    done = CliRunner().invoke(app, ["doctor", "--no-self-test"])
    assert done.exit_code == 0 and "WRONG for gpt-oss" in " ".join(done.output.split())


def test_doctor_says_when_the_engine_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    from longreach.context import parity

    def failed(*arguments: object) -> None:
        raise parity.ParityError("differ by 3.1e-01 nats")

    monkeypatch.setattr(parity, "check_parity", failed)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1 and "NOT exact: differ by 3.1e-01 nats" in done.output
