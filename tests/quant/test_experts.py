"""Experts in 4 bits against the dequantized weights in Transformers' own modules: gradients, loading, saving, refusals."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import torch
import transformers

import longreach
from longreach.context.install import enable, engine_of
from longreach.context.parity import ParityError, check_parity
from longreach.kernels import route
from longreach.quant import MXFP4, NF4, FormatError
from longreach.quant import experts as module
from longreach.quant.experts import PRODUCTS, FourBitExperts
from longreach.quant.mixture import mixture_forward
from tests.exactness.models import CONFIGS, build, gradients, true_fp64, worst
from tests.exactness.test_architectures import TREES, loss_of, stock
from tests.exactness.test_layers import grads_of
from tests.trainers import tiny

from .mixtures import adapted, four_bit, pair

F64 = torch.float64
FORMATS = {"mxfp4": MXFP4(), "nf4": NF4(), "nf4-single": NF4(double=False)}


def given_experts(format=None, name: str = "gpt_oss") -> FourBitExperts:
    model = four_bit(build(name, torch.float32, lora=False), format or MXFP4())
    return next(m for m in model.modules() if isinstance(m, FourBitExperts))


@pytest.mark.parametrize("at_once", ["all", "few"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_gradients(name: str, format: str, at_once: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp64: hand-written layers, the module in the general path, and Transformers' loop over experts on 4-bit weights, all
    against stock Transformers and PEFT on the dequantized weights."""
    if at_once == "few":
        monkeypatch.setattr(module, "EXPERT_SCRATCH", 1)
    with true_fp64():
        tree, rows = TREES["deep"]()
        whole, packed = (adapted(m, F64) for m in pair(name, F64, FORMATS[format]))
        expected = loss_of(stock(whole, rows, F64), F64)
        expected.backward()
        exact = gradients(whole)
        packed.get_base_model().set_experts_implementation("grouped_mm")  # they are built with "eager", the stock loop
        for fuse in (True, False):
            loss, found = grads_of(packed, tree, chunk=7, fuse=fuse)
            assert abs(loss - float(expected.detach())) <= 1e-12 and worst(exact, found)[0] <= 1e-11, fuse
            packed.zero_grad()
        packed.get_base_model().set_experts_implementation("eager")
        with engine_of(packed).stock():
            loss_of(stock(packed, rows, F64), F64).backward()
        assert worst(exact, gradients(packed))[0] <= 1e-11


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("at_once", ["all", "few"])
def test_gradients_of_biases(at_once: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What isn't in 4 bits trains too: biases of experts, routers, norms, attention."""
    if at_once == "few":
        monkeypatch.setattr(module, "EXPERT_SCRATCH", 1)
    monkeypatch.setattr("longreach.quant.mixture.ROWS_AT_ONCE", 5)

    def trained(model):
        model = adapted(model, F64).get_base_model() if lora else model
        for name, p in model.named_parameters():
            p.requires_grad_(p.is_floating_point() and name.rpartition(".")[2] not in PRODUCTS)
        return model

    with true_fp64():
        tree, rows = TREES["deep"]()
        whole, packed = map(trained, pair("gpt_oss", F64, MXFP4()))
        loss_of(stock(whole, rows, F64), F64).backward()
        exact = gradients(whole)
        assert (
            sum("proj_bias" in name and bool(grad.any()) for name, grad in exact.items()) == 8
        )  # in each of four layers
        packed.set_experts_implementation("grouped_mm")  # "eager" is the stock loop
        _, found = grads_of(packed, tree, chunk=7)
        assert worst(exact, found)[0] <= 1e-11
        check_parity(packed, engine_of(packed))


def test_a_missing_gradient_fails_the_parity_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is beside the others, and in whatever precision."""
    packed = four_bit(build("gpt_oss", torch.bfloat16, lora=False), MXFP4())
    biases = [p for name, p in packed.named_parameters() if name.endswith("down_proj_bias")]
    for p in biases:
        p.requires_grad_(True)
    run = FourBitExperts.run

    def without(self, *args):
        for p in biases:
            p.requires_grad_(False)
        out = run(self, *args)
        for p in biases:
            p.requires_grad_(True)
        return out

    packed.set_experts_implementation("grouped_mm")
    enable(packed, chunk=16, parity_check=True)
    monkeypatch.setattr(
        FourBitExperts,
        "run",
        lambda self, *a: (run if self.config._experts_implementation == "eager" else without)(self, *a),
    )
    with pytest.raises(ParityError, match=r"layers.0.*down_proj_bias has a gradient in stock .* none in chunked"):
        check_parity(packed, engine_of(packed))


def test_ranges_cover_the_busy_experts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = given_experts()
    each = sum(torch.Size(s[1:]).numel() for s in experts.shapes.values()) * 4
    monkeypatch.setattr(module, "EXPERT_SCRATCH", 2 * each)
    weights = experts.weights(torch.float32)
    assert weights.at_once == 2
    chosen = torch.tensor([[0, 1], [2, 1], [5, 0]])  # 3 and 4 get nothing
    parts = list(weights.parts(route(chosen, 6)))
    assert [(p.experts.start, p.experts.stop) for p in parts] == [(0, 2), (2, 3), (5, 6)]
    assert [(p.rows.start, p.rows.stop) for p in parts] == [(0, 4), (4, 5), (5, 6)]
    one = list(weights.parts(route(chosen[:1], 6)))
    assert [(p.experts.start, p.experts.stop) for p in one] == [(0, 2)]


def smaller(stock_experts, count: int):
    """The first experts alone."""
    found = copy.deepcopy(stock_experts)
    found.num_experts = count
    for name in PRODUCTS:
        setattr(found, name, torch.nn.Parameter(getattr(found, name)[:count].clone()))
    return found


def test_scales_of_scales_set_the_granule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of NF4 experts begins where a block of 256 scales begins, and gives what the whole gives there."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=2
    )
    config._experts_implementation = "grouped_mm"
    stock_experts = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(config)
    for p in stock_experts.parameters():
        torch.nn.init.normal_(p)
    experts = FourBitExperts.of(stock_experts, NF4())
    assert experts.granule == 4  # 64 x 64 weights have 64 scales; a quarter of a block
    for name in PRODUCTS:
        whole = experts.packed(name).dequantize(torch.float32)
        assert torch.equal(experts.dequantize_range(name, slice(4, 12), torch.float32), whole[4:12])
        few = FourBitExperts.of(smaller(stock_experts, 6), NF4())  # its last block of scales is not full
        assert few.granule == 4
        whole = few.packed(name).dequantize(torch.float32)
        for part in (slice(0, 4), slice(4, 6)):
            assert torch.equal(few.dequantize_range(name, part, torch.float32), whole[part])
    x, chosen = torch.randn(5, 64), torch.tensor([[1, 9], [9, 15], [1, 2], [0, 9], [15, 14]])
    weight = torch.rand(5, 2)
    before = mixture_forward(x, route(chosen, 16), weight, experts.weights(torch.float32))
    monkeypatch.setattr(module, "EXPERT_SCRATCH", 1)
    after = mixture_forward(x, route(chosen, 16), weight, experts.weights(torch.float32))
    torch.testing.assert_close(after, before)


def test_one_dequantization_for_a_pass_over_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = adapted(four_bit(build("gpt_oss", torch.float32, lora=False), MXFP4()), torch.float32)
    made = []
    dequantize = FourBitExperts.dequantize_range
    monkeypatch.setattr(FourBitExperts, "dequantize_range", lambda self, *a: made.append(1) or dequantize(self, *a))
    grads_of(packed, TREES["one"]()[0], chunk=7)
    assert len(made) == 4 * 2 * 2  # layers, products, forward and backward


def test_parity_check() -> None:
    """Stock eager on the same 4-bit weights: passes, and fails when the weights of our pass are others."""
    packed = adapted(four_bit(build("gpt_oss", torch.float32, lora=False), MXFP4()), torch.float32)
    enable(packed, chunk=16, parity_check=True)
    assert packed.config._experts_implementation == "eager"  # as the model was built
    expert = next(m for m in packed.modules() if isinstance(m, FourBitExperts))
    original = expert.weights

    def wrong(*a, **k):
        weights = original(*a, **k)
        weights.down_bias = weights.down_bias + 0.5
        return weights

    expert.weights = wrong  # type: ignore[method-assign]
    with pytest.raises(ParityError, match="nats per token"):
        check_parity(packed, engine_of(packed))


# ---- loading and saving


def checkpoint(folder, name: str = "gpt_oss", mxfp4: bool = False) -> str:
    """A bf16 model on disk with a tokenizer; with `mxfp4` as gpt-oss is published, in blocks and scales."""
    from safetensors.torch import load_file, save_file

    config = CONFIGS[name]()
    config.hidden_size, config.head_dim = 64, 16
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    if mxfp4:
        file = folder / "model.safetensors"
        state = load_file(file)
        for key in [k for k in state if k.endswith(PRODUCTS)]:
            packed = MXFP4().quantize(state.pop(key).transpose(1, 2).contiguous())
            state |= {key + "_blocks": packed.tensors["codes"], key + "_scales": packed.tensors["scales"]}
        save_file(state, file, metadata={"format": "pt"})
        entry = json.loads((folder / "config.json").read_text())
        skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        entry["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
        (folder / "config.json").write_text(json.dumps(entry))
    return str(folder)


def logits(model) -> torch.Tensor:
    ids = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), engine_of(model).stock() if engine_of(model) is not None else contextlib.nullcontext():
        return model.eval()(input_ids=ids, use_cache=False).logits.float()


def experts_of(model) -> list[FourBitExperts]:
    return [m for m in model.modules() if isinstance(m, FourBitExperts)]


def test_gpt_oss_as_published(tmp_path) -> None:
    """Blocks and scales are taken as they are; logits are those of Transformers' dequantized model."""
    folder = checkpoint(tmp_path, mxfp4=True)
    model, _ = longreach.load(folder, device="cpu", lora=2)
    assert len(experts_of(model)) == 4 and experts_of(model)[0].gate_up_proj_blocks.dtype == torch.uint8
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    whole.set_experts_implementation("eager")
    model.config._experts_implementation = "eager"
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(whole), rtol=0, atol=0)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sum("experts" in n for n in names) == 4 * 4 and sum("self_attn" in n for n in names) == 4 * 8


