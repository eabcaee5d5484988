"""A run that was stopped goes on to the same numbers: random states, generated rows in hand, order of later epochs."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import longreach.trainers as ours
from longreach.quant import NF4
from longreach.quant.linear import FourBitLinear

from . import tiny


def run(tmp_path, name, *, steps=5, resume=None, callbacks=None, rows=32, rewards=None, **args):
    """A run with sampled completions, without checkpoints of its own."""

    def reward(completions, **kwargs):
        return [len(set(c.split())) - len(c) / 20 for c in completions]

    settings = dict(
        trainer=ours.GRPOTrainer, output_dir=str(tmp_path / name), max_steps=steps, learning_rate=1e-3, chunk=64,
        data=tiny.prompts(rows), rewards=rewards or reward,
    )  # fmt: skip
    made = tiny.grpo(True, None, train=False, callbacks=callbacks, **(settings | args))
    made.train(resume_from_checkpoint=resume)
    return made


class StopAt(tiny.T.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(), marks=pytest.mark.slow, id="plain"),
        pytest.param(
            dict(steps_per_generation=4, num_iterations=2, stop=3), marks=pytest.mark.slow, id="in a generation"
        ),
        pytest.param(dict(rows=8, stop=3), marks=pytest.mark.slow, id="in the second epoch"),  # an epoch has 2 steps
        # an epoch has 4 steps and two rounds of generation; the resumed run still draws one of them
        pytest.param(dict(rows=16, steps_per_generation=4, steps=7, stop=5), id="in both"),
        pytest.param(dict(rows=8, stop=4), marks=pytest.mark.slow, id="between epochs"),
    ],
)
def test_resumed_run_equals_an_uninterrupted_one(settings, tmp_path):
    stop, steps = settings.pop("stop", 2), settings.get("steps", 5)
    whole = run(tmp_path, "whole", **settings)
    run(tmp_path, "parts", callbacks=[StopAt(stop)], **settings)
    resumed = run(tmp_path, "parts", resume=True, **settings)
    assert resumed.state.global_step == steps
    a, b = tiny.history(whole), tiny.history(resumed)
    for x, y in zip(a[stop:], b[stop - steps :]):
        for name in set(x) - {"step_time"}:
            assert x[name] == y[name], name
    for name, p in tiny.trained(whole).items():
        assert torch.equal(p, tiny.trained(resumed)[name]), name


@pytest.mark.parametrize("best", [False, True], ids=["resumed", "best model"])
def test_adapters_of_4_bit_weights_stay_in_bfloat16(best, tmp_path):
    def four_bit(**args):
        policy = tiny.model()
        for name, module in list(policy.model.layers.named_modules()):
            if type(module) is torch.nn.Linear:
                policy.model.layers.set_submodule(name, FourBitLinear.of(module, NF4()))
        settings = dict(peft=tiny.lora(), policy=policy.bfloat16(), bf16=True, save_strategy="steps", save_steps=2)
        return run(tmp_path, **(settings | args))

    if best:
        how = dict(
            eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_reward"
        )
        made = four_bit(name="whole", steps=4, evaluation=tiny.prompts(8), **how)
        assert made.state.best_model_checkpoint is not None
        assert {p.dtype for p in tiny.trained(made).values()} == {torch.bfloat16}
        return
    whole = four_bit(name="whole", steps=4)
    four_bit(name="parts", callbacks=[StopAt(2)], steps=4)
    resumed = four_bit(name="parts", resume=True, steps=4)
    for name, p in tiny.trained(whole).items():
        assert p.dtype == torch.bfloat16 and torch.equal(p, tiny.trained(resumed)[name]), name


def test_interrupt_saves_a_checkpoint_to_go_on_from(tmp_path):
    calls = []

    def interrupting(completions, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return [float(len(c)) for c in completions]

    before = signal.getsignal(signal.SIGINT)
    callback = ours.InterruptCallback()
    stopped = run(tmp_path, "run", rewards=interrupting, callbacks=[callback])
    assert callback.interrupted and stopped.state.global_step == 2
    assert callback.checkpoint == str(tmp_path / "run" / "checkpoint-2")
    assert signal.getsignal(signal.SIGINT) is before
    whole = run(tmp_path, "whole", rewards=interrupting, steps=3)  # two more calls: no further interrupt
    resumed = run(tmp_path, "run", rewards=interrupting, steps=3, resume=callback.checkpoint)
    for name, p in tiny.trained(whole).items():
        assert torch.equal(p, tiny.trained(resumed)[name]), name


def test_second_interrupt_stops_at_once(tmp_path):
    def interrupting(completions, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return [1.0] * len(completions)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "run", rewards=interrupting, callbacks=[ours.InterruptCallback()])
    assert signal.getsignal(signal.SIGINT) is before
