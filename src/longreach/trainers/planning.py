"""A trainer's plan: the largest step that its configuration admits, made before training starts and followed by every step."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig, Trainer

from ..context.arguments import laid_down, ranks_of
from ..context.auto import Loaded, explained, processes_here
from ..context.choice import card_bytes
from ..context.limits import Limits, this_machine
from ..context.memory import scoring_memory
from ..context.plan import Plan, PlanError, made, size
from ..context.sampling import Sampling, adapter_copies
from ..context.shape import ModelShape
from ..context.work import Work, optimizer_kind
from ..rollout.cache import LayerCache
from ..rollout.plan import Demand, RolloutOptions, device_budget, limits_for
from .config import GRPOConfig, SFTConfig

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
GO_ON = "To go on all the same, with what needs least memory, set on_misfit='warn'."


def largest_step(args: GRPOConfig | SFTConfig) -> dict[str, Any] | None:
    """Rows of the largest step of one process, as arguments of `Work`; None where nothing bounds their length."""
    rows, context = args.per_device_train_batch_size, args.max_length
    if context is None:
        return None
    if isinstance(args, SFTConfig):
        return {
            "context": max(2, context),
            "completion": max(1, context - 1),
            "group": 1,
            "prompts": rows,
            "compact": False,
        }
    group = min(args.num_generations or 1, rows)
    completion = args.max_completion_length or context - 1
    return {"context": context, "completion": completion, "group": group, "prompts": max(1, rows // group)}


def how_trained(args: GRPOConfig | SFTConfig) -> dict[str, Any]:
    """Optimizer, gradients and processes, as arguments of `Work`."""
    kind = optimizer_kind(str(getattr(args.optim, "value", args.optim)))
    if args.optimizer_states == "host":
        kind = "host_adamw"
    return {"optimizer": kind, "released": args.release_gradients, "replicas": max(1, args.world_size)}


def fixed_by(args: GRPOConfig | SFTConfig) -> dict[str, Any]:
    """What the configuration lays down for the engine."""
    return laid_down(args.chunk, args.offload, args.save_attention, args.keep_every, free="auto")


def refuse_before_loading(config: PretrainedConfig, args: GRPOConfig | SFTConfig, dtype: str, peft_config: Any) -> None:
    """Raise PlanError for a model whose largest step cannot fit, before its weights are read.

    Silent where the form of the weights or the adapter is not known from the configuration alone; once the model is there, it
    is planned again from what it is.
    """
    step, weights = largest_step(args), DTYPES.get(dtype)
    if step is None or weights is None or args.on_misfit != "error" or getattr(config, "quantization_config", None):
        return
    try:
        shape = ModelShape.of(config)
        ranks = ranks_of(peft_config, shape)
    except ValueError:  # no formula, or an adapter of another kind
        return
    work = Work(shape, weights=weights, ranks=ranks, **step, **how_trained(args))
    _planned(work, this_machine(str(args.device), processes_here()), args)


def _planned(work: Work, limits: Limits, args: GRPOConfig | SFTConfig) -> Plan:
    try:
        return made(work, limits, fixed_by(args), refuse=args.on_misfit == "error" and work.shape.exact)
    except PlanError as error:
        asked = f"max_length={args.max_length} with per_device_train_batch_size={args.per_device_train_batch_size}"
        raise PlanError(f"{asked}: {error} {GO_ON}") from None


class Planned(Trainer):
    """Part of a trainer: its plan, and what it says when memory runs out all the same.

    Attributes:
        plan: of the largest step; None where `max_length` is None, and each step then chooses by its own size.
    """

    args: Any
    accelerator: Any
    plan: Plan | None = None
    _plan_logged: bool = False

    def _make_plan(self, model: Any, *, engine: bool = False, reference: bool = False) -> dict[str, Any]:
        """Plan the largest step, print it in one line, and return the options for `longreach.enable`.

        Args:
            engine: completions are drawn by the rollout engine between the steps.
            reference: a second model scores them.

        Raises:
            PlanError: it cannot fit, and `on_misfit` is "error".
        """
        args = self.args
        step = largest_step(args)
        if step is None:
            return {name: getattr(args, name) for name in ("chunk", "offload", "save_attention", "keep_every")}
        loaded = Loaded.of(model, processes_here())
        work = loaded.work(**step, **how_trained(args), reference=reference)
        plan = _planned(work, loaded.limits, args)
        if engine:
            plan = self._with_sampling(plan, model)
        self._check_evaluation(plan)
        self.plan = plan
        if self.accelerator.is_main_process:
            print(f"plan: {plan.describe()}", file=sys.stderr)
        return plan.options

    def _with_sampling(self, plan: Plan, model: Any) -> Plan:
        """The plan with the rollout engine's cache beside it, kept during the step if there is room."""
        args, work, shape = self.args, plan.work, plan.work.shape
        requests = args.per_device_train_batch_size * (args.steps_per_generation or 1)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point() and p.ndim == 1)
        layers = [LayerCache(shape.kv_heads, shape.head_dim, shape.head_dim, dtype, window) for window in shape.windows]
        demand = Demand(requests, -(-requests // work.group), max(1, work.prompt), work.completion)
        device = torch.device(args.device)
        budget = device_budget(model, device)
        try:
            limits = limits_for(demand, RolloutOptions(rows=args.rollout_rows), layers, budget, device.type == "cuda")
        except ValueError as error:
            if args.on_misfit == "warn" or not shape.exact:
                return plan
            raise PlanError(f"max_length={args.max_length}: {error}, or set rollout='transformers'. {GO_ON}") from None
        sampling = Sampling(limits.rows, limits.prompts, on_host=limits.host_prompts)
        if args.rollout_memory == "keep":
            kept = made(
                replace(work, standing=limits.pool_bytes(layers) + adapter_copies(work)),
                plan.limits,
                plan.fixed,
                sampling=sampling,
                refuse=False,
            )
            if kept.fits:
                return kept
            args.rollout_memory = "release"
        return replace(plan, sampling=sampling)

    def _check_evaluation(self, plan: Plan) -> None:
        """Evaluation has a batch size of its own: refuse one that does not fit where the training step does."""
        args, work = self.args, plan.work
        if isinstance(args, GRPOConfig) or args.eval_strategy == "no" or args.on_misfit != "error":
            return

        def needed(rows: int) -> int:
            return card_bytes(scoring_memory(replace(work, prompts=rows), plan.policy))

        room, rows = plan.limits.gpu_bytes, args.per_device_eval_batch_size
        if room is None or not work.shape.exact or needed(rows) <= room:
            return
        fitting = next((n for n in range(rows - 1, 0, -1) if needed(n) <= room), 1)
        raise PlanError(
            f"per_device_eval_batch_size={rows} rows of max_length={args.max_length} need a GPU of {size(needed(rows))} in an "
            f"evaluation, not {size(room)}; set per_device_eval_batch_size={fitting}. {GO_ON}"
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with explained(lambda: self.plan):
            return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.plan is not None and not self._plan_logged and "loss" in logs:
            self._plan_logged = True
            policy = self.plan.policy
            logs["plan/gpu_gb"], logs["plan/host_gb"] = self.plan.gpu / 1e9, self.plan.host / 1e9
            logs["plan/chunk"], logs["plan/keep_every"] = policy.chunk, policy.keep_every
        super().log(logs, *args, **kwargs)
