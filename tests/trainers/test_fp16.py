"""fp16 with dynamic loss scaling: the losses of fp32, skipped steps counted, nothing touched by a skip.

Accelerate refuses fp16 on a CPU, so the trainer is given there what it has on a GPU: a scaler, and autocast around the model.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback

import longreach
import longreach.trainers as ours
from longreach import zoo
from longreach.context.support import UnsupportedModelError
from longreach.trainers.config import choose_fp16
from longreach.trainers.loading import load_model
from longreach.trainers.stepping import Fp16OverflowError

from . import tiny


@pytest.fixture
def fp16():
    """Turns a trainer made for a CPU in fp32 into one that trains in fp16."""

    def turn(made, scale):
        made.args.fp16 = True
        made._prepare_stepping()
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        made.accelerator.native_amp = True
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
        return made

    yield turn
    AcceleratorState._reset_state(reset_partial_state=True)


def sft(tmp_path, *, policy=None, peft=None, callbacks=None, **args):
    settings = tiny.RUN | dict(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=12, learning_rate=1e-3, max_length=64, chunk=16,
        parity_check=False, optim="adamw_torch",
    ) | args  # fmt: skip
    return ours.SFTTrainer(
        model=policy or tiny.model(), args=ours.SFTConfig(**settings), train_dataset=tiny.pairs(), peft_config=peft,
        processing_class=tiny.tokenizer(), callbacks=callbacks,
    )  # fmt: skip


def losses(trainer):
    return [h["loss"] for h in tiny.history(trainer)]


@pytest.mark.parametrize("lora", [False, True])
def test_losses_of_fp32(lora, tmp_path, fp16):
    peft = tiny.lora() if lora else None
    exact = sft(tmp_path, peft=peft)
    exact.train()
    made = fp16(sft(tmp_path, peft=peft, policy=tiny.model().half() if lora else None), 2.0**16)
    seen = []
    made.model.get_input_embeddings().register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    made.train()
    assert seen and all(seen)  # or the comparison shows nothing
    assert all(h["overflow_steps"] == 0 for h in tiny.history(made))
    for a, b in zip(losses(exact), losses(made)):
        assert b == pytest.approx(a, rel=3e-3) and a != b


def test_fp16_on_a_cpu_has_no_scaler_and_nothing_to_count(tmp_path):
    made = sft(tmp_path, fp16=True, max_steps=2)
    made.train()
    assert made.accelerator.scaler is None
    assert [h["overflow_steps"] for h in tiny.history(made)] == [0, 0]


def test_grpo_follows_fp32(tmp_path, fp16):
    """Old and new log-probs, the KL term and generation, on a model that is stored in fp16."""
    settings = dict(peft=tiny.lora(), beta=0.1, optim="adamw_torch", learning_rate=1e-3)
    exact = tiny.grpo(True, tmp_path, **settings)
    made = tiny.grpo(True, tmp_path, policy=tiny.model().half(), train=False, **settings)
    fp16(made, 2.0**12).train()
    names = ("loss", "kl", "entropy", "reward")
    assert all(h["overflow_steps"] == 0 for h in tiny.history(made))
    for a, b in zip(tiny.history(exact, *names), tiny.history(made, *names)):
        assert a.keys() == b.keys() and b == pytest.approx(a, rel=0.02, abs=2e-3)
    AcceleratorState._reset_state(reset_partial_state=True)
    sampled = tiny.grpo(True, tmp_path, policy=tiny.model().half(), train=False, trainer=ours.GRPOTrainer, **settings)
    fp16(sampled, 2.0**12).train()
    assert all(math.isfinite(h["loss"]) and h["overflow_steps"] == 0 for h in tiny.history(sampled))


class Weights(TrainerCallback):
    """What a step leaves: the weights, the optimizer's step count, and the learning rate."""

    def __init__(self):
        self.kept = []

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        flat = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        counts = {float(s["step"]) for s in optimizer.state.values()}
        self.kept.append((flat.clone(), counts, lr_scheduler.get_last_lr()[0], optimizer.step_was_skipped))


def test_a_skipped_step_changes_nothing_and_is_counted(tmp_path, fp16):
    weights = Weights()
    made = fp16(sft(tmp_path, callbacks=[weights]), 2.0**23)
    made.train()
    skipped = [s for *_, s in weights.kept]
    counts = [h["overflow_steps"] for h in tiny.history(made)]
    assert skipped[0] and not skipped[-1] and 3 < sum(skipped) < 12
    assert counts == [sum(skipped[: i + 1]) for i in range(len(skipped))]
    start = torch.cat([p.flatten() for p in tiny.model().parameters()])
    taken = 0
    for flat, steps, _, skip in weights.kept:
        assert torch.equal(flat, start) == skip
        taken += not skip
        assert steps == ({float(taken)} if taken else set())
        start = flat
    assert weights.kept[0][2] == 1e-3 and made.accelerator.scaler.get_scale() == 2.0 ** (23 - sum(skipped))
    assert all(math.isfinite(x) for x in losses(made))


