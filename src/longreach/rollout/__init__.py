"""Rollouts: completions from the model that trains, on the same weights, in the same process."""

from .completion import Completion, generate, release_rollout, rollout_engine
from .engine import RolloutEngine
from .plan import RolloutOptions
from .sampler import SamplingParams

__all__ = [
    "Completion",
    "RolloutEngine",
    "RolloutOptions",
    "SamplingParams",
    "generate",
    "release_rollout",
    "rollout_engine",
]
