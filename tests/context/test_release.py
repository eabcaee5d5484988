"""Gradients released into the optimizer: the bits of the plain loop, one layer's gradients at a time, clear refusals."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import longreach
from longreach.context import host_states
from longreach.context.tree import TokenTree
from tests.exactness.models import build
from tests.trainers.tiny import tokenizer


def trees(steps):
    draw = torch.Generator().manual_seed(5)

    def ids(n):
        return torch.randint(3, 90, (n,), generator=draw)

    return [TokenTree.from_groups([(ids(20), [ids(9), ids(5)])]) for _ in range(steps)]


def parameters(model):
    """Two groups, as the Trainer makes them."""
    flat = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in flat if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in flat if p.ndim <= 1], "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(parameters(m), lr=1e-2),
    "adamw fused": lambda m: torch.optim.AdamW(parameters(m), lr=1e-2, fused=True),
    "sgd": lambda m: torch.optim.SGD(parameters(m), lr=1e-2, momentum=0.9),
    "adafactor": lambda m: torch.optim.Adafactor(parameters(m), lr=1e-2),
}


def start(kind, dtype, optimizer, states, lora=False, **config):
    model = build(kind, dtype, lora=lora, **config)
    longreach.enable(model, chunk=8, parity_check=False)
    made = OPTIMIZERS[optimizer](model)
    if states is not None:
        made = longreach.release_gradients(model, made, states=states)
    return model, made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))


def run(kind, dtype, optimizer, states=None, resume=None, **config):
    """Parameters after four steps, and each step's gradient norm. `resume`: all goes through a checkpoint after that step."""
    model, made, schedule = start(kind, dtype, optimizer, states, **config)
    norms = []
    for step, tree in enumerate(trees(4)):
        (-torch.cat(longreach.token_logprobs(model, tree)).mean()).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert (states is None) == bool(grads)
        norms.append(torch.nn.utils.get_total_norm(grads) if states is None else None)
        made.step()
        made.zero_grad()
        schedule.step()
        norms[-1] = float(made.grad_norm if states is not None else norms[-1])
        if step == resume:
            saved = copy.deepcopy([model.state_dict(), made.state_dict(), schedule.state_dict()])
            model, made, schedule = start(kind, dtype, optimizer, states, seed=3, **config)
            for part, state in zip((model, made, schedule), saved):
                part.load_state_dict(state)
    return dict(model.named_parameters()), norms


@pytest.fixture(autouse=True)
def every_state_moves(monkeypatch):
    monkeypatch.setattr(host_states, "SMALL", 16)


@pytest.mark.parametrize("states", ["device", "host"])
@pytest.mark.parametrize(
    "kind, dtype, optimizer, tied",
    [
        ("qwen3", torch.float64, "adamw", False),
        ("qwen3", torch.float32, "adamw fused", True),
        ("qwen3", torch.float32, "sgd", False),
        ("qwen3", torch.bfloat16, "adafactor", True),
        ("gpt_oss", torch.float32, "adamw", True),
    ],
)
def test_the_bits_of_the_plain_loop(kind, dtype, optimizer, tied, states):
    plain, norms = run(kind, dtype, optimizer, tie_word_embeddings=tied)
    for resume in (None, 1):
        ours, own = run(kind, dtype, optimizer, states, resume, tie_word_embeddings=tied)
        for name, p in plain.items():
            assert torch.equal(p, ours[name]), (resume, name)
        assert own == pytest.approx(norms, rel=1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_adapters_are_released_too(kind):
    plain, _ = run(kind, torch.float32, "adamw", lora=True)
    ours, _ = run(kind, torch.float32, "adamw", "device", lora=True)
    start_at = dict(build(kind, torch.float32, lora=True).named_parameters())
    assert all(torch.equal(p, ours[name]) for name, p in plain.items())
    assert all(torch.equal(p, start_at[name]) != ("lora" in name) for name, p in ours.items())


def test_a_checkpoint_is_the_plain_optimizers():
    """A run can go on with released gradients or without."""
    model, made, _ = start("qwen3", torch.float32, "adamw", "host")
    plain_model, plain, _ = start("qwen3", torch.float32, "adamw", None)
    first, second = trees(2)

    def step(model, made, tree):
        (-torch.cat(longreach.token_logprobs(model, tree)).mean()).backward()
        made.step()
        made.zero_grad()

    step(model, made, first)
    step(plain_model, plain, first)
    a, b = made.state_dict(), plain.state_dict()
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for number, states in b["state"].items():
        for name, x in states.items():
            assert torch.equal(a["state"][number][name], x), (number, name)
    plain.load_state_dict(copy.deepcopy(a))
    made.load_state_dict(copy.deepcopy(b))
    step(model, made, second)
    step(plain_model, plain, second)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain_model.parameters()))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_layers_gradients_at_a_time(tied):
    model, made, _ = start("qwen3", torch.float32, "sgd", "device", tie_word_embeddings=tied)
    names = {p: name for name, p in model.named_parameters()}
    alive, order = [], []

    def before(optimizer, args, kwargs):
        found = {names[p] for p in names if p.grad is not None}
        alive.append({n.split(".")[2] if ".layers." in n else n for n in found})
        order.append(found)

    made.inner.register_step_pre_hook(before)
    (-torch.cat(longreach.token_logprobs(model, trees(1)[0])).mean()).backward()
    made.step()
    assert all(len(units) == 1 for units in alive), alive
    layers = [next(iter(units)) for units in alive if next(iter(units)).isdigit()]
    assert layers == ["3", "2", "1", "0"]
    # A tied embedding waits for the head's part and its own.
    assert "model.embed_tokens.weight" in alive[-1]
    assert sorted(n for found in order for n in found) == sorted(names.values())


