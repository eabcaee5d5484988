"""The planner on a card: predicted peak of a step beside what PyTorch's allocator counted, and that it runs where planned."""

from __future__ import annotations

import pytest
import torch
from bench.planner import Step

import longreach
from bench import models, planner
from longreach.context.install import engine_of
from longreach.context.plan import plan
from longreach.context.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = [
    Step(8192, Policy(4096, "none")),
    Step(32768, Policy(8192, "host")),
    Step(32768, Policy(4096, "host", True), group=4),
    Step(16384, Policy(4096, "rows", True, 2), prompts=2, group=2),
    Step(49152, Policy(8192, "keys")),
]


@pytest.fixture(scope="module")
def prepared():
    """A model of real widths and few layers, with its optimizer."""
    shape = models.shape_of("Qwen3-1.7B", 4, tiny=False)
    model = models.adapt(models.build(shape, 65536, "cuda"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)
    planner.warm_up(shape, model, optimizer)
    return shape, model, optimizer


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.context}-{step.policy}")
def test_peak_is_within_a_tenth_of_the_plan(prepared, step):
    found = planner.point(*prepared, step, "cuda")
    assert abs(found["error"]) <= planner.ALLOWED, planner._line(found)


def test_a_planned_step_stays_within_the_card_it_was_planned_for(prepared):
    shape, model, optimizer = prepared
    context, gpu_bytes = 32768, 4 * 10**9
    made = plan(shape, context=context, completion=1024, lora=models.RANK, gpu_bytes=gpu_bytes, host_bytes=64 * 10**9)
    tree = planner._tree(shape, Step(context, made.policy))
    assert planner.on_card(model, optimizer, tree, made.options) <= gpu_bytes


def test_automatic_choices_are_the_planners(prepared):
    """Of a loaded model, whose bytes are read from its parameters."""
    shape, model, _ = prepared
    longreach.enable(model, parity_check=False)
    chosen = engine_of(model).settle(32768, 1024)
    card = torch.cuda.get_device_properties(0).total_memory
    asked = {"context": 32768, "completion": 1024, "lora": models.RANK, "gpu_bytes": card}
    assert chosen.policy == plan(shape, host_bytes=chosen.limits.host_bytes, **asked).policy
    assert chosen.work.weight_bytes == pytest.approx(plan(shape, **asked).work.weight_bytes, rel=1e-3)
