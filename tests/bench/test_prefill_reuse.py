"""The script of the reused prefill runs, records, and refuses what is no case."""

import json

import pytest

from bench import prefill_reuse


@pytest.mark.parametrize("offload", [None, "host"])
def test_a_tiny_run(offload, tmp_path):
    path = tmp_path / "found.json"
    given = [
        "--device",
        "cpu",
        "--tiny",
        "--repeats",
        "1",
        "--cases",
        "2*4096+256x2",
        "--out",
        str(path),
        "--commit",
        "abc",
    ]
    prefill_reuse.main(given + ([] if offload is None else ["--offload", offload]))
    (entry,) = json.loads(path.read_text())
    assert entry["prompts"] == 2 and entry["group"] == 2 and entry["commit"] == "abc"
    assert entry["offload"] == (offload or "none")
    assert entry["without"]["reused_tokens"] == 0 and entry["with"]["reused_tokens"] == 2 * 63
    assert entry["gradient_difference"] < 1e-5
    assert entry["with"]["step_s"] > 0


def test_a_case_that_is_none():
    with pytest.raises(ValueError, match="PROMPTS\\*PROMPT"):
        prefill_reuse.cases("8x2048")
