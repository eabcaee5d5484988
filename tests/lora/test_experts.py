"""Expert adapters: PEFT's names, shapes and numbers, without its materialized delta; every expert is trained."""

from __future__ import annotations

import pytest
import torch

from longreach.context.fused_moe import FusedMoeLayer, fused_layer
from longreach.context.install import enable, engine_of
from longreach.lora import Experts
from longreach.lora.experts import expert_parameters
from longreach.quant import MXFP4
from longreach.quant import mixture as op
from tests.exactness.models import build, gradients, true_fp64, worst
from tests.exactness.test_architectures import TREES, ids, loss_of, stock
from tests.exactness.test_layers import grads_of
from tests.quant.mixtures import EXPERTS, adapted, four_bit, pair

F64 = torch.float64
NAMES = ("gpt_oss", "qwen3_moe")


def layers_of(model):
    return engine_of(model).layers


@pytest.fixture
def no_delta(monkeypatch: pytest.MonkeyPatch):
    """A switch that makes PEFT's materialized path an error."""
    from peft.tuners.lora.layer import ParamWrapper

    def refuse(*a, **k):
        raise AssertionError("a delta of the expert stack was materialized")

    def switch():
        monkeypatch.setattr(ParamWrapper, "get_delta_weight", refuse)
        monkeypatch.setattr(ParamWrapper, "_activate_lora", refuse)

    return switch


