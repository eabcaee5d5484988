"""Rewards that tricks cannot be paid on: sandboxed code, honest timing, strict answers, a run monitor.

Nothing here imports torch or the rest of the package.
"""

from longreach.rewards.code import code_reward
from longreach.rewards.math import math_reward, numeric_reward
from longreach.rewards.policy import Policy, policy_reward
from longreach.rewards.recipes import SpeedRecipe
from longreach.rewards.result import InfrastructureError, RewardResult, Tier, completion_text, to_rewards
from longreach.rewards.sandbox import IsolationError, Limits, Sandbox, Suite
from longreach.rewards.speed import TimingPlan, speed_reward
from longreach.rewards.tasks import FunctionTask, ProgramTask, Relation, SuiteTask
from longreach.rewards.text import format_reward, length_reward, text_reward

__all__ = [
    "FunctionTask",
    "InfrastructureError",
    "IsolationError",
    "Limits",
    "Policy",
    "ProgramTask",
    "Relation",
    "RewardResult",
    "Sandbox",
    "SpeedRecipe",
    "Suite",
    "SuiteTask",
    "Tier",
    "TimingPlan",
    "code_reward",
    "completion_text",
    "format_reward",
    "length_reward",
    "math_reward",
    "numeric_reward",
    "policy_reward",
    "speed_reward",
    "text_reward",
    "to_rewards",
]
