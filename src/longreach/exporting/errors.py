"""What can go wrong with an export, each with a message that says what would be right."""

from __future__ import annotations


class ExportError(ValueError):
    """The export can't be made from what was given. Nothing was left behind."""


class MismatchError(ExportError):
    """The export was made, and does not compute what the training model computes. It lies in a folder marked bad."""
