"""The plain-torch ops against Transformers' own modules and autograd, and what all implementations share: checks, `out`."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from longreach import kernels
from longreach.kernels import dispatch

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def double(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=grad)


def close(ours, expected) -> None:
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-10, atol=1e-10)


def module(kind, weight: torch.Tensor):
    norm = kind(len(weight), eps=1e-5).to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Gemma3RMSNorm])
def test_norm_rounds_as_transformers_does(kind, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(*shape).to(dtype) for shape in ((9, 96), (96,)))
    norm = module(kind, weight)
    offset = kind is Gemma3RMSNorm
    y, _ = kernels.rms_norm(x, weight, 1e-5, unit_offset=offset)
    assert torch.equal(y, norm(x)) and y.dtype == dtype


@pytest.mark.parametrize("offset", [False, True])
def test_norm_gradient(offset: bool) -> None:
    x, weight, dy, add = double(7, 40), double(40), double(7, 40, grad=False), double(7, 40, grad=False)
    y, rstd = kernels.rms_norm(x, weight, 1e-5, unit_offset=offset)
    expected = torch.autograd.grad(y, (x, weight), dy)
    with torch.no_grad():
        close(kernels.rms_norm_backward(dy, x, weight, rstd, unit_offset=offset, need_dweight=True), expected)
        dx, _ = kernels.rms_norm_backward(dy, x, weight, rstd, unit_offset=offset, add=add.clone())
        close([dx], [expected[0] + add])
        out = torch.empty_like(dy)
        assert kernels.rms_norm_backward(dy, x, weight, rstd, add=add, out=out)[0] is out


def rotated(q, k, cos, sin):
    """Transformers' function, on [tokens, heads, size]."""
    turned = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    return [x[0].transpose(0, 1) for x in turned]


@pytest.mark.parametrize("width", [32, 12])
@pytest.mark.parametrize("kind", [None, Qwen3RMSNorm, Gemma3RMSNorm])
def test_rope(kind, width: int) -> None:
    q, k, wq, wk = double(5, 4, 32), double(5, 2, 32), double(32), double(32)
    cos, sin = double(5, width, grad=False), double(5, width, grad=False)
    dq, dk = double(5, 4, 32, grad=False), double(5, 2, 32, grad=False)
    offset = kind is Gemma3RMSNorm

    def normed(x, w):
        if kind is None:
            return x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + w if offset else w)

    expected = rotated(normed(q, wq), normed(k, wk), cos, sin)
    weights = (None, None) if kind is None else (wq, wk)
    with torch.no_grad():
        *ours, stats = kernels.qk_norm_rope(q, k, cos, sin, *weights, 1e-5, offset)
    close(ours, expected)
    grads = torch.autograd.grad(expected, [q, k] + ([] if kind is None else [wq, wk]), [dq, dk])
    with torch.no_grad():
        given = kernels.qk_norm_rope_backward(
            dq.clone(), dk.clone(), q, k, cos, sin, *weights, stats, offset, need_dweight=True
        )
    close([x for x in given if x is not None], grads)


def test_rope_into_given_rows() -> None:
    qkv, cache, dqkv = torch.randn(6, 8, 16), torch.zeros(20, 2, 16), torch.zeros(6, 8, 16)
    q, k = qkv[:, :4], qkv[:, 4:6]
    cos, sin = torch.randn(6, 16), torch.randn(6, 16)
    _, expected, _ = kernels.qk_norm_rope(q, k, cos, sin)
    q_rot, k_rot, _ = kernels.qk_norm_rope(q, k, cos, sin, q_out=q, k_out=cache[3:9])
    assert torch.equal(cache[3:9], expected) and q_rot is q and k_rot.data_ptr() == cache[3].data_ptr()
    dk = torch.randn(6, 2, 16)
    kernels.qk_norm_rope_backward(q_rot, dk, None, None, cos, sin, dk_out=dqkv[:, 4:6])
    assert dqkv[:, 4:6].abs().min() > 0 and dqkv[:, :4].abs().max() == 0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_swiglu(activation: str) -> None:
    gate, up, dh = double(5, 33), double(5, 33), double(5, 33, grad=False)
    act = F.silu if activation == "silu" else lambda x: F.gelu(x, approximate="tanh")
    expected = act(gate) * up
    grads = torch.autograd.grad(expected, (gate, up), dh)
    with torch.no_grad():
        close([kernels.swiglu(gate, up, activation=activation)], [expected])
        given = kernels.swiglu_backward(dh.clone(), gate.clone(), up.clone(), activation=activation, return_h=True)
        close(given, [*grads, expected])
        assert len(kernels.swiglu_backward(dh, gate.clone(), up.clone())) == 2