def test_gpt_oss_as_published_in_16_bits(tmp_path) -> None:
    folder = checkpoint(tmp_path, mxfp4=True)
    stored, _ = longreach.load(folder, device="cpu", parity_check=False)
    whole, _ = longreach.load(folder, weights="bf16", device="cpu", parity_check=False)
    assert not experts_of(whole)
    for path, packed in stored.named_modules():
        if isinstance(packed, FourBitExperts):
            for name in PRODUCTS:
                assert torch.equal(getattr(whole.get_submodule(path), name), packed.dequantize(name, torch.bfloat16))


@pytest.mark.parametrize("weights", ["nf4", "mxfp4"])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_quantized_while_loading_and_saved(name: str, weights: str, tmp_path) -> None:
    folder = checkpoint(tmp_path / "whole", name)
    model, _ = longreach.load(folder, weights=weights, device="cpu", parity_check=False)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    source, found = whole.model.layers[1].mlp.experts, model.model.layers[1].mlp.experts
    for product in PRODUCTS:
        expected = FourBitExperts.of(source, found.format).packed(product)
        for part, tensor in found.packed(product).tensors.items():
            assert torch.equal(tensor, expected.tensors[part]), (product, part)
    model.save_pretrained(tmp_path / "saved")
    tiny.tokenizer().save_pretrained(tmp_path / "saved")
    again, _ = longreach.load(str(tmp_path / "saved"), device="cpu", parity_check=False)
    assert torch.equal(logits(again), logits(model))


