"""Speed rewards for GPU kernels. Less trusted than the sandboxed rewards: see `kernel_reward`."""

from longreach.rewards.gpu.kernel_reward import KernelPlan, KernelReward, kernel_reward
from longreach.rewards.gpu.recipes import KERNEL_RECIPES, KernelRecipe

__all__ = ["KERNEL_RECIPES", "KernelPlan", "KernelRecipe", "KernelReward", "kernel_reward"]
