"""Every CUDA backend against the reference in fp64, next to what PyTorch's own attention errs in the same dtype.

Most of the time is flash-attn-4 compiling: with pytest-xdist, `-n 8` takes 45 seconds on 16 cores.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from longreach.attention import AttentionSpec, KeyValues, attention, explain, select
from longreach.attention.aten_cuda import CudnnAttention, EfficientAttention, FlashAttention2
from longreach.attention.flash4 import FlashAttention4
from longreach.attention.reference import Reference
from longreach.context.tree import IGNORE, Segment, TokenTree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

F64 = torch.float64
KINDS = FlashAttention4, CudnnAttention, FlashAttention2, EfficientAttention


@dataclass(frozen=True)
class Case:
    """One call. `pairs`: (queries, keys) of each; flash-attn-4 compiles anew per shape kind, so it runs only some (`jit`)."""

    pairs: tuple[tuple[int, int], ...]
    causal: bool = True
    heads: tuple[int, int] = (8, 2)
    size: int = 128
    value_size: int | None = None
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16
    jit: bool = False

    @property
    def cu_q(self):
        return (0, *itertools.accumulate(q for q, _ in self.pairs))

    @property
    def cu_k(self):
        return (0, *itertools.accumulate(k for _, k in self.pairs))


SQUARE = Case(((777, 777),))
RAGGED = Case(((300, 300), (1, 1), (129, 129), (64, 64)))
CASES = {
    "square": replace(SQUARE, jit=True),
    "square-fp16": replace(SQUARE, dtype=torch.float16),
    "square-mha": replace(SQUARE, heads=(4, 4)),
    "square-fp32": replace(SQUARE, dtype=torch.float32),
    "unmasked": Case(((600, 1337),), causal=False, jit=True),
    "unmasked-one-query": Case(((1, 1337),), causal=False),
    "unmasked-fp16": Case(((130, 700),), causal=False, dtype=torch.float16),
    "ragged": replace(RAGGED, jit=True),
    "ragged-unmasked": Case(((300, 500), (1, 77), (129, 1)), causal=False, jit=True),
    "length-one": Case(((1, 1),)),
    "window": Case(((700, 700),), window=128, jit=True),
    "window-ragged": Case(((300, 427), (1, 128), (50, 50)), window=128),
    "window-ragged-gqa8": Case(((300, 427), (1, 128), (50, 50)), window=128, heads=(16, 2), size=64, jit=True),
    "gqa4": replace(SQUARE, heads=(32, 8)),
    "gqa8-64": replace(SQUARE, heads=(64, 8), size=64),
    "d64": replace(RAGGED, size=64, dtype=torch.float16, jit=True),
    "d80": replace(RAGGED, size=80, jit=True),
    "d96": replace(RAGGED, size=96, jit=True),
    "d256": replace(RAGGED, size=256, jit=True),
    "d256-unmasked": Case(((130, 700),), causal=False, size=256),
    "mla": replace(RAGGED, heads=(4, 4), size=192, value_size=128, jit=True),
    "mla-unmasked": Case(((130, 700),), causal=False, heads=(4, 4), size=192, value_size=128),
    "small-values-gqa": replace(RAGGED, size=72, value_size=40),
    "softcap": replace(RAGGED, softcap=20.0, jit=True),
}


def draw(rows, heads, size, seed, dtype):
    return torch.randn(rows, heads, size, generator=torch.Generator().manual_seed(seed), dtype=F64).cuda().to(dtype)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def inputs(case: Case):
    (H, K), D, W = case.heads, case.size, case.value_size or case.size
    shapes = ((case.cu_q[-1], H, D), (case.cu_k[-1], K, D), (case.cu_k[-1], K, W), (case.cu_q[-1], H, W))
    return [draw(*shape, seed, case.dtype) for seed, shape in enumerate(shapes)]


def run(backend, case: Case, q, k, v, dout):
    kwargs = {"causal": case.causal, "window": case.window, "softcap": case.softcap, "scale": case.size**-0.5}
    out, lse = backend.forward(q, k, v, case.cu_q, case.cu_k, **kwargs)
    return [out, *backend.backward(dout, q, k, v, out, lse, case.cu_q, case.cu_k, **kwargs)], lse


def visible(n_q, n_k, window):
    last = torch.arange(n_k - n_q, n_k, device="cuda")[:, None]
    key = torch.arange(n_k, device="cuda")[None]
    return (key <= last) & (key > last - (window or n_k))


def sdpa(case: Case, q, k, v, dout):
    """PyTorch's own attention pair by pair in the same dtype; with a softcap, which it lacks, the same steps in its operators."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    outs = []
    for i, (n_q, n_k) in enumerate(case.pairs):
        rows, keys = slice(case.cu_q[i], case.cu_q[i + 1]), slice(case.cu_k[i], case.cu_k[i + 1])
        group = case.heads[0] // case.heads[1]
        one = q[rows].transpose(0, 1)[None]
        ks, vs = (t[keys].transpose(0, 1).repeat_interleave(group, 0)[None] for t in (k, v))
        seen = visible(n_q, n_k, case.window) if case.causal else torch.ones(n_q, n_k, dtype=torch.bool, device="cuda")
        if case.softcap is not None:
            s = case.softcap * torch.tanh(one @ ks.transpose(2, 3) * (case.size**-0.5 / case.softcap))
            out = s.masked_fill(~seen, float("-inf")).softmax(-1) @ vs
        else:
            square = case.causal and case.window is None and n_q == n_k
            mask = None if square or not case.causal else seen
            out = torch.nn.functional.scaled_dot_product_attention(one, ks, vs, attn_mask=mask, is_causal=square)
        outs.append(out[0].transpose(0, 1))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def made(kind):
    """A backend, deterministic where it has the choice."""
    return kind(deterministic=True) if kind in (FlashAttention4, FlashAttention2) else kind()


