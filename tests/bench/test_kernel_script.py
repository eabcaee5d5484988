"""The script of the fused kernels runs, and its record is what the page is made from."""

import json

import pytest

from bench import kernel_tables, kernels


def test_it_runs_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "kernels.json"
    kernels.main(["--device", "cpu", "--tiny", "--out", str(out), "--commit", "abc"])
    record = json.loads(out.read_text())
    assert [row["op"] for row in record["ops"]] == list(kernels.OPS) and record["machine"]["commit"] == "abc"
    assert all(row["microseconds"] > 0 and row["pytorch_microseconds"] > 0 for row in record["ops"])
    record["machine"]["versions"].setdefault("triton", "none")
    page = "\n".join(kernel_tables.kernels(record))
    assert "commit abc" in page and "| rms_norm_backward, add |" in page
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cpu", "--sweep"])


def test_the_sweep_names_ops_and_settings_that_exist():
    import importlib

    pytest.importorskip("triton", reason="the kernels' modules need Triton")
    for place, settings, names in kernels.SWEEP:
        module = importlib.import_module(f"longreach.kernels.jit.{place}")
        assert set(names) <= set(kernels.OPS)
        assert all(hasattr(module, name) for setting in settings for name in setting)
