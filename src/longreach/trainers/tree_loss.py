"""The loss of a GRPO micro-batch: TRL's own, on log-probs that were computed together from one token tree.

Shapes: B rows of a micro-batch, S = P + C, P padded prompt length, C padded completion length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer.utils import split_tensor_dict

from ..context.logprob import score
from ..context.reuse import Prefill
from ..context.tree import TokenTree
from .rows import padded_rows, tree_of_rows, without_gradient

IMAGES = "pixel_values"


class TreeLoss(trl.GRPOTrainer):
    """`trl.GRPOTrainer` whose rows become a token tree; the part of the trainer between a batch and its loss.

    Subclasses set `_joined`, how many of the user's micro-batches one of theirs joins, before TRL's constructor runs.
    """

    args: Any
    model: Any
    num_generations: Any
    _buffered_inputs: Any
    _joined: int = 1
    # Log-probs, entropies and router loss of the micro-batches that TRL is about to ask for
    _ready: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs [B, C], entropies [B, C] or None, router loss or None, of the completions of padded rows."""
        if self._ready:
            return self._ready.pop(0)
        _require_text(images)
        size = batch_size or len(input_ids)
        parts = [
            self._score(model, input_ids[at : at + size], attention_mask[at : at + size], logits_to_keep,
                        entropy=compute_entropy, router_loss=compute_aux_loss)
            for at in range(0, len(input_ids), size)
        ]  # fmt: skip
        logps, entropies, routers = zip(*parts)
        return (
            torch.cat(logps),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(routers).mean() if compute_aux_loss else None,
        )

    def _score(
        self,
        model: Any,
        ids_BS: Tensor,
        mask_BS: Tensor,
        width: int,
        *,
        entropy: bool,
        router_loss: bool,
        keep: list[bool] | None = None,
        prefill: Prefill | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One forward over the kept rows; zeros in the others."""
        batch = len(ids_BS)
        picked = tree_of_rows(ids_BS, mask_BS, width, keep)
        if picked is None:
            zeros_BC = torch.zeros(batch, width, device=ids_BS.device)
            none = zeros_BC.sum() if router_loss else None
            return self._no_rows(model, zeros_BC), zeros_BC if entropy else None, none
        with self._head_autocast():
            scores = score(
                model,
                picked.tree,
                temperature=self.temperature,
                entropy=entropy,
                router_loss=router_loss,
                prefill=prefill,
            )
        self._note_reused(scores.reused)
        logps_BC = padded_rows(scores.logprobs, picked.rows, batch, width)
        entropies_BC = None
        if scores.entropies is not None:
            entropies = scores.entropies if self._entropy_bonus_enabled else [e.detach() for e in scores.entropies]
            entropies_BC = padded_rows(entropies, picked.rows, batch, width)
        return logps_BC, entropies_BC, scores.router_loss

    def _no_rows(self, model: Any, zeros_BC: Tensor) -> Tensor:
        """Zeros to backpropagate from, when no row needs a forward."""
        if not torch.is_grad_enabled():
            return zeros_BC
        if self.accelerator.num_processes == 1:
            return without_gradient(zeros_BC, list(model.parameters()))
        # With several processes gradients are exchanged in the wrapper's forward and backward: run the smallest one.
        token = self._tokenizer.pad_token_id
        return zeros_BC + 0.0 * score(model, TokenTree.from_sequences([[token, token]])).logprobs[0].sum()

    def _head_autocast(self) -> contextlib.AbstractContextManager[None]:
        """The head runs outside the model's forward, so outside its autocast; an fp32 head wants none."""
        return contextlib.nullcontext() if self.args.cast_lm_head_to_fp32 else self.accelerator.autocast()

    # ---- the loss of a micro-batch: TRL's, on rows computed together

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        ids_BS = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask_BS = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        _require_text(inputs)
        skip_B = self._rows_without_gradient(inputs)
        logps, entropies, router = self._score(
            model, ids_BS, mask_BS, width, entropy=True, router_loss=self.aux_loss_enabled, keep=(~skip_B).tolist(),
            prefill=self._take_prefill(),
        )  # fmt: skip
        self._note_difference(logps, inputs)
        if bool(skip_B.any()):
            logps, entropies = self._fill_skipped(logps, entropies, skip_B, inputs)
        self._log_skipped(skip_B)
        parts = split_tensor_dict(inputs, self._joined)
        rows = len(ids_BS) // self._joined
        assert entropies is not None
        self._ready = [(a, b, router) for a, b in zip(logps.split(rows), entropies.split(rows))]
        try:
            with self._micro_batches_of_user() as last:
                losses = []
                for i, part in enumerate(parts):
                    last(i + 1 == len(parts))
                    losses.append(super()._compute_loss(model, part))
        finally:
            self._ready = []
        return torch.stack(losses).sum()

    def _note_difference(self, logps_BC: Tensor, inputs: dict[str, Any]) -> None:
        """For subclasses: the trainer's log-probs of a micro-batch, before skipped rows are filled in."""

    def _take_prefill(self) -> Prefill | None:
        """For subclasses: what the rollout has computed of this micro-batch's prompts on the weights as they are."""

    def _note_reused(self, tokens: int) -> None:
        """For subclasses: how many tokens of a tree's prompts were not computed again."""

    @contextlib.contextmanager
    def _micro_batches_of_user(self) -> Iterator[Callable[[bool], None]]:
        """TRL's normalizers and end-of-step work see the micro-batches that the user configured."""
        k, state = self._joined, self.accelerator.gradient_state
        steps, per_generation, sync = (
            self.current_gradient_accumulation_steps, self.args.steps_per_generation, state.sync_gradients,
        )  # fmt: skip
        self.current_gradient_accumulation_steps = steps * k
        self.args.steps_per_generation = per_generation * k

        def last(is_last: bool) -> None:
            state._set_sync_gradients(sync and is_last)

        try:
            yield last
        finally:
            self.current_gradient_accumulation_steps = steps
            self.args.steps_per_generation = per_generation
            state._set_sync_gradients(sync)

    def _rows_without_gradient(self, inputs: dict[str, Any]) -> Tensor:
        """[B] rows from which nothing of the loss depends on the model: their advantages are zero, or all is masked.

        With a KL or entropy term, a router loss or an entropy quantile every row counts.
        """
        mask_BC = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        nothing_B = mask_BC.sum(1) == 0
        if self.beta != 0.0 or self._entropy_bonus_enabled or self.aux_loss_enabled or self.top_entropy_quantile < 1.0:
            # a row without any token is not part of the tree; one with masked tokens is
            return inputs["completion_mask"].sum(1) == 0
        advantages = inputs["advantages"]
        zero = advantages == 0
        return nothing_B | (zero if zero.ndim == 1 else zero.all(1))

    def _fill_skipped(
        self, logps_BC: Tensor, entropies_BC: Tensor | None, skip_B: Tensor, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Give skipped rows values that leave every ratio at 1 and the mean entropy at that of the rows computed."""
        old_BC = inputs.get("old_per_token_logps")
        if old_BC is not None:
            logps_BC = torch.where(skip_B[:, None], old_BC, logps_BC)
        if entropies_BC is not None:
            mask_BC = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            seen_BC = mask_BC * ~skip_B[:, None]
            mean = (entropies_BC * seen_BC).sum() / seen_BC.sum()  # NaN without rows: TRL leaves NaN out of its means
            entropies_BC = torch.where(skip_B[:, None] & (mask_BC > 0), mean, entropies_BC)
        return logps_BC, entropies_BC

    def _log_skipped(self, skip_B: Tensor) -> None:
        groups = skip_B.view(-1, min(self.num_generations, len(skip_B))).all(1)
        sums = torch.stack([skip_B.sum(), torch.tensor(len(skip_B), device=skip_B.device), groups.sum()]).float()
        rows, total, whole = self.accelerator.reduce(sums, reduction="sum").tolist()
        self._metrics["train"]["skipped/rows"].append(rows / total)
        self._metrics["train"]["skipped/groups"].append(whole)


def _require_text(batch: Mapping[str, Any]) -> None:
    if batch.get(IMAGES) is not None:
        raise ValueError("the batch has images; chunked execution takes text only: train it with trl.GRPOTrainer")
