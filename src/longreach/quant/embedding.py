"""Embedding and head in 8 bits: a scale per row, that is per token of the vocabulary. Both are frozen.

It halves what they take (for a small model with a large vocabulary the largest part of its 4-bit weights) and changes the logits
slightly. Rows are made as they are looked up; the head's weight is made in slices of the vocabulary, forward and backward.

Shape suffixes: V vocabulary, M hidden size, C rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SLICE = 4096  # rows of the head's weight that are made at once
LARGEST = 127


def quantize_rows(weight_VM: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [V, M] and fp32 scales [V]: the nearest multiple of a row's largest magnitude over 127.

    The codes are on the CPU, whatever the device of the weight: beside it there may be no room for them.
    """
    codes_VM = torch.empty(weight_VM.shape, dtype=torch.int8)
    scale_V = torch.empty(len(weight_VM), dtype=torch.float32, device=weight_VM.device)
    for start in range(0, len(weight_VM), SLICE):
        part = slice(start, start + SLICE)
        rows = weight_VM[part].float()
        scale_V[part] = rows.abs().amax(1) / LARGEST
        codes_VM[part] = (rows / scale_V[part, None].clamp(min=1e-38)).round_().to(torch.int8)
    return codes_VM, scale_V


def rows_of(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """code * scale, one rounding; `codes` [..., M], `scale` [...]."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return codes.to(wide).mul_(scale[..., None]).to(dtype)


class _EightBit(nn.Module):
    """Codes [V, M] int8 as the frozen parameter `weight`, scales [V] fp32 as the buffer `scale`; casts reach `dtype` only."""

    weight: nn.Parameter
    scale: Tensor

    def adopt(self, codes_VM: Tensor, scale_V: Tensor, dtype: torch.dtype) -> None:
        self.weight = nn.Parameter(codes_VM, requires_grad=False)
        self.register_buffer("scale", scale_V)
        # Without elements; it is the parameter by which Transformers finds a model's dtype.
        self.like = nn.Parameter(torch.empty(0, dtype=dtype, device=scale_V.device), requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of what it computes."""
        return self.like.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [V, M]."""
        return rows_of(self.weight, self.scale, dtype or self.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """A checkpoint gets the weight as others know it, in `dtype` and on the host."""
        parts = [rows_of(c, s, self.dtype).cpu() for c, s in zip(self.weight.split(SLICE), self.scale.split(SLICE))]
        destination[prefix + "weight"] = torch.cat(parts)
        bias = self._parameters.get("bias")
        if bias is not None:
            destination[prefix + "bias"] = bias if keep_vars else bias.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *args: Any
    ) -> None:
        if prefix + "weight" in state_dict:
            raise ValueError(
                f"{prefix}weight is stored in 8 bits and can't take other weights; load the model again instead"
            )
        if strict:
            missing_keys.append(prefix + "weight")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.scale.device)
        return self


class EightBitEmbedding(_EightBit, nn.Embedding):  # type: ignore[misc]
    """`nn.Embedding` with rows in 8 bits."""

    def __init__(self, source: nn.Embedding, codes_VM: Tensor, scale_V: Tensor) -> None:
        nn.Module.__init__(self)
        for name in nn.Embedding.__constants__:
            setattr(self, name, getattr(source, name))
        self.adopt(codes_VM, scale_V, source.weight.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return rows_of(F.embedding(ids, self.weight), self.scale[ids], self.dtype)


def rows_dtype(embedding: Any) -> torch.dtype:
    """What an embedding hands out: the dtype of its weight, unless that is stored in 8 bits."""
    return embedding.dtype if isinstance(embedding, EightBitEmbedding) else embedding.weight.dtype


class EightBitHead(_EightBit, nn.Linear):  # type: ignore[misc]
    """`nn.Linear` over the vocabulary with rows in 8 bits; the backward is that of its input only."""

    def __init__(self, source: nn.Linear, codes_VM: Tensor, scale_V: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.adopt(codes_VM, scale_V, source.weight.dtype)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = _SlicedProduct.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _SlicedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, head: EightBitHead) -> Tensor:
        ctx.head = head
        x_CM = x.reshape(-1, x.shape[-1])
        y = x.new_empty(*x.shape[:-1], head.out_features)
        for start in range(0, head.out_features, SLICE):
            part = slice(start, min(start + SLICE, head.out_features))
            if x.dtype == torch.float16:  # products with the codes themselves could pass its largest number
                found_CV = x_CM @ rows_of(head.weight[part], head.scale[part], x.dtype).t()
            else:
                found_CV = (x_CM @ head.weight[part].to(x.dtype).t()).mul_(head.scale[part])
            y.view(-1, head.out_features)[:, part] = found_CV
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        dy_CV = dy.reshape(-1, dy.shape[-1])
        # Slices are summed in fp32, as inside one product.
        dx_CM = dy.new_zeros(len(dy_CV), ctx.head.in_features, dtype=torch.promote_types(dy.dtype, torch.float32))
        for part, rows in _slices(ctx.head, dy.dtype):
            dx_CM += dy_CV[:, part] @ rows
        return dx_CM.to(dy.dtype).view(*dy.shape[:-1], ctx.head.in_features), None


def _slices(head: EightBitHead, dtype: torch.dtype):
    for start in range(0, head.out_features, SLICE):
        part = slice(start, min(start + SLICE, head.out_features))
        yield part, rows_of(head.weight[part], head.scale[part], dtype)


def store_in_8_bits(model: Any) -> None:
    """Put a Transformers model's embedding and head into 8 bits, in place; shared codes where they are tied. On the way the
    device holds no more than before: codes wait on the host until the 16-bit weight is gone.

    Raises:
        ValueError: an embedding of a class of the model's own (it does more than look up), or one that is to be trained.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module, plain in (("input embedding", embedding, nn.Embedding), ("head", head, nn.Linear)):
        if type(module) is not plain:
            raise ValueError(
                f"embedding='int8': the {name} of {type(model).__name__} is a {type(module).__name__}, which does more than a "
                f"{plain.__name__}; leave embedding out"
            )
    del module
    tied, device = head.weight is embedding.weight, embedding.weight.device
    codes, scale = quantize_rows(embedding.weight.detach())
    small = EightBitEmbedding(embedding, codes, scale)
    model.set_input_embeddings(small.train(embedding.training))
    del embedding
    if not tied:
        small.weight.data = codes.to(device)
        device = head.weight.device
        codes, scale = quantize_rows(head.weight.detach())
    small_head = EightBitHead(head, codes, scale)
    if tied:
        small_head.weight, small_head.scale = small.weight, small.scale
    model.set_output_embeddings(small_head.train(head.training))
    del head
    small_head.weight.data = codes.to(device)