def test_a_checkpoint_that_does_not_fit_names_the_tensor(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoint(tmp_path, mxfp4=True)
    state = load_file(tmp_path / "model.safetensors")
    key = "model.layers.2.mlp.experts.down_proj_scales"
    for change, message in ((state[key][:, :-1].contiguous(), "down_proj_scales"), (None, "down_proj_scales")):
        broken = {k: v for k, v in state.items() if k != key} | ({} if change is None else {key: change})
        save_file(broken, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(FormatError, match=f"model.layers.2.mlp.experts.{message}"):
            longreach.load(folder, device="cpu", parity_check=False)


def test_adapters_on_4_bits_run_without_the_engine() -> None:
    from peft.tuners.lora.layer import ParamWrapper

    row = torch.arange(3, 9)[None]
    whole, packed = (adapted(model, torch.float32) for model in pair("gpt_oss", torch.float32, MXFP4()))
    torch.testing.assert_close(packed(input_ids=row).logits, whole(input_ids=row).logits)
    for found in packed.modules():
        if isinstance(found, ParamWrapper):  # as if PEFT had made it before our first import
            found.__class__ = ParamWrapper
    with pytest.raises((RuntimeError, ValueError), match=r"call longreach\.enable|FourBitExperts"):
        packed(input_ids=row)
    enable(packed, parity_check=False)
    torch.testing.assert_close(packed(input_ids=row).logits, whole(input_ids=row).logits)


def test_values_of_a_weight_in_4_bits_are_not_handed_out() -> None:
    experts = given_experts()
    assert experts.gate_up_proj.shape == (6, 48, 64) and experts.gate_up_proj.isnan().all()
    assert "gate_up_proj" not in dict(experts.named_parameters()) and "gate_up_proj" not in experts.state_dict()
    assert "gate_up_proj" in dict(experts.named_parameters(recurse=False))


def test_casting_and_moving_keep_the_stored_weight() -> None:
    experts = given_experts(NF4())
    before = {p: t.clone() for p, t in experts.packed("down_proj").tensors.items()}
    experts.to(torch.bfloat16)
    assert experts.dtype == torch.bfloat16 and experts.down_proj_bias.dtype == torch.bfloat16
    assert all(torch.equal(t, before[p]) for p, t in experts.packed("down_proj").tensors.items())


def test_unknown_experts_are_refused() -> None:
    model = build("deepseek_v3", torch.float32, lora=False)
    other = next(m for n, m in model.named_modules() if n.endswith("experts"))
    with pytest.raises(ValueError, match=r"DeepseekV3.*can't be stored in 4 bits"):
        FourBitExperts.of(other, MXFP4())
