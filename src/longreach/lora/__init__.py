"""LoRA as few matrix products, with PEFT's parameters."""

from .adoption import adopt_wrappers
from .experts import Experts
from .linear import Linear, LinearGroup

__all__ = ["Experts", "Linear", "LinearGroup", "adopt_wrappers"]
