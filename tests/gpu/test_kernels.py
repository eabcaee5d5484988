"""Compiled Triton kernels on a CUDA device: error against fp64, same bits twice, nothing compiled for a new length."""

import pytest
import torch

from longreach import kernels
from longreach.kernels import dispatch
from tests.kernels import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = {**cases.odd(), **cases.large()}
HALF_AND_SINGLE = [(name, dtype) for name in cases.odd() for dtype in (torch.float16, torch.float32)]


def errors(got: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Root mean square and largest error; equal infinities don't err."""
    difference = torch.where(got.double() == exact, 0, got.double() - exact)
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


@pytest.mark.parametrize("name, dtype", [*((name, torch.bfloat16) for name in CASES), *HALF_AND_SINGLE], ids=str)
def test_error_is_at_most_twice_that_of_pytorch(name: str, dtype: torch.dtype) -> None:
    ours = CASES[name]("cuda", dtype)
    with dispatch.use("reference"):
        theirs = CASES[name]("cuda", dtype)
        exact = CASES[name]("cuda", torch.float64)
    for i, (x, y, z) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape
        # Results that PyTorch happens to hit exactly leave one rounding in fp32.
        floor = 2**-23 * z[z.isfinite()].abs().max().item()
        for kind, our_error, their_error in zip(("rms", "largest"), errors(x, z), errors(y, z)):
            assert our_error <= 2 * their_error + floor, (
                f"result {i}, {kind} error {our_error:.3g}, PyTorch {their_error:.3g}"
            )


@pytest.mark.parametrize("name", CASES)
def test_same_bits_twice(name: str) -> None:
    first, second = (CASES[name]("cuda", torch.bfloat16) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def compiled() -> int:
    from longreach.kernels.jit import experts, grouped, logprob, merge, norm, rope, swiglu

    kernels = [x for module in (experts, grouped, logprob, merge, norm, rope, swiglu) for x in vars(module).values()]
    return sum(len(cache[0]) for x in kernels for cache in getattr(x, "device_caches", {}).values())


@pytest.mark.parametrize(
    "case",
    [
        lambda T: cases.norm(T, 2560, False),
        lambda T: cases.rope(T, 128, 128, (8, 2), True),
        lambda T: cases.swiglu(T, 640, "silu"),
        lambda T: cases.merge(T, 4, 128, False),
        lambda T: cases.experts(T, 2, 6, 640, kernels.Gating(True, 7.0, 1.702), True),
        lambda T: cases.low_rank(T, 6, 640, 32),
        lambda T: cases.logprob(T, 9000, 1.0, None, True),
    ],
    ids=["norm", "rope", "swiglu", "merge", "experts", "low-rank", "logprob"],
)
def test_new_lengths_compile_nothing(case) -> None:
    case(100)("cuda", torch.bfloat16)
    before = compiled()
    assert before > 0
    for T in (1, 2, 16, 97, 128, 1000):
        case(T)("cuda", torch.bfloat16)
    assert compiled() == before
