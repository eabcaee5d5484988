"""PEFT's adapters of `target_parameters` on experts that are stored in 4 bits."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from torch import Tensor, nn

from ..quant.experts import FourBitExperts
from .experts import unwrap


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
        """Refused: a sum of the weight and the adapter is no 4-bit weight any more."""
        raise ValueError(
            f"the adapter of {self.parameter_name} can't be merged into weights of 4 bits; longreach.export(..., "
            "format='merged') writes the sum in 16 bits"
        )


def adopt_wrappers(model: nn.Module) -> int:
    """Give PEFT's wrappers around experts in 4 bits the class above; how many there were."""
    found = 0
    for module in model.modules():
        if type(module) is PeftParamWrapper and isinstance(module.get_base_layer(), FourBitExperts):
            module.__class__ = ParamWrapper
            found += 1
    return found
