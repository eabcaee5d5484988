"""Training in fp16 with dynamic loss scaling follows fp32 as closely as bf16 does, step after step, on the embedded model."""

from __future__ import annotations

import math

import pytest
import torch

import longreach
from longreach import zoo
from longreach.context.tree import TokenTree

SMOOTH = 20  # steps over which losses are averaged before they are compared
SCALE = (
    2.0**10
)  # at first: no step is lost while the loss falls fast; it doubles every 25 steps, so that later some overflow


def texts(steps):
    """Sequences that repeat a random pattern: the model soon learns to see it."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        period = int(torch.randint(6, 24, (), generator=draw))
        pattern = torch.randint(4, 40, (period,), generator=draw)
        yield TokenTree.from_sequences([pattern.repeat(96 // period + 1)[:96]])


def train(weights, steps):
    """Losses of each step, and which were skipped."""
    torch.manual_seed(0)
    model, _ = longreach.load(str(zoo.model_path()), weights=weights, lora=8, device="cpu", parity_check=False)
    longreach.enable(model, chunk=32, parity_check=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=25, enabled=weights == "fp16")
    losses, skipped = [], []
    for tree in texts(steps):
        loss = -torch.cat(longreach.token_logprobs(model, tree)).mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        skipped.append(scaler.get_scale() < scale)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return losses, skipped


def smoothed(losses):
    return [sum(losses[i : i + SMOOTH]) / SMOOTH for i in range(len(losses) - SMOOTH + 1)]


@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_losses_follow_fp32(steps):
    exact, _ = train("fp32", steps)
    half, skipped = train("fp16", steps)
    brain, _ = train("bf16", steps)
    assert all(math.isfinite(x) for x in half)
    assert sum(skipped) < 0.05 * steps and (steps < 100 or sum(skipped) > 0)
    gain = smoothed(exact)[0] - smoothed(exact)[-1]
    assert gain > (0.5 if steps > 100 else 0.2)  # it has learned, or there is nothing to compare
    off = [[abs(a - b) for a, b in zip(smoothed(exact), smoothed(x))] for x in (half, brain)]
    # fp16 parts from fp32 by the steps that it skipped, hardly by rounding.
    assert max(off[0]) < 2 * max(off[1]) + 0.02, (max(off[0]), max(off[1]))
    assert off[0][-1] < max(2 * off[1][-1], 0.05 * gain), (off[0][-1], off[1][-1])
