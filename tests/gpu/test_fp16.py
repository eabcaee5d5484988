"""fp16 training through our trainers on a GPU: loss scaling, skipped steps, the kernels that cards without bf16 use."""

from __future__ import annotations

import math

import pytest
import torch

import longreach.trainers as ours
from longreach.attention.aten_cuda import EfficientAttention
from longreach.attention.select import use_backend
from longreach.trainers.stepping import Fp16OverflowError
from tests.trainers import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RUN = dict(report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-3, max_steps=20)


def sft(folder, *, precision, peft=None, dtype=torch.float32, scale=None, **args):
    config = ours.SFTConfig(
        **(RUN | args), output_dir=str(folder), fp16=precision == "fp16", bf16=precision == "bf16", chunk=16, max_length=64,
        per_device_train_batch_size=4,
    )  # fmt: skip
    with use_backend(EfficientAttention()):
        made = ours.SFTTrainer(
            model=tiny.model().to(dtype).cuda(), args=config, train_dataset=tiny.pairs(80),
            processing_class=tiny.tokenizer(), peft_config=peft,
        )  # fmt: skip
        if scale is not None:
            made.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=scale)
        made.train()
    return made, [h for h in made.state.log_history if "loss" in h]


@pytest.mark.parametrize("lora", [False, True])
def test_sft_follows_fp32(lora, tmp_path):
    peft = tiny.lora() if lora else None
    _, exact = sft(tmp_path, precision="fp32", peft=peft)
    made, logs = sft(tmp_path, precision="fp16", peft=peft, dtype=torch.float16 if lora else torch.float32)
    assert logs[-1]["overflow_steps"] <= 3
    for a, b in zip(exact, logs):
        assert abs(a["loss"] - b["loss"]) < 0.02 * a["loss"] + 0.01
    assert all(bool(p.isfinite().all()) for p in made.model.parameters())


def test_overflowing_steps_are_skipped_and_counted(tmp_path):
    _, logs = sft(tmp_path, precision="fp16", scale=2.0**36)
    counts = [h["overflow_steps"] for h in logs]
    assert counts[0] == 1 and counts == sorted(counts) and 3 < counts[-1] < 20
    # the schedule waits for steps that are taken
    rates = [h["learning_rate"] for h in logs]
    assert rates[0] == rates[1] == RUN["learning_rate"] and rates[-1] < rates[0]
    assert all(math.isfinite(h["loss"]) for h in logs)


def test_activations_out_of_range_end_the_run(tmp_path):
    model = tiny.model().cuda()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e6)
    config = ours.SFTConfig(
        **(RUN | {"max_steps": 40}),
        output_dir=str(tmp_path),
        fp16=True,
        parity_check=False,
        per_device_train_batch_size=2,
    )
    made = ours.SFTTrainer(
        model=model, args=config, train_dataset=tiny.pairs(80), processing_class=tiny.tokenizer()
    )  # fmt: skip
    with pytest.raises(Fp16OverflowError, match="the last 25 steps had infinite or NaN gradients"):
        made.train()


def test_grpo(tmp_path):
    made = tiny.grpo(
        True,
        tmp_path,
        policy=tiny.model().half().cuda(),
        peft=tiny.lora(),
        use_cpu=False,
        fp16=True,
        trainer=ours.GRPOTrainer,
    )
    logs = tiny.history(made)
    assert len(logs) == 3 and all(math.isfinite(h["loss"]) and "overflow_steps" in h for h in logs)
