"""4-bit weights: formats, linear layers that compute with them, and loading through Transformers."""

from .formats import FORMATS, MXFP4, NF4, FormatError, Packed

__all__ = ["FORMATS", "MXFP4", "NF4", "FormatError", "Packed"]
