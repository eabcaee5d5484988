"""Gradients released into the optimizer on a GPU: the plain loop's bits, one layer's gradients at a time, states on the host."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from longreach.context.install import enable
from longreach.context.logprob import token_logprobs
from longreach.context.release import release_gradients
from longreach.context.tree import TokenTree
from tests.exactness.models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = {"hidden_size": 1024, "intermediate_size": 3072}


def optimizer(kind, model):
    if kind == "fused":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed: its optimizers can't be tried")
    return getattr(bnb.optim, kind)(model.parameters(), lr=1e-3)


def run(kind, *, release, states="device", steps=4, resume=None, autocast=True):
    gc.collect()  # models of earlier tests
    before = torch.cuda.memory_allocated()
    model = build("qwen3", torch.float32, lora=False, spread=0.02, **SHAPE).cuda()
    enable(model, chunk=64, parity_check=False)
    made = optimizer(kind, model)
    made = release_gradients(model, made, states=states) if release else made
    draw = torch.Generator().manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        ids = torch.randint(3, 90, (256,), generator=draw)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = -torch.cat(token_logprobs(model, TokenTree.from_sequences([ids]))).mean()
        loss.backward()
        made.step()
        made.zero_grad()
        if step == resume:
            saved, weights = copy.deepcopy(made.state_dict()), copy.deepcopy(model.state_dict())
            model = build("qwen3", torch.float32, lora=False, seed=5, **SHAPE).cuda()
            model.load_state_dict(weights)
            enable(model, chunk=64, parity_check=False)
            made = optimizer(kind, model)
            made = release_gradients(model, made, states=states) if release else made
            made.load_state_dict(saved)
    return model, made, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", ["fused", "AdamW8bit", "PagedAdamW8bit"])
@pytest.mark.parametrize("resume", [None, 1])
def test_the_numbers_of_the_plain_loop(kind, resume):
    plain, _, _ = run(kind, release=False)
    ours, _, _ = run(kind, release=True, resume=resume)
    for (name, p), q in zip(plain.named_parameters(), ours.parameters()):
        assert torch.equal(p, q), (name, float((p - q).abs().max()))


@pytest.mark.parametrize("resume", [None, 1])
def test_states_on_the_host(resume):
    plain, _, _ = run("fused", release=False)
    ours, made, _ = run("fused", release=True, states="host", resume=resume)
    for (name, p), q in zip(plain.named_parameters(), ours.parameters()):
        assert torch.equal(p, q), name
    places = {x.device.type for held in made.state.values() for x in held.values() if x.numel() > 4096}
    assert places == {"cpu"}


def test_memory_holds_one_layers_gradients():
    """The peak falls by the gradients of the other layers, and with states on the host by most of the states."""
    bytes_ = sum(p.numel() * 4 for p in build("qwen3", torch.float32, lora=False, **SHAPE).parameters())
    kept, released, host = (
        run("fused", release=r, states=s)[2] for r, s in ((False, "device"), (True, "device"), (True, "host"))
    )
    assert kept - released > 0.6 * bytes_, (kept, released, bytes_)
    assert released - host > 1.2 * bytes_, (released, host, bytes_)
