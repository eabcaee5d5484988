"""How a checkpoint stores its weights, by its config, and what `load` refuses to make of them: a plan refuses the same."""

from __future__ import annotations

from ..quant.formats import FORMATS as PACKED
from .precision import check_fits_fp16
from .shape import ModelShape

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
# Their embedding multiplies the rows it looks up, in a class of its own.
SCALED_EMBEDDING = ("gemma", "gemma2", "gemma3_text")


def stored_weights(shape: ModelShape) -> str | None:
    """What `load` gives where nobody asks for another form, a name of `work.FORMATS`; None where the config does not say.

    Raises:
        ValueError: weights packed in a way that can't be read.
    """
    if shape.quantization is None:
        return DTYPES.get(shape.dtype or "")
    from ..quant.quantizer import stored_config  # brings Transformers along, the slowest part of a plan

    found = stored_config(shape.quantization, shape.name)
    assert found is not None
    return found.weights


def loadable(shape: ModelShape, weights: str | None, *, stored: str | None = None) -> str:
    """The form that a plan counts with: the one asked for, or what is stored (bf16 where the config does not say).

    Args:
        stored: of a model that is in memory; None to go by the config.

    Raises:
        ValueError: `load` or the first step would refuse it.
    """
    published = stored_weights(shape)
    if shape.quantization is not None:
        check_not_quantized_again(weights, published, shape.name)
    chosen = weights or stored or published or "bf16"
    if chosen == "fp16":
        check_fits_fp16(shape.kind)
    return chosen


def check_not_quantized_again(weights: str | None, stored: str | None, name: str) -> None:
    """Refuse a packed form of a checkpoint that is packed in another one."""
    if weights in PACKED and weights != stored:
        raise ValueError(
            f"weights={weights!r}: {name} is stored in {stored}, and quantizing it again would add a second error; "
            f"use weights=None (as stored), or weights={weights!r} on the 16-bit model"
        )


def check_plain_embedding(kind: str) -> None:
    """Refuse 8 bits for an embedding that does more than look up, as `store_in_8_bits` does of a model."""
    if kind in SCALED_EMBEDDING:
        raise ValueError(
            f"embedding='int8': the input embedding of {kind} scales what it looks up, which is more than an Embedding does; "
            "leave embedding out"
        )
