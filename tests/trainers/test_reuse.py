"""GRPO whose training step takes its prompts from the rollout's prefill: the run without it, and when it must not be used."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

import longreach.trainers as ours
from longreach.context import reuse
from longreach.context.limits import Limits
from longreach.context.plan import plan
from longreach.context.reuse import Batch
from longreach.context.reuse_room import prefill_bytes, prefill_place

from ..exactness.models import build
from . import tiny

LONG = dict(max_length=80, chunk=16, num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=2)
SHORTEST, LONGEST = 33, 64


def data(rows=32):
    return tiny.prompts(rows, longest=LONGEST, shortest=SHORTEST)


def run(tmp, *, seed=3, **settings):
    torch.manual_seed(seed)
    given = dict(policy=tiny.model(), peft=tiny.lora(), data=data(), trainer=ours.GRPOTrainer) | LONG | settings
    return tiny.grpo(True, tmp, **given)


def tokens(trainer):
    return [h.get("prefill/reused_tokens") for h in tiny.history(trainer)]


def assert_same(without, with_it):
    tiny.assert_same_run(without, with_it, ("loss", "grad_norm", "reward", "entropy"), tol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(offload="host"),
        dict(offload="none", save_attention=True, gradient_accumulation_steps=1),
        dict(per_device_train_batch_size=2, gradient_accumulation_steps=8),
        dict(num_iterations=2, max_steps=4),
        dict(beta=0.04),
        dict(rollout_rows=4, rollout_memory="release"),
        dict(rollout_correction=True),
        dict(release_gradients=True, max_grad_norm=0.0, gradient_accumulation_steps=1, peft=None),
    ],
    ids=lambda s: "-".join(map(str, s.values())) or "plain",
)
def test_a_run_is_the_run_without_it(settings, tmp_path):
    without = run(tmp_path, reuse_prefill=False, **settings)
    with_it = run(tmp_path, reuse_prefill=True, **settings)
    assert_same(without, with_it)
    assert tokens(without) == [None] * len(tokens(without))
    iterations = settings.get("num_iterations", 1)
    for step, found in enumerate(tokens(with_it)):
        assert (found > SHORTEST - 16) if step % iterations == 0 else found == 0
    assert with_it._prefill is None


def test_gpt_oss(tmp_path):
    def policy():
        return build("gpt_oss", torch.float32, lora=False, vocab_size=tiny.WORDS)

    settings = dict(peft=tiny.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), max_steps=2)
    settings |= dict(router_aux_loss_coef=0.0)
    without = run(tmp_path, policy=policy(), reuse_prefill=False, **settings)
    with_it = run(tmp_path, policy=policy(), reuse_prefill=True, **settings)
    assert_same(without, with_it)
    assert all(found > 0 for found in tokens(with_it))


def test_every_token_of_a_prompt_is_counted(tmp_path):
    """One prompt of 49 tokens: 48 in whole chunks, and the last one belongs to the completions."""
    made = run(tmp_path, data=tiny.prompts(8, longest=49, shortest=49), reuse_prefill=True, max_steps=1,
               per_device_train_batch_size=4, gradient_accumulation_steps=1)  # fmt: skip
    assert tokens(made) == [48.0]


def disturb(when):
    """A reward that changes the weights between rollout and training step."""
    model = tiny.model()
    calls = []

    def reward(completions, **kwargs):
        calls.append(1)
        if len(calls) in when:
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        return tiny.reward(completions)

    return dict(policy=model, rewards=reward)


def test_changed_weights_are_trained_as_they_are(tmp_path, caplog):
    without = run(tmp_path, reuse_prefill=False, **disturb((2,)))
    with caplog.at_level(logging.WARNING):
        with_it = run(tmp_path, **disturb((2,)))
    assert_same(without, with_it)
    first, second, third = tokens(with_it)
    assert first > 0 and second == 0 and third > 0
    assert sum("the weights have changed" in r.getMessage() for r in caplog.records) == 1
    with caplog.at_level(logging.WARNING):
        run(tmp_path, **disturb((2,)))  # another trainer says it for itself
    assert sum("the weights have changed" in r.getMessage() for r in caplog.records) == 2


def test_the_check_is_what_keeps_stale_inputs_out(tmp_path, monkeypatch):
    """Without it the run above would be another one."""
    without = run(tmp_path, reuse_prefill=False, **disturb((2,)))
    monkeypatch.setattr(reuse, "weights_version", lambda decoder: ())
    with_it = run(tmp_path, **disturb((2,)))
    with pytest.raises(AssertionError):
        assert_same(without, with_it)


def test_memory_is_gone_when_the_step_is_taken(tmp_path):
    seen = []

    class Watching(ours.GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            gc.collect()
            self.alive = [b for b in seen if b() is not None]
            out = super()._generate_single_turn(*args, **kwargs)
            if self._prefill is not None:
                seen.extend(weakref.ref(batch) for batch, _ in self._prefill.places.values())
            return out

    made = run(tmp_path, trainer=Watching, reuse_prefill=True)
    assert len(seen) >= 3 and not made.alive
    gc.collect()
    assert not [b for b in seen if b() is not None]


def test_memory_is_gone_when_training_breaks_off(tmp_path):
    class Broken(ours.GRPOTrainer):
        def _compute_loss(self, *args, **kwargs):
            held.extend(weakref.ref(batch) for batch, _ in self._prefill.places.values())
            raise RuntimeError("broken")

    held = []
    made = run(tmp_path, trainer=Broken, train=False, reuse_prefill=True)
    with pytest.raises(RuntimeError, match="broken"):
        made.train()
    gc.collect()
    assert held and not [b for b in held if b() is not None]


def test_a_rollout_func_rules_it_out(tmp_path):
    def draw(prompts, trainer):
        raise AssertionError("never called")

    class Drawing(ours.GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, rollout_func=draw, **kwargs)

    with pytest.raises(ValueError, match="reuse_prefill=True: completions are drawn by rollout_func"):
        run(tmp_path, trainer=Drawing, train=False, reuse_prefill=True)
    assert run(tmp_path, trainer=Drawing, train=False)._reuse_place is None


def test_an_evaluation_keeps_nothing(tmp_path, monkeypatch):
    made = run(tmp_path, train=False, reuse_prefill=True, eval_strategy="no")
    built = []
    monkeypatch.setattr(Batch, "kept", lambda *a: built.append(a))
    made.evaluate(data(4))
    assert not built and made._prefill is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(steps_per_generation=4), "gradient_accumulation_steps=2 is not a multiple of steps_per_generation=4"),
        (
            dict(gradient_accumulation_steps=3, steps_per_generation=2),
            "gradient_accumulation_steps=3 is not a multiple",
        ),
        (dict(use_transformers_continuous_batching=True), "drawn by Transformers' generate"),
        (dict(max_length=None), "max_length=None"),
        (dict(rollout="transformers"), "the rollout engine does not draw"),
        (dict(keep_every=2), "keep_every=2"),
        (dict(reuse_prefill="yes"), "reuse_prefill='yes' is not known"),
    ],
)
def test_configurations_that_rule_it_out(settings, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        run(tmp_path, **(dict(reuse_prefill=True) | settings))
    if "reuse_prefill" not in settings:
        assert run(tmp_path, train=False, **settings)._reuse_place is None


def test_models_that_rule_it_out(tmp_path, caplog):
    def policy():
        return build("olmo2", torch.float32, lora=False, vocab_size=tiny.WORDS)

    with pytest.raises(ValueError, match="Olmo2DecoderLayer has no hand-written form"):
        run(tmp_path, policy=policy(), peft=None, reuse_prefill=True)
    with caplog.at_level(logging.WARNING):
        made = run(tmp_path, policy=policy(), peft=None, train=False)
    assert made._reuse_place is None and "Olmo2DecoderLayer has no hand-written form" in caplog.text


def test_dropout_in_training_computes_prompts_again(tmp_path, caplog):
    adapter = tiny.lora()
    adapter.lora_dropout = 0.1
    with caplog.at_level(logging.WARNING):
        made = run(tmp_path, peft=adapter, max_steps=1)
    assert tokens(made) == [0.0] and "dropout" in caplog.text


def test_a_hook_on_the_embedding_computes_prompts_again(tmp_path, caplog):
    """One that acts in training and not in the rollout, as noise would."""

    def hooked(**args):
        policy = tiny.model()
        policy.get_input_embeddings().register_forward_hook(lambda m, x, out: out + 0.01 if m.training else out)
        return run(tmp_path, policy=policy, max_steps=1, **args)

    without = hooked(reuse_prefill=False)
    with caplog.at_level(logging.WARNING):
        with_it = hooked()
    assert_same(without, with_it)
    assert tokens(with_it) == [0.0] and "the embedding has hooks" in caplog.text


def test_the_difference_to_the_rollout_is_that_of_its_weights(tmp_path):
    """Also where an evaluation has drawn completions between two steps on one generation."""
    made = run(tmp_path, evaluation=data(4), num_iterations=2, max_steps=2, eval_strategy="steps", eval_steps=1)
    assert ["sampling/logp_difference/max" in step for step in tiny.history(made)] == [True, False]


def test_room_is_the_plans():
    """On the card, on the host where that is full, nowhere where both are."""
    common = dict(context=33_000, completion=1000, group=8, lora=32, rollout_rows=16, offload="none")
    roomy = plan("Qwen/Qwen3-4B", gpu_bytes=141 * 10**9, host_bytes=200 * 10**9, **common)
    work, policy = roomy.work, roomy.policy
    token = 2560 * 2 + policy.save_attention * (4096 * 2 + 32 * 4)
    assert prefill_bytes(work, policy, 2) == 2 * 31_999 * 35 * token
    assert prefill_place(roomy, 2) == "device"
    assert prefill_place(roomy, 8) == "host"
    assert prefill_place(roomy, 60) is None
    apart = roomy.on(Limits(141 * 10**9, 200 * 10**9, None, offload=False))
    assert prefill_place(apart, 8) is None
    waiting = plan("Qwen/Qwen3-4B", gpu_bytes=141 * 10**9, host_bytes=200 * 10**9, **(common | {"offload": "host"}))
    assert prefill_place(waiting, 2) == "host"
