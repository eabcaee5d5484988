"""Trainers: TRL's GRPO and SFT with exact chunked execution. Losses, metrics, callbacks and checkpoints are TRL's."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import InterruptCallback
    from .config import GRPOConfig, SFTConfig
    from .grpo import GRPOTrainer
    from .prompts import OverlongPromptError
    from .reward_calls import RewardError
    from .sft import SFTTrainer

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "InterruptCallback",
    "OverlongPromptError",
    "RewardError",
    "SFTConfig",
    "SFTTrainer",
]

# Loaded on first use: a configuration is made and checked without the trainers.
_MODULES = {
    "InterruptCallback": "checkpoint",
    "GRPOConfig": "config",
    "SFTConfig": "config",
    "GRPOTrainer": "grpo",
    "OverlongPromptError": "prompts",
    "RewardError": "reward_calls",
    "SFTTrainer": "sft",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
