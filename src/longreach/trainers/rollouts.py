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

from ..context.support import UnsupportedModelError
from ..rollout.completion import release_rollout
from ..rollout.seeds import mix
from .config import GRPOConfig
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
    whose weights are still those that the completions were drawn with.
    """

    _rollout: str = "trl"  # "engine", "shared" (Transformers, a prompt computed once) or "trl" (its own, vLLM included)
    _drawn_at: int = -1  # optimizer step of the last rollout

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
            with self.accelerator.autocast():
                out = generate_by_engine(
                    model, prompt_ids, self.generation_config, seed=seed, tokenizer=self.processing_class,
                    rows=self.args.rollout_rows,
                )  # fmt: skip
            if self.args.rollout_memory == "release":
                release_rollout(model)
            return out

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
