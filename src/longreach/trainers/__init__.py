"""Trainers: TRL's GRPO and SFT with exact chunked execution. Losses, metrics, callbacks and checkpoints are TRL's."""

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
