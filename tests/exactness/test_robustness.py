"""What users do beyond the plain step: parts trained, branches left out, work between forward and backward, odd trees."""

from __future__ import annotations

import pytest
import torch

from longreach.context.install import enable, engine_of
from longreach.context.logprob import token_logprobs
from longreach.context.tree import IGNORE, Segment, TokenTree

from .models import build, gradients, true_fp64, worst
from .test_architectures import TREES, group, ids, loss_of, stock

F64 = torch.float64

PARTS = {
    "embeddings": lambda n: "embed" in n,
    "head": lambda n: "lm_head" in n,
    "norms": lambda n: "norm" in n,
    "one layer": lambda n: "layers.2." in n,
    "keys of one layer": lambda n: "layers.1.self_attn.k_proj" in n,
    "first and last layer": lambda n: "layers.0." in n or "layers.3." in n,
}


def enabled(name="qwen3", *, lora=True, **options):
    model = build(name, F64, lora=lora)
    enable(model, parity_check=False, **{"chunk": 7, **options})
    return model


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_a_part_of_the_parameters(name, part):
    tree, rows = TREES["deep"]()
    with true_fp64():
        reference, model = build(name, F64, lora=False), enabled(name, lora=False)
        for m in (reference, model):
            for n, p in m.named_parameters():
                p.requires_grad_(PARTS[part](n))
        loss_of(stock(reference, rows, F64), F64).backward()
        loss_of(token_logprobs(model, tree), F64).backward()
        assert set(gradients(model)) == set(gradients(reference))
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


@pytest.mark.parametrize(
    "options",
    [dict(modules_to_save=["lm_head", "embed_tokens", "q_norm", "norm"]), dict(use_dora=True), dict(bias="all"),
     dict(trainable_token_indices=[5, 6]), dict(target_modules=["q_proj", "lm_head", "embed_tokens"])],
    ids=lambda o: next(iter(o)),
)  # fmt: skip
def test_adapters_of_other_kinds(options):
    from peft import LoraConfig, get_peft_model

    tree, rows = group()
    with true_fp64():
        grads = []
        for ours in (False, True):
            config = LoraConfig(**{"r": 2, "target_modules": ["q_proj", "down_proj"], **options})
            model = get_peft_model(build("qwen3", F64, lora=False), config).to(F64)
            generator = torch.Generator().manual_seed(4)
            for p in model.parameters():
                if p.requires_grad:
                    p.data.add_(torch.randn(p.shape, dtype=F64, generator=generator) * 0.1)
            if ours:
                enable(model, chunk=7, parity_check=False)
            loss_of(token_logprobs(model, tree) if ours else stock(model, rows, F64), F64).backward()
            grads.append(gradients(model))
        assert set(grads[0]) == set(grads[1]) and worst(*grads)[0] < 1e-11


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_loss_of_some_branches(name):
    tree, rows = group()
    with true_fp64():
        reference, model = build(name, F64, lora=True), enabled(name)
        stock(reference, rows, F64)[1].sum().backward()
        token_logprobs(model, tree)[1].sum().backward()
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


def test_labels_only_in_the_root():
    root, child = ids(15, 1), ids(5, 2)
    segments = [Segment(root, torch.cat([root[1:], torch.tensor([IGNORE])])), Segment(child, child * 0 + IGNORE, 0)]
    with true_fp64():
        reference, model = build("qwen3", F64, lora=True), enabled()
        loss_of(stock(reference, [(root, 1)], F64), F64).backward()
        loss_of(token_logprobs(model, TokenTree(segments)), F64).backward()
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_sequence_as_a_deep_chain_of_segments(name):
    parts = [ids(1 + i % 3, i) for i in range(30)]
    row = torch.cat(parts)
    labels = torch.cat([row[1:], torch.tensor([IGNORE])]).split([len(p) for p in parts])
    tree = TokenTree([Segment(p, label, i - 1) for i, (p, label) in enumerate(zip(parts, labels))])
    with true_fp64():
        reference, model = build(name, F64, lora=True), enabled(name)
        loss_of(stock(reference, [(row, 1)], F64), F64).backward()
        loss_of(token_logprobs(model, tree), F64).backward()
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


def test_only_empty_completions_have_a_zero_gradient():
    model = enabled()
    logprobs = token_logprobs(model, TokenTree.from_groups([(ids(9, 1), [[], []])]))
    assert [len(x) for x in logprobs] == [0, 0]
    torch.cat(logprobs).sum().backward()
    assert gradients(model) and all(float(g.abs().max()) == 0 for g in gradients(model).values())


