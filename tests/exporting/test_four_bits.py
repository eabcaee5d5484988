"""Models that trained on 4-bit weights: merged onto these, or onto the original ones and the difference told."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import longreach
from longreach.exporting.errors import ExportError, MismatchError
from longreach.exporting.gguf_file import mixed_types
from tests.exporting.models import EXPERT_PARAMETERS, MOE, tokenizer_for


def trained(name: str, base: Path, weights: str | None, *, experts: bool = True, dtype=torch.float32):
    """A QLoRA model with an adapter that matters, computing in fp32 so that only the export's rounding shows."""
    parameters = EXPERT_PARAMETERS if experts and name in MOE else None
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear" if experts else ["q_proj", "v_proj"], target_parameters=parameters,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model, _ = longreach.load(str(base), weights=weights, lora=lora, device="cpu", parity_check=False, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize(
    ("name", "weights"), [("qwen3", "nf4"), ("qwen3", "mxfp4"), ("qwen3_moe", "nf4"), ("gpt_oss-mxfp4", None)]
)
def test_merged_onto_what_was_trained_against(name: str, weights: str | None, base, tmp_path: Path) -> None:
    kind = name.removesuffix("-mxfp4")
    model, tokenizer = trained(kind, base(name), weights), tokenizer_for(kind)
    made = longreach.export(model, tokenizer, tmp_path / "m")
    assert made.checks[0].record["logits"]["relative"] < 0.02
    config = json.loads((made.path / "config.json").read_text())
    assert "quantization_config" not in config
    AutoModelForCausalLM.from_pretrained(made.path)
    adapter = longreach.export(model, tokenizer, tmp_path / "a", format="adapter")
    assert adapter.checks[0].record["logits"]["relative"] < 1e-5
    longreach.export(model, tokenizer, tmp_path / "g", format="gguf", quantization="bf16")


def test_from_the_runs_folder_and_onto_the_original_weights(base, tmp_path: Path) -> None:
    model, tokenizer = trained("qwen3", base("qwen3"), "nf4"), tokenizer_for("qwen3")
    run = longreach.export(model, tokenizer, tmp_path / "run", format="adapter").path
    header = {"type": "header", "run": "run", "config": {"model": {"name_or_path": "x", "weights": "nf4"}}}
    (run / "log.jsonl").write_text(json.dumps(header) + "\n")
    # The log says what it was trained on; without that, it would be merged onto the checkpoint's weights.
    for arguments in ({}, {"weights": "nf4"}):
        made = longreach.export(run, None, tmp_path / f"m{len(arguments)}", **arguments)
        assert made.checks[0].record["adapter"]["weights"] == 14
    made = longreach.export(run, None, tmp_path / "o", merge_onto="original")
    assert "merged onto the original 16-bit weights, not the nf4 ones" in made.notes[0]
    assert made.checks[0].record["logits"]["relative"] > 0.05
    with pytest.raises(ExportError, match="export with format='merged' first"):
        longreach.export(run, None, tmp_path / "g", merge_onto="original", format="gguf")
    with pytest.raises(ExportError, match="weights='int3': choose one of nf4, mxfp4"):
        longreach.export(run, None, tmp_path / "g", weights="int3")


def test_merging_a_4_bit_adapter_onto_16_bit_weights_unawares_is_caught(base, tmp_path: Path) -> None:
    from longreach.exporting import pipeline
    from longreach.exporting.weights import CheckpointWeights

    model = trained("qwen3", base("qwen3"), "nf4")
    export = pipeline._Export(pipeline.live_source(model, tokenizer_for("qwen3")), tmp_path / "m", pipeline.Options())
    object.__setattr__(export.source, "base", CheckpointWeights(base("qwen3")))
    with pytest.raises(MismatchError, match="logits"):
        export.run()


def test_mxfp4_stays_as_it_is_where_no_adapter_touches_it(base, tmp_path: Path) -> None:
    import gguf

    tokenizer = tokenizer_for("gpt_oss")
    attention = trained("gpt_oss", base("gpt_oss-mxfp4"), None, experts=False)
    run = longreach.export(attention, tokenizer, tmp_path / "run", format="adapter").path
    made = longreach.export(run, None, tmp_path / "x.gguf", format="gguf", quantization="mxfp4")
    assert "bit for bit" in made.notes[0] and mixed_types(made.path)["mxfp4"] == 6
    untrained = longreach.export(base("gpt_oss-mxfp4"), None, tmp_path / "y.gguf", format="gguf", quantization="mxfp4")
    packed = [
        {t.name: t.data.tobytes() for t in gguf.GGUFReader(file).tensors if t.tensor_type.name == "MXFP4"}
        for file in (made.path, untrained.path)
    ]
    assert packed[0] == packed[1]
    experts = trained("gpt_oss", base("gpt_oss-mxfp4"), None)
    run = longreach.export(experts, tokenizer, tmp_path / "run2", format="adapter").path
    made = longreach.export(run, None, tmp_path / "z.gguf", format="gguf", quantization="mxfp4")
    assert "quantized to MXFP4 again" in made.notes[0] and mixed_types(made.path)["mxfp4"] == 6


@pytest.mark.parametrize("low", [0, 1])
def test_unpacking_by_bytes_gives_the_kernels_bits(low: int) -> None:
    from longreach.exporting.weights import unpacked
    from longreach.kernels.dequant import dequantize_mxfp4

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 6, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, 250, (2, 64, 6), dtype=torch.uint8, generator=generator)
    scales[0, 0, 0] = low
    wanted = dequantize_mxfp4(blocks, scales, torch.empty(2, 64, 192, dtype=torch.bfloat16))
    assert torch.equal(unpacked(blocks, scales), wanted)
