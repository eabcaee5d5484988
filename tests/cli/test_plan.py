"""``longreach plan``: the page it prints, refusals and wrong input as exit codes."""

import json

import pytest
import torch
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


def alone(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which is planned for")
def test_without_a_gpu_every_size_of_card_is_planned_for() -> None:
    """No seconds of a CPU, and no context that only the search ended."""
    text = alone("Qwen/Qwen3-4B", "--context", "65536")
    flat = " ".join(text.split())
    assert "no GPU here: planned for cards elsewhere; hosts of 2 × the card's memory are assumed" in flat
    assert "16777215" not in flat.replace(",", "") and " CPU" not in flat
    assert "rates: H200 as measured by this project" in flat
    first, longest = text.split("Longest context that fits")
    for card in ("T4", "RTX 4090", "A100 40GB", "L40S", "H100", "H200"):
        assert f" {card} " in first and f" {card} " in longest
    rows = [line.split() for line in longest.splitlines() if " host " in line and "GB" in line]
    assert rows and all(row[-4:-3] == ["GB"] or "GB" in row for row in rows)
    assert "* the config names 40,960 positions" in flat


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which is planned for")
def test_a_host_that_is_given_counts_for_every_card() -> None:
    assert "with a host of 64 GB" in alone("Qwen3-4B", "--host", "64GB")
    small = alone("Qwen3-4B", "--weights", "fp32", "--lora", "0", "--context", "4096")
    assert " T4 " in small and "does not fit" in small


def test_what_ends_the_longest_context_is_said() -> None:
    flat = " ".join(alone("Qwen3-4B", "--gpu", "24GB", "--host", "16GB").split())
    assert "tokens (then the host is full; --host plans a larger one)" in flat
    flat = " ".join(alone("zoo", "--context", "64", "--completion", "8", "--gpu", "80GB", "--host", "900GB").split())
    assert "16,777,215 tokens and more, where the search ends" in flat and "> 16,777,215* search" in flat
    assert "tokens (then the GPU is full)" in " ".join(
        alone("Qwen3-4B", "--gpu", "24GB", "--host", "2TB", "--offload", "none").split()
    )


def test_the_form_of_the_weights_is_said_with_its_reason(tmp_path) -> None:
    assert "weights: mxfp4, as the checkpoint stores them" in alone("openai/gpt-oss-20b", "--gpu", "80GB")
    asked = alone("openai/gpt-oss-20b", "--gpu", "80GB", "--weights", "bf16")
    assert "weights: bf16" in asked and "as the checkpoint" not in asked
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "weights: bf16, as the config names no dtype" in alone(str(tmp_path), "--gpu", "16GB")


def test_gemma_on_a_card_without_bf16_is_remarked_on() -> None:
    told = "gemma3_text leaves the range of fp16: a card without bf16, such as the T4, trains it in fp32 only"
    assert told in alone("Gemma-3-12B", "--gpu", "80GB")
    assert told not in alone("Gemma-3-12B", "--gpu", "80GB", "--weights", "fp32")
    assert told not in alone("Qwen3-4B", "--gpu", "80GB")


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
        (["--gpu", "24GB", "--weights", "nf4", "--lora", "0"], "lora=None: weights in nf4 are frozen"),
    ],
)
def test_wrong_input_exits_with_2(options, message):
    result = run(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
