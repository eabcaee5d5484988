"""A linear layer in 4 bits: the products, PEFT on it, and the chunked engine's gradients through it."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from longreach.context.fused import FusedLayer
from longreach.context.install import enable, engine_of
from longreach.context.logprob import token_logprobs
from longreach.quant import FORMATS, MXFP4, NF4
from longreach.quant.linear import FourBitLinear, shared_weights
from tests.exactness.models import build, gradients, true_fp64, worst
from tests.exactness.test_architectures import TREES, loss_of, stock

F64 = torch.float64
BOTH = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def pair(format, dtype=torch.float32, bias=True) -> tuple[FourBitLinear, nn.Linear]:
    """A layer in 4 bits and a plain one with the dequantized weight."""
    torch.manual_seed(0)
    plain = nn.Linear(96, 64, bias=bias, dtype=torch.float32)
    small = FourBitLinear.of(plain, format)
    plain.weight.data = small.dequantize(dtype)
    return small.to(dtype), plain.to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
def test_products(format, dtype, lead) -> None:
    small, plain = pair(format, dtype)
    x = torch.randn(*lead, 96, dtype=dtype)
    results = []
    for layer in (small, plain):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        results.append((y.detach(), given.grad, layer.bias.grad))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-5 if dtype != torch.bfloat16 else 2e-2, atol=1e-5)
    assert torch.equal(results[0][0], results[1][0])


@BOTH
def test_nothing_of_the_weights_size_is_kept(format) -> None:
    small, _ = pair(format)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        small(torch.randn(3, 96, requires_grad=True)).sum()
    assert sum(kept) < 96 * 64


def test_autocast_decides_the_dtype() -> None:
    small, plain = pair(NF4())
    x = torch.randn(4, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = small(x)
        assert torch.equal(y, plain(x))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32


@BOTH
def test_casts_do_not_reach_the_scales(format) -> None:
    small, _ = pair(format)
    before = {k: v.clone() for k, v in small.packed.tensors.items()}
    nn.Sequential(small).to(torch.bfloat16).half()
    assert small.bias.dtype == torch.float16
    assert all(
        torch.equal(small.packed.tensors[k], v) and small.packed.tensors[k].dtype == v.dtype for k, v in before.items()
    )
    small.packed.check("weight")


@BOTH
def test_state_dict_and_copy(format) -> None:
    small, _ = pair(format)
    other = FourBitLinear(96, 64, format=format)
    other.load_state_dict(small.state_dict())
    x = torch.randn(2, 96)
    assert torch.equal(other(x), small(x)) and torch.equal(copy.deepcopy(small)(x), small(x))
    assert not any(p.requires_grad for n, p in small.named_parameters() if n != "bias")


def test_shared_weights_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = pair(MXFP4())
    made = []
    whole = FourBitLinear.dequantize
    monkeypatch.setattr(FourBitLinear, "dequantize", lambda self, *a: made.append(self) or whole(self, *a))
    x = torch.randn(2, 96, requires_grad=True)
    with shared_weights():
        for _ in range(3):
            small(x).sum().backward()
        with shared_weights():
            small(x)
    assert len(made) == 1
    with shared_weights(False):
        small(x), small(x)
    assert len(made) == 3
    with pytest.raises(KeyError), shared_weights():
        raise KeyError
    small(x), small(x)
    assert len(made) == 5


def test_another_weight_is_refused() -> None:
    small, _ = pair(NF4())
    with pytest.raises(ValueError, match=r"q.weight: a weight of shape \[8, 96\] was stored; the layer has \[64, 96\]"):
        small.adopt(NF4().quantize(torch.randn(8, 96)), "q.weight")


# ---- in models


def pack(model: nn.Module, format) -> nn.Module:
    """Every linear layer of the decoder layers in 4 bits."""
    layers = model.get_decoder().layers
    for name, module in list(layers.named_modules()):
        if type(module) is nn.Linear and not name.endswith("gate"):
            layers.set_submodule(name, FourBitLinear.of(module, format))
    return model


def unpack(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with plain layers that hold the dequantized weights."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, FourBitLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=False)
            plain.weight, plain.bias = nn.Parameter(module.dequantize(dtype)), module.bias
            model.set_submodule(name, plain)
    return model


def adapt(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    linears = [n for n, m in model.get_decoder().layers.named_modules() if isinstance(m, nn.Linear)]
    targets = sorted({n.rpartition(".")[2] for n in linears} - {"gate"})
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator, dtype=F64) * 0.1)
    return model.train()


# Hand-written layers with and without biases and sandwich norms; layers run as modules, one with fused projections.
MODELS = ["llama", "qwen2", "gemma3", "phi3", "glm4", "qwen3_5", "deepseek_v3"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tree", ["group", "deep"])
def test_gradients_are_those_of_the_dequantized_model(name, tree) -> None:
    format = NF4() if MODELS.index(name) % 2 else MXFP4()
    small = pack(build(name, torch.float32, lora=False), format)
    tree, rows = TREES[tree]()
    with true_fp64():
        reference, model = adapt(unpack(small, F64), F64), adapt(small, F64)
        enable(model, chunk=8, parity_check=False)
        expected = loss_of(stock(reference, rows, F64), F64)
        got = loss_of(token_logprobs(model, tree), F64)
        expected.backward(), got.backward()
    assert abs(float((expected - got).detach())) < 1e-11
    assert worst(gradients(reference), gradients(model))[0] < 1e-11
    assert len(gradients(model)) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_every_weight_is_made_once_a_pass(name, chunk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per layer once in the forward and once in the backward where there are several chunks; the same bits as made each time."""
    model = adapt(pack(build(name, torch.float32, lora=False), NF4()), torch.float32)
    enable(model, chunk=chunk, parity_check=False)
    monkeypatch.setattr("longreach.context.layer.FEW_TOKENS", 16)
    made, whole = [], FourBitLinear.dequantize
    monkeypatch.setattr(FourBitLinear, "dequantize", lambda self, *a: made.append(self) or whole(self, *a))
    tree, _ = TREES["one"]()
    loss_of(token_logprobs(model, tree), torch.float32).backward()
    linears = sum(isinstance(m, FourBitLinear) for m in model.modules())
    if chunk == 8:
        assert len(made) == 2 * linears
    assert len(made) >= 2 * linears
    used, found = len(made), gradients(model)
    model.zero_grad()
    monkeypatch.setattr("longreach.context.layer.shared_weights", lambda share: __import__("contextlib").nullcontext())
    monkeypatch.setattr("longreach.lora.linear.Linear.__init__", each_time(made))
    loss_of(token_logprobs(model, tree), torch.float32).backward()
    assert len(made) - used >= used
    assert all(torch.equal(found[k], v) for k, v in gradients(model).items())


