"""Every format of every architecture: what is exported computes what the adapter model computes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import longreach
from longreach.exporting import gguf_file
from longreach.exporting.errors import ExportError, MismatchError
from longreach.exporting.libllama import GGUFModel
from longreach.exporting.limits import COMPUTED, GGUF
from longreach.exporting.vocabulary import pre_tokenizer
from tests.exporting.models import CONFIGS, MOE, adapted, tokenizer_for

TEXT = "The harbour master keeps 12 ledgers."


def logits(model, tokenizer) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokenizer(TEXT)["input_ids"]])).logits[0].float()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_and_gguf(name: str, base, tmp_path: Path) -> None:
    model, tokenizer = adapted(name, base(name)), tokenizer_for(name)
    wanted = logits(model, tokenizer)
    plain = logits(AutoModelForCausalLM.from_pretrained(base(name), dtype=torch.float32), tokenizer)
    assert relative(plain, wanted) > 0.1, "the adapter must matter, or the test shows nothing"

    made = longreach.export(model, tokenizer, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32)
    assert next(iter(json.loads((made.path / "config.json").read_text())["architectures"])) == CONFIGS_CLASS[name]
    rounded = (
        copy.deepcopy(model).merge_and_unload().to(torch.bfloat16).float()
    )  # PEFT's own merge, to know what rounding costs
    assert relative(logits(merged, tokenizer), wanted) <= 2 * relative(logits(rounded, tokenizer), wanted)

    file = longreach.export(model, tokenizer, tmp_path / "model.gguf", format="gguf", quantization="f16").path
    assert file.is_file()
    ids = tokenizer(TEXT)["input_ids"]
    with GGUFModel(file) as loaded:
        assert relative(loaded.logits(ids), wanted) < 5e-3
        text = loaded.greedy(ids, 12)
    continued = list(ids)
    with torch.no_grad():
        for _ in text:
            continued.append(int(model(torch.tensor([continued])).logits[0, -1].argmax()))
    assert text == continued[len(ids) :]


CONFIGS_CLASS = {name: gguf_file.ARCHITECTURES[name] for name in CONFIGS}


def test_limits_are_twice_what_was_measured() -> None:
    path = Path(__file__).parents[2] / "bench" / "results" / "export.json"
    worst = json.loads(path.read_text(encoding="utf-8"))["worst"]
    assert set(gguf_file.TYPES) == set(GGUF)
    for kind, limit in GGUF.items():
        assert 2 * worst[kind]["relative"] <= limit.relative <= 2.2 * worst[kind]["relative"], kind
        assert limit.kl >= 2 * worst[kind]["kl"], kind
    measured = worst["bf16 weights, computed in fp32"]["relative"]
    assert 2 * measured <= COMPUTED["fp32"].relative <= 2.2 * measured


def test_every_listed_architecture_is_tested() -> None:
    assert set(CONFIGS) == set(gguf_file.ARCHITECTURES)


@pytest.mark.parametrize("name", ["llama", "gemma2", *MOE])
def test_adapter_reloads_in_stock_peft(name: str, base, tmp_path: Path) -> None:
    from peft import PeftModel

    model, tokenizer = adapted(name, base(name)), tokenizer_for(name)
    made = longreach.export(model, tokenizer, tmp_path / "adapter", format="adapter")
    bare = AutoModelForCausalLM.from_pretrained(base(name), dtype=torch.float32)
    again = PeftModel.from_pretrained(bare, str(made.path))
    assert relative(logits(again, tokenizer), logits(model, tokenizer)) < 1e-6
    assert made.checks[0].record["tensors"] == sum("lora_" in n for n, _ in model.named_parameters())


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_k_m"])
def test_other_gguf_types_stay_within_their_limit(name: str, kind: str, base, tmp_path: Path) -> None:
    made = longreach.export(
        adapted(name, base(name)), tokenizer_for(name), tmp_path / "g", format="gguf", quantization=kind
    )
    assert [c.name for c in made.checks][-1] == f"{kind} in libllama"
    record = json.loads((made.path / "verification.json").read_text())
    assert record["passed"] is True and record["checks"][-1]["record"]["chat template"] == "compared"


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_all_gguf_types(name: str, base, tmp_path: Path) -> None:
    model, tokenizer = adapted(name, base(name)), tokenizer_for(name)
    for kind in gguf_file.TYPES:
        if kind != "mxfp4" or name == "gpt_oss":
            longreach.export(model, tokenizer, tmp_path / kind, format="gguf", quantization=kind)


def test_shared_embedding_and_head_part_where_the_adapter_changes_one(base, tmp_path: Path) -> None:
    model = adapted("qwen2", base("qwen2"), target_modules=["lm_head", "q_proj"])
    assert model.config.tie_word_embeddings
    made = longreach.export(model, tokenizer_for("qwen2"), tmp_path / "m")
    merged = AutoModelForCausalLM.from_pretrained(made.path)
    assert not merged.config.tie_word_embeddings
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)


def test_modules_to_save_and_rank_patterns_arrive(base, tmp_path: Path) -> None:
    model = adapted(
        "llama", base("llama"), target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"],
        rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 32}, use_rslora=True,
    )  # fmt: skip
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(0.5)
    made = longreach.export(model, tokenizer_for("llama"), tmp_path / "m")
    assert made.checks[0].record["adapter"]["weights"] == 5


def test_fully_trained_model(base, tmp_path: Path) -> None:
    """No adapter; fp32 weights as TRL trains them."""
    model = AutoModelForCausalLM.from_pretrained(base("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    made = longreach.export(model, tokenizer_for("qwen3"), tmp_path / "m", quantization="fp16")
    assert AutoModelForCausalLM.from_pretrained(made.path).dtype == torch.float16


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss-mxfp4"])
@pytest.mark.parametrize("verify", ["full", "weights"])
def test_from_an_adapters_folder(name: str, verify: str, base, tmp_path: Path) -> None:
    model = adapted(name.removesuffix("-mxfp4"), base(name.removesuffix("-mxfp4")))
    model.peft_config["default"].base_model_name_or_path = str(base(name))
    model.save_pretrained(tmp_path / "run")
    made = longreach.export(tmp_path / "run", None, tmp_path / "m", verify=verify)
    assert made.checks[0].record["adapter"]["weights"] > 10
    assert "quantization_config" not in json.loads((made.path / "config.json").read_text())


def test_vllm_folder(base, tmp_path: Path) -> None:
    made = longreach.export(adapted("qwen3", base("qwen3")), tokenizer_for("qwen3"), tmp_path / "v", format="vllm")
    assert made.checks[-1].name == "what vLLM asks for" and "vllm serve" in made.notes[-1]
    one_rank = adapted("qwen3", base("qwen3"), r=12)
    made = longreach.export(one_rank, tokenizer_for("qwen3"), tmp_path / "a", format="vllm", as_adapter=True)
    assert "--max-lora-rank 16" in made.notes[-1]
    with pytest.raises(MismatchError, match="target_parameters"):
        experts = adapted("gpt_oss", base("gpt_oss"))
        longreach.export(experts, tokenizer_for("gpt_oss"), tmp_path / "e", format="vllm", as_adapter=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "onnx"}, "format='onnx': choose one of adapter, merged"),
        ({"quantization": "q4_k_m"}, "quantization='q4_k_m' with format='merged': choose one of bf16, fp16"),
        ({"format": "adapter", "quantization": "bf16"}, "leave it out"),
        ({"format": "gguf", "quantization": "mxfp4"}, "is for gpt_oss"),
        ({"verify": "maybe"}, "verify='maybe'"),
        ({"format": "gguf", "verify": "weights"}, "verify='weights' is for merged weights"),
        ({"weights": "nf4"}, "is for a model given as a folder"),
        ({"merge_onto": "original"}, "is for an adapter trained on 4-bit weights"),
        ({"as_adapter": True}, "as_adapter=True is for format='vllm'"),
        ({"dry_run": True}, "give upload"),
        ({"upload": "name"}, "as 'user/name'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str, base, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message.replace("(", "\\(")):
        longreach.export(adapted("qwen3", base("qwen3")), tokenizer_for("qwen3"), tmp_path / "x", **arguments)
    assert not list(tmp_path.iterdir())


def test_unlisted_architecture_is_refused_for_gguf(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with pytest.raises(ExportError, match=r"model_type 'mixtral'.*tested are gemma2"):
        longreach.export(MixtralForCausalLM(config), tokenizer_for("llama"), tmp_path / "x", format="gguf")


def test_an_unknown_way_to_split_text_is_refused() -> None:
    with pytest.raises(ExportError, match="no name for"):
        pre_tokenizer({"pre_tokenizer": {"type": "Whitespace"}})
