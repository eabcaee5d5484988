"""Rewards that tricks cannot be paid on: sandboxed code, honest timing, strict answers, a run monitor.

Nothing here imports torch or the rest of the package.
"""

from longreach.rewards.result import InfrastructureError, RewardResult, Tier, completion_text, to_rewards

__all__ = ["InfrastructureError", "RewardResult", "Tier", "completion_text", "to_rewards"]
