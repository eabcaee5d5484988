"""PEFT's wrappers around weights in 4 or 8 bits become ours, or are refused, whenever PEFT makes them.

Torch says of every module what is put into it (`register_module_module_registration_hook`), from the first import of this
package on. That reaches adapters that are added after `enable`; those from before this import are found on the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..quant.embedding import EightBitEmbedding, EightBitHead
from ..quant.experts import FourBitExperts
from ..quant.linear import FourBitLinear

FEW_BITS = (FourBitLinear, FourBitExperts, EightBitEmbedding, EightBitHead)


def adopt_wrappers(model: nn.Module) -> None:
    """Give PEFT's wrappers on a model the classes of `wrapper`."""
    for module in model.modules():
        _put_in(module, "base_layer", getattr(module, "base_layer", None))


def _put_in(owner: nn.Module, name: str, module: Any) -> None:
    if name == "base_layer" and isinstance(_innermost(module), FEW_BITS):
        from .wrapper import adopt  # here, because it brings PEFT along

        adopt(owner)
    elif name == "original_module" and module is not None and any(isinstance(m, FEW_BITS) for m in module.modules()):
        from .wrapper import refuse_copy

        refuse_copy(owner, module)


def _innermost(module: Any) -> Any:
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


register_module_module_registration_hook(_put_in)
