"""fp16 compute for cards without bf16: matrix products in fp16, and a residual stream in fp32.

Half precision fails in its range, not in its digits: above 65,504 a number becomes infinite. What grows with depth is the
residual stream, so between the layers it is fp32, while every matrix product, attention and gated activation runs in fp16. Inside
them, norms' statistics, softmax, log-sum-exp, log-probs and the sums of key, value and parameter gradients are fp32 in any
dtype. Gradients are scaled by the caller's `torch.amp.GradScaler`.

The hooks act on every pass of the decoder: training, scoring, and Transformers' own generation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .support import UnsupportedModelError

# The norms after attention and MLP multiply by weights of hundreds: their outputs leave fp16's range before they join the stream.
OVERFLOWING = ("gemma", "gemma2", "gemma3_text")


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """What matrix products run in: autocast's dtype, or the hidden state's."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def check_range(model: nn.Module) -> None:
    """Refuse a model whose weights did not fit into fp16 (ValueError names the first)."""
    for name, p in model.named_parameters():
        if p.dtype == torch.float16 and not bool(p.isfinite().all()):
            raise ValueError(f"{name} has values beyond the range of fp16 (65,504); load the model in bf16 or fp32")


def check_fits_fp16(kind: str) -> None:
    """Raise `UnsupportedModelError` for a family known to leave fp16's range inside its layers."""
    if kind in OVERFLOWING:
        raise UnsupportedModelError(
            f"model_type {kind!r} leaves the range of fp16 (65,504) inside its layers; train it in bf16 "
            "(weights='bf16', bf16=True), or on a card without bf16 in fp32 (weights='fp32', fp16=False)"
        )


class WideResidual:
    """Runs a decoder whose weights are fp16 with an fp32 residual stream, under autocast; others stay as they are.

    Installed once, before other hooks on the decoder: its output is then back in the dtype of the weights for them.

    Raises:
        UnsupportedModelError: in the first fp16 pass of a model known to leave fp16's range inside its layers.
    """

    def __init__(self, decoder: Any, layers: list[nn.Module], kind: str) -> None:
        self.kind = kind
        # Of the model itself: adapters have a dtype of their own.
        self._weight = next(p for n, p in layers[0].named_parameters() if p.is_floating_point() and "lora_" not in n)
        self._autocast: torch.autocast | None = None
        self._wide = False
        decoder.register_forward_pre_hook(self._enter)
        layers[0].register_forward_pre_hook(self._first_layer)
        decoder.register_forward_hook(self._leave, always_call=True)

    def _enter(self, decoder: nn.Module, args: tuple[Any, ...]) -> None:
        self._close()  # an interrupt may have ended the last pass before its closing hook
        device = self._weight.device.type
        cast = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if cast else self._weight.dtype
        if compute != torch.float16:
            return
        check_fits_fp16(self.kind)
        self._wide = True
        if not cast:
            self._autocast = torch.autocast(device, dtype=torch.float16)
            self._autocast.__enter__()

    def _first_layer(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (self.widened(args[0]), *args[1:]) if args else None

    def widened(self, hidden: Tensor) -> Tensor:
        """The hidden state that the first layer gets, also when checkpointing runs the layer again after the pass."""
        return hidden.float() if compute_dtype(hidden) == torch.float16 else hidden

    def narrowed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A layer's arguments with rotary tables in the dtype of the weights, as they are where the decoder embeds itself."""
        tables = kwargs.get("position_embeddings")
        if not self._wide or tables is None:
            return kwargs
        return kwargs | {"position_embeddings": tuple(x.to(self._weight.dtype) for x in tables)}

    def _leave(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        wide = self._wide
        self._close()
        if not wide or output is None:
            return None
        if isinstance(output, tuple):
            return (output[0].to(self._weight.dtype), *output[1:])
        output.last_hidden_state = output.last_hidden_state.to(self._weight.dtype)
        return output

    def _close(self) -> None:
        self._wide = False
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None