def attended(q, k, v, sinks=None):
    """(out [C, H, D], lse [H, C]) of plain softmax attention, the sink as one more column of scores."""
    s = torch.einsum("chd,nhd->hcn", q, k)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    p = torch.softmax(s, -1)[..., : len(k)]
    return torch.einsum("hcn,nhd->chd", p, v), torch.logsumexp(s, -1)


def test_merge_equals_one_attention() -> None:
    q, k, v, sinks = (double(*shape, grad=False) for shape in ((6, 3, 16), (11, 3, 16), (11, 3, 16), (3,)))
    out, lse = attended(q, k[:4], v[:4])
    part, part_lse = attended(q, k[4:], v[4:])
    kernels.merge_blocks(out, lse, part, part_lse)
    close([out, lse], attended(q, k, v))
    kernels.apply_sink(out, lse, sinks)
    close([out, lse], attended(q, k, v, sinks))


def test_merge_of_rows_that_saw_nothing() -> None:
    nothing = torch.full((1, 2), -torch.inf)
    out, lse, junk = torch.ones(2, 1, 4), nothing.clone(), torch.full((2, 1, 4), torch.nan)
    kernels.merge_blocks(out, lse, junk, nothing)
    assert torch.equal(out, torch.zeros(2, 1, 4)) and torch.equal(lse, nothing)
    kernels.apply_sink(out, lse, torch.tensor([0.5]))
    assert torch.equal(out, torch.zeros(2, 1, 4)) and torch.equal(lse, torch.full((1, 2), 0.5))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logprob(softcap: float | None) -> None:
    logits, labels = (3 * double(6, 50)).detach().requires_grad_(), torch.randint(50, (6,))
    dlogprob, dentropy = double(6, grad=False), double(6, grad=False)
    z = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
    logp = torch.log_softmax(z, -1)
    expected = logp.gather(1, labels[:, None])[:, 0], torch.logsumexp(z, -1), -(logp.exp() * logp).sum(-1)
    (grad,) = torch.autograd.grad([expected[0], expected[2]], logits, [dlogprob, dentropy])
    with torch.no_grad():
        values = kernels.row_logprob(logits, labels, 0.7, softcap, True)
        close(values, expected)
        _, lse, entropy = values
        held = logits.clone()
        given = kernels.row_logprob_backward(held, labels, lse, dlogprob, dentropy, entropy, 0.7, softcap)
    assert given is held
    close([given], [grad])


@pytest.mark.parametrize("interleaved, limit", [(True, 1.0), (False, None)], ids=["gpt-oss", "silu"])
def test_experts(interleaved: bool, limit: float | None) -> None:
    """Order, activation and weighted sum against the textbook loop, with gradients for weights and rows."""
    T, k, E, F_ = 7, 3, 6, 8
    chosen = torch.stack([torch.randperm(E - 1)[:k] for _ in range(T)])  # the last expert gets nothing
    gating = kernels.Gating(interleaved, limit, 1.702 if limit else 1.0)
    gate_up, bias, out_bias = double(T, k, 2 * F_), double(E, 2 * F_, grad=False), double(E, F_, grad=False)
    weight, dy = double(T, k), double(T, F_, grad=False)

    x = gate_up + bias[chosen]
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    if limit is None:
        inner = F.silu(gate) * up
    else:
        gate = gate.clamp(max=limit)
        inner = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(1.702 * gate)
    expected = (weight[..., None] * (inner + out_bias[chosen])).sum(1)
    grads = torch.autograd.grad(expected, (gate_up, weight), dy)

    with torch.no_grad():
        routing = kernels.route(chosen, E)
        assert torch.equal(routing.expert_S, chosen.flatten().sort().values) and routing.offsets_E[-1] == T * k
        assert torch.equal(routing.row_S[routing.place_Tk], torch.arange(T)[:, None].expand(T, k))
        order = routing.place_Tk.flatten().argsort()
        rows = gate_up.flatten(0, 1)[order]
        h = kernels.expert_swiglu(rows, gating, routing.expert_S, bias)
        out = kernels.combine_rows(h, routing.place_Tk, weight, expert_Tk=chosen, bias_EM=out_bias)
        dh = dy[routing.row_S]
        dx, again, dweight = kernels.expert_swiglu_backward(
            dh, rows, weight.flatten()[order], gating, routing.expert_S, bias
        )
        dweight = dweight[routing.place_Tk] + (dy @ out_bias.t()).gather(1, chosen)
    close([out, again, dx[routing.place_Tk], dweight], [expected, h, *grads])


