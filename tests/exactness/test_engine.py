"""The engine beyond plain trees: padded rows, packing by positions, scoring, dropout, router losses, entropy, parity."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import weakref

import pytest
import torch

from longreach.context.install import enable, engine_of
from longreach.context.logprob import score, token_logprobs
from longreach.context.parity import ParityError, check_parity
from longreach.context.support import REFUSED, UnsupportedModelError, check_supported
from longreach.context.tree import TokenTree

from .models import CONFIGS, build, gradients, true_fp64, worst
from .test_architectures import group, ids, loss_of, one, stock

F64 = torch.float64


def padded(side: str):
    rows = [ids(n, 60 + n) for n in (19, 33, 2)]
    batch, mask = torch.zeros(3, 33, dtype=torch.long), torch.zeros(3, 33, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(33 - len(row), 33)
        batch[i, place], mask[i, place] = row, 1
    return batch, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_5"])
def test_a_users_plain_padded_call(name, side):
    batch, mask = padded(side)
    # Not the first token of a row: with left padding, stock would predict it from a padding token.
    labels = batch.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with true_fp64():
        reference, model = build(name, F64, lora=True), build(name, F64, lora=True)
        enable(model, chunk=7, parity_check=False)
        kwargs = {"input_ids": batch, "attention_mask": mask, "position_ids": positions, "labels": labels}
        expected, got = reference(**kwargs, use_cache=False), model(**kwargs)
        expected.loss.backward(), got.loss.backward()
        assert abs(float(expected.loss - got.loss)) < 1e-12
        assert worst(gradients(reference), gradients(model))[0] < 1e-11
        real = mask.bool()
        torch.testing.assert_close(expected.logits[real], got.logits[real], rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**kwargs).logits[real], got.logits[real].detach())


def test_packing_by_restarting_positions():
    lengths = (13, 1, 20)
    row = torch.cat([ids(n, n) for n in lengths])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with true_fp64():
        reference, model = build("mistral", F64, lora=False), build("mistral", F64, lora=False)
        enable(model, chunk=6, parity_check=False)
        out = model(input_ids=row, position_ids=positions).logits[0]
        at = 0
        for n in lengths:
            expected = reference(input_ids=row[:, at : at + n], use_cache=False).logits[0]
            torch.testing.assert_close(out[at : at + n], expected, rtol=1e-10, atol=1e-10)
            at += n


def test_generation_is_untouched():
    reference, model = build("qwen3", torch.float32, lora=True).eval(), build("qwen3", torch.float32, lora=True).eval()
    enable(model, chunk=7)
    prompt = ids(12, 4)[None]
    kwargs = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(reference.generate(input_ids=prompt, **kwargs), model.generate(input_ids=prompt, **kwargs))
    assert engine_of(model).run is None and model.config._attn_implementation == "eager"


def finite_difference(model, loss, name, step=1e-5):
    """(gradient, central difference) of the largest entry of a parameter's gradient."""
    p = dict(model.named_parameters())[name]
    at = p.grad.abs().argmax()
    with torch.no_grad():
        p.view(-1)[at] += step
        up = float(loss())
        p.view(-1)[at] -= 2 * step
        down = float(loss())
        p.view(-1)[at] += step
    return float(p.grad.view(-1)[at]), (up - down) / (2 * step)


def test_randomness_outside_dropout_modules_is_replayed():
    """Router jitter, and dropout of an adapter on the head."""
    from peft import LoraConfig, get_peft_model

    tree, _ = group()
    with true_fp64():
        jitter = build("mixtral", F64, lora=False, router_jitter_noise=0.3)
        head = get_peft_model(
            build("qwen3", F64, lora=False), LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "lm_head"])
        ).to(F64)
        for n, p in head.named_parameters():
            if "lora_B" in n:
                torch.nn.init.normal_(p.data, std=0.1)
        for model, name in (
            (jitter, "model.layers.1.self_attn.q_proj.weight"),
            (head, "lm_head.lora_B.default.weight"),
        ):
            full = next(n for n, _ in model.named_parameters() if n.endswith(name))
            enable(model.train(), chunk=7, parity_check=False)

            def loss(model=model):
                torch.manual_seed(5)
                return (
                    loss_of(token_logprobs(model, tree), F64).detach()
                    if not torch.is_grad_enabled()
                    else loss_of(token_logprobs(model, tree), F64)
                )

            loss().backward()
            got, expected = finite_difference(model, loss, full)
            assert got == pytest.approx(expected, rel=1e-5)


