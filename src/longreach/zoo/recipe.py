"""The demo's settings: GRPO on the embedded model, found by hand and checked over several seeds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A GRPO run on one task of the zoo. Every weight is trained; the model runs in float32."""

    task: str = "program_trace"
    length: int = 2048
    """Tokens of a prompt, for training and for the held-out evaluation."""
    steps: int = 24
    prompts_per_step: int = 4
    group: int = 8
    """Completions of a prompt, TRL's `num_generations`."""
    learning_rate: float = 4e-4
    schedule: str = "linear"
    """TRL's `lr_scheduler_type`: down to 0 over the run, without warm-up."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    loss: str = "dapo"
    """TRL's `loss_type`: the mean over all completion tokens of a step."""
    beta: float = 0.0
    temperature: float = 1.0
    max_completion_tokens: int = 6
    """The longest right answer is 3 tokens and the end; words in front take 2 more."""
    eval_prompts: int = 16
    eval_group: int = 4
    """Completions sampled for each held-out prompt, at `temperature`."""
    seed: int = 0


DEMO = Recipe()
"""What `longreach demo` runs."""
