"""Where a rollout's prefill can wait for the training step: the bytes it takes, and whether the plan has them."""

from __future__ import annotations

from dataclasses import replace

from .choice import card_bytes
from .limits import HOST_PROCESS
from .memory import Memory
from .plan import Plan
from .policy import Policy
from .work import FLOAT, Work

NAME = "prompts' layer inputs"


def prefill_bytes(work: Work, policy: Policy, prompts: int) -> int:
    """What `reuse.Prefill` holds: per prompt token each layer's input but the first's, and attention that the step would save."""
    shape = work.shape
    token = shape.hidden * work.format.residual
    if policy.save_attention:
        token += shape.query * work.itemsize + shape.heads * FLOAT
    return prompts * max(0, work.prompt - 1) * (shape.layers - 1) * token


def prefill_place(plan: Plan, prompts: int) -> str | None:
    """ "device" or "host", where the prompts of a rollout fit beside the step and beside the sampling; None for neither.

    Args:
        prompts: distinct ones of a rollout. Those of the step that runs stand for its own layer inputs; the others come on top.
    """
    whole = prefill_bytes(plan.work, plan.policy, prompts)
    waiting = prefill_bytes(plan.work, plan.policy, max(0, prompts - plan.work.prompts))
    step, sampled, on_host = plan.choice.memory, plan.sampled, plan.policy.on_host
    if not on_host:
        moments = [_with(step, gpu=waiting)] + ([] if sampled is None else [_with(sampled, gpu=whole)])
        if all(_fits(plan, memory) for memory in moments):
            return "device"
    if not (on_host or plan.limits.offload):
        return None
    moments = [_with(step, host=waiting if on_host else whole)] + (
        [] if sampled is None else [_with(sampled, host=whole)]
    )
    return "host" if all(_fits(plan, memory) for memory in moments) else None


def _with(memory: Memory, gpu: int = 0, host: int = 0) -> Memory:
    return replace(memory, parts={**memory.parts, NAME: gpu}, host_parts={**memory.host_parts, NAME: host})


def _fits(plan: Plan, memory: Memory) -> bool:
    return plan.limits.fit(card_bytes(memory), memory.host + HOST_PROCESS if memory.host else 0)
