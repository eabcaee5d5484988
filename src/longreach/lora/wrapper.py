"""PEFT's adapters on weights that are stored in 4 or 8 bits: their forward on experts, and a refusal to merge."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import Embedding as PeftEmbedding
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from torch import Tensor, nn

from ..quant.embedding import EightBitEmbedding, EightBitHead
from ..quant.experts import FourBitExperts
from ..quant.linear import FourBitLinear
from .experts import unwrap


def _refused(what: str, bits: int = 4) -> ValueError:
    """A sum of the weight and the adapter is no weight of so few bits any more."""
    return ValueError(
        f"the adapter of {what} can't be merged into weights of {bits} bits. Write the sum in 16 bits: longreach.export(model, "
        "tokenizer, path, format='merged'), or `longreach export RUN --format merged`; to sample, leave the adapter on"
    )


class Linear(PeftLinear):
    """PEFT's LoRA on a linear layer in 4 bits or a head in 8, whose merge would add to codes. Bears PEFT's class name."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused."""
        raise _refused("the head", 8) if isinstance(self.get_base_layer(), EightBitHead) else _refused("a linear layer")


class Embedding(PeftEmbedding):
    """The same on an embedding in 8 bits."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused."""
        raise _refused("the embedding", 8)


class ParamWrapper(PeftParamWrapper):
    """PEFT's wrapper around experts in 4 bits, whose own forward would need the weights in floating point.

    Bears PEFT's class name, by which PEFT finds wrappers again. Nested wrappers are one call: the outermost runs the experts
    with the adapters of all.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        unwrapped = unwrap(self)
        if unwrapped is None:
            raise ValueError(
                "experts in 4 bits take one active adapter of PEFT's standard form at a time, not merged; active are "
                f"{list(self.active_adapters)}, merged {list(self.merged_adapters)}"
            )
        base, adapters = unwrapped
        return base.run(x, *args, {name: (*adapter.stacked(), adapter.scale) for name, adapter in adapters.items()})

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused."""
        raise _refused(self.parameter_name)


def adopt_wrappers(model: nn.Module) -> None:
    """Give PEFT's wrappers around weights in 4 or 8 bits the classes above."""
    for module in model.modules():
        if type(module) is PeftParamWrapper and isinstance(module.get_base_layer(), FourBitExperts):
            module.__class__ = ParamWrapper
        elif type(module) is PeftLinear and isinstance(module.get_base_layer(), (FourBitLinear, EightBitHead)):
            module.__class__ = Linear
        elif type(module) is PeftEmbedding and isinstance(module.get_base_layer(), EightBitEmbedding):
            module.__class__ = Embedding
