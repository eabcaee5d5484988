"""Steps on few layers and what the page says of full depth; engines that wait for each other; whole GRPO steps."""

import json
import threading

import pytest

from bench import depth_tables, measure, training_tables

TINY = ["--device", "cpu", "--tiny", "--repeats", "1", "--commit", "abc"]


def test_contexts_on_few_layers_are_recorded_with_their_depth(tmp_path):
    from bench.peers import transformers_step

    from bench import train_step

    out = tmp_path / "t.json"
    shallow = ["--lengths", "", "--shallow", "2048@1,2048@2", "--out", str(out)]
    train_step.main(
        [*TINY, *shallow, "--group", "2", "--prompts", "", "--shallow-prompts", "1024@1", "--row-sample", "1"]
    )
    transformers_step.main([*TINY, *shallow])
    found = {(r["engine"], r["case"], r["context"], r["layers"]): r for r in json.loads(out.read_text())}
    assert set(found) == {
        *((engine, "sequence", 32, layers) for engine in ("longreach", "transformers") for layers in (1, 2)),
        ("longreach", "group tree", 32, 1), ("longreach", "group rows", 32, 1),
    }  # fmt: skip
    assert found["longreach", "group rows", 32, 1]["rows_run"] == 1


def test_a_context_without_its_layers_is_refused(capsys):
    from bench import train_step

    with pytest.raises(SystemExit):
        train_step.main(["--shallow", "2048"])
    assert "such as 131072@6" in capsys.readouterr().err


def test_a_warmed_engine_waits_and_then_counts_each_step(tmp_path):
    from bench.peers import transformers_step

    out, go = tmp_path / "t.json", tmp_path / "go"
    how = [
        "--lengths",
        "2048",
        "--everyday",
        "--everyday-batches",
        "2",
        "--warm",
        "--after",
        str(go),
        "--out",
        str(out),
    ]
    running = threading.Thread(target=transformers_step.main, args=([*TINY, *how],))
    running.start()
    running.join(timeout=5)
    assert running.is_alive() and not out.exists()
    go.touch()
    running.join(timeout=250)
    found = json.loads(out.read_text())
    assert {r["case"] for r in found} == {"sequence", "everyday"}
    assert all(r["first_step_s"] is None and r["repeats"] == 1 and r["step_s"] > 0 for r in found)
    assert next(r for r in found if r["case"] == "everyday")["rows_run"] == 16


def test_memory_alone_has_no_times(tmp_path):
    from bench import train_step

    out = tmp_path / "t.json"
    train_step.main([*TINY, "--memory", "--lengths", "", "--shallow", "2048@2", "--out", str(out)])
    (record,) = json.loads(out.read_text())
    assert record["case"] == "memory" and record["step_s"] is None and "repeats" not in record
    assert record["whole_layers"] == 2 and record["layer_gradient_bytes"] > 0


def test_memory_of_full_depth_adds_the_gradients_of_the_other_layers():
    record = {"case": "memory", "model": "m", "context": 1024, "offload": "host", "layers": 2, "whole_layers": 10,
              "layer_gradient_bytes": 2**28, "above_weights_bytes": 3 * 2**30}  # fmt: skip
    streamed = {**record, "offload": "keys", "above_weights_bytes": 2**30}
    text = depth_tables.memory([record, streamed])
    assert "| m | 5.00 | 3.00 |" in text and "| model | 1,024 | 1,024, keys streamed |" in text
    assert depth_tables.memory([]) == []


def test_time_of_full_depth_follows_from_two_depths():
    record = {"case": "sequence", "engine": "longreach", "model": "m", "context": 1024, "offload": "host", "chunk": 8,
              "save_attention": True, "repeats": 3}  # fmt: skip
    runs = [{**record, "layers": layers, "step_s": 1.0 + layers / 2} for layers in (2, 6)]
    runs.append({**record, "context": 8, "layers": 36, "step_s": 1.0})
    (line,) = [line for line in depth_tables.seconds(runs) if line.startswith("| m,")]
    assert line == "| m, 1,024 | Longreach | 2.00 s on 2 | 4.00 s on 6 | 0.500 s | 19.0 s on 36 |  |  |"
    assert depth_tables.seconds(runs[1:]) == []


def test_rows_of_a_group_are_sequences_of_their_length(tmp_path):
    from bench import make_tables, train_step

    out = tmp_path / "train_step.json"
    how = ["--lengths", "", "--shallow", "2048@2", "--group", "4", "--prompts", "", "--trees-only", "--out", str(out)]
    train_step.main([*TINY, *how, "--shallow-prompts", "1024@2"])
    tree, sequence = sorted(json.loads(out.read_text()), key=lambda r: r["case"])
    assert (tree["case"], sequence["case"]) == ("group tree", "sequence") and tree["context"] == sequence["context"]
    (line,) = [line for line in make_tables.groups([tree, sequence]) if line.startswith("| Qwen3-4B, 4")]
    gain = 4 * sequence["step_s"] / tree["step_s"]
    assert f"| {4 * sequence['step_s']:.2f} s | 1 | {gain:.1f}× |" in line


@pytest.mark.parametrize("engine", ["longreach", "trl"])
def test_a_grpo_step_is_recorded_by_phase(engine, tmp_path):
    from bench import grpo_step

    out = tmp_path / "g.json"
    how = ["--engine", engine, "--warm-completion", "64", "--folder", str(tmp_path / "model"), "--out", str(out)]
    grpo_step.main([*TINY, *how])
    (record,) = json.loads(out.read_text())
    assert record["step_s"] == pytest.approx(record["rollout_s"] + record["reward_s"] + record["training_s"])
    assert min(record["rollout_s"], record["training_s"]) > 0 and len(record["losses"]) == 2
    # completions of the warm step are 4 tokens, of the last one up to 16
    assert 64 * 4 < record["tokens"] <= 64 * 16
    page = training_tables.grpo_steps([{**record, "peak_bytes": 2**30}])
    assert any(line.startswith("| TRL" if engine == "trl" else "| Longreach") for line in page)


def test_gradients_of_a_tree_are_those_of_its_rows(tmp_path):
    from bench import tree_gradients

    out = tmp_path / "g.json"
    tree_gradients.main([*TINY, "--out", str(out)])
    (record,) = json.loads(out.read_text())
    assert record["fp32_tree_to_rows"] < 1e-5 < record["bf16_tree_to_rows"] <= 2 * record["bf16_rows_to_fp32"]
    assert any(line.startswith("| Qwen3-0.6B") for line in training_tables.tree_gradients([record]))


def test_a_wait_without_a_file_is_none():
    measure.wait_for(None)
