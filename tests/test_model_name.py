"""Names of models: the embedded one by the same name everywhere, and paths where there is nothing named as such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import longreach
from longreach import model_name
from longreach.cli import app
from longreach.context.shape import ModelShape
from longreach.exporting.errors import ExportError
from longreach.model_name import EMBEDDED, MissingModelError, embedded_model, model_place
from longreach.origin import origin_of
from longreach.spelling import check_names, nearest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, a model and an owner's folder, which is the current one; the Hub is not asked."""
    for name in ("runs/train_grpo", "my-model", "Qwen/Qwen3-4B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs" / "train_grpo" / "log.jsonl").touch()
    (tmp_path / "my-model" / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "gpt2", "zoo-like", "openai/gpt-oss-20b"])
def test_what_may_be_on_the_hub_is_left_to_it(name: str, here: Path) -> None:
    assert model_place(name) == name


def test_what_is_here_goes_first(here: Path) -> None:
    assert model_place("my-model") == "my-model" and model_place(here / "my-model") == str(here / "my-model")
    assert model_place("train_grpo", here / "runs") == str(here / "runs" / "train_grpo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./my-modle", r"model='./my-modle': no such folder; did you mean 'my-model'\?"),
        ("/nowhere/at/all", r"'/nowhere/at/all': no such folder \(there is no folder '/nowhere/at' either\)"),
        ("~/no-such-model", "'~/no-such-model': no such folder"),
        ("a/b/c", r"'a/b/c': no such folder \(there is no folder 'a/b' either\)"),
        ("my-model/", None),
        ("gone/", "'gone/': no such folder"),
        ("gone.gguf", "'gone.gguf': no such file"),
        ("runs/train_grop", r"'runs/train_grop': no such folder; did you mean 'train_grpo'\?"),
        ("..\\gone", "no such folder"),
    ],
)
def test_what_can_only_be_a_path_is_named(name: str, message: str | None, here: Path) -> None:
    if message is None:
        assert model_place(name)
        return
    with pytest.raises(MissingModelError, match=message) as error:
        model_place(name)
    assert "id of the Hub such as" in str(error.value) and "'zoo'" in str(error.value)


@pytest.mark.parametrize("name", ["", "  ", None, 5])
def test_no_name_is_named(name: object) -> None:
    with pytest.raises(ValueError, match="no name of a model"):
        model_place(name)  # type: ignore[arg-type]


