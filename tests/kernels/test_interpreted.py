"""Triton kernels, interpreted, against the plain-torch reference in fp64 on the same values."""

import pytest
import torch

from longreach import kernels
from longreach.kernels import dispatch
from longreach.kernels.jit import norm
from longreach.quant import MXFP4, NF4

from . import cases

CASES = cases.small()

# Rounding of results to their dtype. The interpreter cuts bf16 instead of rounding it: twice the error.
EPSILON = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}


# Triton's interpreter multiplies matrices of bf16 by their bits: that case waits for a GPU.
NO_PRODUCT = ("low-rank", torch.bfloat16)
# The half types differ from fp32 in their loads and roundings only: the least regular sizes show those.
HALF = [
    (name, dtype)
    for name in (*cases.ODD, "norm-2560", "norm-2304-gemma")
    for dtype in (torch.float16, torch.bfloat16)
    if (name, dtype) != NO_PRODUCT
]


@pytest.mark.parametrize("name, dtype", [*((name, torch.float32) for name in CASES), *HALF], ids=str)
def test_against_fp64(name: str, dtype: torch.dtype) -> None:
    with dispatch.use("jit"):
        ours = CASES[name]("cpu", dtype)
    exact = CASES[name]("cpu", torch.float64)
    for i, (x, y) in enumerate(zip(ours, exact, strict=True)):
        assert x.dtype in (dtype, torch.float32)
        x64 = x.double()
        same = x64 == y  # infinities too
        error = torch.where(same, 0, (x64 - y).abs())
        # A result that is the sum of a few rounded terms errs by those terms' rounding, however small it is itself.
        bound = EPSILON[dtype] * (y.abs() + y[y.isfinite()].abs().max() / 4 + 1e-3)
        assert bool((error <= bound).all()), f"result {i}: {(error / bound).max():.3g} of the bound"


def test_weight_gradient_over_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "PARTIALS", 4)
    case = cases.norm(19, 24, False)
    with dispatch.use("jit"):
        ours = case("cpu", torch.float32)
    for x, y in zip(ours, case("cpu", torch.float64), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=2e-6)


def test_certain_token() -> None:
    """Probability one: log-prob and entropy are zero, not a rounding above it."""
    logits = torch.full((2, 9000), -60.0)
    logits[0, 8500], logits[1, 3] = 37.7, 41.3
    with dispatch.use("jit"):
        logprob, lse, entropy = kernels.row_logprob(logits, torch.tensor([8500, 3]), 0.9, None, True)
    assert torch.equal(logprob, torch.zeros(2)) and torch.equal(entropy, torch.zeros(2))
    torch.testing.assert_close(lse, torch.tensor([37.7, 41.3]) / 0.9)


@pytest.mark.parametrize("shape", [(64, 64), (33, 70), (5, 7), (3, 4802)], ids=str)
@pytest.mark.parametrize("format", [NF4(), NF4(double=False), NF4(block=128), MXFP4()], ids=str)
def test_dequantization_is_the_reference_bit_for_bit(format, shape: tuple[int, int]) -> None:
    packed = format.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    # bf16 only where nothing is rounded: the interpreter cuts instead.
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if isinstance(format, MXFP4) else [])):
        with dispatch.use("jit"):
            ours = packed.dequantize(dtype)
        assert torch.equal(ours, packed.dequantize(dtype))


@pytest.mark.parametrize("name", ["norm-80", "norm-rope-96-96", "merge-80", "logprob-8193"])
def test_same_bits_twice(name: str) -> None:
    with dispatch.use("jit"):
        first, second = CASES[name]("cpu", torch.float16), CASES[name]("cpu", torch.float16)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
