"""The engine on a GPU: against stock attention and fp32, repeatable to the bit, whatever is kept where."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from longreach.context import offload as offload_module
from longreach.context import tree as tree_module
from longreach.context.install import enable, engine_of
from longreach.context.logprob import token_logprobs
from longreach.context.parity import check_parity
from longreach.context.tree import TokenTree
from tests.exactness.models import build, gradients, worst
from tests.exactness.test_architectures import TREES, group, ids, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(name, dtype, **config):
    return build(name, dtype, lora=True, **config).cuda()


def run(model, tree, *, fuse=True, **options):
    enable(model, parity_check=False, **options)
    engine = engine_of(model)
    engine.options = dataclasses.replace(engine.options, fuse=fuse)
    loss = loss_of(token_logprobs(model, tree), torch.float32)
    loss.backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss", "llama", "deepseek_v3"])
def test_parity_with_stock_eager_attention(name, dtype):
    if name == "gemma3" and dtype == torch.float16:
        pytest.skip("Gemma 3 is refused in fp16: it leaves its range")
    model = on_gpu(name, dtype)
    enable(model, parity_check=False)
    check_parity(model, engine_of(model))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2"])
def test_bf16_is_as_near_to_fp32_as_stock(name):
    """Gradients of a ragged group: the engine's distance to fp32 is at most twice that of stock eager attention."""
    tree, rows = group()
    exact = run(build(name, torch.float32, lora=True), tree, chunk=7)[1]
    ours = run(on_gpu(name, torch.bfloat16), tree, chunk=16)[1]
    model = on_gpu(name, torch.bfloat16)
    parts = []
    for row, first in rows:
        logits = model(input_ids=row[None].cuda(), use_cache=False).logits[0, first - 1 : -1].float()
        parts.append(torch.log_softmax(logits, -1).gather(-1, row[first:, None].cuda()).squeeze(-1))
    loss_of(parts, torch.float32).backward()
    stock = gradients(model)

    def distance(grads):
        return sum(float((grads[n].float().cpu() - exact[n]).square().sum()) for n in exact) ** 0.5

    assert distance(ours) <= 2 * distance(stock)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "module"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_host_memory_and_repeats_change_no_bit(name, fuse):
    tree = TokenTree.from_sequences([ids(700, 1), ids(33, 2)])
    first = run(on_gpu(name, torch.bfloat16), tree, chunk=128, offload="none", save_attention=False, fuse=fuse)
    for offload in ("none", "host"):
        again = run(on_gpu(name, torch.bfloat16), tree, chunk=128, offload=offload, save_attention=False, fuse=fuse)
        assert again[0] == first[0] and worst(first[1], again[1])[0] == 0.0, offload
    saved = [
        run(on_gpu(name, torch.bfloat16), tree, chunk=128, offload=o, save_attention=True, fuse=fuse)
        for o in ("none", "host")
    ]
    assert worst(saved[0][1], saved[1][1])[0] == 0.0
    assert worst(first[1], saved[0][1])[0] < 0.05


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "module"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_streaming_changes_no_bit(name, fuse, monkeypatch):
    """Several key blocks to a chunk, so that copies in both directions run beside the kernels; twice, for races."""
    monkeypatch.setattr(tree_module, "KEY_BLOCK", 256)
    tree = TokenTree.from_groups([(ids(1500, 1), [ids(200, 2), ids(333, 3), ids(1, 4)]), (ids(40, 5), [ids(90, 6)])])
    plain = run(on_gpu(name, torch.bfloat16), tree, chunk=128, offload="none", save_attention=False, fuse=fuse)
    for offload, every in (("rows", 1), ("keys", 1), ("keys", 3), ("host", 2), ("keys", 1)):
        model = on_gpu(name, torch.bfloat16)
        again = run(model, tree, chunk=128, offload=offload, keep_every=every, save_attention=False, fuse=fuse)
        assert again[0] == plain[0] and worst(plain[1], again[1])[0] == 0.0, (offload, every)


def test_memory_hardly_grows_with_the_context():
    """Above the model: rows, keys and values of one layer and a chunk, not one more layer input per layer."""
    model = on_gpu("llama", torch.bfloat16, num_hidden_layers=16, hidden_size=512, vocab_size=97)
    peaks = {}
    for length in (4096, 16384):
        tree = TokenTree.from_sequences([torch.randint(3, 97, (length,))])
        run(model, tree, chunk=1024, offload="host", save_attention=True)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        run(model, tree, chunk=1024, offload="host", save_attention=True)
        peaks[length] = torch.cuda.max_memory_allocated() - base
    row = 512 * 2
    growth = (peaks[16384] - peaks[4096]) / (16384 - 4096)
    assert growth < 16 * row, f"{growth:.0f} bytes per token; keeping every layer's input alone would be {16 * row}"


def test_streamed_memory_is_flat(monkeypatch):
    """Only tables and ids are left that grow with the context. The model is small: all of a row would fit into what may be
    under way to the host."""
    monkeypatch.setattr(offload_module, "LEAVING", (2, 0))
    model = on_gpu("llama", torch.bfloat16, num_hidden_layers=4, hidden_size=512, vocab_size=97)
    peaks = {}
    for length in (65536, 131072):
        tree = TokenTree.from_groups([(ids(length - 64, 1), [ids(64, 2)])])
        run(model, tree, chunk=2048, offload="keys")
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        run(model, tree, chunk=2048, offload="keys")
        peaks[length] = torch.cuda.max_memory_allocated() - base
    growth = (peaks[131072] - peaks[65536]) / 65536
    assert growth < 512, f"{growth:.0f} bytes per token"


@pytest.mark.parametrize("tree_name", TREES)
def test_trees_in_fp32_equal_the_cpu(tree_name):
    tree, _ = TREES[tree_name]()
    loss, grads = run(on_gpu("qwen3", torch.float32), tree, chunk=16)
    expected, cpu = run(build("qwen3", torch.float32, lora=True), tree, chunk=16)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert worst(cpu, {n: g.cpu() for n, g in grads.items()})[0] < 1e-3
