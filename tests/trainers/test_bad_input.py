"""Bad input: one clear error each, before any training step, naming what is wrong and what would be right."""

from __future__ import annotations

import copy
import logging
import pickle
import types
from dataclasses import replace

import pytest
import torch
import trl
import trl.trainer.utils
from datasets import Dataset, IterableDataset

import longreach.trainers as ours
from longreach.context import fused, install
from longreach.context.parity import ParityError
from longreach.context.support import UnsupportedModelError
from longreach.rewards.result import InfrastructureError
from longreach.trainers import reward_calls, versions

from . import tiny


def grpo_config(**changes):
    return ours.GRPOConfig(**(tiny.RUN | dict(num_generations=4, max_completion_length=10) | changes))


@pytest.mark.parametrize("config", [ours.GRPOConfig, ours.SFTConfig])
def test_a_scripts_command_line_is_read(config, tmp_path):
    common = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False"]
    (found,) = trl.TrlParser(config).parse_args_and_config(common)
    assert (found.chunk, found.keep_every, found.save_attention) == ("auto", "auto", "auto")
    given = ["--chunk", "4096", "--keep_every", "2", "--save_attention", "true"]
    (found,) = trl.TrlParser(config).parse_args_and_config(common + given)
    assert (found.chunk, found.keep_every, found.save_attention) == (4096, 2, True)


def test_a_configuration_may_have_arguments_of_its_own(tmp_path):
    class Mine(ours.GRPOConfig):
        def __init__(self, mine, **fields):
            self.mine = mine
            super().__init__(**fields)

    assert Mine(mine=2, output_dir=str(tmp_path), use_cpu=True).mine == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(chunk=0), "chunk=0 .* positive whole number or 'auto'"),
        (dict(chunk="many"), "chunk='many' is not a number"),
        (dict(offload="disk"), "offload='disk' .* 'auto', 'none', 'host'"),
        (dict(save_attention="maybe"), "save_attention='maybe' .* 'auto', True or False"),
        (dict(parity_check="yes"), "parity_check='yes' .* True or False"),
        (dict(rollout="sglang"), "rollout='sglang' .* 'auto', 'engine', 'transformers'"),
        (dict(rollout_memory="swap"), "rollout_memory='swap' .* 'keep', 'release'"),
        (dict(rollout_rows=0), "rollout_rows=0 is out of range"),
        (dict(rollout_correction="yes"), "rollout_correction='yes' .* True or False"),
        (dict(on_overlong="cut"), "on_overlong='cut' .* 'error', 'drop', 'truncate_left'"),
        (dict(max_length=8), "max_length=8 leaves no room .* max_completion_length=10"),
        (dict(max_completion_length=None), "max_completion_length=None is not a number"),
        (dict(max_length=-1), "max_length=-1 is out of range"),
        (dict(neftune_noise_alpha=5.0), "neftune_noise_alpha=5.0: .* leave it None"),
        (dict(use_liger_kernel=True), "use_liger_kernel=True .* set it to False"),
        (
            dict(per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=1),
            "per_device_train_batch_size=2 splits groups .* gradient_accumulation_steps to be a multiple of 2, not 1",
        ),
    ],
)
def test_config(changes, message):
    with pytest.raises(ValueError, match=message):
        grpo_config(**changes)


@pytest.mark.parametrize("cls", [ours.GRPOConfig, ours.SFTConfig])
def test_a_misspelt_field_gets_the_nearest(cls):
    with pytest.raises(TypeError, match=rf"{cls.__name__} takes no 'lerning_rate'; did you mean 'learning_rate'\?"):
        cls(**tiny.RUN, lerning_rate=1e-4)
    with pytest.raises(TypeError, match=r"takes no 'offlaod'; did you mean 'offload'\?"):
        cls(**tiny.RUN, offlaod="host")
    made = cls(**tiny.RUN, offload="host")
    assert copy.deepcopy(made).offload == pickle.loads(pickle.dumps(made)).offload == "host"


def test_sft_config():
    with pytest.raises(ValueError, match=r"on_overlong='truncate_left' .* 'truncate', 'drop', 'error'"):
        ours.SFTConfig(**tiny.RUN, on_overlong="truncate_left")


def test_values_from_a_command_line():
    made = grpo_config(chunk="512", save_attention="false", max_length="130")
    assert (made.chunk, made.save_attention, made.max_length, made.max_prompt_length) == (512, False, 130, 120)


