"""The rollout benchmark runs at toy sizes and records what it measures."""

import json

import pytest

from bench import rollout


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
        assert entries[-1]["mean_abs"] < 0.02
