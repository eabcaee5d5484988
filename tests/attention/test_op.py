"""Every backend and the merging op against the plain reference: odd sizes, length 1, windows, sinks, GQA, head sizes."""

from __future__ import annotations

import itertools

import pytest
import torch

from longreach.attention import AttentionSpec, KeyValues, attention, select, use_backend
from longreach.attention.aten import FlashForCpu
from longreach.attention.reference import Reference
from longreach.context import tree as tree_module
from longreach.context.tree import IGNORE, Segment, TokenTree

F64 = torch.float64


def draw(rows, heads, size, dtype=F64, seed=0):
    return torch.randn(rows, heads, size, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


CALLS = [
    ((0, 9), (0, 9), True, None),
    ((0, 1), (0, 1), True, None),
    ((0, 5, 6, 19), (0, 5, 6, 19), True, None),
    ((0, 7, 8), (0, 31, 44), False, None),
    ((0, 6, 7, 15), (0, 11, 15, 23), True, 5),
    ((0, 12), (0, 40), True, 40),
    ((0, 3), (0, 17), True, None),
]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("size, value_size", [(16, 16), (24, 24), (256, 256), (24, 16), (16, 40)])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_cpu_flash_equals_the_reference(call, size, value_size, heads, kv_heads):
    cu_q, cu_k, causal, window = call
    q, k, v = (
        draw(cu_q[-1], heads, size),
        draw(cu_k[-1], kv_heads, size, seed=1),
        draw(cu_k[-1], kv_heads, value_size, seed=2),
    )
    kwargs = {"causal": causal, "window": window, "softcap": None, "scale": 0.3}
    out, lse = Reference().forward(q, k, v, cu_q, cu_k, **kwargs)
    got, got_lse = FlashForCpu().forward(q, k, v, cu_q, cu_k, **kwargs)
    torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_lse, lse, rtol=1e-12, atol=1e-12)
    dout = draw(cu_q[-1], heads, value_size, seed=3)
    expected = Reference().backward(dout, q, k, v, out, lse, cu_q, cu_k, **kwargs)
    for a, b in zip(FlashForCpu().backward(dout, q, k, v, out, lse, cu_q, cu_k, **kwargs), expected):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_reference_equals_autograd(call, softcap):
    """The reference itself, against a dense mask written from its definition."""
    cu_q, cu_k, causal, window = call
    q, k, v = (
        t.requires_grad_() for t in (draw(cu_q[-1], 4, 8), draw(cu_k[-1], 2, 8, seed=1), draw(cu_k[-1], 2, 8, seed=2))
    )
    seen = torch.zeros(cu_q[-1], cu_k[-1], dtype=torch.bool)
    for p in range(len(cu_q) - 1):
        shift = (cu_k[p + 1] - cu_k[p]) - (cu_q[p + 1] - cu_q[p])
        for i, j in itertools.product(range(cu_q[p + 1] - cu_q[p]), range(cu_k[p + 1] - cu_k[p])):
            near = window is None or j > i + shift - window
            seen[cu_q[p] + i, cu_k[p] + j] = (not causal) or (j <= i + shift and near)
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.4
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    out = torch.einsum("hqk,khd->qhd", s.masked_fill(~seen, float("-inf")).softmax(-1), v.repeat_interleave(2, 1))
    dout = draw(cu_q[-1], 4, 8, seed=3)
    out.backward(dout)
    kwargs = {"causal": causal, "window": window, "softcap": softcap, "scale": 0.4}
    with torch.no_grad():
        got, lse = Reference().forward(q, k, v, cu_q, cu_k, **kwargs)
        torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
        for a, t in zip(Reference().backward(dout, q, k, v, got, lse, cu_q, cu_k, **kwargs), (q, k, v)):
            torch.testing.assert_close(a, t.grad, rtol=1e-11, atol=1e-11)


def tree():
    """Two trees: a root with two children and ragged leaves, and a lone root."""
    lengths, parents = (23, 9, 4, 7, 1, 12, 18), (-1, 0, 0, 1, 1, 2, -1)
    return TokenTree(
        Segment(torch.ones(n, dtype=torch.long), torch.full((n,), IGNORE), p) for n, p in zip(lengths, parents)
    )


def dense(q, k, v, layout, window, sinks, scale, softcap):
    """The whole tree at once under its mask: [T, H, D]."""
    T = layout.tokens
    segment = torch.empty(T, dtype=torch.long)
    for i in layout.order:
        segment[layout.start[i] : layout.start[i] + layout.length[i]] = i
    path = {i: {i, *layout.ancestors(i)} for i in layout.order}
    seen = torch.zeros(T, T, dtype=torch.bool)
    for i, j in itertools.product(range(T), range(T)):
        gap = int(layout.positions[i] - layout.positions[j])
        seen[i, j] = int(segment[j]) in path[int(segment[i])] and gap >= 0 and (window is None or gap < window)
    group = q.shape[1] // k.shape[1]
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(-1, T, 1)], -1)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1)[..., :T], v.repeat_interleave(group, 1))