def make(tmp_path, **changes):
    keys = ("model", "reward_funcs", "train_dataset", "eval_dataset", "processing_class")
    given = dict(
        model=tiny.model(), reward_funcs=tiny.reward, train_dataset=tiny.prompts(), processing_class=tiny.tokenizer()
    )
    given |= {k: changes.pop(k) for k in keys if k in changes}
    args = grpo_config(output_dir=str(tmp_path), parity_check=False, **(dict(max_steps=2) | changes))
    return tiny.OurGRPO(args=args, **given)


def test_empty_datasets(tmp_path):
    empty = Dataset.from_dict({"prompt": []})
    with pytest.raises(ValueError, match="train_dataset is empty"):
        make(tmp_path, train_dataset=empty)
    with pytest.raises(ValueError, match="eval_dataset is empty"):
        make(tmp_path, eval_dataset=empty)
    with pytest.raises(ValueError, match=r"eval_dataset\['b'\] is empty"):
        make(tmp_path, eval_dataset={"a": tiny.prompts(), "b": empty})
    with pytest.raises(ValueError, match="train_dataset is empty"):
        make(tmp_path, train_dataset=IterableDataset.from_generator(lambda: iter(())))
    args = ours.SFTConfig(**tiny.RUN, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="train_dataset is empty"):
        ours.SFTTrainer(tiny.model(), args, train_dataset=empty, processing_class=tiny.tokenizer())


def test_missing_prompt_column(tmp_path):
    with pytest.raises(ValueError, match="train_dataset has no column 'prompt'; it has 'question', 'answer'"):
        make(tmp_path, train_dataset=Dataset.from_dict({"question": ["w1"], "answer": ["w2"]}))


def test_args_of_trl(tmp_path):
    args = trl.GRPOConfig(**tiny.RUN, output_dir=str(tmp_path), num_generations=4)
    with pytest.raises(TypeError, match=r"args is a trl.*GRPOConfig; GRPOTrainer takes a longreach.GRPOConfig"):
        ours.GRPOTrainer(tiny.model(), tiny.reward, args, tiny.prompts(), processing_class=tiny.tokenizer())


def test_prompts_longer_than_allowed(tmp_path, caplog):
    # prompts have 5 … 14 tokens; 12 are allowed
    with pytest.raises(
        ours.OverlongPromptError, match=r"6 of the 32 prompts of train_dataset are longer than 12 .* row 8"
    ):
        make(tmp_path, max_length=22)
    with caplog.at_level(logging.WARNING):
        dropped = make(tmp_path, max_length=22, on_overlong="drop")
    assert "6 of the 32 prompts of train_dataset are longer than 12 tokens (longest 14): dropped" in caplog.text
    assert len(dropped.train_dataset) == 26
    with pytest.raises(ValueError, match="none is left"):
        make(tmp_path, max_length=12, on_overlong="drop")
    some = [*tiny.prompts(4)["prompt"], ""]
    with pytest.raises(
        ValueError, match="1 of the 5 prompts of train_dataset are empty, the first in row 4; a prompt needs"
    ):
        make(tmp_path, max_length=40, train_dataset=Dataset.from_dict({"prompt": some}))
    cut = make(tmp_path, max_length=22, on_overlong="truncate_left", max_steps=6)
    assert "their first tokens are cut" in caplog.text
    long = cut.train_dataset["prompt"][9]
    ids = cut._tokenize_prompts([long])[0]
    assert ids == [tiny.tokenizer()(long)["input_ids"][-12:]]
    cut.train()
    assert any(h.get("prompts/truncated", 0) > 0 for h in cut.state.log_history)
    assert make(tmp_path, max_length=24).train_dataset.num_rows == 32


@pytest.mark.skipif(
    not hasattr(trl.trainer.utils, "repeat_iterable_dataset"), reason="this TRL has no streamed data in GRPOTrainer"
)
def test_streamed_prompts_longer_than_allowed(tmp_path):
    streamed = tiny.prompts().to_iterable_dataset()
    with pytest.raises(ours.OverlongPromptError, match=r"a prompt of this batch has 1[34] tokens"):
        make(tmp_path, train_dataset=streamed, max_length=22, shuffle_dataset=False, max_steps=6).train()
    kept = make(tmp_path, train_dataset=streamed, max_length=22, on_overlong="drop")
    assert len(list(kept.train_dataset)) == 26


