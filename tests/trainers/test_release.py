"""`release_gradients` in our trainers: stock TRL's numbers, checkpoints, metrics, and what it rules out."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

import longreach.trainers as ours
from longreach.context import host_states
from longreach.context.release import ReleasingOptimizer
from longreach.trainers.rows import without_gradient

from . import tiny
from .test_sft_equality import sft

RELEASE = dict(release_gradients=True, max_grad_norm=0.0, gradient_accumulation_steps=1)
PLAIN = dict(max_grad_norm=0.0, gradient_accumulation_steps=1)


@pytest.fixture(autouse=True)
def every_state_moves(monkeypatch):
    monkeypatch.setattr(host_states, "SMALL", 16)


@pytest.mark.parametrize("states", ["device", "host"])
def test_sft_has_the_numbers_of_stock_trl(states, tmp_path):
    settings = dict(lr_scheduler_type="linear", weight_decay=0.1, warmup_steps=1)
    stock = sft(False, tmp_path, **PLAIN, **settings)
    own = sft(True, tmp_path, optimizer_states=states, **RELEASE, **settings)
    tiny.assert_same_run(stock, own, ("loss", "grad_norm", "learning_rate", "mean_token_accuracy"))
    assert isinstance(own.optimizer.optimizer, ReleasingOptimizer)


def test_sft_has_the_bits_of_our_own_plain_run(tmp_path):
    plain, released = sft(True, tmp_path, **PLAIN), sft(True, tmp_path, **RELEASE)
    tiny.assert_same_run(plain, released, ("loss",), tol=0.0)


def test_grpo_has_the_bits_of_our_own_plain_run(tmp_path):
    """With a tied embedding, and a step in which no row has an advantage."""

    def run(**args):
        made = tiny.model(tie_word_embeddings=True)
        calls = []

        def reward(completions, **kwargs):
            calls.append(1)
            return [1.0] * len(completions) if len(calls) == 2 else tiny.reward(completions)

        return tiny.grpo(True, tmp_path, policy=made, rewards=reward, weight_decay=0.1, **args)

    plain, released = run(**PLAIN), run(**RELEASE)
    tiny.assert_same_run(plain, released, ("loss", "reward"), tol=0.0)
    assert tiny.history(released)[1]["skipped/groups"] > 0
    for a, b in zip(tiny.history(plain, "grad_norm"), tiny.history(released, "grad_norm")):
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-6)


def test_a_step_without_gradient_holds_no_more_than_the_others():
    """Zeros come one parameter at a time."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(5)]
    alive = []
    for p in params:

        def hook(p):
            alive.append((sum(q.grad is not None for q in params), p.grad.tolist()))
            p.grad = None

        p.register_post_accumulate_grad_hook(hook)
    without_gradient(torch.zeros(2, 3), params).sum().backward()
    assert alive == [(1, [0.0] * 4)] * 5


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            control.should_training_stop = control.should_save = True


@pytest.mark.parametrize("states", ["device", "host"])
def test_a_resumed_run_equals_an_uninterrupted_one(states, tmp_path):
    settings = RELEASE | dict(optimizer_states=states, max_steps=4, lr_scheduler_type="linear")
    whole = sft(True, tmp_path / "whole", **settings)
    stopped = sft(True, tmp_path / "parts", train=False, **settings)
    stopped.add_callback(StopAt())
    stopped.train()
    resumed = sft(True, tmp_path / "parts", train=False, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    for name, p in tiny.trained(whole).items():
        assert torch.equal(p, tiny.trained(resumed)[name]), name


def test_an_optimizer_of_the_users(tmp_path):
    """Passed as TRL takes it, with a schedule of its own."""

    def run(**args):
        made = sft(True, tmp_path, train=False, **args)
        optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1, momentum=0.9)
        made.optimizer = optimizer
        made.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        made.train()
        return made

    tiny.assert_same_run(run(**PLAIN), run(**RELEASE), ("loss", "learning_rate"), tol=0.0)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(max_grad_norm=1.0), r"so max_grad_norm=1.0 can't clip by it; set max_grad_norm=0.0"),
        (
            dict(gradient_accumulation_steps=4),
            "gradient_accumulation_steps must be 1, not 4; raise per_device_train_batch_size",
        ),
        (dict(fp16=True), "fp16=True may have to skip a step after all gradients are known"),
        (dict(auto_find_batch_size=True), "auto_find_batch_size"),
        (dict(optimizer_states="disk"), "optimizer_states='disk' is not known; use one of 'device', 'host'"),
        (dict(release_gradients="yes"), "release_gradients='yes' is not a truth value"),
        (
            dict(release_gradients=False, optimizer_states="host"),
            "optimizer_states='host' needs release_gradients=True",
        ),
    ],
)
def test_what_it_rules_out(change, message, tmp_path):
    for config in (ours.SFTConfig, ours.GRPOConfig):
        with pytest.raises(ValueError, match=message):
            config(str(tmp_path), **(dict(bf16=False, use_cpu=True) | RELEASE | change))


def test_micro_batches_that_are_joined_count_as_one(tmp_path):
    """GRPO joins micro-batches to whole groups; what is left to accumulate decides."""
    args = dict(per_device_train_batch_size=2, num_generations=4, bf16=False, use_cpu=True)
    ours.GRPOConfig(str(tmp_path), **(RELEASE | args | dict(gradient_accumulation_steps=2)))
    with pytest.raises(ValueError, match="must be 1, not 4"):
        ours.GRPOConfig(str(tmp_path), **(RELEASE | args | dict(gradient_accumulation_steps=4)))