@pytest.mark.parametrize("rows", [None, 5], ids=["whole", "pieces"])
@pytest.mark.parametrize("tree_name", ["group", "deep", "packing"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_materialized_delta(
    name: str, tree_name: str, rows: int | None, no_delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows is not None:
        monkeypatch.setattr(op, "ROWS_AT_ONCE", rows)
    with true_fp64():
        tree, reference_rows = TREES[tree_name]()
        reference = adapted(build(name, F64, lora=False), F64)
        expected = loss_of(stock(reference, reference_rows, F64), F64)
        expected.backward()
        no_delta()
        model = adapted(build(name, F64, lora=False), F64)
        loss, found = grads_of(model, tree, chunk=7)
        assert abs(loss - float(expected.detach())) <= 1e-12
        assert worst(gradients(reference), found)[0] <= 1e-11


@pytest.mark.parametrize("four_bits", [False, True], ids=["whole", "mxfp4"])
@pytest.mark.parametrize("name", NAMES)
def test_every_expert_is_trained(name: str, four_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert of each layer, both products, both matrices, where every expert gets a token."""
    choose = FusedMoeLayer.choose

    def in_turn(self, x_CM):
        expert_Ck, weight_Ck, logits_CE = choose(self, x_CM)
        return torch.arange(expert_Ck.numel()).view_as(expert_Ck) % 6, weight_Ck, logits_CE

    monkeypatch.setattr(FusedMoeLayer, "choose", in_turn)
    model = build(name, torch.float32, lora=False)
    model = adapted(four_bit(model, MXFP4()) if four_bits else model, torch.float32)
    _, found = grads_of(model, TREES["one"]()[0], chunk=16)
    names = [n for n, p in model.named_parameters() if "experts" in n and p.requires_grad]
    assert len(names) == 4 * 4 and set(names) <= set(found)
    for n in names:
        grad = found[n].view(6, 4, -1) if "lora_A" in n else found[n].view(-1, 4, 6).permute(2, 1, 0)
        assert (grad.flatten(1).abs().amax(1) > 0).all(), n


def test_an_expert_without_a_token_gets_zero_and_one_token_is_enough() -> None:
    """One token of two experts: four of six get exactly nothing."""
    model = adapted(build("gpt_oss", torch.float32, lora=False), torch.float32)
    enable(model, parity_check=False)
    fused = fused_layer(layers_of(model)[0], torch.float32)
    grads: dict = {}
    x = torch.randn(1, 48)
    y = fused._mlp(x)
    assert y.shape == x.shape and not torch.equal(y, x)
    fused._mlp_backward(torch.randn(1, 48), x, grads)
    a = fused.experts.adapters[0].a
    assert (grads[a].view(6, -1).abs().amax(1) > 0).sum() == 2


def test_small_parameters_beside_the_adapters_are_trained() -> None:
    """Sinks, router, norms and attention biases in the hand-written layer."""

    def unfrozen(model):
        for n, p in model.named_parameters():
            if any(
                part in n for part in ("sinks", "router", "norm", "q_proj.base_layer.bias", "o_proj.base_layer.bias")
            ):
                p.requires_grad_(True)
        return model

    with true_fp64():
        tree, rows = TREES["deep"]()
        reference = unfrozen(adapted(build("gpt_oss", F64, lora=False), F64))
        loss_of(stock(reference, rows, F64), F64).backward()
        model = unfrozen(adapted(build("gpt_oss", F64, lora=False), F64))
        enable(model, parity_check=False)
        assert isinstance(fused_layer(layers_of(model)[0], F64), FusedMoeLayer)
        _, found = grads_of(model, tree, chunk=7)
        expected = gradients(reference)
        assert sum("sinks" in n for n in expected) == 4 and sum("router" in n for n in expected) == 8
        assert worst(expected, found)[0] <= 1e-11


def test_ranks_that_are_no_multiple_and_differ_by_parameter() -> None:
    config = {"r": 3, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"down_proj": 7}}
    with true_fp64():
        tree, rows = TREES["group"]()
        reference = adapted(build("gpt_oss", F64, lora=False), F64, **config)
        loss_of(stock(reference, rows, F64), F64).backward()
        _, found = grads_of(adapted(build("gpt_oss", F64, lora=False), F64, **config), tree, chunk=7)
        assert {p.shape[0] for n, p in found.items() if "mlp.experts.lora_A" in n} == {5 * 6} or {
            p.shape[0] for n, p in found.items() if "experts.base_layer.lora_A" in n
        } == {5 * 6}
        assert worst(gradients(reference), found)[0] <= 1e-11


@pytest.mark.parametrize("only", EXPERTS)
def test_one_of_the_two_products(only: str) -> None:
    with true_fp64():
        tree, rows = TREES["group"]()
        reference = adapted(build("gpt_oss", F64, lora=False), F64, target_parameters=[only])
        loss_of(stock(reference, rows, F64), F64).backward()
        model = adapted(build("gpt_oss", F64, lora=False), F64, target_parameters=[only])
        _, found = grads_of(model, tree, chunk=7)
        assert worst(gradients(reference), found)[0] <= 1e-11


def log_probs(model, row: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(stock(model.eval(), [(row, 1)], torch.float32))


def test_adapters_travel_between_4_bits_and_stock_peft(tmp_path) -> None:
    """Saved from experts in 4 bits, loaded by stock PEFT onto Transformers' experts, and back."""
    from peft import PeftModel

    whole, packed = pair("gpt_oss", torch.float32, MXFP4())
    packed = adapted(packed, torch.float32)
    enable(packed, parity_check=False)
    packed.save_pretrained(tmp_path / "ours")
    loaded = PeftModel.from_pretrained(whole, str(tmp_path / "ours"))
    row = ids(20, 5)
    with engine_of(packed).stock():
        torch.testing.assert_close(log_probs(packed, row), log_probs(loaded, row), rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(tmp_path / "stock")
    again = PeftModel.from_pretrained(pair("gpt_oss", torch.float32, MXFP4())[1], str(tmp_path / "stock"))
    enable(again, parity_check=False)
    for (n, p), (m, q) in zip(packed.named_parameters(), again.named_parameters(), strict=True):
        assert n == m and torch.equal(p, q), n


def test_forms_that_the_op_does_not_know_run_on_the_module() -> None:
    model = adapted(build("gpt_oss", torch.float32, lora=False), torch.float32)
    layer = model.get_base_model().model.layers[0]
    assert Experts.of(layer.mlp.experts) is not None
    layer.mlp.experts.get_base_layer().down_proj.requires_grad_(True)
    assert Experts.of(layer.mlp.experts) is None and FusedMoeLayer.of(layer, torch.float32) is None
    layer.mlp.experts.get_base_layer().down_proj.requires_grad_(False)
    assert FusedMoeLayer.of(layer, torch.bfloat16) is None  # the weights are in fp32
    from peft import LoraConfig

    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS))
    model.base_model.set_adapter(["default", "second"])
    assert Experts.of(layer.mlp.experts) is None
    assert Experts.of(build("deepseek_v3", torch.float32, lora=False).model.layers[1].mlp.experts) is None


def test_adapters_that_come_after_enable() -> None:
    """Their forward is our operation, and merging them is refused."""
    from longreach.lora.wrapper import ParamWrapper

    packed = pair("gpt_oss", torch.float32, MXFP4())[1]
    enable(packed, parity_check=False)
    late = adapted(packed, torch.float32)
    assert sum(type(m) is ParamWrapper for m in late.modules()) == 8
    early = adapted(pair("gpt_oss", torch.float32, MXFP4())[1], torch.float32)
    enable(early, parity_check=False)
    row = ids(20, 5)
    torch.testing.assert_close(log_probs(late, row), log_probs(early, row))
    with pytest.raises(ValueError, match=r"adapter of .*_proj can't be merged into weights of 4 bits"):
        late.merge_adapter()


def test_the_adapter_switched_off_is_the_base_model() -> None:
    with true_fp64():
        tree, rows = TREES["group"]()
        base = build("gpt_oss", F64, lora=False)
        expected = torch.cat(stock(base, rows, F64)).detach()
        model = adapted(build("gpt_oss", F64, lora=False), F64)
        enable(model, chunk=7, parity_check=False)
        from longreach import token_logprobs

        with torch.no_grad(), model.disable_adapter():
            torch.testing.assert_close(torch.cat(token_logprobs(model, tree)), expected)


def test_names_for_peft() -> None:
    assert sorted(expert_parameters(build("gpt_oss", torch.float32, lora=False))) == sorted(EXPERTS)
    assert expert_parameters(build("qwen3", torch.float32, lora=False)) == []
