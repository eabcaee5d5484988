"""``longreach plan``: the page it prints, refusals and wrong input as exit codes."""

import pytest
from typer.testing import CliRunner

from longreach.cli import app

ASKED = ["plan", "Qwen/Qwen3-4B", "--context", "131072", "--group", "8", "--host", "128GB"]


def run(*more: str):
    return CliRunner().invoke(app, [*ASKED, *more], env={"COLUMNS": "160"})


def test_the_page_names_choice_table_and_longest_context():
    result = run("--gpu", "24GB")
    assert result.exit_code == 0, result.output
    flat = " ".join(result.output.split())
    assert "Qwen3-4B, context 131072, group 8: inputs on host, chunk 8192" in flat
    assert "131,072" in flat and "RTX 4090" in flat
    assert "longest context that fits here: " in flat
    assert "the config names 40,960 positions" in flat


def test_sizes_are_read_with_their_units():
    from longreach.cli.plan import _bytes

    assert [_bytes("--gpu", text) for text in ("24GB", "24", "1.5 GiB", "512mb")] == [
        24 * 10**9,
        24 * 10**9,
        3 * 2**29,
        512 * 10**6,
    ]
    assert _bytes("--gpu", None) is None


def test_what_does_not_fit_exits_with_1_and_says_what_would():
    result = run("--gpu", "10GB")
    assert result.exit_code == 1
    assert "Does not fit" in result.output and "needs a GPU of" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "lots"], "--gpu 'lots': give a size such as 24GB"),
        (["--gpu", "24GB", "--completion", "200000"], "completion=200000 with context=131072"),
        (["--gpu", "24GB", "--weights", "int2"], "weights='int2'"),
    ],
)
def test_wrong_input_exits_with_2(options, message):
    result = run(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