def test_prompt_tuning_is_refused_and_a_changed_input_noticed():
    from peft import PromptTuningConfig, get_peft_model

    model = build("qwen3", torch.float32, lora=False)
    enable(model, parity_check=False)
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedModelError, match="PROMPT_TUNING"):
        enable(tuned)
    with pytest.raises(UnsupportedModelError, match="changes its input"):
        token_logprobs(tuned, one()[0])
    assert engine_of(model).run is None


def test_a_mask_with_holes():
    row, mask = ids(20, 1)[None], torch.ones(1, 20, dtype=torch.long)
    mask[0, 5:9] = 0
    with true_fp64():
        reference, model = build("llama", F64, lora=False), build("llama", F64, lora=False)
        enable(model, chunk=7, parity_check=False)
        kwargs = {"input_ids": row, "attention_mask": mask}
        expected, got = reference(**kwargs, use_cache=False).logits, model(**kwargs).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-10, atol=1e-10)
    windowed = build("mistral", torch.float32, lora=False)
    enable(windowed, parity_check=False)
    with pytest.raises(ValueError, match="move the padding to one side"):
        windowed(**kwargs)


def test_an_interrupt_leaves_nothing_switched_on():
    model = build("olmo2", torch.float32, lora=False)
    enable(model, chunk=7, parity_check=False)
    expected = torch.cat(token_logprobs(model, one()[0])).detach()

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[2].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        token_logprobs(model, one()[0])
    hook.remove()
    assert torch.equal(torch.cat(token_logprobs(model, one()[0])).detach(), expected)
    assert model.generate(input_ids=ids(5, 1)[None], max_new_tokens=2, pad_token_id=0).shape[1] > 5
    assert model.config._attn_implementation == "eager" and torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_what_one_backward_only_can_give_is_said(name):
    model = build(name, torch.float32, lora=False)
    enable(model, chunk=7, parity_check=False)
    logprobs = token_logprobs(model, group()[0])
    logprobs[0].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        logprobs[1].sum().backward()
    weight = model.model.layers[0].mlp.down_proj.weight
    (grad,) = torch.autograd.grad(token_logprobs(model, one()[0])[0].sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_models_of_another_form_are_refused():
    import transformers

    small = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)
    with pytest.raises(UnsupportedModelError, match=r"elsewhere than in `\.layers`"):
        enable(transformers.GPT2LMHeadModel(small))
    with pytest.raises(UnsupportedModelError, match="no language-model head"):
        enable(build("llama", torch.float32, lora=False).model)
    model = build("llama", torch.float32, lora=False, output_hidden_states=True)
    enable(model, parity_check=False)
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        model(input_ids=ids(5, 1)[None])


def test_an_enabled_model_is_freed_and_copied_whole():
    model = build("qwen3", torch.float32, lora=False)
    enable(model, chunk=7, offload="host", parity_check=False)
    twin = copy.deepcopy(model)
    assert engine_of(twin) is not engine_of(model) and engine_of(twin).causal is twin
    with torch.no_grad():
        twin.model.layers[0].mlp.down_proj.weight.zero_()
    ours, theirs = (torch.cat(token_logprobs(m, one()[0])) for m in (model, twin))
    assert not torch.equal(ours, theirs)
    ours.sum().backward()
    assert all(p.grad is None for p in twin.parameters())
    gone = weakref.ref(model)
    del model, ours, theirs
    gc.collect()
    assert gone() is None


def test_scoring_equals_training_and_keeps_nothing():
    tree, _ = group()
    model = build("qwen3_next", torch.float32, lora=False)
    enable(model, chunk=7)
    trained = token_logprobs(model, tree)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            scored, entropies = token_logprobs(model, tree, entropy=True)
        assert all(torch.equal(a.detach(), b) for a, b in zip(trained, scored))
        assert not any(t.requires_grad for t in scored + entropies)
    assert torch.is_grad_enabled() and model.training


