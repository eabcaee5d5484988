"""fp16 compute: the residual stream is fp32 in every pass, and the numbers are nearer to fp32 than bf16's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import longreach
from longreach.context.install import enable, engine_of
from longreach.context.logprob import token_logprobs
from longreach.context.parity import check_parity
from longreach.context.precision import OVERFLOWING
from longreach.context.support import UnsupportedModelError
from tests.exactness.models import CONFIGS, build, gradients
from tests.exactness.test_architectures import group, loss_of

TREE, _ = group()


def made(name, dtype, **config):
    model = build(name, dtype, lora=True, spread=0.05, **config)
    for key, p in model.named_parameters():
        if "lora_" in key:
            p.data = p.data.float()  # as PEFT makes adapters
    enable(model, chunk=8, parity_check=False)
    return model


def run(model, *, fuse=True, scale=1.0):
    engine = engine_of(model)
    engine.options = dataclasses.replace(engine.options, fuse=fuse)
    (scale * loss_of(token_logprobs(model, TREE), torch.float32)).backward()
    return gradients(model)


def distance(exact, other):
    top = sum(float((exact[n].double() - other[n].double()).square().sum()) for n in exact)
    return (top / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5


FAST = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "glm4", "qwen3_5")
SLOW = sorted(set(CONFIGS) - {*FAST, "gemma2", "gemma3"})


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_nearer_to_fp32_than_bf16(name):
    exact = run(made(name, torch.float32))
    model = made(name, torch.float16)
    half, module = run(model), run(made(name, torch.float16), fuse=False)
    brain = run(made(name, torch.bfloat16))
    assert distance(exact, half) < 0.6 * distance(exact, brain)
    assert distance(exact, module) < 0.6 * distance(exact, brain)
    check_parity(model, engine_of(model))


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "module"])
def test_the_residual_stream_may_leave_the_range_of_fp16(fuse):
    """Sublayers each within fp16, whose sum is not: finite only where the stream is wider."""

    def grown(dtype):
        model = made("llama", dtype, mlp_bias=True)
        with torch.no_grad():
            for layer in model.get_base_model().model.layers:
                layer.mlp.down_proj.base_layer.bias[0] = 3e4
        return model

    seen = []
    model = grown(torch.float16)
    model.get_base_model().model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    # The final norm divides by the grown stream: without a scale, gradients would be below fp16's smallest number.
    half, exact = (run(m, fuse=fuse, scale=2.0**14) for m in (model, grown(torch.float32)))
    assert seen[0].dtype == torch.float32 and float(seen[0].detach().abs().max()) > 65504
    assert all(bool(g.isfinite().all()) for g in half.values())
    assert distance(exact, half) < 0.01


def test_every_pass_is_wide():
    """Scoring, training and generation; and the model gives back the dtype of its weights."""
    model = made("qwen3", torch.float16)
    seen = []
    model.get_base_model().model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(input_ids=ids, use_cache=False).logits.dtype == torch.float16
        token_logprobs(model, TREE)
        generated = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] == 15 and len(seen) >= 5 and set(seen) == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("offload", ["host", "rows", "keys"])
def test_streamed_values_are_wide_too(offload):
    model = made("qwen3", torch.float16)
    kept = run(model)
    model.zero_grad()
    enable(model, chunk=8, offload=offload, parity_check=False)
    streamed = run(model)
    assert all(torch.equal(kept[name], g) for name, g in streamed.items())


def test_autocast_is_left_where_a_forward_fails():
    model = made("qwen3", torch.float16)
    with pytest.raises(ValueError, match="output_hidden_states"):
        model(input_ids=torch.ones(1, 8, dtype=torch.int64), output_hidden_states=True, use_cache=False)
    assert not torch.is_autocast_enabled("cpu")
    token_logprobs(model, TREE)
    assert not torch.is_autocast_enabled("cpu")


def test_other_dtypes_are_left_alone():
    for dtype in (torch.bfloat16, torch.float32):
        model = made("llama", dtype)
        seen = []
        model.get_base_model().model.norm.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].dtype)
        )
        token_logprobs(model, TREE)
        assert set(seen) == {dtype}


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemma_is_refused(name):
    model = build(name, torch.float16, lora=False)
    assert model.config.model_type in OVERFLOWING
    with pytest.raises(UnsupportedModelError, match=r"leaves the range of fp16 \(65,504\).*weights='fp32'"):
        enable(model)


def test_weights_out_of_range_are_refused(tmp_path):
    model = build("llama", torch.float32, lora=False)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.layers.2.mlp.up_proj.weight has values beyond the range of fp16"):
        longreach.load(str(tmp_path), weights="fp16", device="cpu")
