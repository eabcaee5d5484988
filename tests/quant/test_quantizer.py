"""Checkpoints: quantized while loading, read from and written for bitsandbytes, and what a broken one is told."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

import longreach
from longreach.quant.checkpoint import read_header
from longreach.quant.embedding import EightBitEmbedding, EightBitHead
from longreach.quant.experts import FourBitExperts
from longreach.quant.formats import NF4, FormatError
from longreach.quant.linear import FourBitLinear
from longreach.quant.quantizer import FourBitConfig
from tests.trainers import tiny

IDS = torch.tensor([[5, 17, 3, 60, 8, 41]])
KINDS = {"nf4": dict(weights="nf4"), "single": dict(weights="nf4", double=False), "mxfp4": dict(weights="mxfp4")}
AUTO = T.AutoModelForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases in bfloat16, sharded over several files, and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = T.Qwen2Config(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = T.Qwen2ForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    model.bfloat16().save_pretrained(path, max_shard_size="100KB")
    tiny.tokenizer().save_pretrained(path)
    return path


def quantized(folder: Path, kind: str, **kwargs) -> T.PreTrainedModel:
    return AUTO.from_pretrained(
        folder, quantization_config=FourBitConfig(**KINDS[kind]), dtype=torch.bfloat16, **kwargs
    )


def load(path: Path, **kwargs):
    return longreach.load(str(path), device="cpu", parity_check=False, **kwargs)[0]


def same(a, b) -> bool:
    """Whether two models hold the same bits."""
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], v) for k, v in second.items())


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_while_loading(folder, kind) -> None:
    model = quantized(folder, kind)
    stored = AUTO.from_pretrained(folder, dtype=torch.bfloat16)
    format = FourBitConfig(**KINDS[kind]).format
    small = {n: m for n, m in model.named_modules() if isinstance(m, FourBitLinear)}
    assert len(small) == 14 and type(model.lm_head) is torch.nn.Linear
    for name, module in small.items():
        expected = format.quantize(stored.get_submodule(name).weight)
        assert all(torch.equal(module.packed.tensors[k], v) for k, v in expected.tensors.items())
        assert module.bias is None or torch.equal(module.bias, stored.get_submodule(name).bias)
    assert model.is_quantized and model.dtype == torch.bfloat16
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    T.trainer_utils.validate_quantization_for_training(
        __import__("peft").get_peft_model(model, __import__("peft").LoraConfig(target_modules="all-linear"))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_read_again(folder, kind, tmp_path) -> None:
    model = quantized(folder, kind)
    model.save_pretrained(tmp_path / "a", max_shard_size="60KB")
    tiny.tokenizer().save_pretrained(tmp_path / "a")
    again = load(tmp_path / "a")
    assert same(again, model)
    again.save_pretrained(tmp_path / "b")
    first, second = ({n: t.dtype for p in f.glob("*.safetensors") for n, t in read_header(p).items()}
                     for f in (tmp_path / "a", tmp_path / "b"))  # fmt: skip
    assert first == second
    entries = [json.loads((tmp_path / f / "config.json").read_text())["quantization_config"] for f in "ab"]
    assert entries[0] == entries[1]
    plain = load(tmp_path / "a", weights="bf16")
    assert not any(isinstance(m, FourBitLinear) for m in plain.modules()) and not plain.is_quantized
    assert all(
        torch.equal(plain.get_submodule(n).weight, m.dequantize(torch.bfloat16))
        for n, m in model.named_modules()
        if isinstance(m, FourBitLinear)
    )
    plain.save_pretrained(tmp_path / "c")
    assert same(AUTO.from_pretrained(tmp_path / "c", dtype=torch.bfloat16), plain)


@pytest.mark.parametrize("double", [True, False])
def test_bitsandbytes_both_ways(folder, double, tmp_path) -> None:
    other = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes isn't installed")

    def weights(model):
        """Dequantized, of ours or theirs."""
        found = {}
        for name, m in model.named_modules():
            if isinstance(m, FourBitLinear):
                found[name] = m.dequantize(torch.bfloat16)
            elif hasattr(m, "weight") and hasattr(m.weight, "quant_state"):
                found[name] = other.dequantize_4bit(m.weight.data, m.weight.quant_state)
        return found

    ours = quantized(folder, "nf4" if double else "single")
    ours.save_pretrained(tmp_path / "ours")
    read = weights(AUTO.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16))
    assert len(read) == 14 and all(torch.equal(read[k], v) for k, v in weights(ours).items())

    config = T.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    theirs = AUTO.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    tiny.tokenizer().save_pretrained(tmp_path / "theirs")
    expected, model = weights(theirs), load(tmp_path / "theirs")
    found = weights(model)
    assert len(found) == 14 and all(torch.equal(found[k], v) for k, v in expected.items())
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert {m.format for m in model.modules() if isinstance(m, FourBitLinear)} == {NF4(double=double)}


def test_load_with_an_adapter_trains(folder) -> None:
    model, _ = longreach.load(str(folder), weights="nf4", lora=4, device="cpu")
    tree = longreach.TokenTree.from_groups([(IDS[0], [IDS[0, :4], IDS[0, 1:]])])
    torch.cat(longreach.token_logprobs(model, tree)).sum().backward()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in model.named_parameters() if p.grad is not None} and len(trained) == 28
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 9)


@pytest.mark.parametrize("trainer", ["grpo", "sft"])
def test_trl_loads_and_trains_it(folder, trainer, tmp_path) -> None:
    """By `model_init_kwargs`: adapters become bfloat16 and train, and the frozen weights stay what they were."""
    import longreach.trainers as ours

    kwargs = tiny.RUN | dict(
        output_dir=str(tmp_path), max_steps=2, learning_rate=1e-2, parity_check=False,
        model_init_kwargs={"quantization_config": FourBitConfig("nf4"), "dtype": "bfloat16", "device_map": None},
    )  # fmt: skip
    if trainer == "grpo":
        args = ours.GRPOConfig(**kwargs, num_generations=4, max_completion_length=6)
        made = ours.GRPOTrainer(
            str(folder), tiny.reward, args, tiny.prompts(), processing_class=tiny.tokenizer(), peft_config=tiny.lora()
        )
    else:
        args = ours.SFTConfig(**kwargs)
        made = ours.SFTTrainer(
            str(folder), args, train_dataset=tiny.pairs(), processing_class=tiny.tokenizer(), peft_config=tiny.lora()
        )
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    made.train()
    after = dict(made.model.named_parameters())
    assert sum(isinstance(m, FourBitLinear) for m in made.model.modules()) == 14
    assert {p.dtype for p in after.values() if p.requires_grad} == {torch.bfloat16}
    assert all(torch.equal(before[n], p) for n, p in after.items() if not p.requires_grad)
    assert any(not torch.equal(before[n], p) for n, p in after.items() if p.requires_grad)


MEMORY = """
import resource, sys, threading, time, torch
torch.set_num_threads(1)
import transformers as T
from longreach.quant.quantizer import FourBitConfig
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
before = anonymous()
thread = threading.Thread(target=watch); thread.start()
model = T.AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=FourBitConfig(sys.argv[2]), dtype=torch.bfloat16)
done = True; thread.join()
print(peak - before, model.get_memory_footprint())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc")
def test_the_16_bit_model_is_never_held(tmp_path) -> None:
    config = T.LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = T.LlamaForCausalLM(config)
    state = {n: torch.randn(p.shape, dtype=torch.bfloat16) * 0.02 for n, p in model.named_parameters()}
    whole = sum(t.nbytes for t in state.values())
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path)
    del state
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), "nf4"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
    )
    peak, footprint = map(int, done.stdout.split())
    assert footprint < 0.3 * whole
    # The finished model, one weight in 16 bits, the fp32 workspace of quantizing a slice of it, and what libraries take.
    assert peak < footprint + 130e6 < 0.9 * whole, f"{peak / 1e6:.0f} MB of {whole / 1e6:.0f} MB"


