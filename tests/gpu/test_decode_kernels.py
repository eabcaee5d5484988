"""Compiled decoding kernels on a CUDA device: error against fp64, same bits twice, one graph for all lengths."""

import pytest
import torch

from longreach.kernels import decode_reference, dispatch
from longreach.kernels.decode_attention import DecodePlan, decode_attention
from tests.kernels import decode_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = decode_cases.small()
CASES = {**SMALL, **decode_cases.large()}
HALF_AND_SINGLE = [(name, dtype) for name in list(SMALL)[::3] for dtype in (torch.float16, torch.float32)]


def errors(got: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Root mean square and largest error; what must not be written is NaN in both."""
    assert (got.isnan() == exact.isnan()).all()
    difference = torch.where((got.double() == exact) | exact.isnan(), 0, got.double() - exact)
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


@pytest.mark.parametrize("name, dtype", [*((name, torch.bfloat16) for name in CASES), *HALF_AND_SINGLE], ids=str)
def test_error_is_at_most_twice_that_of_pytorch(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = CASES[name]("cuda", dtype)
    with dispatch.use("reference"):
        exact = CASES[name]("cuda", torch.float64)
        if name.startswith("attention"):  # as eager attention does it: products in the dtype itself
            monkeypatch.setattr(decode_reference, "wide", lambda x: x)
        theirs = CASES[name]("cuda", dtype)
    for i, (x, y, z) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape
        # Results that PyTorch happens to hit exactly leave one rounding in fp32.
        floor = 2**-22 * z.nan_to_num().abs().max().item()
        for kind, our_error, their_error in zip(("rms", "largest"), errors(x, z), errors(y, z)):
            assert our_error <= 2 * their_error + floor, (
                f"result {i}, {kind} error {our_error:.3g}, PyTorch {their_error:.3g}"
            )


@pytest.mark.parametrize("name", [name for name in CASES if name != "attention-sinks"])
def test_same_bits_twice(name: str) -> None:
    first, second = (CASES[name]("cuda", torch.bfloat16) for _ in range(2))
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(first, second, strict=True))


def test_one_graph_serves_every_length() -> None:
    B, H, K, D, page, pages = 6, 8, 2, 128, 64, 400
    generator = torch.Generator("cuda").manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    def integers(*values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    q, k, v, sinks = (
        half(B, H, D),
        half(pages, K, page, D).transpose(1, 2),
        half(pages, K, page, D).transpose(1, 2),
        half(H),
    )
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(torch.int32).cuda()
    own_pages, prefix_pages = (
        order[: B * 30].view(B, 30).contiguous(),
        order[B * 30 : B * 30 + 2 * 100].view(2, 100).contiguous(),
    )
    own, prefix, prefix_of = integers(*[1] * B), integers(64, 64), integers(0, 0, 1, 1, 1, -1)
    plan = DecodePlan(
        own_pages, own, prefix_of, prefix_pages, prefix, integers([0, 1, -1], [2, 3, 4]),
        heads=H, kv_heads=K, head_dim=D, page=page,
    )  # fmt: skip

    def step() -> torch.Tensor:
        plan.update()
        return decode_attention(q, k, v, plan, scale=D**-0.5, sinks_H=sinks)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths, prefixes in (
        ([1] * B, (64, 64)),
        ([1900, 3, 0, 65, 640, 1200], (6400, 1)),
        ([2, 2, 2, 2, 2, 0], (300, 5000)),
    ):
        own.copy_(integers(*lengths))
        prefix.copy_(integers(*prefixes))
        graph.replay()
        with dispatch.use("reference"):
            expected = decode_attention(q.double(), k.double(), v.double(), plan, scale=D**-0.5, sinks_H=sinks.double())
        assert torch.equal(out, step())
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_does_not_depend_on_the_others(window: int | None) -> None:
    alone, beside = (
        decode_cases.attention(groups=groups, heads=(4, 2), window=window, per_row=True)("cuda", torch.bfloat16)[0]
        for groups in ([(300, [270])], [(300, [270, 700]), (90, [260])])
    )
    assert torch.equal(alone[0], beside[0])
