"""LoRA as few matrix products, with PEFT's parameters."""

from .linear import Linear, LinearGroup

__all__ = ["Linear", "LinearGroup"]