@pytest.mark.parametrize("chunk", [1, 5, 16, 500])
@pytest.mark.parametrize(
    "window, sinks, softcap", [(None, False, None), (6, False, None), (None, True, None), (6, True, 4.0)]
)
def test_chunks_of_a_tree_equal_the_dense_mask(chunk, window, sinks, softcap):
    layout = tree().layout
    T = layout.tokens
    q, k, v = (draw(T, h, 8, seed=s).requires_grad_() for h, s in ((4, 0), (2, 1), (2, 2)))
    sink = draw(1, 1, 4, seed=5).flatten().mul(3).requires_grad_() if sinks else None
    dout = draw(T, 4, 8, seed=3)
    expected = dense(q, k, v, layout, window, sink, 0.4, softcap)
    grads = torch.autograd.grad(expected, [q, k, v, *([sink] if sinks else [])], dout)
    kv, pieces = KeyValues(T), []
    for c in layout.chunks(chunk):
        spec = AttentionSpec(kv, c.start, c.calls(window), 0.4, softcap)
        part = [t[c.start : c.stop].detach().requires_grad_() for t in (q, k, v)]
        own_sink = sink.detach().requires_grad_() if sinks else None
        out, _ = attention(*part, spec, own_sink)
        torch.testing.assert_close(out, expected[c.start : c.stop], rtol=1e-12, atol=1e-12)
        pieces.append((c, part, own_sink, out))
    kv.begin_backward()
    dsink = 0
    for c, part, own_sink, out in reversed(pieces):
        got = torch.autograd.grad(out, part + ([own_sink] if sinks else []), dout[c.start : c.stop])
        for a, b in zip(got[:3], grads):
            torch.testing.assert_close(a, b[c.start : c.stop], rtol=1e-10, atol=1e-11)
        dsink = dsink + got[3] if sinks else 0
    if sinks:
        torch.testing.assert_close(dsink, grads[3], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("chunk", "most"), [(1, 6), (2, 8), (5, 20), (16, 24)])
def test_long_key_ranges_are_cut_by_the_size_of_chunks(chunk, most, monkeypatch):
    """Small chunks make calls on few keys, which together are all keys before the chunk, each once."""
    monkeypatch.setattr(tree_module, "SMALL_KEY_BLOCK", 6)
    monkeypatch.setattr(tree_module, "KEY_BLOCK", 24)
    layout = TokenTree.from_sequences([list(range(100))]).layout
    for c in layout.chunks(chunk):
        own, *before = c.calls()
        assert own.keys == ((c.start, c.stop),)
        assert [k for call in before for k in range(*call.keys[0])] == list(range(c.start))
        assert max((call.keys[0][1] - call.keys[0][0] for call in before), default=0) == min(most, c.start)
    test_chunks_of_a_tree_equal_the_dense_mask(chunk, None, True, None)


def test_large_sinks_take_everything():
    """bf16 would round these gradients to zero; a sink far above every score leaves no output."""
    kv = KeyValues(3)
    q = draw(3, 2, 8).requires_grad_()
    layout = TokenTree.from_sequences([[1, 2, 3]]).layout
    spec = AttentionSpec(kv, 0, layout.chunks(8)[0].calls(), 0.1)
    out, lse = attention(q, draw(3, 2, 8, seed=1), draw(3, 2, 8, seed=2), spec, torch.tensor([50.0, -50.0], dtype=F64))
    assert float(out[:, 0].abs().max()) < 1e-18 and float(out[:, 1].abs().max()) > 0.1
    assert torch.allclose(lse[0], torch.tensor(50.0, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_errs_at_most_twice_what_pytorch_errs(dtype):
    T, H, D = 96, 4, 32
    layout = TokenTree.from_sequences([list(range(T))]).layout
    exact = [draw(T, H, D, seed=s) for s in range(3)]
    dout = draw(T, H, D, seed=4)

    def grads(run, inputs, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        out = run(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]

    def sdpa(q, k, v):
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    def chunked(q, k, v):
        kv, outs = KeyValues(T), []
        for c in layout.chunks(23):
            parts = (t[c.start : c.stop] for t in (q, k, v))
            outs.append(attention(*parts, AttentionSpec(kv, c.start, c.calls(), D**-0.5))[0])
        return torch.cat(outs)

    truth = grads(sdpa, exact, F64)
    theirs, ours = grads(sdpa, exact, dtype), grads(chunked, exact, dtype)
    for name, t, a, b in zip(("out", "dq", "dk", "dv"), truth, ours, theirs):
        assert relative(a, t) <= 2 * relative(b, t), name


def test_selection_and_override():
    assert select(torch.device("cpu"), torch.float32, 64).name == "aten-flash-cpu"
    assert select(torch.device("cpu"), torch.float32, 64, softcap=30.0).name == "reference"
    with use_backend(Reference()) as forced:
        assert select(torch.device("cpu"), torch.float32, 64) is forced


def test_heads_that_do_not_divide():
    spec = AttentionSpec(KeyValues(4), 0, (), 1.0)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        attention(draw(4, 3, 8), draw(4, 2, 8), draw(4, 2, 8), spec)
