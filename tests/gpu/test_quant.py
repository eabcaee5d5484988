"""4-bit weights on a CUDA device: the same bits as the reference and as bitsandbytes; a layer's forward and backward."""

import pytest
import torch

from longreach.kernels import dispatch
from longreach.quant import MXFP4, NF4, Packed
from longreach.quant.embedding import EightBitHead, quantize_rows
from longreach.quant.linear import FourBitLinear, shared_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FORMATS = [NF4(), NF4(double=False), NF4(block=128), MXFP4()]
SHAPES = [(64, 64), (33, 70), (5, 7), (3, 19202), (2560, 9728), (2, 96, 64)]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_as_the_reference(format, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    packed = format.quantize(torch.randn(shape, device="cuda") * 0.03).check("weight")
    for dtype in FLOATS:
        with dispatch.use("reference"):
            expected = packed.dequantize(dtype)
        assert torch.equal(packed.dequantize(dtype), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_code_and_scale_of_mxfp4(dtype: torch.dtype) -> None:
    """All 256 bytes under each of the 255 finite scales, the subnormal one among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    packed = Packed(MXFP4(), (255, 512), {"codes": codes, "scales": scales}).check("weight")
    on_card = Packed(MXFP4(), (255, 512), {"codes": codes.cuda(), "scales": scales.cuda()})
    ours, expected = on_card.dequantize(dtype).cpu(), packed.dequantize(dtype)
    assert torch.equal(ours, expected) and torch.equal(ours.signbit(), expected.signbit())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (33, 70), (2560, 4096)], ids=str)
def test_same_bits_as_bitsandbytes(shape: tuple[int, int], nested: bool) -> None:
    other = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes isn't installed")
    torch.manual_seed(0)
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    codes, state = other.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    tensors = {"codes": codes, "absmax": state.absmax}
    if nested:
        tensors |= {
            "nested_absmax": state.state2.absmax,
            "nested_map": state.state2.code,
            "nested_offset": state.offset,
        }
    packed = Packed(NF4(double=nested), shape, tensors).check("weight")
    for dtype in FLOATS:
        state.dtype = dtype
        assert torch.equal(packed.dequantize(dtype), other.dequantize_4bit(codes, state))
    ours = NF4(double=False).quantize(weight)
    assert torch.equal(ours.tensors["codes"], codes)
    if not nested:
        assert torch.equal(ours.tensors["absmax"], state.absmax)


@pytest.mark.parametrize("format", FORMATS[::3], ids=str)
def test_linear_layer(format) -> None:
    """Bit for bit the products with the dequantized weight, and nothing of its size kept for the backward."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, 4096, device="cuda", dtype=torch.bfloat16)
    small = FourBitLinear.of(linear, format)
    weight = small.dequantize(torch.bfloat16)
    x = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(2, 64, 4096, device="cuda", dtype=torch.bfloat16)
    small(x.detach())  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    y = small(x)
    assert torch.cuda.memory_allocated() - before < weight.nbytes // 2
    y.backward(dy)
    assert torch.equal(y, torch.nn.functional.linear(x, weight, small.bias))
    assert torch.equal(x.grad, dy @ weight)
    with shared_weights():
        assert torch.equal(small(x), y)


def test_head_in_8_bits() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(256, 40_000, bias=False, device="cuda", dtype=torch.bfloat16)
    small = EightBitHead(head, *quantize_rows(head.weight.detach())).cuda()
    weight = small.dequantize()
    x = torch.randn(9, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(9, 40_000, device="cuda", dtype=torch.bfloat16)
    y = small(x)
    y.backward(dy)
    torch.testing.assert_close(y.float(), x.float() @ weight.float().t(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(x.grad.float(), dy.float() @ weight.float(), rtol=1e-2, atol=0.2)
    assert (weight - head.weight).abs().max() <= head.weight.abs().max() / 100