def test_embedding_in_8_bits(folder, tmp_path) -> None:
    model, exact = load(folder, weights="nf4", embedding="int8"), load(folder, weights="nf4")
    assert isinstance(model.model.embed_tokens, EightBitEmbedding) and isinstance(model.lm_head, EightBitHead)
    assert model.dtype == torch.bfloat16
    close, plain = model(IDS).logits.float(), exact(IDS).logits.float()
    assert 0 < (close - plain).abs().mean() < 0.05 * plain.std()
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    again = load(tmp_path)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.dequantize())
    torch.testing.assert_close(again(IDS).logits.float(), close, rtol=0.05, atol=0.05)


def test_tied_embedding_in_8_bits(tmp_path) -> None:
    tiny.model(tie_word_embeddings=True).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    model = load(tmp_path, weights="nf4", embedding="int8", lora=2)
    base = model.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight
    longreach.enable(model)  # the parity check: the head's gradient and the chunked log-probs
    x = torch.randn(3, 32, requires_grad=True)
    weight = base.lm_head.dequantize()
    y = base.lm_head(x)
    torch.testing.assert_close(y, x @ weight.T)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach() @ weight)


@pytest.mark.parametrize(("table", "said"), [("embed_tokens", "the embedding"), ("lm_head", "the head")])
def test_merging_into_8_bits_is_an_error(folder, table, said) -> None:
    """PEFT would add whole numbers to the codes."""
    adapter = peft.LoraConfig(r=2, target_modules=[table], init_lora_weights=False, task_type="CAUSAL_LM")
    model = load(folder, embedding="int8", lora=adapter)
    with pytest.raises(ValueError, match=rf"adapter of {said} can't be merged into weights of 8 bits.*format='merged'"):
        model.merge_adapter()


