"""Longreach: reinforcement learning and fine-tuning of language models on very long contexts, on one GPU."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Names load on first use, so that `longreach.rewards` and the command line need no torch. None may be that of a module of this
# package: importing the module would put it in the name's place.
_NAMES = {
    "TokenTree": "context.tree",
    "enable": "context.install",
    "token_logprobs": "context.logprob",
    "load": "loading",
    "FourBitConfig": "quant.quantizer",
    "release_gradients": "context.release",
    "plan": "context.plan",
    "export": "exporting.pipeline",
    "generate": "rollout.completion",
    "Completion": "rollout.completion",
    "SamplingParams": "rollout.sampler",
    "GRPOConfig": "trainers.config",
    "SFTConfig": "trainers.config",
    "GRPOTrainer": "trainers.grpo",
    "SFTTrainer": "trainers.sft",
}
_MODULES = ("attention", "audit", "cli", "context", "report", "rewards", "rollout", "trainers", "zoo")

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'longreach' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
