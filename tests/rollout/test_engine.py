"""Completions of the engine: Transformers' greedy tokens in fp32, the trainer's log-probs, seeds that nobody else disturbs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import longreach
from longreach.context.support import UnsupportedModelError
from longreach.quant import MXFP4, NF4
from longreach.quant.embedding import store_in_8_bits
from longreach.quant.experts import FourBitExperts
from longreach.quant.linear import FourBitLinear
from longreach.rollout import RolloutOptions, SamplingParams, generate, moe_step, release_rollout, rollout_engine
from longreach.rollout.fused_step import FusedStep
from longreach.rollout.module_step import ModuleStep

from ..exactness.models import CONFIGS, HYBRID, build

FUSED = ("gemma3", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
TRAINED_EXPERTS = ("gpt_oss", "qwen3_moe")  # of the models without LoRA here: their modules run
LENGTHS = (1, 2, 37, 20, 17)
SMALL = RolloutOptions(rows=7, page=16)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


def prompts_of(lengths=LENGTHS, seed=0, vocabulary=90):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocabulary, (n,), generator=draw).tolist() for n in lengths]


def stock_greedy(model, prompt, new=12, ends=(2,)):
    ids = torch.tensor([prompt])
    config = GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0, eos_token_id=list(ends))
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in HYBRID])
def test_greedy_tokens_are_those_of_stock_generate(name, lora):
    """Ragged prompts, groups of three, fewer rows than completions; by hand and through the model's modules."""
    model = build(name, torch.float32, lora=lora).eval()
    want = [ids for p in prompts_of() for ids in [stock_greedy(model, p)] * 3]
    for fused in (True, False):
        got = generate(
            model, prompts_of(), sampling=GREEDY, group=3, options=RolloutOptions(rows=7, page=16, fused=fused)
        )
        assert [c.ids for c in got] == want
        by_hand = fused and name in FUSED and (lora or name not in TRAINED_EXPERTS)
        assert isinstance(rollout_engine(model).step, FusedStep if by_hand else ModuleStep)
        if name not in FUSED:
            break
    assert {c.finish_reason for c in got} <= {"stop", "length"}


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "gemma2"])
def test_windows_wrap_in_their_pages(name):
    """Completions several times as long as what a window layer keeps."""
    model = build(name, torch.float32, lora=False).eval()
    sampling = SamplingParams(temperature=0, max_new_tokens=90, stop_ids=())
    got = generate(model, prompts_of(), sampling=sampling, options=SMALL)
    assert [c.ids for c in got] == [stock_greedy(model, p, 90, ends=(-1,)) for p in prompts_of()]


@pytest.mark.parametrize("hidden", [64, 48])
def test_gpt_oss_experts_in_mxfp4(hidden):
    """Also where rows don't end with a block of 32, which the kernel can't read."""
    model = build("gpt_oss", torch.float32, lora=True, hidden_size=hidden, intermediate_size=64, head_dim=16).eval()
    for layer in model.get_base_model().model.layers:
        layer.mlp.experts = FourBitExperts.of(layer.mlp.experts, MXFP4())
    got = generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    step = rollout_engine(model).step
    assert isinstance(step, FusedStep) and step.captures == (hidden == 64)
    assert [c.ids for c in got] == [stock_greedy(model, p) for p in prompts_of()]


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("form", [None, MXFP4()], ids=["whole", "mxfp4"])
def test_adapters_of_experts(name, form):
    from peft import LoraConfig, get_peft_model

    base = build(
        name, torch.float32, lora=False, hidden_size=64, intermediate_size=64, head_dim=16, moe_intermediate_size=64
    )
    if form is not None:
        for layer in base.model.layers:
            layer.mlp.experts = FourBitExperts.of(layer.mlp.experts, form)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
    longreach.enable(model, parity_check=False)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.copy_(torch.randn(p.shape, generator=draw) * 0.2)
    model.eval()
    got = generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    step = rollout_engine(model).step
    assert isinstance(step, FusedStep) and step.captures == (name == "gpt_oss" and form is not None)
    assert [c.ids for c in got] == [stock_greedy(model, p) for p in prompts_of()]
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "experts" in n and "lora" in n:
                p.mul_(-1.3)
    again = generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    assert rollout_engine(model).step is step
    through_modules = generate(
        model, prompts_of(), sampling=GREEDY, options=RolloutOptions(rows=7, page=16, fused=False)
    )
    assert [c.ids for c in again] == [c.ids for c in through_modules] == [stock_greedy(model, p) for p in prompts_of()]


