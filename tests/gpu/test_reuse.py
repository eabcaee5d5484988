"""A rollout's prefill in the training step on a GPU: the same log-probs to the bit, gradients as two runs without it."""

from __future__ import annotations

import gc

import pytest
import torch

import longreach
from longreach.context.logprob import score
from longreach.context.reuse import Prefill
from longreach.rollout import RolloutOptions, SamplingParams, rollout_engine
from longreach.rollout.completion import requests_of
from tests.exactness.models import gradients, worst

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHUNK = 1024


def made(kind):
    import transformers as T
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    common = dict(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=16384,
    )  # fmt: skip
    if kind == "gpt_oss":
        rope = {"rope_type": "default", "rope_theta": 150000.0}
        config = T.GptOssConfig(
            **{**common, "intermediate_size": 512}, num_local_experts=8, num_experts_per_tok=2, sliding_window=128,
            rope_parameters=rope,
        )  # fmt: skip
        model = T.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:
        model = T.AutoModelForCausalLM.from_config(T.Qwen3Config(**common))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(
        model.to("cuda", torch.bfloat16), LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    )
    return model.train()


def step(model, groups, prefill=None):
    model.zero_grad(set_to_none=True)
    scores = score(model, longreach.TokenTree.from_groups(groups), prefill=prefill)
    logprobs = torch.cat(scores.logprobs)
    (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).mean().backward()
    return gradients(model), logprobs.detach(), scores.reused


@pytest.mark.parametrize(("offload", "on_host"), [("none", False), ("none", True), ("host", True), ("keys", True)])
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_the_same_step(kind, offload, on_host):
    model = made(kind)
    longreach.enable(model, chunk=CHUNK, offload=offload, save_attention=True, parity_check=False)
    draw = torch.Generator().manual_seed(1)
    for lengths in ((4097,), (1500, 3000, 700)):
        prompts = [torch.randint(0, 1000, (n,), generator=draw).tolist() for n in lengths]
        kept = Prefill(on_host=on_host, save_attention=True, required=True)
        requests = requests_of(model, prompts, SamplingParams(max_new_tokens=40, stop_ids=()), 4, 0, None)
        rollout_engine(model, RolloutOptions(graphs=False)).run(requests, keep=kept)
        ids = [r.ids for r in requests]
        groups = [(p, ids[4 * i : 4 * i + 4]) for i, p in enumerate(prompts)]
        want, logprobs, _ = step(model, groups)
        again, _, _ = step(model, groups)
        got, reused_logprobs, reused = step(model, groups, kept)
        assert reused == sum(lengths) - len(lengths)
        if kind == "qwen3":  # equal products give equal bits; those of experts depend on who else is in a chunk
            assert torch.equal(logprobs, reused_logprobs)
        else:
            assert float((logprobs - reused_logprobs).abs().mean()) < 5e-3
        noise = worst(want, again)[0]
        assert worst(want, got)[0] <= max(4 * noise, 1e-2 if kind == "gpt_oss" else 1e-6), (noise, worst(want, got))


def test_memory_comes_back():
    model = made("qwen3")
    longreach.enable(model, chunk=CHUNK, offload="none", save_attention=True, parity_check=False)
    held = []
    for _ in range(3):
        kept = Prefill(on_host=False, save_attention=True, required=True)
        requests = requests_of(model, [list(range(900)) * 4], SamplingParams(max_new_tokens=8, stop_ids=()), 4, 0, None)
        rollout_engine(model, RolloutOptions(graphs=False)).run(requests, keep=kept)
        step(model, [(requests[0].prompt, [r.ids for r in requests])], kept)
        del kept
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[2] <= held[1]
