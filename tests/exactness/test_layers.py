"""Hand-written layers against the module itself, and every way of keeping things between forward and backward."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from longreach.context import fused
from longreach.context.fused import FAMILIES, FusedLayer
from longreach.context.install import enable, engine_of
from longreach.context.logprob import token_logprobs
from longreach.context.tree import TokenTree

from .models import build, gradients, true_fp64, worst
from .test_architectures import TREES, group, ids, loss_of

F32, F64 = torch.float32, torch.float64
FUSED = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def grads_of(model, tree, *, fuse=True, **options):
    enable(model, parity_check=False, **options)
    engine = engine_of(model)
    engine.options = dataclasses.replace(engine.options, fuse=fuse)
    loss = loss_of(token_logprobs(model, tree), next(model.parameters()).dtype)
    loss.backward()
    return float(loss.detach()), gradients(model)


def layers_of(model):
    return engine_of(model).layers


@pytest.mark.parametrize("name", FUSED)
def test_known_families_are_fused(name):
    model = build(name, torch.float32, lora=True)
    enable(model, parity_check=False)
    assert all(FusedLayer.of(layer, torch.float32) is not None for layer in layers_of(model))
    assert type(layers_of(model)[0]).__name__ in FAMILIES


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_equals_the_module(name, lora, monkeypatch):
    """With windows, norms trained, groups and K,V-only chunks; and the hand-written form really ran."""
    calls = []
    forward = FusedLayer.forward
    monkeypatch.setattr(FusedLayer, "forward", lambda self, *a: calls.append(1) or forward(self, *a))
    tree, _ = TREES["deep"]()
    with true_fp64():
        ours = grads_of(build(name, F64, lora=lora), tree, chunk=7)
        assert calls
        count = len(calls)
        theirs = grads_of(build(name, F64, lora=lora), tree, chunk=7, fuse=False)
        assert len(calls) == count
    assert abs(ours[0] - theirs[0]) < 1e-12 * abs(theirs[0])
    assert worst(theirs[1], ours[1])[0] < 1e-11


def test_what_a_fused_layer_does_not_know_runs_on_the_module():
    from peft import LoraConfig, get_peft_model

    def fused_first(model):
        enable(model, parity_check=False)
        return FusedLayer.of(layers_of(model)[0], torch.float32)

    dropout = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
    assert fused_first(get_peft_model(build("qwen3", torch.float32, lora=False), dropout).train()) is None
    dora = LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])
    assert fused_first(get_peft_model(build("qwen3", torch.float32, lora=False), dora)) is None
    hooked = build("qwen3", torch.float32, lora=False)
    hooked.model.layers[0].mlp.register_forward_hook(lambda *a: None)
    assert fused_first(hooked) is None


def test_the_adapter_switched_off_is_the_base_model():
    tree, _ = group()
    model = build("qwen3", F64, lora=True)
    with true_fp64(), torch.no_grad():
        enable(model, chunk=7, parity_check=False)
        with_adapter = torch.cat(token_logprobs(model, tree))
        with model.disable_adapter():
            without = torch.cat(token_logprobs(model, tree))
            engine_of(model).options = dataclasses.replace(engine_of(model).options, fuse=False)
            torch.testing.assert_close(without, torch.cat(token_logprobs(model, tree)))
    assert float((with_adapter - without).abs().max()) > 1e-3


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "module"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_next", "gpt_oss"])
def test_keeping_on_the_host_and_saving_attention_change_nothing(name, fuse):
    """On the host: not a bit. Saved attention: rounding only, since keys are rebuilt by a product of another width."""
    tree, _ = group()
    plain = grads_of(
        build(name, torch.float32, lora=True), tree, chunk=7, offload="none", save_attention=False, fuse=fuse
    )
    for offload in ("none", "host"):
        for save in (False, True):
            model = build(name, torch.float32, lora=True)
            loss, grads = grads_of(model, tree, chunk=7, offload=offload, save_attention=save, fuse=fuse)
            assert loss == plain[0]
            assert worst(plain[1], grads)[0] <= (2e-6 if save and fuse else 0.0), (offload, save)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma2", "qwen3_next", "gpt_oss", "mixtral"])
@pytest.mark.parametrize(
    ("tree_name", "fuse"),
    [
        pytest.param("group", True, id="group-fused"),
        pytest.param("deep", False, id="deep-module"),
        pytest.param("deep", True, id="deep-fused", marks=pytest.mark.slow),
        pytest.param("group", False, id="group-module", marks=pytest.mark.slow),
    ],
)
def test_streaming_from_the_host_changes_no_bit(name, tree_name, fuse):
    """The hidden row, keys, values and all gradients on the host; inputs of few layers kept. Windows, states, experts too."""
    tree, _ = TREES[tree_name]()
    plain = grads_of(build(name, F32, lora=True), tree, chunk=7, offload="none", save_attention=False, fuse=fuse)
    for offload, every, save in (
        ("rows", 1, True),
        ("keys", 1, False),
        ("keys", 3, False),
        ("none", 2, False),
        ("host", 4, True),
    ):
        model = build(name, F32, lora=True)
        how = {"chunk": 7, "offload": offload, "keep_every": every, "fuse": fuse}
        loss, grads = grads_of(model, tree, save_attention=save, **how)
        assert loss == plain[0]
        assert worst(plain[1], grads)[0] <= (2e-6 if save and fuse else 0.0), (offload, every)
        assert grads.keys() == plain[1].keys()
        with torch.no_grad():
            assert loss_of(token_logprobs(model, tree), F32) == loss


@pytest.mark.parametrize("name", ["llama", "granite", "gpt_oss"])
def test_streaming_with_trained_embeddings(name):
    """All parameters: the embedding's output and its gradient are then a tensor of the first layer."""
    tree, _ = TREES["packing"]()
    plain = grads_of(build(name, F32, lora=False), tree, chunk=7, offload="none", save_attention=False)
    for offload, every in (("rows", 3), ("keys", 1)):
        grads = grads_of(
            build(name, F32, lora=False), tree, chunk=7, offload=offload, keep_every=every, save_attention=False
        )
        assert worst(plain[1], grads[1])[0] == 0.0, offload