def test_tables_in_8_bits():
    model = build("qwen3", torch.float32, lora=True).eval()
    store_in_8_bits(model.get_base_model())
    got = generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    assert isinstance(rollout_engine(model).step, FusedStep)
    assert [c.ids for c in got] == [stock_greedy(model, p) for p in prompts_of()]


def test_experts_take_more_rows_than_their_kernel(monkeypatch):
    monkeypatch.setattr(moe_step, "FEW_TOKENS", 2)
    test_gpt_oss_experts_in_mxfp4(64)


@pytest.mark.parametrize("form", [NF4(), NF4(double=False), MXFP4()], ids=["nf4", "nf4 single", "mxfp4"])
def test_four_bit_weights(form):
    model = build("qwen3", torch.float32, lora=True, hidden_size=64, intermediate_size=128, head_dim=16).eval()
    for layer in model.get_base_model().model.layers:
        for module in list(layer.modules()):
            if isinstance(getattr(module, "base_layer", None), nn.Linear):
                module.base_layer = FourBitLinear.of(module.base_layer, form)
    got = generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    assert isinstance(rollout_engine(model).step, FusedStep)
    assert [c.ids for c in got] == [stock_greedy(model, p) for p in prompts_of()]


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss", "granite", "gemma2"])
def test_log_probs_are_the_trainers(name):
    model = build(name, torch.float32, lora=True).eval()
    sampling = SamplingParams(temperature=0.8, max_new_tokens=20)
    out = generate(model, prompts_of(), sampling=sampling, group=4, seed=3, options=SMALL)
    groups = [(p, [c.ids for c in out[i * 4 : i * 4 + 4]]) for i, p in enumerate(prompts_of())]
    with torch.no_grad():
        scored = longreach.token_logprobs(model, longreach.TokenTree.from_groups(groups), temperature=0.8)
    for completion, logprobs in zip(out, scored):
        assert torch.allclose(torch.tensor(completion.logprobs), logprobs, atol=2e-5)


def test_a_seed_draws_the_same_alone_and_in_a_batch_of_64():
    model = build("qwen3", torch.float32, lora=True).eval()
    prompts = prompts_of([1 + i % 40 for i in range(64)])
    sampling = [SamplingParams(max_new_tokens=16, seed=i, temperature=0.5 + i % 3, stop_ids=()) for i in range(64)]
    together = generate(model, prompts, sampling=sampling, options=RolloutOptions(page=16))
    for i in range(0, 64, 9):
        alone = generate(model, [prompts[i]], sampling=sampling[i], options=SMALL)[0]
        assert alone.ids == together[i].ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)
    assert len({tuple(c.ids) for c in together}) == 64
    some = SamplingParams(max_new_tokens=16)
    first, again, other = (generate(model, prompts[:3], sampling=some, seed=s)[1].ids for s in (5, 5, 6))
    assert first == again != other


def test_bits_do_not_depend_on_the_batch_on_request():
    model = build("qwen3", torch.float32, lora=False).eval()
    options = RolloutOptions(rows=9, page=16, batch_invariant=True)
    sampling = [SamplingParams(max_new_tokens=8, seed=i, stop_ids=()) for i in range(20)]
    prompts = prompts_of([3 + i for i in range(20)])
    together = generate(model, prompts, sampling=sampling, options=options)
    alone = generate(model, [prompts[13]], sampling=sampling[13], options=options)[0]
    assert alone.logprobs == together[13].logprobs


def test_weights_that_change_are_seen_and_stay_the_models_own():
    model = build("qwen3", torch.float32, lora=True).eval()
    parameters = dict(model.named_parameters())
    generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    assert all(parameters[n] is p for n, p in model.named_parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.05).add_(0.01)
    step = rollout_engine(model).step
    got = generate(model, prompts_of(), sampling=GREEDY)
    assert rollout_engine(model).step is step  # nothing was joined again
    assert [c.ids for c in got] == [stock_greedy(model, p) for p in prompts_of()]
    clone = copy.deepcopy(model)
    assert [c.ids for c in generate(clone, prompts_of(), sampling=GREEDY)] == [c.ids for c in got]
    model.to(torch.float64)  # weights elsewhere: joined anew
    got = generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    assert [c.ids for c in got] == [stock_greedy(model, p) for p in prompts_of()]


