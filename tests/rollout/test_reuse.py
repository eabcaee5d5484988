"""The prefill of a rollout in the training step: the same gradients, and never with other weights, adapters or dtypes."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import longreach
from longreach.context.install import engine_of
from longreach.context.logprob import score
from longreach.context.reuse import Prefill, ReuseError
from longreach.quant import MXFP4, NF4
from longreach.quant.experts import FourBitExperts
from longreach.quant.linear import FourBitLinear
from longreach.rollout import RolloutOptions, SamplingParams, rollout_engine
from longreach.rollout.completion import requests_of

from ..exactness.models import build, gradients, true_fp64, worst

LENGTHS = (37, 2, 70, 20, 48)
OPTIONS = RolloutOptions(rows=7, page=16)
SAMPLING = SamplingParams(max_new_tokens=9)
CHUNK = 16


def prompts_of(lengths=LENGTHS):
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(4, 90, (n,), generator=draw).tolist() for n in lengths]


def rollout(model, prompts, *, on_host=False, save_attention=False, required=True, group=3):
    """A prefill and the groups drawn with it."""
    kept = Prefill(on_host=on_host, save_attention=save_attention, required=required)
    requests = requests_of(model, prompts, SAMPLING, group, 1, None)
    rollout_engine(model, OPTIONS).run(requests, keep=kept)
    ids = [r.ids for r in requests]
    return kept, [(p, ids[i * group : i * group + group]) for i, p in enumerate(prompts)]


def trained(model, groups, prefill):
    """(gradients, log-probs, tokens reused) of a step."""
    model.zero_grad(set_to_none=True)
    scores = score(model, longreach.TokenTree.from_groups(groups), prefill=prefill)
    logprobs = torch.cat(scores.logprobs)
    weight = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    (logprobs * weight).sum().backward()
    return gradients(model), logprobs.detach(), scores.reused


def four_bits(model, form):
    for layer in model.get_base_model().model.layers:
        for module in list(layer.modules()):
            if isinstance(getattr(module, "base_layer", None), nn.Linear):
                module.base_layer = FourBitLinear.of(module.base_layer, form)
            if hasattr(module, "experts") and not isinstance(module.experts, FourBitExperts):
                module.experts = FourBitExperts.of(module.experts, MXFP4())


WIDE = dict(hidden_size=64, intermediate_size=64, head_dim=16)
CASES = [
    ("llama", True, None),
    ("qwen3", False, None),
    ("mistral", True, None),
    ("gemma3", True, None),
    ("gpt_oss", True, None),
    ("qwen3_moe", True, None),
    ("qwen3", True, NF4()),
    ("gpt_oss", True, NF4()),
]
POLICIES = [("none", False), ("none", True), ("host", True), ("rows", False), ("keys", True)]


EVERY = [(*case, *POLICIES[i % 4 :: 3][0]) for i, case in enumerate(CASES)]
EVERY += [(*CASES[i], *policy) for i in (1, 4) for policy in POLICIES if (*CASES[i], *policy) not in EVERY]


@pytest.mark.parametrize(("name", "lora", "form", "offload", "save"), EVERY)
def test_gradients_are_those_of_a_step_without_it(name, lora, form, offload, save):
    model = build(name, torch.float64, lora=lora, **(WIDE if form else {}))
    if form:
        four_bits(model, form)
    with true_fp64():
        longreach.enable(model, chunk=CHUNK, offload=offload, save_attention=save, parity_check=False)
        kept, groups = rollout(model, prompts_of(), on_host=offload != "none", save_attention=save)
        want, logprobs, none = trained(model, groups, None)
        got, again, reused = trained(model, groups, kept)
    assert none == 0 and reused == sum(LENGTHS) - len(LENGTHS)
    assert float((logprobs - again).abs().max()) < 1e-11
    assert want.keys() == got.keys()
    assert worst(want, got)[0] < 1e-11, worst(want, got)


@pytest.mark.parametrize("where", [False, True], ids=["device", "host"])
def test_equal_chunks_give_equal_bits(where):
    model = build("qwen3", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, offload="none", save_attention=True, parity_check=False)
    kept, groups = rollout(model, prompts_of((49,)), on_host=where, save_attention=True)
    want, logprobs, _ = trained(model, groups, None)
    got, again, reused = trained(model, groups, kept)
    assert reused == 48
    assert torch.equal(logprobs, again)
    assert all(torch.equal(want[n], got[n]) for n in want)


def test_micro_batches_each_find_their_prompts():
    """Of prompts computed together; in another order, and with one that the rollout has not seen."""
    with true_fp64():
        model = build("qwen3", torch.float64, lora=True)
        longreach.enable(model, chunk=CHUNK, offload="none", save_attention=True, parity_check=False)
        kept, groups = rollout(model, prompts_of(), save_attention=True)
        other = ([5] * 13, [[7, 8, 9]])
        for batch, tokens in (
            ([groups[4]], 47),
            ([groups[2], groups[0]], 69 + 36),
            ([groups[3], other], 16),  # whole chunks only
            ([other, groups[1]], 0),
        ):
            want, _, _ = trained(model, batch, None)
            got, _, reused = trained(model, batch, kept)
            assert reused == tokens
            assert worst(want, got)[0] < 1e-11


def reasons(caplog):
    return [r.getMessage() for r in caplog.records if "prefill is not reused" in r.getMessage()]


def test_other_weights_are_never_used(caplog):
    model = build("qwen3", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, groups = rollout(model, prompts_of(), required=False)
    assert trained(model, groups, kept)[2] > 0
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    want = trained(model, groups, None)
    with caplog.at_level(logging.WARNING):
        got = trained(model, groups, kept)
        trained(model, groups, kept)
    assert got[2] == 0 and torch.equal(want[1], got[1])
    assert all(torch.equal(want[0][n], got[0][n]) for n in want[0])
    assert len(reasons(caplog)) == 1 and "the weights have changed" in reasons(caplog)[0]
    kept.required = True
    with pytest.raises(ReuseError, match="the weights have changed"):
        trained(model, groups, kept)


@pytest.mark.parametrize("required", [True, False])
def test_prompts_that_it_does_not_hold_are_said_where_it_is_required(required, caplog):
    model = build("llama", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, _ = rollout(model, prompts_of(), required=required)
    other = ([5] * 30, [[7, 8, 9]])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert trained(model, [other], kept)[2] == 0
    assert ["not those that the rollout has computed" in text for text in reasons(caplog)] == [True] * required


def test_a_rollout_on_new_weights_forgets_the_old_ones():
    model = build("qwen3", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, groups = rollout(model, prompts_of())
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).mul_(2)
    requests = requests_of(model, prompts_of((30,)), SAMPLING, 1, 1, None)
    rollout_engine(model, OPTIONS).run(requests, keep=kept)
    assert [batch.layout.tokens for batch, _ in kept.places.values()] == [29]
    assert trained(model, groups, kept)[2] == 0


def dropout(model):
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(0.1).train()


def another_adapter(model):
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")


def hook(model):
    model.get_base_model().model.layers[2].mlp.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("experts", [False, True])
def test_adapters_of_another_strength(experts):
    from peft import LoraConfig, get_peft_model

    name = "mlp.experts" if experts else "v_proj"
    model = get_peft_model(
        build("gpt_oss", torch.float32, lora=False),
        LoraConfig(
            r=2, target_modules=["v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        ),
    ).train()
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, groups = rollout(model, prompts_of())
    next(m for n, m in model.named_modules() if n.endswith(name) and hasattr(m, "scaling")).scaling["default"] *= 2
    with pytest.raises(ReuseError, match="layer 0 has other adapters"):
        trained(model, groups, kept)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(dropout, "dropout or hooks"), (another_adapter, "changed|other adapters"), (hook, "dropout or hooks")],
)
def test_layers_that_compute_otherwise_than_in_the_rollout(change, reason):
    model = build("llama", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, groups = rollout(model, prompts_of())
    change(model)
    with pytest.raises(ReuseError, match=reason):
        trained(model, groups, kept)


def test_the_adapter_switched_off_scores_without_it():
    """As for reference log-probs: no gradients, and no prefill either."""
    model = build("llama", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, groups = rollout(model, prompts_of())
    tree = longreach.TokenTree.from_groups(groups)
    with torch.no_grad():
        assert score(model, tree, prefill=kept).reused == 0
    with model.disable_adapter(), pytest.raises(ReuseError, match="other adapters"):
        score(model, tree, prefill=kept)


@pytest.mark.parametrize(("name", "lora"), [("olmo2", True), ("gpt_oss", False)])
def test_layers_without_a_hand_written_form(name, lora):
    model = build(name, torch.float32, lora=lora)
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, groups = rollout(model, prompts_of())
    with pytest.raises(ReuseError, match=r"layer 0 .*DecoderLayer. is not run by a hand-written form"):
        trained(model, groups, kept)


def test_another_dtype():
    model = build("llama", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, groups = rollout(model, prompts_of())
    with pytest.raises(ReuseError, match="another dtype"), torch.autocast("cpu", dtype=torch.bfloat16):
        trained(model, groups, kept)


def test_router_losses_and_thinned_inputs_need_the_whole_forward():
    model = build("qwen3_moe", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, parity_check=False)
    kept, groups = rollout(model, prompts_of())
    tree = longreach.TokenTree.from_groups(groups)
    with pytest.raises(ReuseError, match="router loss"):
        score(model, tree, router_loss=True, prefill=kept)
    longreach.enable(model, chunk=CHUNK, keep_every=2, parity_check=False)
    with pytest.raises(ReuseError, match="keep_every"):
        score(model, tree, prefill=kept)


@pytest.mark.parametrize("where", [False, True], ids=["device", "host"])
def test_nothing_stays_behind(where):
    model = build("llama", torch.float32, lora=True)
    longreach.enable(model, chunk=CHUNK, offload="host" if where else "none", parity_check=False)
    kept, groups = rollout(model, prompts_of(), on_host=where)
    trained(model, groups, kept)
    batches = [weakref.ref(batch) for batch, _ in kept.places.values()]
    slabs = sum(map(len, engine_of(model).pool.free))
    del kept
    gc.collect()
    assert all(batch() is None for batch in batches)
    assert (sum(map(len, engine_of(model).pool.free)) > slabs) is where
    assert engine_of(model).run is None
