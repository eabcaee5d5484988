"""Experts on a CUDA device: error beside PyTorch's own, same bits twice, tiny models end to end in bf16 and in 4 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longreach.kernels import Gating, route
from longreach.quant import MXFP4
from longreach.quant import experts as four_bit
from longreach.quant.experts import FourBitExperts, is_experts
from longreach.quant.mixture import DenseWeights, LowRank, mixture_backward, mixture_forward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# T, k, E, M, F of gpt-oss-20b with fewer experts; the last two get no token.
T, K, E, M, F = 3001, 4, 8, 2880, 2880
GPT_OSS, SILU = Gating(True, 7.0, 1.702), Gating()


def inputs(gating: Gating) -> dict[str, Tensor]:
    make = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=make, device="cuda")).bfloat16()

    found = {
        "x": normal(T, M), "dy": normal(T, M), "w1": normal(E, M, 2 * F, scale=0.03), "w2": normal(E, F, M, scale=0.03),
        "a1": normal(E, 32, M, scale=0.02), "b1": normal(E, 32, 2 * F, scale=0.02), "a2": normal(E, 32, F, scale=0.02),
        "b2": normal(E, 32, M, scale=0.02), "weight": torch.softmax(normal(T, K), -1),
    }  # fmt: skip
    if gating.limit is not None:
        found |= {"bias1": normal(E, 2 * F), "bias2": normal(E, M)}
    return found


def chosen() -> Tensor:
    scores = torch.rand(T, E - 2, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return scores.topk(K).indices


def ours(gating: Gating, given: dict[str, Tensor]) -> list[Tensor]:
    lows = tuple(
        LowRank.of(given[a], given[b], 2.0, torch.bfloat16, (True, True)) for a, b in (("a1", "b1"), ("a2", "b2"))
    )
    weights = DenseWeights(given["w1"], given["w2"], gating, given.get("bias1"), given.get("bias2"))
    routing = route(chosen(), E)
    y = mixture_forward(given["x"], routing, given["weight"], weights, lows)
    dx, dweight, found = mixture_backward(given["dy"], given["x"], routing, given["weight"], weights, lows)
    return [y, dx, dweight, *(g for sums in found for g in sums.done())]


def plain(gating: Gating, given: dict[str, Tensor]) -> list[Tensor]:
    """A loop over experts and autograd, adapters added to the weights, in the dtype given."""
    leaves = {n: given[n].clone().requires_grad_() for n in ("x", "weight", "a1", "b1", "a2", "b2")}
    w1 = given["w1"] + 2.0 * leaves["a1"].transpose(1, 2) @ leaves["b1"]
    w2 = given["w2"] + 2.0 * leaves["a2"].transpose(1, 2) @ leaves["b2"]
    y = torch.zeros_like(given["x"])
    where = chosen()
    for e in range(E):
        token, choice = torch.where(where == e)
        hidden = leaves["x"][token] @ w1[e]
        if "bias1" in given:
            hidden = hidden + given["bias1"][e]
            gate, up = hidden[:, ::2].clamp(max=7.0), hidden[:, 1::2].clamp(-7.0, 7.0)
            inner = (up + 1) * (gate * torch.sigmoid(1.702 * gate))
        else:
            gate, up = hidden.chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up
        out = inner @ w2[e]
        out = out + given["bias2"][e] if "bias2" in given else out
        y = y.index_add(0, token, out * leaves["weight"][token, choice, None])
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), given["dy"])]


def rms(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


@pytest.mark.parametrize("gating", [GPT_OSS, SILU], ids=["gpt-oss", "silu"])
def test_error_is_at_most_twice_that_of_pytorch(gating: Gating) -> None:
    given = inputs(gating)
    mine, theirs = ours(gating, given), plain(gating, given)
    exact = plain(gating, {name: x.double() for name, x in given.items()})
    names = ("y", "dx", "dweight", "da1", "db1", "da2", "db2")
    for name, x, y, z in zip(names, mine, theirs, exact, strict=True):
        print(f"{name}: {rms(x, z):.2e}, PyTorch {rms(y, z):.2e}")
        assert rms(x, z) <= 2 * rms(y, z), name


def test_same_bits_twice() -> None:
    given = inputs(GPT_OSS)
    assert all(torch.equal(x, y) for x, y in zip(ours(GPT_OSS, given), ours(GPT_OSS, given), strict=True))


def tiny(dtype: torch.dtype, four_bits: bool):
    """Two layers of gpt-oss's form with adapters on attention and experts."""
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=512, hidden_size=256, intermediate_size=192, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_local_experts=8, num_experts_per_tok=4, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to("cuda", dtype)
    if four_bits:
        for name, module in list(model.named_modules()):
            if is_experts(module):
                model.set_submodule(name, FourBitExperts.of(module, MXFP4()))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=names)
    model = get_peft_model(model, lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    return model.train()


@pytest.mark.parametrize("four_bits", [False, True], ids=["whole", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiny_gpt_oss(dtype: torch.dtype, four_bits: bool) -> None:
    """The engine against stock eager on the same weights; raises beyond the dtype's rounding."""
    from longreach.context.install import enable, engine_of
    from longreach.context.parity import check_parity

    model = tiny(dtype, four_bits)
    enable(model, chunk=16, parity_check=False)
    print(dtype, four_bits, check_parity(model, engine_of(model)))


def test_ranges_of_experts_give_what_all_at_once_give() -> None:
    from longreach import TokenTree, enable, token_logprobs

    kept, found = four_bit.EXPERT_SCRATCH, []
    try:
        for scratch in (kept, 2**18):
            four_bit.EXPERT_SCRATCH = scratch
            model = tiny(torch.bfloat16, True)
            enable(model, chunk=64, parity_check=False)
            ids = torch.randint(2, 512, (300,), generator=torch.Generator().manual_seed(2))
            loss = torch.cat(token_logprobs(model, TokenTree.from_sequences([ids]))).mean()
            loss.backward()
            found.append([p.grad.float() for p in model.parameters() if p.grad is not None])
    finally:
        four_bit.EXPERT_SCRATCH = kept
    assert len(found[0]) > 8
    for x, y in zip(*found, strict=True):
        assert float((x - y).norm()) <= 0.02 * float(x.norm()) + 1e-9


def test_the_backward_picks_the_experts_of_the_forward() -> None:
    from longreach import TokenTree, enable, token_logprobs
    from longreach.context.fused_moe import FusedMoeLayer

    picked: list[Tensor] = []
    choose = FusedMoeLayer.choose

    def recorded(self, x_CM):
        found = choose(self, x_CM)
        picked.append(found[0])
        return found

    FusedMoeLayer.choose = recorded  # type: ignore[method-assign]
    try:
        model = tiny(torch.bfloat16, False)
        enable(model, chunk=64, parity_check=False)
        ids = torch.randint(2, 512, (190,), generator=torch.Generator().manual_seed(2))
        torch.cat(token_logprobs(model, TokenTree.from_sequences([ids]))).mean().backward()
    finally:
        FusedMoeLayer.choose = choose  # type: ignore[method-assign]
    # Layers first to last and chunks in order in the forward; both reversed in the backward.
    half = len(picked) // 2
    assert half == 6 and all(torch.equal(x, y) for x, y in zip(picked[:half], reversed(picked[half:]), strict=True))
