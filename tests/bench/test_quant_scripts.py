"""The scripts of the 4-bit figures run, tiny and on a CPU."""

import json

from bench import dequant, load, qlora
from longreach.quant.checkpoint import read_header

TINY = ["--device", "cpu", "--tiny", "--commit", "abc"]


def test_a_qlora_step(tmp_path):
    out = tmp_path / "qlora.json"
    case = ["--weights", "nf4,bf16", "--cases", "2048:1024:host", "--repeats", "0"]
    qlora.main([*TINY, *case, "--out", str(out)])
    found = {(r["weights"], r["chunk"], r["offload"], r["context"]) for r in json.loads(out.read_text())}
    assert found == {("nf4", 16, "host", 32), ("bf16", 16, "host", 32)}


def test_dequantization(tmp_path):
    dequant.main([*TINY, "--out", str(tmp_path / "dequant.json")])
    found = json.loads((tmp_path / "dequant.json").read_text())
    assert found["down_proj nf4 bfloat16"]["us"] > 0 and found["commit"] == "abc"


def test_loading(tmp_path):
    for model, weights in (("gpt-oss-20b", "mxfp4"), ("qwen3-4b", "nf4")):
        out = tmp_path / "load.json"
        load.main([*TINY, "--model", model, "--weights", weights, "--folder", str(tmp_path / model), "--out", str(out)])
        found = json.loads(out.read_text())
        assert found["bytes"] == sum(
            t.stop - t.start for file in (tmp_path / model).glob("*.safetensors") for t in read_header(file).values()
        )
        assert found["cold_load_s"] > 0 and found["warm_read_1_s"] > 0
