"""Completions of a training run: which engine draws them, and what becomes of their log-probs.

The rollout engine's log-probs take the place of vLLM's in TRL's batch: TRL pads them, off-policy masking uses them, and with
`rollout_correction=True` TRL weighs tokens by the ratio between trainer and sampler as it does for vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from trl.models import unwrap_model_for_generation

from ..context.fused import FAMILIES
from ..context.fused_moe import MOE_FAMILIES
from ..context.install import engine_of
from ..context.plan import Plan
from ..context.reuse import Prefill
from ..context.reuse_room import prefill_place
from ..context.support import UnsupportedModelError
from ..rollout.completion import release_rollout
from ..rollout.seeds import mix
from .config import GRPOConfig, reuse_obstacle
from .generation import engine_obstacle, generate_by_engine, generate_shared, sharing_obstacle
from .tree_loss import TreeLoss

logger = logging.getLogger(__name__)


class _SameWeights:
    """In the place of TRL's vLLM client: the engine decodes on the weights that train, so there is nothing to send."""

    def sync_weights(self) -> None:
        """Nothing to do."""


class Rollouts(TreeLoss):
    """The part of the trainer that draws completions.

    Extra metrics of the engine: `sampling/logp_difference/mean` and `/max`, between its log-probs and the trainer's, of steps
    whose weights are still those that the completions were drawn with; `prefill/reused_tokens`, prompt tokens of a micro-batch
    whose forward was the rollout's prefill.
    """

    plan: Plan | None
    _rollout: str = "trl"  # "engine", "shared" (Transformers, a prompt computed once) or "trl" (its own, vLLM included)
    _drawn_at: int = -1  # optimizer step of the last rollout
    _reuse_place: str | None = (
        None  # of a prefill for the training step: "device", "host"; None to compute prompts again
    )
    _prefill: Prefill | None = None
    _collecting: bool = False  # from the next rollout on
    _said: set[str]  # why a step has not reused it

    def _choose_rollout(self, args: GRPOConfig) -> None:
        """Settle how completions are drawn; says why where it is not the engine.

        Raises:
            UnsupportedModelError: rollout="engine" for a model or an option that the engine does not know.
            ValueError: `rollout_correction` without the engine.
        """
        self._rollout = "trl"
        if not (self.use_vllm or self.use_transformers_continuous_batching or args.rollout == "transformers"):
            self._rollout = self._best(args)
        if args.rollout_correction:
            if self._rollout != "engine":
                raise ValueError(
                    "rollout_correction=True weighs tokens by the rollout engine's log-probs, but it does not draw the "
                    "completions; set it to False (TRL's vllm_importance_sampling_correction is for vLLM)"
                )
            # TRL corrects where it believes that vLLM has sampled; the log-probs are ours
            self.use_vllm, self.vllm_mode = True, "engine"
            self.vllm_generation: Any = _SameWeights()
            self._last_loaded_step = self.state.global_step

    def _best(self, args: GRPOConfig) -> str:
        kind = self.accelerator.distributed_type
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            reason: str | None = f"the weights are sharded ({kind.value})"
            shared = reason
        else:
            reason = engine_obstacle(base, self.generation_config)
            shared = sharing_obstacle(base, self.generation_config)
        if reason is None:
            return "engine"
        if args.rollout == "engine":
            raise UnsupportedModelError(
                f"rollout='engine' can't draw these completions: {reason}. Use rollout='auto' or 'transformers'."
            )
        logger.warning("completions are drawn by Transformers' generate, not by the rollout engine: %s", reason)
        if shared is not None:
            logger.warning("each completion computes its prompt again: %s", shared)
        return "shared" if shared is None else "trl"

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """(completion ids per row, sampling log-probs or None)."""
        if self._rollout == "trl":
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.model.training:  # an evaluation between a generation's steps draws others
            self._drawn_at = self.state.global_step
        with (
            unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, generation_kwargs=self.generation_kwargs
            ) as model,
            torch.no_grad(),
        ):
            if self._rollout == "shared":
                return generate_shared(model, prompt_ids, self.generation_config, self.accelerator.device), None
            # From torch's own generator: a resumed run goes on with the numbers of one that was never stopped
            seed = mix(int(torch.randint(2**62, ())), self.accelerator.process_index)
            keep = self._new_prefill()
            with self.accelerator.autocast():
                out = generate_by_engine(
                    model, prompt_ids, self.generation_config, seed=seed, tokenizer=self.processing_class,
                    rows=self.args.rollout_rows, keep=keep,
                )  # fmt: skip
            self._prefill = keep or self._prefill
            if self.args.rollout_memory == "release":
                release_rollout(model)
            return out

    # ---- the prefill in the training step

    def _settle_reuse(self, args: GRPOConfig, plan: Plan | None) -> None:
        """Settle whether and where prefills wait for the training step; says why not.

        Raises:
            ValueError: reuse_prefill=True where it can't be.
        """
        self._said = set()
        if args.reuse_prefill is False:
            return
        reason, level = reuse_obstacle(args), logging.INFO
        if reason is None and (self._rollout != "engine" or self.rollout_func is not None):
            by = "rollout_func" if self.rollout_func is not None else "Transformers' generate"
            reason = f"completions are drawn by {by}, not by the rollout engine"
        if reason is None and plan is not None:
            reason, level = self._no_reuse(plan), logging.WARNING
        if reason is None:
            first = f", in the first of num_iterations={args.num_iterations}" if args.num_iterations > 1 else ""
            logger.info(
                "training steps take their prompts from the rollout's prefill, kept on the %s%s",
                self._reuse_place, first,
            )  # fmt: skip
            return
        if args.reuse_prefill:
            raise ValueError(f"reuse_prefill=True: {reason}; set it to None or False to compute prompts again")
        logger.log(level, "each training step computes its prompts again (reuse_prefill): %s", reason)

    def _no_reuse(self, plan: Plan) -> str | None:
        """What model and plan have against it; settles the place if they have nothing."""
        engine = engine_of(self.model)
        kinds = {type(layer).__name__ for layer in engine.layers} if engine is not None else set()
        other = sorted(kinds - FAMILIES.keys() - MOE_FAMILIES.keys())
        if other:
            return f"{other[0]} has no hand-written form, which would make rollout and training step the same"
        if self.aux_loss_enabled:
            return "the router loss (router_aux_loss_coef) needs the router's logits of every token"
        if plan.policy.keep_every > 1:
            return f"by plan only every {plan.policy.keep_every}th layer's input is kept"
        requests = self.args.per_device_train_batch_size * (self.args.steps_per_generation or 1)
        self._reuse_place = prefill_place(plan, -(-requests // plan.work.group))
        return None if self._reuse_place else "the plan has no room for the prompts' layer inputs beside the sampling"

    def _begin_generation(self) -> None:
        """Forget the last rollout's prefill; the first one of this generation is kept if its prompts are to be trained on."""
        self._prefill = None
        self._collecting = self._reuse_place is not None and self.model.training

    def _new_prefill(self) -> Prefill | None:
        """Later turns of a conversation have other prompts than the training step: theirs is not kept."""
        if not self._collecting or self.plan is None:
            return None
        self._collecting = False
        return Prefill(
            on_host=self._reuse_place == "host",
            save_attention=self.plan.policy.save_attention,
            required=bool(self.args.reuse_prefill),
            said=self._said,
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; however it ends, no prefill stays behind."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._prefill = None

    def _take_prefill(self) -> Prefill | None:
        """The prefill while the weights are those of the rollout; the last micro-batch before they change takes it away."""
        found = self._prefill
        if self.accelerator.sync_gradients or self._drawn_at != self.state.global_step:
            self._prefill = None
        return found if self._drawn_at == self.state.global_step else None

    def _note_reused(self, tokens: int) -> None:
        if self._reuse_place is not None and torch.is_grad_enabled():
            self._metrics["train"]["prefill/reused_tokens"].append(float(tokens))

    def _note_difference(self, logps_BC: Tensor, inputs: dict[str, Any]) -> None:
        """Log how far the trainer's log-probs are from the engine's, while the weights are the same."""
        sampled_BC = inputs.get("sampling_per_token_logps")
        if self._rollout != "engine" or sampled_BC is None or self._drawn_at != self.state.global_step:
            return
        mask_BC = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool() & (logps_BC != 0)
        difference = (logps_BC.detach() - sampled_BC).abs()[mask_BC]
        if len(difference):
            self._metrics["train"]["sampling/logp_difference/mean"].append(difference.mean().item())
            self._metrics["train"]["sampling/logp_difference/max"].append(difference.max().item())