@pytest.mark.parametrize("offload", ["none", "host"])
def test_scoring_and_sampling_between_forward_and_backward(offload):
    tree, rows = group()
    with true_fp64():
        reference, model = build("qwen3", F64, lora=True), enabled(offload=offload)
        loss_of(stock(reference, rows, F64), F64).backward()
        loss = loss_of(token_logprobs(model, tree), F64)
        with torch.inference_mode(), model.disable_adapter():
            token_logprobs(model, TREES["deep"]()[0])
        with torch.no_grad():
            model(input_ids=ids(5, 2)[None])
            model.generate(input_ids=ids(5, 1)[None], max_new_tokens=3, pad_token_id=0)
        loss.backward()
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_the_users_own(reentrant):
    tree, rows = group()
    with true_fp64():
        reference, model = build("qwen3", F64, lora=True), build("qwen3", F64, lora=True)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        enable(model, chunk=7, parity_check=False)
        loss_of(stock(reference, rows, F64), F64).backward()
        loss_of(token_logprobs(model, tree), F64).backward()
        assert worst(gradients(reference), gradients(model))[0] < 1e-11
        assert model.is_gradient_checkpointing


def test_after_an_error_in_the_forward_the_model_is_as_it_was(monkeypatch):
    monkeypatch.setattr("longreach.context.logprob.check_vocabulary", lambda tree, size: None)
    x = ids(30, 1)[None]
    with true_fp64():
        reference, model = build("qwen3", F64, lora=True), enabled()
        engine = engine_of(model)
        with torch.no_grad(), pytest.raises(IndexError):
            token_logprobs(model, TokenTree.from_sequences([[5, 9999, 3]]))
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[5, 9999]]))
        assert engine.run is None and engine.pending is None and torch.is_grad_enabled()
        assert engine.config._attn_implementation == "eager" and not engine.layers[0].gradient_checkpointing
        torch.testing.assert_close(model(input_ids=x).logits, reference(input_ids=x, use_cache=False).logits)


def test_a_row_of_padding_only_and_rows_that_are_not_contiguous():
    x, mask = ids(40, 1).view(20, 2).t(), torch.ones(2, 20, dtype=torch.long)
    mask[0] = 0
    with true_fp64():
        reference, model = build("qwen3", F64, lora=True), enabled()
        expected = reference(input_ids=x, attention_mask=mask, use_cache=False).logits
        got = model(input_ids=x, attention_mask=mask).logits
        torch.testing.assert_close(got[1], expected[1])


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(do_sample=True, top_k=5), dict(use_cache=False)], ids=str)
def test_ways_of_generating(options):
    prompt = torch.stack([ids(12, 4), ids(12, 5)])
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    out = []
    for ours in (False, True):
        model = build("qwen3", torch.float32, lora=True).eval()
        if ours:
            enable(model, chunk=7, parity_check=False)
        torch.manual_seed(0)
        out.append(model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=7, pad_token_id=0, **options))
    assert torch.equal(*out)


@pytest.mark.parametrize("offload", ["none", "keys"])
@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("top", [1, 3])
def test_few_kept_inputs_above_frozen_layers(top, every, offload):
    """Layers without a gradient below them keep nothing; the first with one keeps its input."""
    tree, rows = group()
    with true_fp64():
        reference, model = build("qwen3", F64, lora=False), build("qwen3", F64, lora=False)
        for m in (reference, model):
            for name, p in m.named_parameters():
                p.requires_grad_(any(f"layers.{i}." in name for i in range(top, 4)))
        loss_of(stock(reference, rows, F64), F64).backward()
        enable(model, parity_check=False, chunk=7, offload=offload, keep_every=every)
        loss_of(token_logprobs(model, tree), F64).backward()
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])  # written by hand, and through the module
def test_other_adapters_in_the_backward_are_refused(name):
    model = build(name, torch.float32, lora=True)
    enable(model, parity_check=False, chunk=7)
    loss = loss_of(token_logprobs(model, group()[0]), torch.float32)
    with model.disable_adapter(), pytest.raises(RuntimeError, match="between the forward and its backward"):
        loss.backward()


def test_hooks_before_a_modules_backward_are_heeded():
    tree, rows = group()
    with true_fp64():
        reference, model = build("qwen3", F64, lora=True), build("qwen3", F64, lora=True)
        enable(model, parity_check=False, chunk=1000)
        for m in (reference, model):
            mlp = next(module for name, module in m.named_modules() if name.endswith("layers.1.mlp"))
            mlp.register_full_backward_pre_hook(lambda module, grad: (grad[0] * 3,))
        loss_of(stock(reference, rows, F64), F64).backward()
        loss_of(token_logprobs(model, tree), F64).backward()
        # The last layer's hook sees labelled rows only; layer 1 is no last layer.
        assert worst(gradients(reference), gradients(model))[0] < 1e-11