def adapter(**given) -> peft.LoraConfig:
    return peft.LoraConfig(**({"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | given))


@pytest.mark.parametrize("stored", [dict(weights="nf4"), dict(weights="mxfp4"), dict(embedding="int8")], ids=str)
@pytest.mark.parametrize("field, value", [("use_dora", True), ("init_lora_weights", "pissa")])
def test_an_adapter_that_reads_the_weight_is_refused(folder, stored, field, value) -> None:
    """PEFT would take the codes for the weight: a traceback for 4 bits, wrong numbers for 8."""
    target, bits = ("q_proj", 4) if "weights" in stored else ("lm_head", 8)
    said = rf"{field}={value!r} needs the weight itself.* is stored in {bits} bits here; leave {field} out, or load"
    with pytest.raises(ValueError, match=said):
        load(folder, **stored, lora=adapter(target_modules=[target], **{field: value}))


def test_an_adapter_that_reads_a_weight_in_16_bits_is_not(folder) -> None:
    model = load(folder, weights="nf4", lora=adapter(target_modules=["lm_head"], use_dora=True))
    assert any("magnitude" in name for name, p in model.named_parameters() if p.requires_grad)


def test_a_trainer_names_what_an_adapter_needs(folder, tmp_path) -> None:
    """By `model_init_kwargs`, where TRL loads the model and adds the adapter."""
    import longreach.trainers as ours

    given = {"quantization_config": FourBitConfig("nf4"), "dtype": "bfloat16", "device_map": None}
    args = ours.SFTConfig(**tiny.RUN, output_dir=str(tmp_path), model_init_kwargs=given)
    tables = dict(train_dataset=tiny.pairs(), processing_class=tiny.tokenizer())
    with pytest.raises(ValueError, match="use_dora=True needs the weight itself"):
        ours.SFTTrainer(str(folder), args, **tables, peft_config=adapter(use_dora=True))


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(modules_to_save=["lm_head"]), "modules_to_save: the head would be trained"),
        (dict(modules_to_save=["embed_tokens"]), "modules_to_save: the embedding would be trained"),
        (dict(trainable_token_indices=[5]), "trainable_token_indices: the embedding would be trained"),
    ],
    ids=str,
)
def test_training_what_is_in_8_bits_is_refused(folder, given, said) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*8 bits, frozen; leave .* out, or .*\(without embedding='int8'\)"):
        load(folder, embedding="int8", lora=adapter(**given))


def test_training_what_is_in_4_bits_is_refused(folder) -> None:
    with pytest.raises(ValueError, match=r"modules_to_save: a linear layer would be trained.*4 bits.*weights='bf16'"):
        load(folder, weights="nf4", lora=adapter(modules_to_save=["mlp"]))
    load(folder, weights="nf4", embedding="int8", lora=adapter(modules_to_save=["norm"]))


