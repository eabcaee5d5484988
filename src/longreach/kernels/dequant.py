"""4-bit weights to floating point: codes, a table of 16 values, and one scale per block of weights.

Two formats: NF4 (arXiv 2305.14314; the layout of bitsandbytes) and MXFP4 (OCP Microscaling Formats 1.0; the layout of gpt-oss).
Every value is table[code] * scale in fp32 with one rounding to the output's dtype, on every device: the same bits.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import check_shape, implementation
from .reference import E2M1_VALUES, NESTED_BLOCK, NF4_VALUES

__all__ = ["E2M1_VALUES", "MX_BLOCK", "NESTED_BLOCK", "NF4_VALUES", "dequantize_mxfp4", "dequantize_nf4"]

MX_BLOCK = 32  # weights that share a scale


def dequantize_nf4(
    codes: Tensor, absmax: Tensor, out: Tensor, *, block: int = 64, nested: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """NF4 to out's dtype.

    Args:
        codes: uint8, (numel + 1) // 2 elements of any shape; the first of two weights is in the high half of a byte.
        absmax: the scale of each run of `block` weights in row-major order: fp32, or uint8 with `nested`.
        out: contiguous, of any shape and floating dtype; its numel is the number of weights.
        block: weights per scale, a power of two from 32 up.
        nested: (scales [blocks / 256] fp32, table [256] fp32, offset [] fp32) of double quantization; a scale is
            table[absmax] * nested scale + offset.

    Returns:
        out.
    """
    blocks = _parts(out.numel(), block)
    if block < 32 or block & (block - 1):
        raise ValueError(f"dequantize_nf4: block={block}: expected a power of two from 32 up")
    _check_out("dequantize_nf4", out)
    check_shape("dequantize_nf4", "codes (flat)", codes.reshape(-1), (_parts(out.numel(), 2),), "out")
    check_shape("dequantize_nf4", "absmax", absmax, (blocks,), "out")
    if nested is not None:
        check_shape("dequantize_nf4", "nested absmax", nested[0], (_parts(blocks, NESTED_BLOCK),), "absmax")
        check_shape("dequantize_nf4", "nested table", nested[1], (256,), "absmax")
    return implementation(out, "dequant").dequantize_nf4(codes, absmax, out, block=block, nested=nested)


def dequantize_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """MXFP4 to out's dtype.

    Args:
        codes: uint8 [..., G, 16]; the first of two weights is in the low half of a byte.
        scales: uint8 [..., G]: e8m0, 2 ** (scale - 127) for each run of 32 weights; 255 gives infinities and NaN.
        out: contiguous [..., 32 G], of any floating dtype.

    Returns:
        out.
    """
    _check_out("dequantize_mxfp4", out)
    groups = (*out.shape[:-1], out.shape[-1] // MX_BLOCK)
    if out.shape[-1] % MX_BLOCK:
        raise ValueError(f"dequantize_mxfp4: out has shape {tuple(out.shape)}; its last axis must be a multiple of 32")
    check_shape("dequantize_mxfp4", "codes", codes, (*groups, MX_BLOCK // 2), "out")
    check_shape("dequantize_mxfp4", "scales", scales, groups, "out")
    return implementation(out, "dequant").dequantize_mxfp4(codes, scales, out)


def _parts(size: int, block: int) -> int:
    return -(-size // block)


def _check_out(op: str, out: Tensor) -> None:
    if not out.is_contiguous() or not out.is_floating_point():
        raise ValueError(
            f"{op}: out must be a contiguous tensor of a floating dtype; it is {out.dtype}, {out.stride()}"
        )