def test_grouped_products() -> None:
    x, w, b, offsets = double(9, 4), double(3, 4, 5), double(3, 16, 5), torch.tensor([4, 4, 9], dtype=torch.int32)
    t, dy = double(9, 16), double(9, 5, grad=False)
    expected = torch.cat([x[:4] @ w[0] + 0.5 * t[:4] @ b[0], x[4:] @ w[2] + 0.5 * t[4:] @ b[2]])
    grads = torch.autograd.grad(expected, (w, b), dy)
    with torch.no_grad():
        y = kernels.add_low_rank(kernels.grouped_mm(x, w, offsets), t, b, offsets, 0.5)
        close([y], [expected])
        close([kernels.grouped_outer(x, dy, offsets), 0.5 * kernels.grouped_outer(t, dy, offsets)], grads)


X, W = torch.zeros(4, 8), torch.zeros(8)
Q, ANGLES = torch.zeros(4, 2, 8), torch.zeros(4, 8)
LSE = torch.zeros(2, 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: kernels.rms_norm(X[None], W, 1e-6), r"x has shape \(1, 4, 8\)"),
        (lambda: kernels.rms_norm(X, W[:4], 1e-6), r"weight has shape \(4,\)"),
        (lambda: kernels.rms_norm(torch.zeros(8, 4).T, W, 1e-6), "x has stride 4"),
        (lambda: kernels.rms_norm_backward(X, X, W, torch.zeros(3)), r"rstd has shape \(3,\)"),
        (lambda: kernels.qk_norm_rope(Q, Q, ANGLES[:, :7], ANGLES[:, :7]), "cos is 7 wide"),
        (lambda: kernels.qk_norm_rope(Q, Q, ANGLES, ANGLES, W), "k_weight is None"),
        (lambda: kernels.qk_norm_rope_backward(Q, Q, None, None, ANGLES, ANGLES, W, W), "q, k and stats"),
        (lambda: kernels.swiglu(X, X, activation="relu"), "activation='relu': expected one of silu, gelu_tanh"),
        (lambda: kernels.swiglu(X, X[:2]), r"up has shape \(2, 8\)"),
        (lambda: kernels.merge_blocks(Q, LSE.T, Q, LSE.T), r"lse has shape \(4, 2\)"),
        (lambda: kernels.merge_blocks(Q, LSE.half(), Q, LSE.half()), "lse is torch.float16; expected torch.float32"),
        (lambda: kernels.route(W, 3), r"expert has shape \(8,\)"),
        (lambda: kernels.gather_rows(W, W.long()), r"x has shape \(8,\), row \(8,\)"),
        (lambda: kernels.expert_swiglu(X[:, :7], kernels.Gating()), r"x has shape \(4, 7\)"),
        (lambda: kernels.expert_swiglu(X, kernels.Gating(), W[:4].long()), "bias is None"),
        (lambda: kernels.combine_rows(X, torch.zeros(2, 2).long(), W[:2]), r"weight has shape \(2,\)"),
        (lambda: kernels.add_low_rank(X, X, torch.zeros(2, 8, 8), torch.zeros(2).int()), "rank 8: pad t and b"),
        (lambda: kernels.row_logprob(X, torch.zeros(4, dtype=torch.int64), 0.0), "temperature=0.0"),
        (lambda: kernels.row_logprob(X, torch.zeros(4, dtype=torch.int64), 1.0, -1.0), "softcap=-1.0"),
        (lambda: kernels.row_logprob_backward(X, W[:4].long(), W[:4], W[:4], W[:4]), "entropy is None"),
        (lambda: dispatch.use("cuda").__enter__(), "choice='cuda'"),
    ],
)  # fmt: skip
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