@pytest.mark.parametrize("stored", [dict(weights="nf4"), dict(embedding="int8")], ids=str)
@pytest.mark.parametrize("later", ["get_peft_model", "add_adapter", "load_adapter"])
@pytest.mark.parametrize("safe", [False, True])
def test_adapters_that_come_later_are_not_merged_either(folder, stored, later, safe, tmp_path) -> None:
    """With `safe_merge` PEFT would round the adapter to whole numbers and add these to the codes of 8 bits."""
    others, few = ("lm_head", "k_proj") if "weights" in stored else ("q_proj", "lm_head")
    more = adapter(target_modules=[few], init_lora_weights=False)
    if later == "get_peft_model":
        model = peft.get_peft_model(load(folder, **stored), more)
    else:
        model = load(folder, **stored, lora=adapter(target_modules=[others]))
    if later == "add_adapter":
        model.add_adapter("second", more)
    elif later == "load_adapter":
        peft.get_peft_model(load(folder), more).save_pretrained(tmp_path, save_embedding_layers=False)
        model.load_adapter(str(tmp_path), "second")
    model.set_adapter("default" if later == "get_peft_model" else "second")
    before = [(m, m.weight.clone()) for m in model.modules() if isinstance(m, (FourBitLinear, EightBitHead))]
    with pytest.raises(ValueError, match="can't be merged into weights of"):
        model.merge_and_unload(safe_merge=safe)
    assert before and all(torch.equal(m.weight, codes) for m, codes in before)


def test_an_adapter_from_a_folder_goes_onto_an_embedding_in_8_bits(folder, tmp_path) -> None:
    lora = adapter(init_lora_weights=False)
    first = load(folder, embedding="int8", lora=lora)
    first.save_pretrained(tmp_path)
    again = load(tmp_path, embedding="int8")
    torch.testing.assert_close(again(IDS).logits, first(IDS).logits)
    with pytest.raises(RuntimeError, match=r"Missing key.*lm_head\.weight"):
        first.load_state_dict({})


def test_an_embedding_that_does_more_is_refused() -> None:
    from longreach.quant.embedding import store_in_8_bits
    from tests.exactness.models import build

    with pytest.raises(ValueError, match="input embedding of Gemma3ForCausalLM is a Gemma3TextScaledWordEmbedding"):
        store_in_8_bits(build("gemma3", torch.float32, lora=False))


# ---- what is wrong with a checkpoint is said before it is read


def damaged(folder: Path, tmp_path: Path, kind: str, change) -> Path:
    quantized(folder, kind).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return tmp_path


Q = "model.layers.1.mlp.down_proj.weight"
STATE = f"{Q}.quant_state.bitsandbytes__nf4"


def state(**changes):
    def change(tensors) -> None:
        values = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)

    return change


BAD = {
    "missing scales": ("nf4", lambda t: t.pop(f"{Q}.absmax"), rf"{Q}.absmax is missing"),
    "missing nested": ("nf4", lambda t: t.pop(f"{Q}.nested_absmax"), rf"{Q}.absmax: U8 \[128\] in the checkpoint; .* F32"),
    "missing state": ("nf4", lambda t: t.pop(STATE), rf"{Q}: U8 .* its scales are missing"),
    "missing codes": ("nf4", lambda t: t.pop(Q), rf"{Q} is missing"),
    "short codes": ("nf4", lambda t: t.update({Q: t[Q][:-4].clone()}), rf"{Q}: U8 \[4092, 1\] .* shape \[64, 128\] in nf4"),
    "other shape": ("nf4", state(shape=[128, 64]), rf"{STATE}: shape=\[128, 64\]; the model has \[64, 128\]"),
    "fp4": ("nf4", state(quant_type="fp4"), "quant_type='fp4'"),
    "block": ("nf4", state(blocksize=48), "blocksize=48"),
    "no JSON": ("nf4", lambda t: t.update({STATE: t[STATE][3:].clone()}), rf"{STATE}: can't be read"),
    "no scales": ("mxfp4", lambda t: t.pop(Q.replace("weight", "scales")), "down_proj.scales is missing"),
    "short scales": (
        "mxfp4", lambda t: t.update({Q.replace("weight", "scales"): torch.zeros(64, 3, dtype=torch.uint8)}),
        r"down_proj.scales: U8 \[64, 3\] .* the model has uint8 \[64, 4\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damaged_checkpoints(folder, tmp_path, case) -> None:
    kind, change, message = BAD[case]
    with pytest.raises(FormatError, match=message):
        load(damaged(folder, tmp_path, kind, change))


def test_truncated_files(folder, tmp_path) -> None:
    quantized(folder, "nf4").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for size, message in (
        (len(data) - 100, "cut off inside 'model.layers.1.self_attn.v_proj.weight.quant_state"),
        (40, "cut off in its header"),
        (3, "cut off"),
    ):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match=f"model.safetensors: .*{message}"):
            load(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "hqq", "bitsandbytes"])