def same(kind, names, ours, again):
    """Two runs give the same bits; of cuDNN's, the forward only."""
    for what, a, b in zip(names, ours, again):
        if kind is not CudnnAttention or what in ("out", "lse"):
            assert torch.equal(a, b), f"{what} differs between two runs"


def skip_unless_supported(backend, case: Case):
    reason = backend.unsupported(
        device=torch.device("cuda"), dtype=case.dtype, head_dim=case.size, value_dim=case.value_size or case.size,
        windowed=case.window is not None, softcap=case.softcap, varlen=len(case.pairs) > 1,
    )  # fmt: skip
    if reason is not None:
        pytest.skip(f"{backend.name} {reason}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CASES)
def test_backend_errs_at_most_twice_what_pytorch_errs(name, kind, record_property):
    case, backend = CASES[name], made(kind)
    if kind is FlashAttention4 and not case.jit:
        pytest.skip("flash-attn-4 would compile kernels for this case alone")
    skip_unless_supported(backend, case)
    q, k, v, dout = inputs(case)
    truth, true_lse = run(Reference(), case, *(t.to(F64) for t in (q, k, v, dout)))
    ours, lse = run(backend, case, q, k, v, dout)
    theirs = sdpa(case, q, k, v, dout)
    assert lse.shape == true_lse.shape and lse.dtype == torch.float32
    # A log is wrong by the relative error of its sum, which is that of the scores: a few units of fp32, as they are kept in it.
    assert float((lse.double() - true_lse).abs().max()) < (2e-5 if case.softcap is None else 2e-3)
    for what, exact, mine, reference in zip(("out", "dq", "dk", "dv"), truth, ours, theirs):
        assert mine.shape == exact.shape, what
        if float(exact.abs().max()) < 1e-12:  # one key: its weight is 1 whatever the score
            assert float(mine.abs().max()) < 1e-2, what
            continue
        error, bound = relative(mine, exact), 2 * relative(reference, exact)
        record_property(what, f"{error:.1e} of {bound:.1e}")
        assert error <= bound, f"{what}: {error:.2e}, twice PyTorch's is {bound:.2e}"
    again, lse_again = run(backend, case, q, k, v, dout)
    same(kind, ("out", "dq", "dk", "dv", "lse"), [*ours, lse], [*again, lse_again])


def tree():
    """A prompt with two branches, one of which forks, and a second prompt; 700 + ... tokens."""
    lengths, parents = (640, 300, 80, 150, 1, 77), (-1, 0, 0, 1, 1, -1)
    return TokenTree(
        Segment(torch.ones(n, dtype=torch.long), torch.full((n,), IGNORE), p) for n, p in zip(lengths, parents)
    )


def through_chunks(backend, layout, q, k, v, sinks, dout, window):
    """The whole tree in chunks of at most 500 tokens, forward and backward: (out, dq, dk, dv, dsinks)."""
    kv, steps = KeyValues(layout.tokens), []
    for chunk in layout.chunks(500):
        spec = AttentionSpec(kv, chunk.start, chunk.calls(window), q.shape[-1] ** -0.5, backend=backend)
        part = [t[chunk.start : chunk.stop].detach().requires_grad_() for t in (q, k, v)]
        own = sinks.detach().clone().requires_grad_()
        steps.append((chunk, part, own, attention(*part, spec, own)[0]))
    assert len(steps) >= 3
    kv.begin_backward()
    grads, dsinks = [], 0
    for chunk, part, own, out in reversed(steps):
        *got, dsink = torch.autograd.grad(out, [*part, own], dout[chunk.start : chunk.stop])
        grads.append(got)
        dsinks = dsinks + dsink.double()
    joined = [torch.cat(parts) for parts in zip(*reversed(grads))]
    return [torch.cat([out.detach() for *_, out in steps]), *joined, dsinks]


def plain(layout, q, k, v, sinks, dout, window):
    """The dense tree mask through scaled_dot_product_attention; the sink is a key of zeros with a bias, its value zero."""
    q, k, v, sinks = (t.detach().clone().requires_grad_() for t in (q, k, v, sinks))
    T, (H, K) = layout.tokens, (q.shape[1], k.shape[1])
    segment = torch.empty(T, dtype=torch.long)
    for i in layout.order:
        segment[layout.start[i] : layout.start[i] + layout.length[i]] = i
    on_path = torch.tensor([[j in {i, *layout.ancestors(i)} for j in range(len(layout.length))] for i in layout.order])
    order = torch.empty(len(layout.order), dtype=torch.long)
    order[torch.tensor(layout.order)] = torch.arange(len(layout.order))
    gap = layout.positions[:, None] - layout.positions[None]
    seen = (on_path[order[segment]][:, segment] & (gap >= 0) & (gap < (window or T))).cuda()
    bias = torch.zeros(T, T, device="cuda").masked_fill(~seen, float("-inf"))
    bias = torch.cat([bias.expand(H, T, T), sinks.float()[:, None, None].expand(-1, T, 1)], -1).to(q.dtype)
    ks, vs = (
        torch.nn.functional.pad(t.transpose(0, 1).repeat_interleave(H // K, 0), (0, 0, 0, 1))[None] for t in (k, v)
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], ks, vs, attn_mask=bias[None])
    out = out[0].transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), dout)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("window", [None, 128])