def test_skips_of_a_fused_optimizer_are_counted(tmp_path, fp16):
    """Accelerate takes them for steps; so a configuration with fp16 turns to the plain form of the default optimizer."""
    made = fp16(sft(tmp_path, optim="adamw_torch_fused", max_steps=3), 2.0**40)
    made.train()
    assert [h["overflow_steps"] for h in tiny.history(made)] == [1, 2, 3]
    assert ours.SFTConfig(str(tmp_path), fp16=True, bf16=False).optim == "adamw_torch"
    assert ours.SFTConfig(str(tmp_path), bf16=False).optim == "adamw_torch_fused"


def test_the_count_goes_on_after_a_resume(tmp_path, fp16):
    made = fp16(sft(tmp_path, save_strategy="steps", save_steps=6), 2.0**23)
    made.train()
    whole = tiny.history(made)[-1]["overflow_steps"]
    AcceleratorState._reset_state(reset_partial_state=True)
    again = fp16(sft(tmp_path), 2.0**16)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert tiny.history(again)[-1]["overflow_steps"] == whole  # the scaler's scale came with the checkpoint
    for name, p in tiny.trained(made).items():
        assert torch.equal(p, tiny.trained(again)[name]), name


def test_activations_out_of_range_end_the_run(tmp_path, fp16):
    model = tiny.model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e6)
    made = fp16(sft(tmp_path, policy=model, max_steps=30), 2.0**16)
    with pytest.raises(
        Fp16OverflowError, match=r"last 25 steps had infinite or NaN gradients .* fallen to 0\.00195312"
    ):
        made.train()


def test_weights_that_train_in_fp16_are_refused(tmp_path, fp16):
    with pytest.raises(ValueError, match=r"parameters that train are stored in float16.*dtype='float32'"):
        fp16(sft(tmp_path, policy=tiny.model().half()), 2.0**16)


def scaled_step(model, tree, scale):
    """Whether the step changed nothing, and whether the scale fell."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = -torch.cat(longreach.token_logprobs(model, tree)).mean()
    scaler.scale(loss).backward()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    return same, scaler.get_scale() < scale


@pytest.mark.parametrize("scale", [2.0**14, 2.0**24, 2.0**36, 2.0**60])
def test_no_overflow_is_silent(scale):
    """Wherever gradients leave the range, among several chunks and branches, the scaler sees it and the step is skipped."""
    from peft import get_peft_model

    model = get_peft_model(tiny.model().half(), tiny.lora())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    longreach.enable(model, chunk=8, parity_check=False)
    draw = torch.Generator().manual_seed(0)
    prompt, *answers = (torch.randint(3, 90, (n,), generator=draw) for n in (30, 9, 14))
    tree = longreach.TokenTree.from_groups([(prompt, answers)])
    same, lowered = scaled_step(model, tree, scale)
    assert same == lowered == (scale > 2.0**20)


def test_gemma_is_refused():
    from tests.exactness.models import build

    model = build("gemma3", torch.float16, lora=False)
    with pytest.raises(UnsupportedModelError, match="'gemma3_text' leaves the range of fp16"):
        longreach.enable(model)


@pytest.mark.parametrize(
    "bf16, fp16, cpu, native, expected",
    [
        (None, False, False, False, True),  # a T4, nothing chosen
        (None, False, False, True, False),
        (True, False, False, False, False),
        (False, False, False, False, False),
        (None, False, True, False, False),
    ],
)
def test_a_card_without_bf16_gets_fp16_unless_chosen(bf16, fp16, cpu, native, expected, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    config = SimpleNamespace(bf16=bf16, fp16=fp16, use_cpu=cpu)
    choose_fp16(config)
    assert config.fp16 == expected and ("Tesla T4 has no bf16: fp16=True is used" in caplog.text) == expected


def test_frozen_weights_are_loaded_in_fp16(tmp_path):
    """Under an adapter; what trains stays in fp32."""
    args = ours.SFTConfig(str(tmp_path), fp16=True, bf16=False, use_cpu=True)
    for adapter, dtype in ((tiny.lora(), torch.float16), (None, torch.float32)):
        model = load_model(str(zoo.model_path()), args, peft_config=adapter)
        assert {p.dtype for p in model.parameters()} == {dtype}
