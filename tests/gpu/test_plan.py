"""The planner on a card: predicted peak of a step beside what PyTorch's allocator counted, and that it runs where planned."""

from __future__ import annotations

import pytest
import torch

import longreach
from bench import models, planner
from longreach.context.plan import plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# context, group, chunk, offload, save_attention
STEPS = [
    (8192, 1, 4096, "none", False),
    (32768, 1, 8192, "host", False),
    (32768, 4, 4096, "host", True),
    (65536, 1, 8192, "none", False),
]


@pytest.fixture(scope="module")
def prepared():
    """A model of real widths and few layers, with its optimizer."""
    shape = models.shape_of("Qwen3-1.7B", 4, tiny=False)
    model = models.adapt(models.build(shape, 65536, "cuda"))
    return shape, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: "-".join(map(str, step)))
def test_peak_is_within_a_tenth_of_the_plan(prepared, step):
    found = planner.point(*prepared, step, "cuda")
    assert abs(found["error"]) <= planner.ALLOWED, planner._line(found)


def test_a_planned_step_stays_within_the_card_it_was_planned_for(prepared):
    shape, model, optimizer = prepared
    context, gpu_bytes = 32768, 4 * 10**9
    made = plan(shape, context=context, completion=1024, lora=models.RANK, gpu_bytes=gpu_bytes, host_bytes=64 * 10**9)
    root, leaf = models.token_ids(context - 1024, shape.vocab), models.token_ids(1024, shape.vocab, seed=1)
    peak = planner.on_card(model, optimizer, longreach.TokenTree.from_groups([(root, [leaf])]), made.options)
    assert peak <= gpu_bytes