def test_more_tokens_than_positions(tmp_path):
    with pytest.raises(ValueError, match="max_length=5000 is beyond the 4096 positions"):
        make(tmp_path, max_length=5000)


def test_refused_architecture_before_its_weights_are_read(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match=r"mamba.*stock TRL"):
        make(tmp_path, model=str(tmp_path / "m"))


def test_parity_failure_stops_with_the_measured_difference(tmp_path, monkeypatch):
    """A wrong attention scale, as a broken kernel would give."""

    def scaled(good):
        def make(*args, **kwargs):
            spec = good(*args, **kwargs)
            return replace(spec, scale=spec.scale * 1.1)

        return make

    for module in (fused, install):
        monkeypatch.setattr(module, "AttentionSpec", scaled(module.AttentionSpec))
    args = grpo_config(output_dir=str(tmp_path))
    with pytest.raises(ParityError, match=r"differ by \d\.\d\de-0\d nats per token"):
        ours.GRPOTrainer(tiny.model(), tiny.reward, args, tiny.prompts(), processing_class=tiny.tokenizer())


REWARDS = [
    (lambda completions, **kw: [1.0] * (len(completions) - 1), "returned 15 values; it must return a list of 16"),
    (lambda completions, **kw: 1.0, "returned 1.0; it must return a list"),
    (lambda completions, **kw: None, "returned None; it must return a list"),
    (lambda completions, **kw: ["good"] * len(completions), "returned 'good' for completion 0"),
    (lambda completions, **kw: [float("inf")] * len(completions), "returned inf for completion 0; .* finite"),
    (lambda completions, **kw: [float("nan")] * len(completions), "no completion of this batch has a reward: 'score'"),
    (lambda completions, **kw: [None] * len(completions), "no completion of this batch has a reward: 'score'"),
]


@pytest.mark.parametrize("score, message", REWARDS)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_rewards(score, message, kind, tmp_path):
    async def wait(completions, **kwargs):
        return score(completions)

    reward = score if kind == "sync" else wait
    reward.__name__ = "score"
    with pytest.raises(ours.RewardError, match=message):
        make(tmp_path, reward_funcs=reward, gradient_accumulation_steps=2).train()


def test_a_raising_reward_is_not_a_zero(tmp_path):
    def fragile(completions, **kwargs):
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer") as caught:
        make(tmp_path, reward_funcs=[tiny.reward, fragile]).train()
    assert "raised by reward function 'fragile'" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_failing_grader_is_tried_again_and_then_stops_training(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(reward_calls, "RETRY_SECONDS", (0.0, 0.0))
    calls = []

    def run(works_at):
        calls.clear()

        def grade(completions, **kwargs):
            calls.append(len(completions))
            if len(calls) < works_at:
                raise InfrastructureError("sandbox did not start")
            return tiny.reward(completions)

        async def grade_async(completions, **kwargs):
            return grade(completions)

        reward = grade if kind == "sync" else grade_async
        return make(tmp_path, reward_funcs=reward, learning_rate=0.0)

    run(works_at=3).train()
    assert len(calls) == 4  # two failures, then one call per step
    with pytest.raises(InfrastructureError, match=r"the grader keeps failing .sandbox did not start.; training stops"):
        run(works_at=99).train()
    assert len(calls) == 3


def test_tensor_and_boolean_rewards_are_numbers():
    assert reward_calls.check_rewards(torch.tensor([0.5, 1.0]), "r", ["", ""]) == [0.5, 1.0]
    assert reward_calls.check_rewards([True, None], "r", ["", ""]) == [1.0, None]


def test_unsupported_trl(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda name: "0.24.0")
    with pytest.raises(versions.UnsupportedTRLError, match=r"trl 0.24.0 is not supported; install trl>=1.8.0,<2.0.0"):
        versions.require_supported_trl()
    monkeypatch.setattr(versions, "version", lambda name: "1.99.0")
    monkeypatch.setattr(trl, "GRPOTrainer", types.SimpleNamespace())
    with pytest.raises(versions.UnsupportedTRLError, match=r"trl 1.99.0 has no GRPOTrainer._prepare_inputs"):
        versions.require_supported_trl()


def test_corrupt_run_state_in_a_checkpoint(tmp_path):
    from longreach.trainers.checkpoint import load_run_state, run_state_file

    assert load_run_state(str(tmp_path), 0) is None
    run_state_file(str(tmp_path), 0).write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"rollout_state_0.pt cannot be read .*resume from another"):
        load_run_state(str(tmp_path), 0)
