"""The formats against bitsandbytes' and Transformers' own code, and what bad input is told."""

import dataclasses

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from longreach.quant import FORMATS, MXFP4, NF4, FormatError, Packed, formats
from longreach.quant.formats import dynamic_map, packed_bytes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# bitsandbytes' dequantization on CPUs with AVX-512 (0.50.2) is wrong for rows that are a multiple of 32 and not of 64: its plain
# kernel and its CUDA kernels give what we give. No such rows here.
SHAPES = [(64, 64), (128, 320), (33, 70), (5, 7), (1, 1), (3, 19202), (2, 3, 31)]


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])) * 0.03).to(dtype)


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes isn't installed")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_is_bitsandbytes(bitsandbytes, shape, nested: bool) -> None:
    for dtype in FLOATS:
        codes, state = bitsandbytes.quantize_4bit(weight(shape, dtype), quant_type="nf4", compress_statistics=nested)
        ours = NF4(double=nested).quantize(weight(shape, dtype)).check("weight").tensors
        assert torch.equal(ours["codes"], codes)
        tensors = {"codes": codes, "absmax": state.absmax}
        if nested:
            tensors |= {"nested_absmax": state.state2.absmax, "nested_map": state.state2.code}
            tensors |= {"nested_offset": state.offset}
            for name in ("nested_absmax", "nested_map", "nested_offset"):
                assert torch.equal(ours[name], tensors[name])
            # Its search among the 256 values may take the neighbour of a scale that lies in the middle of two.
            far = (ours["absmax"].int() - state.absmax.int()).abs() * (state.state2.absmax.amax() > 0)
            assert far.max() <= 1 and far.float().mean() < 0.02
        else:
            assert torch.equal(ours["absmax"], state.absmax)
        stored = Packed(NF4(double=nested), shape, tensors).check("weight")
        for out in FLOATS:
            state.dtype = out
            assert torch.equal(stored.dequantize(out), bitsandbytes.dequantize_4bit(codes, state).view(shape))


def test_nf4_of_a_recorded_weight() -> None:
    """What bitsandbytes 0.50.2 made of 64 weights from -0.05 to 0.05, for where it is not installed."""
    packed = NF4(double=False).quantize(torch.linspace(-0.05, 0.05, 64))
    assert bytes(packed.tensors["codes"].flatten().tolist()).hex() == RECORDED
    assert packed.tensors["absmax"].tolist() == [0.05000000074505806]
    assert packed.dequantize(torch.float32)[[0, 20, 40, 63]].tolist() == VALUES


VALUES = [-0.05000000074505806, -0.019745875149965286, 0.012305615469813347, 0.05000000074505806]
RECORDED = "00000111111112222233344445556667788899aaabbbccccddddeeeeeeefffff"


def test_dynamic_map_is_bitsandbytes(bitsandbytes) -> None:
    assert torch.equal(dynamic_map(), bitsandbytes.create_dynamic_map())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_mxfp4_is_transformers(dtype: torch.dtype) -> None:
    """Every byte under every finite scale, in gpt-oss's layout, the signs of zeros too."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 16)
    expected = convert_moe_packed_tensors(codes[None], scales[None], dtype=dtype)[0].T
    ours = Packed(MXFP4(), (255, 512), {"codes": codes, "scales": scales}).check("weight").dequantize(dtype)
    assert torch.equal(ours, expected) and torch.equal(ours.signbit(), expected.signbit())


@pytest.mark.parametrize("shape", [(4, 64, 96), (7, 40), (3, 1), (65, 32)], ids=str)
def test_mxfp4_takes_the_nearest_value(shape) -> None:
    w = weight(shape)
    packed = MXFP4().quantize(w).check("weight")
    scales = torch.exp2(packed.tensors["scales"].double() - 127).repeat_interleave(32, -1)[..., : shape[-1]]
    values = torch.tensor(formats.E2M1_VALUES, dtype=torch.float64)
    nearest = (w.double() / scales).unsqueeze(-1).sub(values).abs().amin(-1)
    error = (packed.dequantize(torch.float64) - w.double()).abs() / scales
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-12)
    assert (w.abs() / scales < 8).all() and (w.abs().amax(-1) / scales[..., 0] >= 0).all()


@pytest.mark.parametrize("format", [NF4(), NF4(double=False), NF4(block=32), MXFP4()], ids=str)
def test_what_was_quantized_quantizes_to_itself(format) -> None:
    once = format.quantize(weight((48, 96))).dequantize(torch.float32)
    again = dataclasses.replace(format, double=False) if isinstance(format, NF4) else format
    assert torch.equal(again.quantize(once).dequantize(torch.float32), once)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_slices_change_nothing(format, monkeypatch: pytest.MonkeyPatch) -> None:
    from longreach.kernels import reference

    whole = format.quantize(weight((50, 96)))
    values = whole.dequantize(torch.bfloat16)
    monkeypatch.setattr(formats, "SLICE", 256)
    monkeypatch.setattr(reference, "SLICE", 128)
    sliced = format.quantize(weight((50, 96)))
    assert all(torch.equal(whole.tensors[k], sliced.tensors[k]) for k in whole.tensors)
    assert torch.equal(sliced.dequantize(torch.bfloat16), values)


@pytest.mark.parametrize("format", [NF4(), NF4(double=False), MXFP4()], ids=str)
def test_zeros_stay_zeros(format) -> None:
    w = torch.zeros(4, 64)
    w[1, 3] = 2.0
    out = format.quantize(w).dequantize(torch.float32)
    assert torch.equal(out == 0, w == 0) and out[1, 3] == pytest.approx(2.0, rel=1e-6)


def test_bytes() -> None:
    for format in FORMATS.values():
        packed = format.quantize(weight((128, 256)))
        assert packed.nbytes == packed_bytes(format, (128, 256))
    assert packed_bytes(MXFP4(), (128, 256)) == 128 * 256 * 17 // 32
    assert packed_bytes(NF4(), (128, 256)) == 128 * 256 // 2 + 512 + 2 * 4 + 1024 + 4


def broken(**changes) -> Packed:
    packed = NF4().quantize(weight((64, 64)))
    tensors = {k: v for k, v in (dict(packed.tensors) | changes).items() if v is not None}
    return Packed(packed.format, packed.shape, tensors)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: broken(absmax=None).check("q.weight"), "q.weight: its 'absmax' is missing"),
        (lambda: broken(absmax=torch.zeros(3, dtype=torch.uint8)).check("q.weight"), r"'absmax' is uint8 \[3\]"),
        (lambda: broken(codes=torch.zeros(2048, 1)).check("q.weight"), r"'codes' is float32 \[2048, 1\]"),
        (lambda: NF4(block=48), "block=48: expected a power of two"),
        (lambda: NF4().quantize(torch.zeros(4, 4, dtype=torch.int32)), r"can't quantize torch.int32 \[4, 4\]"),
        (lambda: MXFP4().quantize(torch.zeros(0, 4)), r"can't quantize torch.float32 \[0, 4\]"),
    ],
)  # fmt: skip
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    assert issubclass(FormatError, ValueError)
