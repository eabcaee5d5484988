"""The train file: short and long forms, TRL's flat names, and a clear error for everything else."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from longreach.cli.config import parse, read_file
from longreach.cli.fields import build, checked, field_names
from longreach.cli.terminal import ConfigError

FIELDS = {
    "grpo": ["learning_rate", "num_generations", "max_length", "beta", "reward_weights", "output_dir"],
    "sft": ["learning_rate", "packing", "max_length", "output_dir"],
}
GRPO = {"method": "grpo", "model": "m", "data": "d.jsonl", "reward": "r.py:f"}
SFT = {"method": "sft", "model": "m", "data": "d.jsonl"}


def test_short_and_long_forms_mean_the_same() -> None:
    short = parse({**GRPO, "lora": 16, "learning_rate": 1e-5}, FIELDS)
    long = parse(
        {
            "method": "grpo",
            "model": {"name_or_path": "m"},
            "data": {"train": "d.jsonl"},
            "reward": ["r.py:f"],
            "lora": {"r": 16},
            "training": {"learning_rate": 1e-5},
        },
        FIELDS,
    )
    flat = parse(
        {
            "method": "grpo",
            "model_name_or_path": "m",
            "dataset_name": "d.jsonl",
            "reward_funcs": "r.py:f",
            "use_peft": True,
            "lora_r": 16,
            "learning_rate": 1e-5,
        },
        FIELDS,
    )
    assert short == long == flat


def test_lora_can_be_switched_off_and_on() -> None:
    assert parse({**SFT, "lora": False}, FIELDS).lora is None
    assert parse({**SFT, "use_peft": False, "lora_r": 8}, FIELDS).lora is None
    assert parse({**SFT, "lora": True}, FIELDS).lora == {}
    assert parse(SFT, FIELDS).lora is None


def test_flat_fields_and_the_training_section_add_up() -> None:
    file = parse({**SFT, "training": {"packing": True}, "max_length": 9}, FIELDS)
    assert file.training == {"packing": True, "max_length": 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_generation": 8}, r"unknown key 'num_generation'; did you mean 'num_generations'\?"),
        ({"training": {"betta": 0.1}}, r"unknown key 'training\.betta'; did you mean 'beta'\?"),
        ({"packing": True}, r"unknown key 'packing': it belongs to method sft, and method is grpo"),
        ({"model": {"name_or_path": "m", "weight": "nf4"}}, r"unknown key 'model\.weight'; did you mean 'weights'\?"),
        ({"data": {"train": "d", "spilt": "x"}}, r"unknown key 'data\.spilt'; did you mean 'split'\?"),
        ({"model": {"name_or_path": "m", "weights": "int3"}}, r"model\.weights='int3': input should be 'bf16', 'fp16'"),
        ({"data": {"train": "d", "length": "long"}}, r"data\.length='long': input should be a valid integer"),
        ({"method": "ppo"}, r"method='ppo' is unknown; write method: grpo or method: sft"),
        ({"method": None}, r"method is missing"),
        ({"reward": []}, r"reward is missing; method grpo needs one"),
        ({"reward": None, "method": "sft"}, r"reward=None"),
        ({"method": "sft"}, r"reward=\['r.py:f'\]: method sft takes no reward"),
        ({"training": 3}, r"training=3: must be a mapping"),
        ({"beta": 1.0, "training": {"beta": 0.5}}, r"beta and training\.beta are both given"),
        (
            {"model_name_or_path": "n", "model": {"name_or_path": "m"}},
            r"model_name_or_path and model\.name_or_path are both",
        ),
        ({"reward_funcs": "x.py:f"}, r"reward_funcs and reward are both given"),
        ({"lora": False, "lora_r": 4}, r"lora_r and lora=None are both given"),
        ({"model": 7}, r"model=7: must be a folder, a Hub id or zoo, or a mapping with name_or_path"),
        ({"reward": 7}, r"reward=7: must be path/to/file\.py:function, or a list"),
        ({"lora": "eight"}, r"lora='eight': must be a rank, true or false"),
        ({"model": ""}, r"model\.name_or_path=''"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({**GRPO, **change}, FIELDS)


@pytest.mark.parametrize("key", ["model", "data"])
def test_missing_sections_are_named_with_an_example(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} is missing; write {key}: "):
        parse({name: value for name, value in GRPO.items() if name != key}, FIELDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "line 2: 'a' is given twice"),
        ("a: [1\n", r"line 2, column 1: not YAML"),
        ("? [a]\n: 1\n", r"line 1: a key must be a name, not \['a'\]"),
        ("seed: 2020-99-99\n", "not YAML: month must be in"),
        ("- 1\n", "holds list, not a mapping"),
        ("", "holds NoneType, not a mapping"),
        ("method: grpo\nlora:\n  r: 8\n  r: 9\n", "line 4: 'r' is given twice"),
    ],
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_file(path)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("a: 1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no such file; did you mean 'train\.yaml'\?"):
        read_file(tmp_path / "trian.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        read_file(tmp_path / "nowhere" / "train.yaml")


@dataclass
class Settings:
    rate: float = 1.0
    count: int = 1
    name: str | None = None
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    targets: list[str] | str | None = None
    anything: Any = None
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count={self.count}: must not be negative")


def test_values_become_what_the_field_declares() -> None:
    # YAML 1.1 reads 1e-5 as text: the most common surprise in a config.
    assert checked(Settings, {"rate": "1e-5", "count": "3", "targets": ["q"], "anything": {"x": 1}}) == {
        "rate": 1e-5,
        "count": 3,
        "targets": ["q"],
        "anything": {"x": 1},
    }
    assert field_names(Settings) == ["rate", "count", "name", "kind", "flag", "targets", "anything"]


def test_true_and_false_reach_a_field_that_may_be_auto() -> None:
    @dataclass
    class Choice:
        save: str = "auto"
        folder: str = "out"

    assert checked(Choice, {"save": True}) == {"save": "true"}
    with pytest.raises(ConfigError, match="folder=True"):
        checked(Choice, {"folder": True})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": "fast"}, r"lora\.rate='fast': input should be a valid number"),
        ({"count": 2.5}, r"lora\.count=2\.5: input should be a valid integer"),
        ({"kind": "c"}, r"lora\.kind='c': input should be 'a' or 'b'"),
        ({"flag": "perhaps"}, r"lora\.flag='perhaps': input should be a valid boolean"),
        ({"made": 1}, r"unknown key 'lora\.made'"),
        ({"rat": 1}, r"unknown key 'lora\.rat'; did you mean 'rate'\?"),
        ({"count": -1}, r"lora: count=-1: must not be negative"),
    ],
)
def test_values_of_the_wrong_kind_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Settings, values, "lora.")


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_names_read_from_the_source_are_those_of_the_classes(method: str) -> None:
    from longreach.cli.fields import declared_names
    from longreach.trainers.config import GRPOConfig, SFTConfig

    found = declared_names(method)
    assert found is not None and sorted(found) == sorted(field_names({"grpo": GRPOConfig, "sft": SFTConfig}[method]))


def test_classes_elsewhere_are_imported_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    from longreach.cli import fields

    monkeypatch.setitem(fields.LINEAGE, "grpo", (("trl", "trainer/gone.py", "GRPOConfig"),))
    assert fields.declared_names("grpo") is None
    monkeypatch.setitem(fields.LINEAGE, "grpo", (("trl", "trainer/grpo_config.py", "Gone"),))
    assert fields.declared_names("grpo") is None