def test_dropout_is_replayed():
    """Finite differences through LoRA dropout: the backward must see the forward's masks."""
    from peft import LoraConfig, get_peft_model

    tree, _ = group()
    with true_fp64():
        base = build("qwen3", F64, lora=False)
        model = get_peft_model(
            base, LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj", "down_proj"])
        )
        for n, p in model.to(F64).named_parameters():
            if "lora_B" in n:
                torch.nn.init.normal_(p.data, std=0.1)
        enable(model.train(), chunk=7, parity_check=False)

        def loss():
            torch.manual_seed(5)
            return loss_of(token_logprobs(model, tree), F64)

        loss().backward()
        for name, p in model.named_parameters():
            if p.grad is None or "layers.1.self_attn.q_proj.lora_A" not in name:
                continue
            at = p.grad.abs().argmax()
            step = 1e-5
            with torch.no_grad():
                p.view(-1)[at] += step
                up = float(loss())
                p.view(-1)[at] -= 2 * step
                down = float(loss())
                p.view(-1)[at] += step
            assert float(p.grad.view(-1)[at]) == pytest.approx((up - down) / (2 * step), rel=1e-5)
            return
    raise AssertionError("no adapter gradient was found")


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe", "qwen3_next"])
def test_router_loss_of_padded_rows(name):
    batch, mask = padded("right")
    labels = batch.masked_fill(mask == 0, -100)
    kwargs = {"input_ids": batch, "attention_mask": mask, "labels": labels, "output_router_logits": True}
    with true_fp64():
        reference, model = (build(name, F64, lora=False, router_aux_loss_coef=0.5) for _ in range(2))
        enable(model, chunk=7, parity_check=False)
        expected, got = reference(**kwargs, use_cache=False), model(**kwargs)
        expected.loss.backward(), got.loss.backward()
        assert float(got.aux_loss) == pytest.approx(float(expected.aux_loss), rel=1e-11)
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_router_loss_of_a_group_counts_the_prompt_once_per_row(name):
    tree, rows = group()
    longest = max(len(r) for r, _ in rows)
    batch, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, (row, _) in enumerate(rows):
        batch[i, : len(row)], mask[i, : len(row)] = row, 1
    with true_fp64():
        reference, model = build(name, F64, lora=False), build(name, F64, lora=False)
        enable(model, chunk=7, parity_check=False)
        out = reference(input_ids=batch, attention_mask=mask, output_router_logits=True, use_cache=False)
        (out.aux_loss * 0.3 + loss_of(stock(reference, rows, F64), F64)).backward()
        scores = score(model, tree, router_loss=True)
        (scores.router_loss * 0.3 + loss_of(scores.logprobs, F64)).backward()
        assert float(scores.router_loss) == pytest.approx(float(out.aux_loss), rel=1e-11)
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


def test_entropy_and_temperature():
    tree, rows = one()
    row = rows[0][0]
    with true_fp64():
        reference, model = build("gemma2", F64, lora=False), build("gemma2", F64, lora=False)
        enable(model, chunk=7, parity_check=False)
        logp = torch.log_softmax(reference(input_ids=row[None], use_cache=False).logits[0, :-1] / 0.7, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp.gather(-1, row[1:, None]).squeeze(-1)
        (chosen.square().sum() + entropy.square().sum()).backward()
        (logprobs,), (entropies,) = token_logprobs(model, tree, temperature=0.7, entropy=True)
        (logprobs.square().sum() + entropies.square().sum()).backward()
        torch.testing.assert_close(entropies, entropy, rtol=1e-11, atol=1e-11)
        assert worst(gradients(reference), gradients(model))[0] < 1e-11


@pytest.mark.parametrize(
    "name, dtype",
    [
        (name, dtype)
        for name in CONFIGS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        if dtype != torch.float16
        or name not in ("gemma2", "gemma3")  # refused in fp16: tests/context/test_precision.py
    ],
)
def test_parity_holds(name, dtype):
    model = build(name, dtype, lora=False)
    enable(model, parity_check=False)
    check_parity(model, engine_of(model))


@pytest.mark.parametrize("name, where", [("qwen3", "fused"), ("olmo2", "install")])
def test_parity_failure_stops_with_the_difference(monkeypatch, name, where):
    """A wrong attention scale, as a broken kernel would give: in the hand-written layer and in the general path."""
    module = importlib.import_module(f"longreach.context.{where}")
    good = module.AttentionSpec

    def broken(*args, **kwargs):
        spec = good(*args, **kwargs)
        return dataclasses.replace(spec, scale=spec.scale * 1.05)

    monkeypatch.setattr(module, "AttentionSpec", broken)
    with pytest.raises(ParityError, match=rf"parity check failed for '{name}' in float32: .* nats per token"):
        enable(build(name, torch.float32, lora=True))


def test_parity_is_checked_again_when_an_adapter_joins(monkeypatch):
    from peft import LoraConfig, get_peft_model

    from longreach.context import parity

    seen = []
    monkeypatch.setattr(parity, "check_parity", lambda model, engine: seen.append(model))
    model = build("qwen3", torch.float32, lora=False)
    enable(model, parity_check=False)
    enable(model), enable(model)
    assert len(seen) == 1
    enable(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])))
    assert len(seen) == 2