@pytest.mark.parametrize("offload", ["rows", "keys"])
def test_a_hook_on_the_embedding_sees_whole_rows_once(offload):
    """One that adds noise would add other noise to a row that is computed again."""
    tree, _ = TREES["packing"]()

    def run(offload):
        model = build("qwen3", F32, lora=True)
        draw = torch.Generator().manual_seed(1)
        model.get_input_embeddings().register_forward_hook(
            lambda m, x, out: out + torch.rand(out.shape, generator=draw)
        )
        return grads_of(model, tree, chunk=7, offload=offload, save_attention=False)

    plain, streamed = run("none"), run(offload)
    assert streamed[0] == plain[0] and worst(plain[1], streamed[1])[0] == 0.0


def test_streamed_keys_leave_no_trace_of_the_layer_before():
    """Sums of another layer lie in the same host memory; a window touches a part of them only."""
    tree = TokenTree.from_sequences([ids(60, 1)])
    plain = grads_of(build("gemma3", F32, lora=True), tree, chunk=5, offload="none")
    assert worst(plain[1], grads_of(build("gemma3", F32, lora=True), tree, chunk=5, offload="keys")[1])[0] == 0.0


def test_saved_attention_is_not_computed_again(monkeypatch):
    tree, _ = group()
    counts = {}
    for save in (False, True):
        model = build("qwen3", torch.float32, lora=True)
        seen = []
        forward = fused.attention_forward

        def counted(q, k, v, spec, *rest, forward=forward, seen=seen):
            seen.append(spec.saved is None)
            return forward(q, k, v, spec, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(fused, "attention_forward", counted)
            grads_of(model, tree, chunk=7, save_attention=save)
        counts[save] = sum(seen)
    assert counts[True] * 2 == counts[False]


def test_host_memory_is_used_again_by_the_next_step():
    model = build("qwen3", torch.float32, lora=True)
    enable(model, chunk=7, offload="host", parity_check=False)
    pool = engine_of(model).pool
    addresses = []
    for _ in range(3):
        loss_of(token_logprobs(model, group()[0]), torch.float32).backward()
        assert len(pool.free) == 1
        addresses.append(pool.free[0].data_ptr())
    assert len(set(addresses)) == 1


@pytest.mark.parametrize(
    "options", [{"offload": "host"}, {"offload": "keys"}, {"offload": "host", "keep_every": 2}], ids=str
)
def test_a_loss_that_is_kept_keeps_no_host_memory(options):
    """A loop holds its last loss while the next forward runs."""
    model = build("qwen3", torch.float32, lora=True)
    enable(model, chunk=7, parity_check=False, **options)
    pool, made, losses, found = engine_of(model).pool, [], [], []
    for _ in range(3):
        model.zero_grad()
        losses.append(loss_of(token_logprobs(model, group()[0]), torch.float32))
        losses[-1].backward()
        made.append({slab.data_ptr() for slab in pool.free})
        found.append(gradients(model))
    assert made[0] and made[0] == made[1] == made[2]
    assert worst(found[0], found[2])[0] == 0.0


def test_two_graphs_alive_at_once_do_not_share_what_is_kept():
    trees = [TokenTree.from_sequences([ids(30, s)]) for s in (1, 2)]
    model = build("qwen3", torch.float32, lora=True)
    enable(model, chunk=7, offload="host", parity_check=False)
    losses = [loss_of(token_logprobs(model, t), torch.float32) for t in trees]
    (losses[0] + losses[1]).backward()
    together = gradients(model)
    model.zero_grad()
    for t in trees:
        loss_of(token_logprobs(model, t), torch.float32).backward()
    assert worst(gradients(model), together)[0] < 1e-6


def test_accumulated_micro_batches_equal_one_backward():
    """Half-precision sums: chunks add up in fp32, so many chunks are as near to fp32 as one."""
    tree, _ = TREES["one"]()
    exact = grads_of(build("llama", torch.float32, lora=False), tree, chunk=1000)[1]
    errors = {}
    for chunk in (1000, 3):
        half = grads_of(build("llama", torch.bfloat16, lora=False), tree, chunk=chunk)[1]
        errors[chunk] = sum(float((half[n].float() - exact[n]).square().sum()) for n in exact) ** 0.5
    assert errors[3] < 1.5 * errors[1000]