def test_a_second_backward_before_the_step_is_refused():
    model, _made, _ = start("qwen3", torch.float32, "sgd", "device")
    first, second = trees(2)
    (-torch.cat(longreach.token_logprobs(model, first)).mean()).backward()
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer.step\(\).*gradient_accumulation_steps=1"):
        (-torch.cat(longreach.token_logprobs(model, second)).mean()).backward()


def test_frozen_and_unused_parameters():
    """A layer of which a part is frozen or gets no gradient is updated with what it has."""
    results = []
    for states in (None, "device"):
        model = build("qwen3", torch.float32, lora=False)
        extra = nn.Parameter(torch.ones(3))
        model.model.layers[1].register_parameter("unused", extra)
        model.model.layers[2].self_attn.q_proj.weight.requires_grad_(False)
        longreach.enable(model, chunk=8, parity_check=False)
        made = torch.optim.SGD(parameters(model), lr=0.1)
        made = made if states is None else longreach.release_gradients(model, made)
        for tree in trees(3):
            (-torch.cat(longreach.token_logprobs(model, tree)).mean()).backward()
            made.step()
            made.zero_grad()
        results.append(list(model.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(*results))


def test_a_model_in_four_bits_becomes_one_to_train_whole(tmp_path):
    """gpt-oss from MXFP4, by dequantizing to bf16 while loading."""
    small = build("gpt_oss", torch.bfloat16, lora=False, spread=0.05, hidden_size=64, intermediate_size=64, head_dim=16)
    small.save_pretrained(tmp_path / "bf16")
    tokenizer().save_pretrained(tmp_path / "bf16")
    packed, _ = longreach.load(str(tmp_path / "bf16"), weights="mxfp4", device="cpu", parity_check=False)
    packed.save_pretrained(tmp_path / "mxfp4")
    tokenizer().save_pretrained(tmp_path / "mxfp4")
    results = []
    for release in (False, True):
        model, _ = longreach.load(str(tmp_path / "mxfp4"), weights="bf16", device="cpu", parity_check=False)
        longreach.enable(model, chunk=8, parity_check=False)
        start = [p.detach().clone() for p in model.parameters()]
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.is_quantized
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made = longreach.release_gradients(model, made) if release else made
        for tree in trees(2):
            (-torch.cat(longreach.token_logprobs(model, tree)).mean()).backward()
            made.step()
            made.zero_grad()
        assert all(not torch.equal(p, q) for p, q in zip(start, model.parameters()))
        results.append(list(model.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(*results))


def test_hooks_come_off():
    model, made, _ = start("qwen3", torch.float32, "sgd", "device")
    made.remove()
    (-torch.cat(longreach.token_logprobs(model, trees(1)[0])).mean()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("states", ["device", "host"])
def test_model_and_states_are_freed_together(states):
    model, made, schedule = start("qwen3", torch.float32, "adamw", states)
    (-torch.cat(longreach.token_logprobs(model, trees(1)[0])).mean()).backward()
    made.step()
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del model, made, schedule
    gc.collect()
    assert weight() is None


class Foreign(torch.optim.Optimizer):
    """Of no known package."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})


def test_bad_input():
    model = build("qwen3", torch.float32, lora=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"not enabled; call longreach.enable\(model\) first"):
        longreach.release_gradients(model, plain)
    longreach.enable(model, parity_check=False)
    with pytest.raises(ValueError, match="states='disk': choose one of 'device', 'host'"):
        longreach.release_gradients(model, plain, states="disk")
    with pytest.raises(
        ValueError, match="can't be released into tests's Foreign: its update of one parameter may depend"
    ):
        longreach.release_gradients(model, Foreign(model.parameters()))
    with pytest.raises(ValueError, match="can't be released into torch's LBFGS"):
        longreach.release_gradients(model, torch.optim.LBFGS(model.parameters()))
    other = torch.optim.SGD([nn.Parameter(torch.ones(2)), *model.parameters()], lr=1.0)
    with pytest.raises(ValueError, match=r"1 of the optimizer's \d+ parameters are not the model's"):
        longreach.release_gradients(model, other)
    made = longreach.release_gradients(model, plain)
    with pytest.raises(ValueError, match="add_param_group"):
        made.add_param_group({"params": []})
    with pytest.raises(TypeError, match="save its state_dict"):
        copy.deepcopy(made)