def test_chunks_of_a_tree_with_sinks(kind, window):
    layout, dtype = tree().layout, torch.bfloat16
    backend = made(kind)
    case = Case(((1, 1), (1, 1)), size=64, window=window, dtype=dtype)
    if kind is CudnnAttention:
        case = replace(case, pairs=case.pairs[:1])  # bundles go to it pair by pair if it is forced
    skip_unless_supported(backend, case)
    q, k, v, dout = (draw(layout.tokens, h, 64, seed, dtype) for seed, h in enumerate((16, 2, 2, 16)))
    sinks = draw(1, 1, 16, 9, torch.float32).flatten() * 2
    exact = plain(layout, *(t.to(F64) for t in (q, k, v, sinks, dout)), window)
    theirs = plain(layout, q, k, v, sinks, dout, window)
    ours = through_chunks(backend, layout, q, k, v, sinks, dout, window)
    for what, a, b, truth in zip(("out", "dq", "dk", "dv", "dsinks"), ours, theirs, exact):
        # PyTorch's math path keeps fp32 throughout; a flash kernel rounds its weights, hence half a bf16 unit more.
        assert relative(a, truth) <= 2 * max(relative(b, truth), 2e-3), what
    again = through_chunks(backend, layout, q, k, v, sinks, dout, window)
    same(kind, ("out", "dq", "dk", "dv", "dsinks"), ours, again)


def test_keys_in_ranges_give_the_same_gradients(monkeypatch):
    from longreach.attention import aten_cuda

    case = Case(((300, 900),), causal=False)
    tensors = inputs(case)
    for kind in (FlashAttention2, EfficientAttention):
        skip_unless_supported(kind(), case)
        (_, *whole), _ = run(kind(), case, *tensors)
        monkeypatch.setattr(aten_cuda, "KEYS", 256)
        (_, *parts), _ = run(kind(), case, *tensors)
        monkeypatch.undo()
        for a, b in zip(whole, parts):
            assert relative(a, b) < 4e-3


def test_what_is_chosen():
    device = torch.device("cuda")
    for dtype, size, kwargs in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32, F64), (64, 128, 256), ({}, {"windowed": True}, {"varlen": True})
    ):
        chosen = select(device, dtype, size, **kwargs)
        names = explain(device, dtype, size, **kwargs)
        assert chosen.name == next(name for name, reason in names if reason is None)
        assert (chosen.name == "reference") == (dtype == F64)
