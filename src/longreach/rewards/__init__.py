"""Rewards that tricks cannot be paid on: sandboxed code, honest timing, strict answers, a run monitor.

Nothing here imports torch or the rest of the package.
"""

from longreach.rewards.result import InfrastructureError, RewardResult, Tier, completion_text, to_rewards
from longreach.rewards.sandbox import IsolationError, Limits, Sandbox, Suite

__all__ = [
    "InfrastructureError",
    "IsolationError",
    "Limits",
    "RewardResult",
    "Sandbox",
    "Suite",
    "Tier",
    "completion_text",
    "to_rewards",
]
