"""Modelfiles: the derived Go template, run by Go's own template engine, gives the conversations of the Jinja template."""

import json
import stat
from pathlib import Path

import pytest

import longreach
from longreach.exporting import ollama
from longreach.exporting.chat import CONVERSATIONS
from longreach.exporting.errors import ExportError
from longreach.exporting.ollama import template_faults, turns_of
from tests.exporting.models import CHATML, adapted, tokenizer_for

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set front = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set front = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}{{ '[INST] ' + (front if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}" + CHATML
)
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
BRACES = CHATML.replace("<|im_end|>", "<|im_end|>{{ '{{' }}")
TEMPLATES = {
    "chatml": CHATML, "inlined system": LLAMA2, "default system": DEFAULT_SYSTEM, "no system": NO_SYSTEM, "thinking": THINKING,
    "braces": BRACES,
}  # fmt: skip


def go(template: str, conversation: list[dict[str, str]], folder: Path) -> str:
    """Run the template as Ollama does."""
    engine = pytest.importorskip("go_template", reason="Go's template engine is packaged for Linux on x86-64 only")
    file = folder / "template"
    file.write_text(template)
    values = {
        "System": next((m["content"] for m in conversation if m["role"] == "system"), ""),
        "Messages": [{"Role": m["role"], "Content": m["content"]} for m in conversation],
    }
    return engine.render(file, values).decode()


@pytest.mark.parametrize("name", [*TEMPLATES, "gemma"])
def test_the_go_template_renders_what_jinja_renders(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_for("gemma3_text" if name == "gemma" else "llama")
    if name != "gemma":
        tokenizer.chat_template = TEMPLATES[name]
    turns = turns_of(tokenizer)
    assert template_faults(tokenizer, turns) == []
    for conversation in CONVERSATIONS:
        messages = [{**m, "content": m["content"].strip()} for m in conversation]
        if name == "no system" and messages[0]["role"] == "system":
            continue
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # Ollama adds the beginning-of-sequence token by itself.
        assert go(turns.go(), messages, tmp_path) == wanted.removeprefix(tokenizer.bos_token)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['content'] }}"),
        "{% for m in messages %}{{ loop.index }}: {{ m['content'] }}\n{% endfor %}",
        CHATML.replace("{{ m['role'] }}", "{{ m['role'] }}{{ messages | length }}"),
    ],
    ids=["content twice", "numbered", "counted"],
)
def test_a_template_that_is_more_than_text_around_messages_is_refused(template: str) -> None:
    tokenizer = tokenizer_for("llama")
    tokenizer.chat_template = template
    try:
        faults = template_faults(tokenizer, turns_of(tokenizer))
    except ExportError as error:
        faults = [str(error)]
    assert faults


@pytest.mark.parametrize("works", [True, False])
def test_export_and_ollama_create(works: bool, base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the program, which is not installed where tests run."""
    program = tmp_path / "bin" / "ollama"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/said\n{"exit 0" if works else "echo no space >&2; exit 1"}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    model, tokenizer = adapted("gemma2", base("gemma2")), tokenizer_for("gemma2")
    if not works:
        with pytest.raises(ExportError, match=r"ollama create mine failed: no space; the files are in"):
            longreach.export(model, tokenizer, tmp_path / "mine", format="ollama")
        assert (tmp_path / "mine" / "Modelfile").is_file()
        return
    made = longreach.export(model, tokenizer, tmp_path / "mine", format="ollama", quantization="q4_k_m")
    assert (tmp_path / "said").read_text().strip() == "create mine -f Modelfile"
    text = (made.path / "Modelfile").read_text()
    assert text.startswith("FROM ./model-q4_k_m.gguf\nTEMPLATE")
    assert (
        'PARAMETER stop "<end_of_turn>"' in text
        and 'PARAMETER stop "</s>"' in text
        and "PARAMETER temperature 0.7" in text
    )
    assert json.loads((made.path / "verification.json").read_text())["passed"]


def test_without_ollama_the_command_is_told(base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama.shutil, "which", lambda name: None)
    made = longreach.export(base("qwen3"), None, tmp_path / "o", format="ollama")
    assert made.notes[-1].startswith("ollama create o -f ")
