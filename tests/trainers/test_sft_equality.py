"""Stock TRL's SFTTrainer and ours: the same loss, gradient norm, accuracy and parameters (fp32)."""

from __future__ import annotations

import logging

import pytest
import trl
from datasets import Dataset

import longreach.trainers as ours
from longreach.trainers.sft import OverlongSequenceError

from . import tiny

NAMES = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")


def sft(own, tmp_path, *, data=None, peft=None, tok=None, train=True, policy=None, **args):
    settings = tiny.RUN | dict(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=1e-4, max_length=64,
    ) | args  # fmt: skip
    if own:
        settings = dict(chunk=16, parity_check=False) | settings
    made = (ours.SFTTrainer if own else trl.SFTTrainer)(
        model=policy or tiny.model(), args=(ours.SFTConfig if own else trl.SFTConfig)(**settings),
        train_dataset=tiny.pairs() if data is None else data, processing_class=tok or tiny.tokenizer(),
        peft_config=peft,
    )  # fmt: skip
    if train:
        made.train()
    return made


KINDS = {
    "padded, completion only": dict(),
    "whole sequence": dict(completion_only_loss=False),
    "text": dict(data=Dataset.from_dict({"text": tiny.prompts(24)["prompt"]})),
    "padding free": dict(padding_free=True, max_length=None),
    "packing": dict(packing=True),
    "packing, wrapped": dict(packing=True, packing_strategy="wrapped", max_length=32),
    "dft": dict(loss_type="dft"),
    "truncated": dict(max_length=12),
    "pad to multiple": dict(pad_to_multiple_of=16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_full_parameters(kind, tmp_path):
    tiny.assert_same_run(sft(False, tmp_path, **KINDS[kind]), sft(True, tmp_path, **KINDS[kind]), NAMES)


@pytest.mark.parametrize("kind", ["padded, completion only", "packing"])
def test_lora(kind, tmp_path):
    stock, own = (sft(o, tmp_path, peft=tiny.lora(), **KINDS[kind]) for o in (False, True))
    tiny.assert_same_run(stock, own, NAMES)


@pytest.mark.parametrize("peft", [None, tiny.lora()], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["padded, completion only", "packing"])
def test_noise_of_neftune_is_as_strong_as_in_trl(kind, peft, tmp_path):
    def strongest(own):
        made = sft(own, tmp_path, peft=peft, train=False, neftune_noise_alpha=5.0, **KINDS[kind])
        found = []

        def noise(embedding, given, out):
            found.append((out - embedding.weight[given[0]]).abs().max().item())

        # runs after the hook that adds the noise, which is registered when training begins
        made.add_callback(Once(lambda: made.model.get_input_embeddings().register_forward_hook(noise)))
        made.train()
        return found

    stock, own = strongest(False), strongest(True)
    assert own == pytest.approx(stock, rel=0.02)  # of hundreds of numbers drawn uniformly


class Once(tiny.T.TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_train_begin(self, args, state, control, **kwargs):
        self.call()


def test_router_loss(tmp_path):
    def run(own):
        policy = tiny.model("qwen3_moe", router_aux_loss_coef=0.1, output_router_logits=True)
        return sft(own, tmp_path, policy=policy, router_aux_loss_coef=0.1)  # TRL 1.8 has a default of its own

    tiny.assert_same_run(run(False), run(True), (*NAMES, "aux_loss"))


def test_pad_equal_to_eos_changes_nothing(tmp_path):
    own, same = sft(True, tmp_path), sft(True, tmp_path, tok=tiny.tokenizer(pad="</s>"))
    tiny.assert_same_run(own, same, NAMES, tol=0.0)


def test_evaluation(tmp_path):
    results = [
        sft(own, tmp_path, train=False).evaluate(sft(own, tmp_path, train=False).train_dataset) for own in (False, True)
    ]
    for key in ("eval_loss", "eval_mean_token_accuracy"):
        assert results[1][key] == pytest.approx(results[0][key], rel=1e-5)


def test_sequences_longer_than_allowed(tmp_path, caplog):
    with pytest.raises(
        OverlongSequenceError, match=r"\d+ of the 24 sequences of train_dataset are longer than max_length=12"
    ):
        sft(True, tmp_path, max_length=12, on_overlong="error")
    with caplog.at_level(logging.WARNING):
        sft(True, tmp_path, max_length=12, train=False)
    assert "are longer than max_length=12 tokens (longest 2" in caplog.text and "truncated (keep_start)" in caplog.text
    dropped = sft(True, tmp_path, max_length=12, on_overlong="drop", train=False)
    lengths = [len(ids) for ids in dropped.train_dataset["input_ids"]]
    assert 0 < len(lengths) < 24 and max(lengths) <= 12
    with pytest.raises(ValueError, match="none is left; raise max_length=2"):
        sft(True, tmp_path, max_length=2, on_overlong="drop")
    packed = sft(
        True, tmp_path, max_length=12, on_overlong="error", packing=True, packing_strategy="wrapped", train=False
    )
    assert len(packed.train_dataset) > 0


def test_streamed_sequences(tmp_path, caplog):
    streamed = tiny.pairs().to_iterable_dataset()
    stock, own = (sft(o, tmp_path, data=streamed, max_length=12) for o in (False, True))
    tiny.assert_same_run(stock, own, NAMES)
    assert "train_dataset is streamed" in caplog.text
    with pytest.raises(
        OverlongSequenceError, match=r"a sequence of train_dataset has 1[34] tokens, more than max_length=12"
    ):
        sft(True, tmp_path, data=streamed, max_length=12, on_overlong="error")
    kept = list(sft(True, tmp_path, data=streamed, max_length=12, on_overlong="drop", train=False).train_dataset)
    assert 0 < len(kept) < 24 and all(len(row["input_ids"]) <= 12 for row in kept)