def test_other_quantizations_are_named(folder, tmp_path, method) -> None:
    shutil.copytree(folder, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "load_in_8bit": True}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"'{method}.*quantization, which can't be trained here"):
        load(tmp_path / "m")


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"weights": "int4"}, "weights='int4': choose one of 'bf16', 'fp16', 'fp32', 'nf4', 'mxfp4'"),
        ({"embedding": "int4"}, "embedding='int4': choose 'int8'"),
        ({"weights": "bf16", "dtype": "float32"}, "weights='bf16' and dtype='float32'"),
        ({"weights": "nf4", "quantization_config": FourBitConfig("mxfp4")}, "weights='nf4' and quantization_config="),
        ({"weights": "nf4", "device_map": {"": "disk"}}, "'disk'"),
    ],
)  # fmt: skip
def test_bad_arguments(folder, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, **kwargs)


def test_quantizing_twice_is_refused(folder, tmp_path) -> None:
    quantized(folder, "nf4").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is stored in nf4, and quantizing it again"):
        load(tmp_path, weights="mxfp4")
    with pytest.raises(ValueError, match="weights='q4': choose one of 'nf4', 'mxfp4'"):
        FourBitConfig("q4")


def test_chosen_modules_stay_as_they_are(folder, tmp_path) -> None:
    config = FourBitConfig("nf4", modules_to_not_convert=["down_proj", "model.layers.0.self_attn"])
    model = AUTO.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    small = {n for n, m in model.named_modules() if isinstance(m, FourBitLinear)}
    assert len(small) == 14 - 2 - 4 and not any("down_proj" in n for n in small)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    again = load(tmp_path)
    assert {n for n, m in again.named_modules() if isinstance(m, FourBitLinear)} == small
    assert same(again, model)


@pytest.mark.parametrize(
    "kind, stored", [("gpt_oss-mxfp4", "gpt-oss"), ("gpt_oss-nf4", "longreach"), ("qwen3_moe-nf4", "longreach")]
)
def test_experts_are_stored_too(kind, stored, tmp_path) -> None:
    """Saved as published where that is possible: stock Transformers reads the experts of gpt-oss."""
    from tests.exactness.models import CONFIGS

    name, weights = kind.split("-")
    config = CONFIGS[name]()
    config.hidden_size, config.head_dim = 64, 16
    torch.manual_seed(0)
    AUTO.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "a")
    tiny.tokenizer().save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a", weights=weights)
    assert sum(isinstance(m, FourBitExperts) for m in model.modules()) == 4
    assert any(isinstance(m, FourBitLinear) for m in model.modules()) == (stored != "gpt-oss")
    model.save_pretrained(tmp_path / "b")
    tiny.tokenizer().save_pretrained(tmp_path / "b")
    again = load(tmp_path / "b")
    assert same(again, model) and again.config.quantization_config.stored_as == stored
    if stored == "gpt-oss":
        plain = AUTO.from_pretrained(
            tmp_path / "b", quantization_config=T.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
        )
        ours, theirs = (m.model.layers[0].mlp.experts for m in (model, plain))
        assert torch.equal(ours.dequantize("down_proj", torch.bfloat16), theirs.down_proj)