def each_time(made):
    from longreach.lora.linear import Linear

    whole = Linear.__init__

    def init(self, *args, **kwargs):
        whole(self, *args, **(kwargs | {"keep": False}))

    return init


def test_hand_written_layers_take_them() -> None:
    model = pack(build("qwen3", torch.float32, lora=False), NF4())
    layer = model.get_decoder().layers[0]
    assert FusedLayer.of(layer, torch.float32) is not None
    assert FusedLayer.of(layer, torch.float32, keep=False).qkv.linears[0]._made is None


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_parity_check_passes(format, dtype) -> None:
    model = adapt(pack(build("qwen3", torch.float32, lora=False, spread=0.05), format).to(dtype), torch.float32)
    for name, p in model.named_parameters():
        if "lora_" not in name and p.is_floating_point():
            p.data = p.data.to(dtype)
    enable(model)
    assert engine_of(model).checked


def test_the_parity_check_sees_a_wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from longreach.context.parity import ParityError
    from longreach.lora.linear import Linear

    model = adapt(pack(build("qwen3", torch.float32, lora=False), NF4()), torch.float32)
    weight = Linear.weight.fget
    monkeypatch.setattr(Linear, "weight", property(lambda self: weight(self) * 1.01))
    with pytest.raises(ParityError):
        enable(model)


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merging_into_4_bits_is_an_error_that_says_what_to_do(merge: str) -> None:
    model = adapt(pack(build("qwen3", torch.float32, lora=False), NF4()), torch.float32)
    enable(model, parity_check=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"can't be merged into weights of 4 bits.*longreach export RUN --format merged"
    ):
        getattr(model, merge)()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    copy.deepcopy(model).unload()


@pytest.mark.parametrize("name, lora", [("qwen3", True), ("gemma3", False)])
def test_weights_of_another_dtype_under_autocast(name, lora) -> None:
    """fp32 weights, products in bf16: cast once a pass in the hand-written layer, which errs no more than the module does."""
    tree, _ = TREES["group"]()
    found = {}
    for form in ("exact", "module", "hand-written"):
        model = build(name, torch.float32, lora=lora, spread=0.05)
        enable(model, chunk=8, parity_check=False)
        engine = engine_of(model)
        engine.options = dataclasses.replace(engine.options, fuse=form == "hand-written")
        with torch.autocast("cpu", torch.bfloat16, enabled=form != "exact"):
            logprobs = token_logprobs(model, tree)
        loss_of(logprobs, torch.float32).backward()
        found[form] = torch.cat([g.flatten() for _, g in sorted(gradients(model).items())])
    assert len({len(v) for v in found.values()}) == 1
    error = {form: float((v - found["exact"]).norm() / found["exact"].norm()) for form, v in found.items()}
    assert 0 < error["hand-written"] < 2 * error["module"] < 0.1
