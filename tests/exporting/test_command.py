"""``longreach export`` on the run that ``longreach demo`` leaves, to every format; then a chat with the GGUF file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from longreach.cli import app
from longreach.exporting.libllama import GGUFModel


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["export", *arguments])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "run"
    done = CliRunner().invoke(app, ["demo", "--steps", "1", "--length", "192", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize(("format", "quantization"), [("merged", "bf16"), ("vllm", "fp16"), ("ollama", "q4_k_m")])
def test_demo_to_every_format(format: str, quantization: str, demo: Path, tmp_path: Path) -> None:
    done = run(str(demo), "--format", format, "--quantization", quantization, "--out", str(tmp_path / "x"))
    assert done.exit_code == 0, done.output
    assert "relative difference" in done.output and f"written to {tmp_path}/x" in done.output.replace("\n", "")
    assert json.loads((tmp_path / "x" / "verification.json").read_text())["passed"] is True
    assert "# run" in (tmp_path / "x" / "README.md").read_text()


def test_demo_to_gguf_and_a_chat_with_it(demo: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from longreach.zoo import task

    file = tmp_path / "demo.gguf"
    done = run(str(demo), "-f", "gguf", "-q", "f16", "--out", str(file))
    assert done.exit_code == 0, done.output
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo)
    with GGUFModel(file, context=1024) as loaded:
        assert loaded.chat_template == tokenizer.chat_template
        for row in task("program_trace").dataset("heldout", 2, 192, 5):
            prompt = row["prompt"]
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = loaded.tokenize(text, special=False)
            assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
            answer = loaded.text(loaded.greedy(ids, 6))
            with torch.no_grad():
                made = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :]
            assert answer.strip() == tokenizer.decode(made, skip_special_tokens=True).strip() != ""


def test_the_place_is_named_after_the_run(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(demo.parent)
    assert run(demo.name, "--verify", "off").exit_code == 0
    assert (demo.parent / "run-merged" / "config.json").is_file()
    again = run(demo.name, "--verify", "off")
    assert again.exit_code == 2 and "exists already" in again.output and "--force" in again.output
    assert run(demo.name, "--verify", "off", "--force").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "adapter"], "the model has no adapter; choose format='merged'"),
        (["--format", "pdf"], "format='pdf': choose one of"),
        (["--upload", "x"], "give a repository of the Hub as 'user/name'"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, demo: Path, tmp_path: Path) -> None:
    done = run(str(demo), *arguments, "--out", str(tmp_path / "x"))
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [".", ".."])
def test_force_does_not_replace_the_run_itself(place: str, demo: Path) -> None:
    before = sorted(p.name for p in demo.iterdir())
    done = run(str(demo), "--out", str(demo / place), "--force")
    assert done.exit_code == 2 and "would replace the model that is exported" in done.output.replace("\n", " ")
    assert sorted(p.name for p in demo.iterdir()) == before


@pytest.mark.parametrize("given", ["/nowhere/at/all", "./missing"])
def test_missing_run(given: str) -> None:
    done = run(given)
    assert done.exit_code == 2 and "no such folder" in done.output


def test_a_run_that_was_interrupted_names_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    done = run(str(tmp_path), "--out", str(tmp_path / "x"))
    assert done.exit_code == 2 and "checkpoint-4" in done.output.replace("\n", "")


def test_mismatch_is_exit_status_1(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longreach.exporting import merge

    monkeypatch.setattr(merge, "_sum", None)
    pieces = merge._pieces
    monkeypatch.setattr(merge, "_pieces", lambda *given: (piece * 2 for piece in pieces(*given)))
    done = run(str(demo), "--out", str(tmp_path / "x"))
    assert done.exit_code == 1 and "not verified" in done.output
    assert (tmp_path / "x.bad").is_dir() and not (tmp_path / "x").exists()
