"""How an optimizer step is taken: gradients released layer by layer, and steps that overflowed in fp16."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..context.release import ReleasingOptimizer, release_gradients

logger = logging.getLogger(__name__)

OVERFLOWS = "overflow_steps"
# A loss scale of 65,536 halved this often is 2e-3: what still overflows then is the forward, which no scale helps.
OVERFLOWS_IN_A_ROW = 25


class Fp16OverflowError(ArithmeticError):
    """Every step overflows in fp16, whatever the loss scale: nothing is learned."""


class OverflowCallback(TrainerCallback):
    """Counts the steps that the loss scaler skipped because a gradient was infinite or NaN. On a CPU there is no scaler.

    Attributes:
        skipped: such steps since the run began, as far as the log of a resumed run tells.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._in_a_row = 0
        self._scale = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logged = [int(entry[OVERFLOWS]) for entry in state.log_history if OVERFLOWS in entry]
        self.skipped = logged[-1] if logged else 0

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if optimizer.scaler is not None:
            self._scale = optimizer.scaler.get_scale()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if optimizer.scaler is None:
            return
        # Accelerate does not notice it where an optimizer skips by itself (PyTorch's fused ones), but then the scale has fallen.
        scale = optimizer.scaler.get_scale()
        if not optimizer.step_was_skipped and scale >= self._scale:
            self._in_a_row = 0
            return
        self.skipped += 1
        self._in_a_row += 1
        logger.info("step %d skipped: a gradient overflowed in fp16; loss scale now %g", state.global_step, scale)
        if self._in_a_row == OVERFLOWS_IN_A_ROW:
            raise Fp16OverflowError(
                f"fp16=True: the last {self._in_a_row} steps had infinite or NaN gradients although the loss scale has fallen to "
                f"{scale:g}, so activations themselves leave the range of fp16 (65,504). Train this model with bf16=True, or "
                "on a card without bf16 with bf16=False, fp16=False"
            )


class Stepping(Trainer):
    """Part of a trainer: `release_gradients` and `optimizer_states` of its configuration, and the metric `overflow_steps`."""

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any

    def _prepare_stepping(self) -> None:
        """Called once the model is there."""
        self._overflows: OverflowCallback | None = None
        if self.args.fp16:
            check_fp16_weights(self.model)
            self._overflows = OverflowCallback()
            self.add_callback(self._overflows)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        super().create_optimizer(*args, **kwargs)
        if self.args.release_gradients and not isinstance(self.optimizer, ReleasingOptimizer):
            self.optimizer = release_gradients(self.model, self.optimizer, states=self.args.optimizer_states)
        return self.optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            if self._overflows is not None:
                logs[OVERFLOWS] = self._overflows.skipped
            released = getattr(self.optimizer, "optimizer", self.optimizer)  # inside accelerate's wrapper
            if isinstance(released, ReleasingOptimizer) and released.grad_norm is not None:
                logs["grad_norm"] = released.grad_norm.item()
        super().log(logs, *args, **kwargs)


def check_fp16_weights(model: Any) -> None:
    """Refuse weights that train in fp16: a loss scaler needs fp32 gradients, and small updates would be rounded away."""
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if half:
        raise ValueError(
            f"fp16=True: {len(half)} parameters that train are stored in float16 (the first is {half[0]!r}), but gradients can "
            "be scaled only for float32: load the model with dtype='float32' (products still run in fp16), or train an adapter, "
            "whose weights are float32"
        )
