"""The rollout engine on a GPU: Transformers' tokens in fp32, the trainer's log-probs in bf16, graphs that see every change."""

from __future__ import annotations

import copy

import pytest
import torch

from longreach.context.logprob import token_logprobs
from longreach.context.tree import TokenTree
from longreach.rollout import RolloutOptions, SamplingParams, generate, rollout_engine
from longreach.rollout.fused_step import FusedStep
from tests.exactness.models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 997}
FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_oss", "qwen3_moe")
LENGTHS = (1, 2, 37, 300, 130)


def model_of(name, dtype, **changes):
    sizes = dict(SIZES) | {"query_pre_attn_scalar": 64} if name.startswith("gemma") else dict(SIZES)
    if name in ("qwen2", "olmo2"):
        del sizes["head_dim"]
    return build(name, dtype, lora=True, spread=0.05, **(sizes | changes)).cuda().eval()


def prompts_of(lengths=LENGTHS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 900, (n,), generator=draw).tolist() for n in lengths]


def stock_greedy(model, prompt, new):
    from transformers import GenerationConfig

    ids = torch.tensor([prompt], device="cuda")
    config = GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0, eos_token_id=[2])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", [*FUSED, "gemma2"])
def test_greedy_tokens_in_fp32_are_those_of_stock_generate(name, fused):
    model = model_of(name, torch.float32)
    sampling = SamplingParams(temperature=0, max_new_tokens=40)
    got = generate(model, prompts_of(), sampling=sampling, group=3, options=RolloutOptions(rows=9, fused=fused))
    step = rollout_engine(model).step
    assert isinstance(step, FusedStep) == (fused and name in FUSED)
    want = [stock_greedy(model, p, 40) for p in prompts_of()]
    assert [c.ids for c in got] == [w for w in want for _ in range(3)]


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_log_probs_in_bf16_agree_with_the_trainers(name):
    """On 10,000 tokens, engine and trainer differ no more than the trainer in bf16 differs from itself in fp32."""
    model = model_of(name, torch.bfloat16)
    prompts = prompts_of((300, 130, 64, 20) * 2)
    out = generate(model, prompts, sampling=SamplingParams(temperature=0.9, max_new_tokens=160, stop_ids=()), group=8)
    groups = [(p, [c.ids for c in out[i * 8 : i * 8 + 8]]) for i, p in enumerate(prompts)]
    tree = TokenTree.from_groups(groups)

    def scored(model):
        with torch.no_grad():
            return torch.cat(token_logprobs(model, tree, temperature=0.9)).float().cpu()

    trainer, engine = scored(model), torch.cat([torch.tensor(c.logprobs) for c in out])
    exact = scored(copy.deepcopy(model).float())
    ours, own = (trainer - engine).abs(), (trainer - exact).abs()
    assert len(ours) >= 10_000
    print(
        name,
        f"engine {ours.mean():.4f} {ours.quantile(0.99):.4f}, bf16 itself {own.mean():.4f} {own.quantile(0.99):.4f}",
    )
    assert ours.mean() <= 1.2 * own.mean() and ours.quantile(0.99) <= 1.5 * own.quantile(0.99)


def test_a_completion_does_not_depend_on_who_shares_its_batch():
    model = model_of("qwen3", torch.bfloat16)
    options = RolloutOptions(rows=64, batch_invariant=True)
    sampling = [SamplingParams(max_new_tokens=64, seed=i, stop_ids=()) for i in range(64)]
    prompts = prompts_of([20 + i for i in range(64)])
    together = generate(model, prompts, sampling=sampling, options=options)
    for i in (0, 17, 63):
        alone = generate(model, [prompts[i]], sampling=sampling[i], options=options)[0]
        assert alone.ids == together[i].ids and alone.logprobs == together[i].logprobs


def test_graphs_see_new_lengths_and_new_weights():
    model = model_of("qwen3", torch.float32)
    greedy = SamplingParams(temperature=0, max_new_tokens=24)
    generate(model, prompts_of(), sampling=greedy, options=RolloutOptions(rows=8))
    engine = rollout_engine(model)
    graphs = dict(engine.graphs.graphs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "q_proj" in name:
                parameter.mul_(-1.5)
    prompts = prompts_of((3, 250, 11, 90, 5), seed=1)
    got = generate(model, prompts, sampling=greedy)
    assert rollout_engine(model).graphs.graphs.items() >= graphs.items()  # captured once
    assert [c.ids for c in got] == [stock_greedy(model, p, 24) for p in prompts]


def test_long_prompts_keys_wait_on_the_host():
    model = model_of("qwen3", torch.float32)
    options = RolloutOptions(rows=5, prompt_keys="host")
    got = generate(
        model, prompts_of(), sampling=SamplingParams(temperature=0, max_new_tokens=24), group=2, options=options
    )
    assert [c.ids for c in got] == [ids for p in prompts_of() for ids in [stock_greedy(model, p, 24)] * 2]


def test_experts_in_mxfp4_with_adapters_in_graphs():
    from peft import LoraConfig, get_peft_model

    from longreach import enable
    from longreach.quant import MXFP4
    from longreach.quant.experts import FourBitExperts

    sizes = SIZES | {"intermediate_size": 256}
    model = build("gpt_oss", torch.float32, lora=False, spread=0.05, **sizes).cuda()
    for layer in model.model.layers:
        layer.mlp.experts = FourBitExperts.of(layer.mlp.experts, MXFP4())
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets)).eval()
    enable(model, parity_check=False)
    draw = torch.Generator().manual_seed(5)
    greedy = SamplingParams(temperature=0, max_new_tokens=24)
    prompts = prompts_of()
    for _ in range(2):  # the second time in the graphs of the first
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
        got = generate(model, prompts, sampling=greedy, group=3, options=RolloutOptions(rows=15))
        assert isinstance(rollout_engine(model).step, FusedStep) and rollout_engine(model).graphs.graphs
        assert [c.ids for c in got] == [ids for p in prompts for ids in [stock_greedy(model, p, 24)] * 3]


@pytest.mark.parametrize("rows", [3, 65])
def test_four_bits(rows):
    from longreach.quant import NF4
    from longreach.quant.linear import FourBitLinear

    model = model_of("qwen3", torch.float32)
    for layer in model.get_base_model().model.layers:
        for module in list(layer.modules()):
            if hasattr(module, "base_layer"):
                module.base_layer = FourBitLinear.of(module.base_layer, NF4())
    prompts = prompts_of([5 + i % 40 for i in range(rows)])
    sampling = SamplingParams(temperature=0, max_new_tokens=24)
    got = generate(model, prompts, sampling=sampling, options=RolloutOptions(rows=rows))
    assert isinstance(rollout_engine(model).step, FusedStep)
    for i in (0, 1, rows - 1):
        assert got[i].ids == stock_greedy(model, prompts[i], 24)