# Dense models: a router near a tie picks another expert in any two bf16 runs, stock's own included.
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral"])
def test_bf16_autocast_is_as_close_to_fp32_as_stock(name):
    tree, rows = group()
    exact = build(name, torch.float32, lora=True, spread=0.03)
    loss_of(stock(exact, rows, torch.float32), torch.float32).backward()
    distance = {}
    for kind in ("stock", "chunked"):
        model = build(name, torch.float32, lora=True, spread=0.03)
        enable(model, chunk=7, parity_check=False)
        with torch.autocast("cpu", torch.bfloat16):
            if kind == "stock":
                with engine_of(model).stock():
                    logprobs = stock(model, rows, torch.float32)
            else:
                logprobs = token_logprobs(model, tree)
        loss_of(logprobs, torch.float32).backward()
        pairs = [(gradients(model)[n], g) for n, g in gradients(exact).items()]
        distance[kind] = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    assert distance["chunked"] <= 2 * distance["stock"], distance


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_by_name(name):
    config = copy.copy(CONFIGS["llama"]())
    config.model_type = name
    with pytest.raises(UnsupportedModelError, match=f"'{name}' can't be trained in exact chunks: .*stock TRL"):
        check_supported(config)


def test_refused_by_structure():
    for field, value, words in (
        ("layer_types", ["chunked_attention"], "chunked_attention"),
        ("use_bidirectional_attention", True, "bidirectional"),
        ("attention_dropout", 0.1, "attention_dropout=0.1"),
    ):
        config = CONFIGS["llama"]()
        setattr(config, field, value)
        with pytest.raises(UnsupportedModelError, match=words):
            check_supported(config)


def test_a_window_only_in_the_mask_is_refused():
    """Attention that never hears of its window would silently see everything."""
    model = build("gemma3", torch.float32, lora=False)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="does not pass `sliding_window`"):
        enable(model)


@pytest.mark.parametrize(
    "options, words",
    [({"chunk": 0}, "chunk=0"), ({"chunk": "big"}, "chunk='big'"), ({"offload": "disk"}, "offload='disk'"),
     ({"save_attention": "yes"}, "save_attention='yes'")],
)  # fmt: skip
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        enable(build("llama", torch.float32, lora=False), **options)


def test_bad_calls():
    model = build("llama", torch.float32, lora=False)
    enable(model, parity_check=False)
    with pytest.raises(ValueError, match="two-dimensional"):
        model(input_ids=ids(5, 1)[None], attention_mask=torch.zeros(1, 1, 5, 5))
    with pytest.raises(ValueError, match="output_attentions=True"):
        model(input_ids=ids(5, 1)[None], output_attentions=True)
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        token_logprobs(model, one()[0], temperature=0.0)
    assert engine_of(model).run is None and not torch.is_inference_mode_enabled()
    token_logprobs(model, TokenTree.from_groups([([5], [[6, 7], [], [8]])]))[0].sum().backward()
