"""Models given by name or folder: dtype, tokenizer, engine, and the user's configuration left as it was."""

from __future__ import annotations

import pytest
import torch

import longreach.trainers as ours
from longreach.context.install import engine_of
from longreach.trainers import loading

from . import tiny


@pytest.fixture
def folder(tmp_path):
    """A model stored in bfloat16, with its tokenizer."""
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def grpo(folder, tmp_path, *, peft=None, **args):
    config = ours.GRPOConfig(
        **(
            tiny.RUN
            | dict(output_dir=str(tmp_path / "out"), num_generations=4, max_completion_length=6, max_steps=1)
            | args
        )
    )
    return ours.GRPOTrainer(folder, tiny.reward, config, tiny.prompts(), peft_config=peft), config


def test_full_parameters_are_float32_as_in_trl(folder, tmp_path):
    made, _ = grpo(folder, tmp_path)
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    assert made.processing_class.padding_side == "left"
    made.train()


def test_frozen_weights_under_an_adapter_stay_as_stored(folder, tmp_path):
    made, _ = grpo(folder, tmp_path, peft=tiny.lora(), bf16=True)
    assert {p.dtype for p in made.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in made.model.parameters() if p.requires_grad} == {torch.float32}


def test_without_half_precision_frozen_weights_are_float32_as_in_trl(folder, tmp_path):
    made, _ = grpo(folder, tmp_path, peft=tiny.lora(), bf16=False)
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}


def test_dtype_and_engine_fields_are_what_was_asked_for(folder, tmp_path):
    made, config = grpo(
        folder, tmp_path, model_init_kwargs={"dtype": "bfloat16"}, chunk=5, save_attention="true", max_length=64
    )
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    options = engine_of(made.model).options
    assert (options.chunk, options.save_attention) == (5, True)
    assert config.model_init_kwargs == {"dtype": "bfloat16"}


def test_other_arguments_of_transformers_go_through_trls_loading(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", None)
    made, _ = grpo(folder, tmp_path, model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"})
    assert made.model.config._attn_implementation == "eager" and engine_of(made.model) is not None


def test_the_users_configuration_is_not_changed(folder, tmp_path):
    made, config = grpo(folder, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (2, 4)
    assert (made.args.per_device_train_batch_size, made.args.gradient_accumulation_steps) == (4, 2)
    again, _ = grpo(folder, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert again.args.per_device_train_batch_size == 4


def test_model_without_a_name_needs_its_tokenizer(tmp_path):
    args = ours.SFTConfig(**tiny.RUN, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="processing_class is None and the model does not say where it came from"):
        ours.SFTTrainer(tiny.model(), args, train_dataset=tiny.pairs())


def test_sft_by_folder_with_defaults(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ours.SFTConfig(**tiny.RUN, output_dir=str(tmp_path / "out"), max_steps=1)
    made = ours.SFTTrainer(folder, args, train_dataset=tiny.pairs())
    made.train()
    assert {p.dtype for p in made.model.parameters()} == {torch.float32} and engine_of(made.model) is not None


def test_default_output_folder():
    assert loading.default_output_dir("org/Model-4B", "GRPO") == "Model-4B-GRPO"
    assert loading.default_output_dir(tiny.model(), "SFT") == "-SFT"
