"""A trainer's plan: the largest step of a configuration, what it is refused for, and what it says when memory runs out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import get_peft_model

import longreach
from longreach.context import auto, limits
from longreach.context.choice import card_bytes
from longreach.context.install import engine_of
from longreach.context.limits import Limits
from longreach.context.plan import PlanError
from longreach.context.speed import CARDS, GB
from longreach.trainers import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from longreach.trainers.planning import how_trained, largest_step

from . import tiny

SMALL = Limits(2 * GB, 16 * GB, CARDS["H200"])


@pytest.fixture
def card(monkeypatch):
    """Makes the CPU count as a card with so many bytes."""

    def of(**changes):
        limited = dataclasses.replace(SMALL, **changes)
        for module in (auto, limits, longreach.trainers.planning):
            monkeypatch.setattr(module, "this_machine", lambda *a, **k: limited)

    return of


def grpo(tmp_path, **changes):
    settings = dict(
        output_dir=str(tmp_path), num_generations=4, per_device_train_batch_size=8, max_completion_length=8, max_length=64,
        max_steps=1, learning_rate=1e-3, **tiny.RUN,
    )  # fmt: skip
    return GRPOConfig(**(settings | changes))


def trainer(args, **changes):
    rows = {"prompt": ["w1 w2 w3", "w4 w5 w6"] * 4}
    given = dict(
        model=tiny.model(), args=args, reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        train_dataset=tiny.Dataset.from_dict(rows), processing_class=tiny.tokenizer(), peft_config=tiny.lora(),
    )  # fmt: skip
    return GRPOTrainer(**(given | changes))


def test_the_largest_step_is_that_of_the_configuration(tmp_path):
    assert largest_step(grpo(tmp_path)) == {"context": 64, "completion": 8, "group": 4, "prompts": 2}
    assert largest_step(grpo(tmp_path, max_length=None)) is None
    sft = SFTConfig(output_dir=str(tmp_path), max_length=128, per_device_train_batch_size=3, **tiny.RUN)
    assert largest_step(sft) == {"context": 128, "completion": 127, "group": 1, "prompts": 3, "compact": False}


def test_optimizer_and_gradients_are_those_of_the_configuration(tmp_path):
    full = grpo(
        tmp_path, release_gradients=True, optimizer_states="host", max_grad_norm=0.0, gradient_accumulation_steps=1
    )
    assert how_trained(full) == {"optimizer": "host_adamw", "released": True, "replicas": 1}
    kinds = {
        "adamw_8bit": "adamw_8bit",
        "adamw_torch": "adamw_foreach",
        "sgd": "sgd",
        "paged_adamw_8bit": "paged_adamw_8bit",
    }
    for optim, kind in kinds.items():
        assert how_trained(grpo(tmp_path, optim=optim))["optimizer"] == kind


def test_the_plan_is_printed_once_followed_and_logged(tmp_path, capsys):
    made = trainer(grpo(tmp_path))
    assert capsys.readouterr().err.count("plan: ") == 1
    options = engine_of(made.model).options
    assert made.plan is not None and made.plan.work.prompts == 2 and made.plan.work.group == 4
    assert (options.chunk, options.offload, options.save_attention) == tuple(made.plan.options.values())
    made.train()
    logged = [entry for entry in made.state.log_history if "plan/gpu_gb" in entry]
    assert len(logged) == 1 and logged[0]["plan/chunk"] == made.plan.policy.chunk


def test_what_the_user_lays_down_stays(tmp_path):
    made = trainer(grpo(tmp_path, chunk=96, offload="host", save_attention=False, keep_every=2))
    assert made.plan.options == {"chunk": 96, "offload": "host", "save_attention": False, "keep_every": 2}


def test_without_a_bound_each_step_chooses_for_itself(tmp_path):
    made = trainer(grpo(tmp_path, max_length=None))
    assert made.plan is None and engine_of(made.model).options.chunk is None


def test_loaded_weights_are_counted_as_they_are():
    model = tiny.model()
    found = auto.Loaded.of(model)
    sizes = {p.data_ptr(): p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers())}
    assert found.model_bytes == sum(sizes.values())
    assert found.trained_bytes == sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert found.weights == "fp32" and not found.ranks
    adapted = auto.Loaded.of(get_peft_model(model, tiny.lora()))
    assert adapted.model_bytes == found.model_bytes
    assert adapted.trained_bytes == sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert dict(adapted.ranks) == dict.fromkeys(tiny.PROJECTIONS, 4)


def test_what_cannot_fit_is_refused_with_what_would(tmp_path, card):
    card(gpu_bytes=GB)
    with pytest.raises(PlanError, match=r"max_length=4096 .* needs a GPU of 1\.9 GB .*on_misfit='warn'"):
        trainer(grpo(tmp_path, max_length=4096, per_device_train_batch_size=400, max_completion_length=2000))


def test_or_goes_on_with_what_needs_least(tmp_path, card):
    card(gpu_bytes=GB)
    args = grpo(
        tmp_path, max_length=4096, per_device_train_batch_size=400, max_completion_length=2000, on_misfit="warn"
    )
    made = trainer(args)
    assert not made.plan.fits and made.plan.policy.offload == "keys"


def test_a_model_by_name_is_refused_before_its_weights_are_read(tmp_path, card, monkeypatch):
    folder = tmp_path / "model"
    config = tiny.model().config
    config.dtype = torch.float32
    config.save_pretrained(folder)  # no weights there
    tiny.tokenizer().save_pretrained(folder)
    card(gpu_bytes=GB)
    with pytest.raises(PlanError, match="does not fit"):
        trainer(
            grpo(tmp_path, max_length=4096, per_device_train_batch_size=400, max_completion_length=2000),
            model=str(folder),
        )


def test_an_evaluation_that_cannot_fit_is_refused(tmp_path, card):
    rows = tiny.Dataset.from_dict({"text": ["w1 w2 w3"] * 8})
    settings = dict(output_dir=str(tmp_path), max_length=4096, per_device_train_batch_size=1, max_steps=1, **tiny.RUN)
    card(gpu_bytes=int(1.3 * GB))
    args = SFTConfig(eval_strategy="steps", per_device_eval_batch_size=4096, **settings)
    with pytest.raises(PlanError, match=r"per_device_eval_batch_size=4096 rows .* set per_device_eval_batch_size=\d+"):
        SFTTrainer(
            model=tiny.model(), args=args, train_dataset=rows, eval_dataset=rows, processing_class=tiny.tokenizer()
        )


def test_a_reference_model_and_a_standing_cache_count(tmp_path):
    made = trainer(grpo(tmp_path))
    made._make_plan(made.model, engine=True, reference=True)
    parts = made.plan.choice.memory.parts
    assert parts["reference model"] == parts["weights"]
    assert parts["rollout's cache"] == made.plan.work.standing > 0


def test_the_cache_is_released_where_it_leaves_no_room(tmp_path, card):
    made = trainer(grpo(tmp_path))
    made._make_plan(made.model, engine=True)
    sampled, alone = made.plan.sampled, made.plan.choice.gpu_needed - made.plan.work.standing
    assert made.args.rollout_memory == "keep" and made.plan.work.standing
    card(gpu_bytes=max(alone, card_bytes(sampled)) + made.plan.work.standing // 4)
    made._make_plan(made.model, engine=True)
    assert made.args.rollout_memory == "release" and not made.plan.work.standing and made.plan.fits


def test_running_out_of_memory_says_plan_and_fact(tmp_path, monkeypatch):
    made = trainer(grpo(tmp_path))

    def out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(made, "_prepare_inputs", out)
    with pytest.raises(
        auto.PlannedOutOfMemory, match=r"CUDA out of memory\. out of GPU memory with .* planned were"
    ) as caught:
        made.train()
    assert "Tried to allocate" in str(caught.value.__cause__)


def test_so_does_a_loop_of_your_own(monkeypatch):
    model, tree = tiny.model(), longreach.TokenTree.from_sequences([[1, 2, 3, 4]])
    longreach.enable(model, parity_check=False)
    logprobs = longreach.token_logprobs(model, tree)

    def out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(longreach.context.autograd.Step, "run", out)
    with pytest.raises(torch.OutOfMemoryError, match="planned were"):
        logprobs[0].sum().backward()
    monkeypatch.setattr(longreach.context.autograd, "compute", out)
    with pytest.raises(torch.OutOfMemoryError, match="planned were"):
        longreach.token_logprobs(model, tree)