COMMANDS = (
    ["plan"],
    ["chat", "--prompt", "x"],
    ["export", "--out", "out"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_name_a_missing_folder(command: list[str], here: Path) -> None:
    done = CliRunner().invoke(app, [command[0], "./my-modle", *command[1:]])
    assert done.exit_code == 2
    assert done.output.startswith("error: model='./my-modle': no such folder; did you mean 'my-model'?")


def test_python_names_a_missing_folder(here: Path) -> None:
    args = longreach.SFTConfig(output_dir="out", bf16=False, use_cpu=True)
    with pytest.raises(MissingModelError, match=r"'./gone': no such folder"):
        longreach.load("./gone")
    with pytest.raises(MissingModelError, match=r"'./gone': no such folder"):
        longreach.SFTTrainer("./gone", args)
    with pytest.raises(ExportError, match=r"'./gone': no such folder"):
        longreach.export("./gone", None, "out")
    with pytest.raises(MissingModelError, match=r"'./gone': no such folder"):
        longreach.plan("./gone", context=64, completion=8)


def test_what_the_hub_does_not_have_is_said_with_what_lies_here(here: Path) -> None:
    message = (
        r"model='my-modell': no such folder here; did you mean 'my-model'\?, and not to be had from the Hub; .*says: "
    )
    for ask in (
        lambda: longreach.load("my-modell"),
        lambda: longreach.plan("my-modell", context=64, completion=8),
        lambda: longreach.export("my-modell", None, "out"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


def test_without_a_network_nobody_waits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's client sleeps between its attempts."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    nowhere = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", nowhere)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: pytest.fail(f"sleeps {seconds} s"))
    for ask in (
        lambda: longreach.load("my-modell"),
        lambda: longreach.plan("my-modell", context=64, completion=8),
    ):
        with pytest.raises(
            ValueError, match=r"did you mean 'my-model'\?, and not to be had from the Hub; .*no connection"
        ):
            ask()


def test_without_a_network_what_is_in_the_cache_is_taken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longreach.model_name import check_connected

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    nowhere = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", nowhere)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "cache"))
    (commit := here / "cache" / "models--some--model" / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (refs := commit.parents[1] / "refs").mkdir()
    (commit / "config.json").write_text("{}", encoding="utf-8")
    for revision in ("main", "v1"):
        with pytest.raises(ConnectionError):
            check_connected("some/model", revision)
        (refs / revision).write_text("a" * 40, encoding="utf-8")
        check_connected("some/model", revision)
    for name in ("some/model", str(here), "no id of the Hub"):
        check_connected(name)


def test_a_folder_without_a_model_is_named_with_its_checkpoint(here: Path) -> None:
    for step in (5, 10):
        (here / "runs" / "train_grpo" / f"checkpoint-{step}").mkdir()
    with pytest.raises(MissingModelError, match=r"holds no config.json.* newest checkpoint in it is .*checkpoint-10$"):
        longreach.load("runs/train_grpo")


def test_an_adapter_whose_base_is_gone_says_so(here: Path) -> None:
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone/model"}))
    with pytest.raises(
        MissingModelError, match=r"adapter_config.json: base_model_name_or_path: .* is gone; .*/gone/model'"
    ):
        origin_of("adapter")


def test_the_embedded_model_has_one_name_everywhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longreach.zoo.model_path() == embedded_model() == Path(origin_of(EMBEDDED).base)
    assert ModelShape.of(EMBEDDED).name == EMBEDDED and ModelShape.of(EMBEDDED).vocab == 862
    model, tokenizer = longreach.load("zoo", device="cpu", parity_check=False)
    assert model.config.vocab_size == len(tokenizer) == 862
    runner = CliRunner()
    planned = runner.invoke(app, ["plan", "zoo", "--context", "2048", "--completion", "6"])
    assert planned.exit_code == 0 and planned.output.startswith("zoo, context 2048"), planned.output
    said = runner.invoke(app, ["chat", "zoo", "--prompt", "Program :", "--max-new-tokens", "4", "--device", "cpu"])
    assert said.exit_code == 0 and said.output.strip(), said.output
    made = runner.invoke(app, ["export", "zoo", "--verify", "weights"])
    assert made.exit_code == 0 and (here / "zoo-merged" / "model.safetensors").is_file(), made.output


@pytest.mark.parametrize("kwargs", [{}, {"attn_implementation": "eager"}], ids=["ours", "trl's loading"])
def test_trainers_take_the_embedded_model(kwargs: dict[str, str], here: Path) -> None:
    from datasets import Dataset

    args = longreach.SFTConfig(
        output_dir="out", bf16=False, use_cpu=True, report_to=[], parity_check=False, model_init_kwargs=kwargs
    )
    rows = Dataset.from_list([{"text": "let a = b"}])
    trainer = longreach.SFTTrainer("zoo", args, train_dataset=rows)
    assert trainer.model.config.vocab_size == 862


def test_an_installation_without_its_weights_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_name, "EMBEDDED_FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="the installation is incomplete"):
        longreach.load("zoo")


def test_a_misspelt_name_gets_the_nearest() -> None:
    assert nearest("modell", ["model", "data"]) == "; did you mean 'model'?"
    assert nearest("xyz", ["model", "data"]) == "; valid names: data, model"
    with pytest.raises(TypeError, match=r"Thing takes no 'sise'; did you mean 'size'\?"):
        check_names("Thing", ["colour", "sise"], ["colour", "size"])
