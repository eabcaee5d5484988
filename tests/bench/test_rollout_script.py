"""The rollout benchmark runs at toy sizes and records what it measures."""

import json

import pytest

from bench import decode_step, logprobs, rollout


@pytest.mark.parametrize(
    "arguments", [["--batches", "2", "--logprobs"], ["--weights", "nf4", "--batches", "1"], ["--prefix", "4096"]]
)
def test_rollout(arguments, tmp_path):
    out = tmp_path / "rollout.json"
    rollout.main(["--device", "cpu", "--tiny", "--new", "8", "--out", str(out), *arguments])
    entries = json.loads(out.read_text())
    assert {e["engine"] for e in entries} <= {"longreach", "longreach log-probs"}
    assert all(e["tokens_per_s"] > 0 for e in entries if e["engine"] == "longreach")
    if "--prefix" in arguments:
        assert [e["shared"] for e in entries] == [True, False]
    if "--logprobs" in arguments:
        found = [e for e in entries if e["engine"] == "longreach log-probs"]
        assert [e["adapters"] for e in found] == ["random", "trained"]
        assert all(0 < e["engine_trainer_mean"] <= 2 * e["trainer_fp32_mean"] < 0.02 for e in found)


def test_log_probs_alone(tmp_path):
    out = tmp_path / "rollout.json"
    logprobs.main(["--device", "cpu", "--tiny", "--new", "8", "--out", str(out)])
    entries = json.loads(out.read_text())
    assert [e["tokens"] for e in entries] == [512, 512]
    # The two strengths are two measurements, of different adapters.
    assert entries[0]["engine_fp32_mean"] != entries[1]["engine_fp32_mean"]


def test_decode_step(tmp_path):
    out = tmp_path / "decode_step.json"
    decode_step.main(["--device", "cpu", "--tiny", "--batches", "1,8", "--out", str(out)])
    entries = json.loads(out.read_text())
    assert [(e["batch"], e["own"]) for e in entries] == [(1, 8), (8, 8)]
    assert all(0 < e["shortest_us"] <= e["median_us"] for e in entries)
