"""A plan follows the checkpoint as `load` does, and refuses what `load` or the first step would refuse, in the same words."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3TextConfig

import longreach
from bench import models
from longreach.context.plan import PlanError, plan
from longreach.context.precision import OVERFLOWING
from longreach.context.shape import KNOWN
from longreach.context.speed import GB
from longreach.context.stored import SCALED_EMBEDDING
from longreach.context.support import TESTED, UnsupportedModelError
from longreach.loading import quantization
from tests.exactness.models import build

ASKED = {"context": 256, "completion": 16, "lora": 8, "gpu_bytes": 80 * GB, "host_bytes": 256 * GB}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def folder_of(place: Path, name: str = "gpt-oss-20b", **entries) -> str:
    """A folder with the config of a tiny model, and more entries in it."""
    config = models.config_of(models.shape_of(name, 2, tiny=True), 256).to_dict()
    (place / "config.json").write_text(json.dumps(config | entries))
    return str(place)


# --- the default


@pytest.mark.parametrize(
    ("name", "entries", "weights"),
    [
        ("gpt-oss-20b", {"quantization_config": MXFP4}, "mxfp4"),
        ("Qwen3-4B", {"quantization_config": BITSANDBYTES, "dtype": "bfloat16"}, "nf4"),
        ("Qwen3-4B", {"dtype": "bfloat16"}, "bf16"),
        ("Qwen3-4B", {"torch_dtype": "float16"}, "fp16"),
        ("Qwen3-4B", {"dtype": "float32"}, "fp32"),
        ("Qwen3-4B", {}, "bf16"),
    ],
)
def test_the_default_is_what_the_checkpoint_stores(name, entries, weights, tmp_path):
    folder = folder_of(tmp_path, name, **entries)
    for given in (folder, AutoConfig.from_pretrained(folder), json.loads((tmp_path / "config.json").read_text())):
        assert plan(given, **ASKED).work.weights == weights
    assert plan(folder, weights="bf16", **ASKED).work.weights == "bf16"


@pytest.mark.parametrize("name", ["gpt-oss-20b", "openai/gpt-oss-20b"])
def test_gpt_oss_by_name_is_mxfp4_as_published(name):
    made = plan(name, **ASKED)
    assert made.work.weights == "mxfp4" and 13 * GB < made.work.weight_bytes < 14 * GB
    assert plan(name, weights="bf16", **ASKED).work.weight_bytes > 40 * GB
    assert plan("Qwen3-4B", **ASKED).work.weights == "bf16"


def test_the_dtype_of_a_model_of_images_and_text_is_found():
    text = models.config_of(models.shape_of("Gemma-3-12B", None, tiny=True), 256)
    whole = Gemma3Config(text_config=text.to_dict(), dtype="float32")
    assert isinstance(whole.get_text_config(), Gemma3TextConfig)
    assert plan(whole, **ASKED).work.weights == plan(whole.to_dict(), **ASKED).work.weights == "fp32"


@pytest.mark.parametrize(("dtype", "weights"), [(torch.float32, "fp32"), (torch.float16, "fp16"), (None, "mxfp4")])
def test_a_model_in_memory_is_taken_as_it_is(dtype, weights):
    if dtype is None:
        shape = dataclasses.replace(models.shape_of("gpt-oss-20b", 1, tiny=True), hidden=64, mlp=64)
        model = models.pack(models.build(shape, 256, "cpu"), "mxfp4")
    else:
        model = build("qwen3", dtype, lora=False)
    assert plan(model, **ASKED).work.weights == weights
    assert plan(model, weights="bf16", **ASKED).work.weights == "bf16"


def test_weights_in_4_bits_do_not_train():
    with pytest.raises(ValueError, match=r"lora=None: weights in mxfp4 are frozen.*give lora, or weights='bf16'"):
        plan("gpt-oss-20b", **ASKED | {"lora": None})
    assert plan("gpt-oss-20b", weights="bf16", **ASKED | {"lora": None, "gpu_bytes": None}).work.weights == "bf16"


# --- refusals


@pytest.mark.parametrize(("entry", "asked"), [(MXFP4, "nf4"), (BITSANDBYTES, "mxfp4")])
def test_a_packed_checkpoint_is_not_quantized_again(entry, asked, tmp_path):
    folder = folder_of(tmp_path, quantization_config=entry)
    with pytest.raises(ValueError, match="quantizing it again would add a second error") as planned:
        plan(folder, weights=asked, **ASKED)
    with pytest.raises(ValueError) as loaded:
        quantization(AutoConfig.from_pretrained(folder), asked, tmp_path.name, {})
    assert str(planned.value) == str(loaded.value)


def test_what_cannot_be_read_is_refused_whatever_is_asked_for(tmp_path):
    folder = folder_of(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    for weights in (None, "bf16"):
        with pytest.raises(ValueError, match="stored with 'gptq' quantization"):
            plan(folder, weights=weights, **ASKED)


def test_no_other_4_bits_are_proposed_for_a_packed_checkpoint():
    small = ASKED | {"gpu_bytes": 16 * GB, "weights": "bf16"}
    with pytest.raises(PlanError, match=r"or 4-bit weights \(weights=None, as stored\)\."):
        plan("gpt-oss-20b", **small)
    with pytest.raises(PlanError, match=r"or 4-bit weights \(weights='nf4'\)\."):
        plan("Gemma-3-12B", **small)


def test_an_embedding_that_does_more_is_refused_in_8_bits():
    with pytest.raises(
        ValueError, match="embedding='int8': the input embedding of gemma3_text scales what it looks up"
    ):
        plan("Gemma-3-12B", embedding="int8", **ASKED)
    assert plan("Qwen3-4B", embedding="int8", **ASKED).work.eight_bit_tables


@pytest.mark.parametrize("kind", [*TESTED, "gemma"])
def test_the_kinds_whose_embedding_does_more_are_those_of_transformers(kind):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=1))
    assert (kind in SCALED_EMBEDDING) == (type(model.get_input_embeddings()) is not torch.nn.Embedding)


@pytest.mark.parametrize("kind", OVERFLOWING)
def test_fp16_is_refused_where_a_step_refuses_it(kind):
    gemma = dataclasses.replace(KNOWN["gemma-3-12b"], kind=kind)
    with pytest.raises(UnsupportedModelError, match=r"leaves the range of fp16 \(65,504\)") as planned:
        plan(gemma, weights="fp16", **ASKED)
    for weights in ("bf16", "fp32"):
        plan(gemma, weights=weights, **ASKED)
    if kind != "gemma":
        model = build(kind.removesuffix("_text"), torch.float16, lora=False)
        with pytest.raises(UnsupportedModelError) as met:
            longreach.enable(model)
        assert str(met.value) == str(planned.value)
