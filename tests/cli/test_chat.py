"""``longreach chat``: one answer, a conversation, streams that break no character, runs and adapters."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longreach.cli import app
from longreach.cli.chat import Conversation, TextStream
from longreach.rollout import SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"


def invoke(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, ["chat", *arguments, "--max-new-tokens", "8", "--device", "cpu"], input=stdin)


def test_one_answer_is_printed_and_repeats(tiny_model: Path) -> None:
    first, second = (invoke(str(tiny_model), "--prompt", "a b c", "--seed", "3") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.output == second.output and first.output.strip()
    assert invoke(str(tiny_model), "--prompt", "a b c", "--seed", "4").output != first.output


def test_without_a_template_texts_are_continued(tiny_model: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(tiny_model, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    done = invoke(str(bare), stdin="a b\n/reset\nc\n\n")
    assert done.exit_code == 0 and "No chat template" in done.output and done.output.count("> ") >= 4
    refused = invoke(str(bare), "--prompt", "a", "--system", "x")
    assert refused.exit_code == 2 and "no chat template" in refused.output


def test_a_conversation_remembers_and_forgets(tiny_model: Path) -> None:
    import longreach

    model, tokenizer = longreach.load(str(tiny_model), device="cpu", parity_check=False)
    tokenizer.chat_template = TEMPLATE
    talk = Conversation(model, tokenizer, SamplingParams(max_new_tokens=6), 0, "be brief")
    first = talk.answer("a b")
    talk.answer("c")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.messages[2]["content"] == first
    talk.reset()
    assert [m["role"] for m in talk.messages] == ["system"]


def test_an_adapter_and_a_run_of_checkpoints_are_found(tiny_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    folder = tmp_path / "run" / "checkpoint-3"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    plain = invoke(str(tiny_model), "--prompt", "a b c", "--temperature", "0").output
    adapted = [invoke(str(path), "--prompt", "a b c", "--temperature", "0") for path in (folder, folder.parent)]
    assert adapted[0].exit_code == 0, adapted[0].output
    assert adapted[0].output == adapted[1].output != plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["--top-p", "0"], "top_p=0.0"),
    ],
)
def test_wrong_options_are_named(tiny_model: Path, arguments: list[str], message: str) -> None:
    done = invoke(str(tiny_model), "--prompt", "a", *arguments)
    assert done.exit_code == 2 and message in done.output


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    done = invoke(str(tmp_path), "--prompt", "a")
    assert done.exit_code == 2 and "holds no model, adapter or checkpoint" in done.output


def test_characters_come_whole() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode(errors="replace")

    stream, given = TextStream(Bytes()), []
    text = "naïve 🙂!"
    for end in range(1, len(text.encode()) + 1):
        given.append(stream.next(list(text.encode()[:end])))
    assert "".join(given) == text and "\ufffd" not in "".join(given)
