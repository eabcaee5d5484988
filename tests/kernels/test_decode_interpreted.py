"""The decoding kernels, interpreted, against their plain-torch twins in fp64 on the same values."""

import pytest
import torch

from longreach.kernels import dispatch

from . import decode_cases

CASES = decode_cases.small()
EPSILON = {torch.float32: 4e-6, torch.float16: 2**-10}  # the interpreter has no products of bf16


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name: str, dtype: torch.dtype) -> None:
    with dispatch.use("jit"):
        ours = CASES[name]("cpu", dtype)
    exact = CASES[name]("cpu", torch.float64)
    for i, (x, y) in enumerate(zip(ours, exact, strict=True)):
        assert x.dtype in (dtype, torch.float32)
        assert (x.isnan() == y.isnan()).all()
        error = torch.where(y.isnan(), 0, (x.double() - y).abs())
        bound = EPSILON[dtype] * (y.abs() + y.nan_to_num().abs().max() / 2 + 1e-3)
        worst = torch.where(y.isnan(), 0, error / bound).max()
        assert worst <= 1, f"result {i}: {worst:.3g} of the bound"


@pytest.mark.parametrize("name", ["attention-two-groups", "fourbit-split-sum", "sample"])
def test_same_bits_twice(name: str) -> None:
    with dispatch.use("jit"):
        first, second = CASES[name]("cpu", torch.float16), CASES[name]("cpu", torch.float16)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_programs_take_several_items(monkeypatch: pytest.MonkeyPatch) -> None:
    from longreach.kernels.jit import decode_attention

    case = CASES["attention-many-splits"]
    with dispatch.use("jit"):
        one_each = case("cpu", torch.float32)
        monkeypatch.setattr(decode_attention, "PROGRAMS", 5)
        several = case("cpu", torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(one_each, several, strict=True))


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_does_not_depend_on_the_others(window: int | None) -> None:
    """The first row alone with its prefix, beside other members, and beside another prefix."""
    with dispatch.use("jit"):
        alone, beside = (
            decode_cases.attention(groups=groups, heads=(4, 2), window=window, per_row=True)("cpu", torch.float32)[0]
            for groups in ([(300, [270])], [(300, [270, 700, 3]), (90, [260])])
        )
    assert torch.equal(alone[0], beside[0])