def test_joined_weights_are_saved_and_loaded_like_any(tmp_path):
    from transformers import AutoModelForCausalLM

    model = build("qwen3", torch.float32, lora=False).eval()
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) < before * 1.1
    assert (tmp_path / "state.pt").stat().st_size < before * 1.2
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    states = torch.load(tmp_path / "state.pt")
    for name, p in again.named_parameters():
        assert torch.equal(p, model.get_parameter(name)) and torch.equal(p, states[name])


def test_a_disabled_adapter_is_left_out():
    model = build("qwen3", torch.float32, lora=True).eval()
    generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    with model.disable_adapter():
        got = generate(model, prompts_of(), sampling=GREEDY)
        assert [c.ids for c in got] == [stock_greedy(model, p) for p in prompts_of()]


def test_training_mode_and_gradients_are_left_alone():
    model = build("qwen3", torch.float32, lora=True).train()
    model.get_base_model().model.layers[1].eval()
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(0.5)  # in training mode, and of no effect on a rollout
    modes = [m.training for m in model.modules()]
    got = generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    assert [m.training for m in model.modules()] == modes
    assert [c.ids for c in got] == [stock_greedy(copy.deepcopy(model).eval(), p) for p in prompts_of()]
    ids = torch.tensor([prompts_of()[2]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_prompts_are_computed_once_and_long_ones_in_chunks():
    model = build("mistral", torch.float32, lora=False).eval()
    longreach.enable(model, chunk=16, parity_check=False)
    prompts = prompts_of((70, 70, 33))
    prompts[1] = prompts[0]
    got = generate(model, prompts, sampling=GREEDY, group=2, options=SMALL)
    stats = rollout_engine(model).stats
    assert stats.prefilled == 69 + 32 and stats.tokens == sum(len(c.ids) for c in got)
    assert [c.ids for c in got] == [ids for p in prompts for ids in [stock_greedy(model, p)] * 2]
    unshared = RolloutOptions(rows=7, page=16, share_prompts=False)
    again = generate(model, prompts, sampling=GREEDY, group=2, options=unshared)
    assert [c.ids for c in again] == [c.ids for c in got]
    assert rollout_engine(model).stats.prefilled == 4 * 69 + 2 * 32


def test_memory_is_used_again_and_released():
    model = build("qwen3", torch.float32, lora=False).eval()
    generate(model, prompts_of(), sampling=GREEDY, options=SMALL)
    state = rollout_engine(model).state
    generate(model, prompts_of((5, 30)), sampling=GREEDY)
    assert rollout_engine(model).state is state
    generate(model, prompts_of((90,)), sampling=GREEDY)  # a longer prompt than it was made for
    assert rollout_engine(model).state is not state
    release_rollout(model)
    assert rollout_engine(model).state is None


def pool_bytes(model):
    pool = rollout_engine(model).state.pool
    return sum(x.nbytes for x in (*pool.k, *pool.v))


def test_the_plan_halves_the_batch_until_it_fits():
    model = build("qwen3", torch.float32, lora=False).eval()
    want = generate(model, prompts_of(), sampling=GREEDY, group=4, options=RolloutOptions(page=16))
    whole = pool_bytes(model)
    got = generate(model, prompts_of(), sampling=GREEDY, group=4, options=RolloutOptions(page=16, kv_bytes=whole // 8))
    assert rollout_engine(model).state.limits.rows < 20 and [c.ids for c in got] == [c.ids for c in want]
    with pytest.raises(ValueError, match="more than kv_bytes=1,000"):
        generate(model, prompts_of(), sampling=GREEDY, options=RolloutOptions(kv_bytes=1000))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_long_prompts_keys_can_wait_on_the_host(name):
    model = build(name, torch.float32, lora=True).eval()
    options = RolloutOptions(rows=3, page=16, prompt_keys="host")
    got = generate(model, prompts_of(), sampling=GREEDY, group=2, options=options)
    assert any(k is not None for k in rollout_engine(model).state.pool.host.k)
    assert [c.ids for c in got] == [ids for p in prompts_of() for ids in [stock_greedy(model, p)] * 2]


def test_prompts_go_to_the_host_when_one_would_not_fit():
    model = build("qwen3", torch.float32, lora=False).eval()
    prompts = prompts_of((400,))
    want = generate(model, prompts, sampling=GREEDY, options=RolloutOptions(page=16))
    room = pool_bytes(model)
    got = generate(model, prompts, sampling=GREEDY, options=RolloutOptions(page=16, kv_bytes=int(room * 0.7)))
    assert rollout_engine(model).state.limits.host_prompts and got[0].ids == want[0].ids


def test_cancelling_by_callback():
    model = build("qwen3", torch.float32, lora=False).eval()
    seen = []

    def watch(number, ids):
        seen.append((number, len(ids)))
        return not (number == 1 and len(ids) == 3)

    out = generate(
        model, prompts_of(), sampling=SamplingParams(max_new_tokens=9, stop_ids=()), options=SMALL, on_token=watch
    )
    assert out[1].finish_reason == "cancelled" and len(out[1].ids) == 3
    assert [c.finish_reason for i, c in enumerate(out) if i != 1] == ["length"] * 4
    assert sorted(seen) == sorted((i, n) for i in range(5) for n in range(1, 10 if i != 1 else 4))


def test_an_interrupt_leaves_an_engine_that_works():
    model = build("qwen3", torch.float32, lora=False).eval()

    def interrupt(number, ids):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, prompts_of(), sampling=GREEDY, options=SMALL, on_token=interrupt)
    got = generate(model, prompts_of(), sampling=GREEDY)
    assert [c.ids for c in got] == [stock_greedy(model, p) for p in prompts_of()]


@pytest.mark.parametrize("name", HYBRID)
def test_models_with_linear_attention_are_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=r"linear-attention layers.*rollout='transformers'"):
        generate(build(name, torch.float32, lora=False), prompts_of())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[5], [97]]}, "prompt 1 holds token id 97; the model's vocabulary has 97"),
        ({"prompts": "text"}, "prompts is one string"),
        ({"prompts": [[1.5]]}, r"prompt 0 is \[1.5\]: give token ids, whole numbers"),
        ({"prompts": [["a"]]}, r"prompt 0 is \['a'\]: give token ids"),
        ({"prompts": [[5], None]}, "prompt 1 is None: give token ids"),
        ({"sampling": SamplingParams(stop_ids=(7, 97))}, r"stop_ids=\(7, 97\): .* has 97, so 97 never comes"),
        ({"prompts": ["text"]}, "prompt 0 is a text; pass tokenizer="),
        ({"group": 0}, "group=0"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"sampling": [GREEDY] * 2}, "sampling has 2 entries for 1 prompts"),
        ({"sampling": SamplingParams(max_new_tokens=600)}, "max_new_tokens=600 it goes beyond the 512 positions"),
        ({"sampling": SamplingParams(max_new_tokens=9, stop=("x",))}, "stop strings need the tokenizer"),
        ({"sampling": SamplingParams(max_new_tokens=9, regex="x")}, "need the tokenizer"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    model = build("qwen3", torch.float32, lora=False)
    with pytest.raises(ValueError, match=message):
        generate(model, **({"prompts": [[5, 6]], "sampling": GREEDY} | arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page": 24}, "page=24.*power of two"),
        ({"rows": 0}, "rows=0"),
        ({"fused": 1}, "fused=1"),
        ({"prompt_keys": "disk"}, "'auto', 'device' or 'host'"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        RolloutOptions(**changes)


def test_a_hook_added_after_a_rollout_is_heeded():
    """The hand-written step would skip it."""
    model = build("qwen3", torch.float32, lora=True)
    sampling = SamplingParams(max_new_tokens=6, stop_ids=[], temperature=0)
    before = generate(model, [[5, 6, 7, 8]], sampling=sampling)[0]
    mlp = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
    mlp.register_forward_hook(lambda module, args, out: out * 2)
    after = generate(model, [[5, 6, 7, 8]], sampling=sampling)[0]
    fresh = build("qwen3", torch.float32, lora=True)
    mlp = next(module for name, module in fresh.named_modules() if name.endswith("layers.1.mlp"))
    mlp.register_forward_hook(lambda module, args, out: out * 2)
    expected = generate(fresh, [[5, 6, 7, 8]], sampling=sampling)[0]
    assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert before.logprobs != pytest.approx(expected.logprobs, abs=1e-3)


def test_flat_ids_are_refused():
    with pytest.raises(ValueError, match="each a list of ids"):
        generate(build("qwen3", torch.float32, lora=True), [5, 6, 7])
