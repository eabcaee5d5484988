"""Data for training: every kind of source, and a clear error for each way it can be wrong."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from longreach.cli.config import DataSection
from longreach.cli.data import load_data
from longreach.cli.terminal import ConfigError

ROWS = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}, {"prompt": "three", "answer": "3"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def load(folder: Path, method: str = "grpo", **section: object) -> tuple[Dataset, Dataset | None]:
    return load_data(DataSection(**section), method, folder)


def test_files_of_each_kind(tmp_path: Path) -> None:
    data = Dataset.from_list(ROWS)
    (tmp_path / "a.jsonl").write_text(lines(ROWS) + "\n", encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(ROWS), encoding="utf-8")
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.to_csv(str(tmp_path / "a.csv"))
    for name in ("a.jsonl", "a.json", "a.parquet", "a.csv"):
        train, held_out = load(tmp_path, train=name)
        assert train["prompt"][:] == ["one", "two", "three"] and held_out is None, name


def test_folders_and_saved_data(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "1.jsonl").write_text(lines(ROWS[:1]), encoding="utf-8")
    (shards / "2.jsonl").write_text(lines(ROWS[1:]), encoding="utf-8")
    assert load(tmp_path, train="shards")[0]["prompt"][:] == ["one", "two", "three"]
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(str(tmp_path / "saved"))
    train, held_out = load(tmp_path, train="saved", eval_split="test")
    assert len(train) == 3 and held_out is not None and len(held_out) == 1
    with pytest.raises(ConfigError, match=r"has no split 'valid'; its splits: train, test"):
        load(tmp_path, train="saved", eval_split="valid")


def test_the_zoo_gives_held_out_rows_too(tmp_path: Path) -> None:
    train, held_out = load(tmp_path, train="zoo:log_facts", size=4, eval_size=2, length=256)
    assert held_out is not None and (len(train), len(held_out)) == (4, 2)
    with pytest.raises(
        ConfigError, match=r"data\.train='zoo:log_fact': the zoo has no such task; did you mean 'log_facts'"
    ):
        load(tmp_path, train="zoo:log_fact")
    with pytest.raises(ConfigError, match="length=5"):
        load(tmp_path, train="zoo:log_facts", length=5)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", r"data\.train='a\.jsonl': the file is empty"),
        ("a.jsonl", "\n\n", r"data\.train='a\.jsonl'"),
        ("a.json", "[]", r"data\.train='a\.json'"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"line 2 is not JSON"),
        ("a.jsonl", '["x"]\n', r"line 1 is not an object but list"),
        ("a.txt", "x", r"unknown kind of file '\.txt'; known: \.jsonl"),
        ("a.parquet", "not parquet", r"cannot be read as parquet"),
        ("a.jsonl", '{"prompts": "x"}\n', r"has no column 'prompt'; its columns: prompts; did you mean 'prompts'"),
        ("a.jsonl", '{"question": "x", "answer": "y"}\n', r"has no column 'prompt'; its columns: question, answer$"),
        ("a.jsonl", '{"prompt": ""}\n', r"row 0: prompt=''; it must be a text that is not empty or a list of messages"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": null}\n', r"row 1: prompt='None'"),
        ("a.jsonl", '{"prompt": [{"text": "x"}]}\n', r"row 0: prompt="),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, train=name)


def test_sft_names_the_columns_it_needs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sft needs a column 'text' or 'messages', or 'prompt' and 'completion'"):
        load(tmp_path, method="sft", train="a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    assert len(load(tmp_path, method="sft", train="b.jsonl")[0]) == 1


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"data\.train='trian\.jsonl': no such file or folder; did you mean 'train\.jsonl'"
    ):
        load(tmp_path, train="trian.jsonl")
    with pytest.raises(ConfigError, match=r"data\.eval='sub/x\.jsonl': no such file or folder; there is no folder"):
        load(tmp_path, train="train.jsonl", eval="sub/x.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folder holds no \.jsonl"):
        load(tmp_path, train="empty")
    (tmp_path / "empty" / "a.csv").write_text("x", encoding="utf-8")
    (tmp_path / "empty" / "a.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mixes \.json and \.csv files"):
        load(tmp_path, train="empty")


def test_a_hub_id_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(
        ConfigError, match=r"data\.train='me/data': no such file .* not to be had from the Hub: no route$"
    ):
        load(tmp_path, train="me/data")
