"""The scripts of the figures run: options, tiny runs on a CPU, records, and the page made of them."""

import importlib
import json
from pathlib import Path

import pytest

from bench import make_tables, measure, models, plots

ROOT = Path(__file__).parents[2]
STEP = ["--device", "cpu", "--tiny", "--lengths", "2048,4096", "--repeats", "1"]


def records(path: Path) -> dict[tuple[str, str, int], dict]:
    return {(r["engine"], r["case"], r["context"]): r for r in json.loads(path.read_text())}


@pytest.mark.parametrize(
    "name",
    [
        "train_step",
        "planner",
        "make_tables",
        "peers.transformers_step",
        "peers.unsloth_step",
        "gpt_oss",
        "gpt_oss_grpo",
        "full_finetune",
        "half_precision",
    ],
)
def test_help_says_what_it_does(name, capsys):
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"bench.{name}").main(["--help"])
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Results of tiny runs of ours and of stock Transformers, in one file, and of the planner's check."""
    from bench.peers import transformers_step

    from bench import planner, train_step

    folder = tmp_path_factory.mktemp("results")
    out = ["--out", str(folder / "train_step.json"), "--commit", "abc"]
    train_step.main([*STEP, *out, "--group", "3", "--prompts", "1024", "--everyday"])
    transformers_step.main([*STEP, *out])
    planner.main(["--device", "meta", "--tiny", "--out", str(folder / "planner.json"), "--commit", "abc"])
    return folder


def test_every_case_is_recorded_with_its_origin(results):
    found = records(results / "train_step.json")
    assert set(found) == {
        ("longreach", "sequence", 64),
        ("longreach", "sequence", 32),
        ("longreach", "group tree", 32),
        ("longreach", "group rows", 32),
        ("longreach", "everyday", 20),
        ("transformers", "sequence", 64),
        ("transformers", "sequence", 32),
    }
    for record in found.values():
        assert record["step_s"] > 0 and record["first_step_s"] > 0 and record["commit"] == "abc"
        assert {"torch", "transformers", "python"} <= set(record["versions"])
    assert found["longreach", "group rows", 32]["gradient_difference"] < 0.05
    assert 0 < found["longreach", "sequence", 32]["utilization"] < 1


def test_a_new_record_takes_the_place_of_the_old_one(results, tmp_path):
    path = tmp_path / "again.json"
    entry = {"engine": "longreach", "case": "sequence", "model": "m", "context": 8, "step_s": 1.0}
    for seconds in (1.0, 2.0):
        measure.record(path, {**entry, "step_s": seconds}, "abc")
    measure.record(path, {**entry, "context": 9}, "abc")
    assert [r["step_s"] for r in json.loads(path.read_text())] == [2.0, 1.0]


def test_planner_check_has_each_point_within_a_tenth(results):
    found = json.loads((results / "planner.json").read_text())
    assert len(found["points"]) == 4 and found["against"] == "meta"
    assert max(abs(p["error"]) for p in found["points"]) <= 0.10


def test_the_page_is_made_from_the_results(results, tmp_path):
    page = tmp_path / "docs" / "benchmarks.md"
    how = ["--results", str(results), "--page", str(page)]
    make_tables.main(how)
    text = page.read_text()
    for expected in ("## One sequence", "## Groups that share a prompt", "## Everyday short rows", "## The planner"):
        assert expected in text
    plot = page.parent / "time_qwen3_4b.svg"
    assert f"]({plot.name})" in text and plot.read_text().startswith("<svg")
    make_tables.main([*how, "--check"])
    page.write_text(text + "edited")
    with pytest.raises(SystemExit, match="not what the results say"):
        make_tables.main([*how, "--check"])


def test_the_published_page_is_what_the_results_say():
    make_tables.main(["--check"])


def test_a_run_out_of_memory_has_a_line(tmp_path):
    record = {"engine": "transformers", "case": "sequence", "model": "m", "layers": 2, "context": 64, "step_s": None,
              "error": "CUDA out of memory", "card": "c", "commit": "abc", "versions": {}}  # fmt: skip
    (tmp_path / "train_step.json").write_text(json.dumps([record]))
    assert "| 64 | Transformers |  |  | out of memory |" in make_tables.page(tmp_path)


def test_plots_place_powers_of_two_evenly():
    svg = plots.lines("t", "s", {"a (how)": [(1024, 1.0), (4096, 4.0)], "b": []})
    xs = [float(part.split('"')[1]) for part in svg.split("<circle cx=")[1:]]
    assert len(xs) == 2 and xs[0] == plots.LEFT and xs[1] == plots.WIDTH - plots.RIGHT
    assert "1K" in svg and "4K" in svg and ">how<" in svg


def test_the_peer_says_how_to_be_installed(monkeypatch, tmp_path):
    from bench.peers import unsloth_step

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install unsloth"):
        unsloth_step.main(["--device", "cpu", "--tiny", "--folder", str(tmp_path)])


def test_the_peers_folder_is_a_model(tmp_path):
    from bench.peers import unsloth_step
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unsloth_step.main(["--device", "cpu", "--tiny", "--only-write", "--folder", str(tmp_path)])
    models.stretch(tmp_path, 100_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == 100_000
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == model.config.vocab_size


def test_a_device_that_is_not_there_is_refused(capsys):
    from bench import train_step

    if measure.torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit):
        train_step.main(["--tiny"])
    assert "there is no CUDA device" in capsys.readouterr().err


def test_gpt_oss_and_stock_beside_it(tmp_path):
    from bench import gpt_oss

    out = tmp_path / "gpt_oss.json"
    for weights in ("bf16", "mxfp4"):
        gpt_oss.main(
            ["--device", "cpu", "--tiny", "--weights", weights, "--rank", "4", "--lengths", "2048", "--stock-lengths", "2048",
             "--out", str(out), "--commit", "abc"]
        )  # fmt: skip
    found = json.loads(out.read_text())
    assert {(r["engine"], r["case"]) for r in found} == {
        (engine, f"{weights} r=4") for engine in ("longreach", "transformers") for weights in ("bf16", "mxfp4")
    }
    assert all(r["step_s"] > 0 for r in found)
