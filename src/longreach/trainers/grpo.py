"""GRPO on long contexts: TRL's trainer, with the log-probs of a batch computed from a token tree.

Overridden, and nothing else: loading, generation, how rows become log-probs, and the bookkeeping that keeps the completions of
a prompt together. Losses, importance weights, rewards, tools, environments, callbacks and checkpoints are TRL's.

Shapes: B rows of a micro-batch, P padded prompt length, C padded completion length.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
import trl
from accelerate.utils import DistributedType
from torch import Tensor
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import split_tensor_dict

from ..context.logprob import score
from ..context.tree import TokenTree
from .checkpoint import ResumableRepeatSampler, load_run_state, save_run_state
from .config import GRPOConfig, micro_batch_factor
from .generation import generate_shared, sharing_obstacle
from .loading import (
    check_architecture,
    default_output_dir,
    enable_engine,
    load_model,
    load_tokenizer,
    require_config,
    wants_longreach_load,
)
from .prompts import OverlongPromptError, PromptBound, check_rows, overlong_message, tokenizer_of
from .reward_calls import RewardError, checked
from .rows import padded_rows, tree_of_rows, without_gradient

logger = logging.getLogger(__name__)

IMAGES = "pixel_values"


class GRPOTrainer(trl.GRPOTrainer):
    """`trl.GRPOTrainer` for long prompts: same arguments, same numbers, memory that hardly grows with the context.

    * The prompt of a group is computed once for all its completions, in chunks, with the exact gradient.
    * Rows whose advantage is zero, where no other term of the loss depends on them, are skipped before any forward.
      The loss and its normalizer stay what they are; the `entropy` metric is then the mean over the rows computed.
    * A group is never split over micro-batches. Where `per_device_train_batch_size` would split it, micro-batches are joined
      for the forward and each is given the loss that TRL would have given it.
    * A completion for which every reward is None is quarantined: out of the group's statistics, and masked out of the
      loss like TRL masks truncated completions.

    Extra metrics: `skipped/rows` and `skipped/groups` (fraction, number per micro-batch), `quarantined` (fraction),
    `prompts/truncated` (number per generation).

    Raises:
        ValueError: bad data, before any long work: an empty dataset, no `prompt` column, a prompt longer than
            `max_length - max_completion_length` (:class:`OverlongPromptError`), an architecture that cannot be run
            exactly (`UnsupportedModelError`), a failed comparison with stock attention (`ParityError`).
        RewardError: while training, for rewards that are not one number or None per completion.
    """

    args: GRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        require_config(args, GRPOConfig, "GRPOTrainer")
        given = GRPOConfig(default_output_dir(model, "GRPO")) if args is None else args
        check_architecture(model, given)
        env = kwargs.get("environment_factory")
        if train_dataset is not None and env is None:
            check_rows(train_dataset, "train_dataset", columns=["prompt"])
        if eval_dataset is not None and env is None:
            check_rows(eval_dataset, "eval_dataset", columns=["prompt"])
        args, self._joined = _joined_micro_batches(given)
        if processing_class is None:
            processing_class = load_tokenizer(model, args)
            processing_class.padding_side = processing_class.truncation_side = "left"
        self._bound = None
        if args.max_prompt_length is not None:
            assert args.max_length is not None
            self._bound = PromptBound(args.max_length, args.max_prompt_length, args.on_overlong)
        if self._bound and env is None and kwargs.get("rollout_func") is None:
            tokenize = tokenizer_of(processing_class, kwargs.get("tools"), args.chat_template_kwargs)
            train_dataset = self._bound.apply(train_dataset, "train_dataset", tokenize)
            eval_dataset = self._bound.apply(eval_dataset, "eval_dataset", tokenize)
        if isinstance(model, str) and wants_longreach_load(args, kwargs.get("quantization_config")):
            model = load_model(model, args)
            args.model_init_kwargs = None
        rewards = reward_funcs if isinstance(reward_funcs, list) or reward_funcs is None else [reward_funcs]
        rewards = None if rewards is None else [checked(r) for r in rewards]
        self._quarantined: Tensor | None = None
        self._ready: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        super().__init__(
            model=model,
            reward_funcs=rewards,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self._finish(args)

    def _finish(self, args: GRPOConfig) -> None:
        """What needs the model and TRL's settings."""
        if self._joined > 1 and self.aux_loss_enabled:
            raise ValueError(
                f"per_device_train_batch_size={args.per_device_train_batch_size // self._joined} splits groups of "
                f"num_generations={args.num_generations}, and the router loss of such parts is not that of the whole "
                f"group; set per_device_train_batch_size to a multiple of {args.num_generations}, or "
                "router_aux_loss_coef=0.0"
            )
        enable_engine(self.model, args)
        if self.ref_model is not None:
            enable_engine(self.accelerator.unwrap_model(self.ref_model), args, parity_check=False)
        self._share_prompts = self._shares_prompts(args)

    # ---- rows to log-probs

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
        if images.get(IMAGES) is not None:
            raise ValueError("the batch has images; chunked execution takes text only: train it with trl.GRPOTrainer")
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
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One forward over the kept rows; zeros in the others."""
        batch = len(ids_BS)
        picked = tree_of_rows(ids_BS, mask_BS, width, keep)
        if picked is None:
            zeros_BC = torch.zeros(batch, width, device=ids_BS.device)
            none = zeros_BC.sum() if router_loss else None
            return self._no_rows(model, zeros_BC), zeros_BC if entropy else None, none
        with self._head_autocast():
            scores = score(model, picked.tree, temperature=self.temperature, entropy=entropy, router_loss=router_loss)
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
        # With several processes the gradients are exchanged in the wrapper's forward and backward: run the smallest one.
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
        if inputs.get(IMAGES) is not None:
            raise ValueError("the batch has images; chunked execution takes text only: train it with trl.GRPOTrainer")
        skip_B = self._rows_without_gradient(inputs)
        logps, entropies, router = self._score(
            model, ids_BS, mask_BS, width, entropy=True, router_loss=self.aux_loss_enabled, keep=(~skip_B).tolist()
        )
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

    @contextlib.contextmanager
    def _micro_batches_of_user(self) -> Iterator[Any]:
        """TRL's normalizers and end-of-step work see the micro-batches that the user configured, not the joined ones."""
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

    # ---- generation, rewards, batches

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's, without the shuffle of the generated rows: the completions of a prompt stay neighbours."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(batch, self.args.steps_per_generation)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._quarantined = None
        batch = super()._generate_and_score_completions(inputs)
        longest = int((batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).max())
        if self.args.max_length is not None and longest > self.args.max_length:
            raise OverlongPromptError(
                f"a generated row has {longest} tokens (prompt + completion), more than max_length={self.args.max_length}; "
                "raise max_length or shorten what rollout_func or the environment gives"
            )
        if self._quarantined is not None:
            mask_BC = batch["completion_mask"] * batch.get("tool_mask", 1)
            taken = (mask_BC * self._quarantined[:, None]).sum()
            batch["num_items_in_batch"] = batch["num_items_in_batch"] - self.accelerator.gather(taken).sum()
            batch["completion_mask"] = batch["completion_mask"] * ~self._quarantined[:, None]
        return batch

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """TRL's rewards [all rows, functions]; notes the rows that no function could score.

        Raises:
            RewardError: if that is every row of the batch.
        """
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        lost = torch.isnan(rewards).all(dim=1)
        if bool(lost.all()):
            raise RewardError(
                f"no completion of this batch has a reward: {', '.join(map(repr, self.reward_func_names))} returned None "
                f"or NaN for all {len(lost)}; at least one must return a number"
            )
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["quarantined"].append(lost.float().mean().item())
        if bool(lost.any()):  # the same on every process
            first = self.accelerator.process_index * len(prompts)
            self._quarantined = lost[first : first + len(prompts)]
        return rewards

    def _tokenize_prompts(self, prompts: Any) -> Any:
        prompt_ids, *rest = super()._tokenize_prompts(prompts)
        if self._bound is not None:
            prompt_ids, cut = self._bound.cut(prompt_ids)
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["prompts/truncated"].append(float(cut))
        return prompt_ids, *rest

    def _shares_prompts(self, args: GRPOConfig) -> bool:
        if args.rollout != "auto" or self.use_vllm or self.use_transformers_continuous_batching:
            return False
        kind = self.accelerator.distributed_type
        if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            obstacle: str | None = f"the weights are sharded ({kind.value})"
        else:
            base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            obstacle = sharing_obstacle(base, self.generation_config)
        if obstacle:
            logger.warning("rollout='transformers' is used, each completion computes its prompt: %s", obstacle)
        return obstacle is None

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """(completion ids per row, sampling log-probs or None)."""
        if not self._share_prompts:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        with (
            unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, generation_kwargs=self.generation_kwargs
            ) as model,
            torch.no_grad(),
        ):
            return generate_shared(model, prompt_ids, self.generation_config, self.accelerator.device), None

    # ---- checkpoints

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return ResumableRepeatSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epochs_done=lambda: int((self.state.epoch or 0.0) + 1e-9),
        )

    def _save_rng_state(self, output_dir: str) -> None:
        """With the random states goes what the run has generated and not yet used."""
        super()._save_rng_state(output_dir)
        every = self.args.steps_per_generation * self.num_iterations
        state = {
            "step": self._step,
            "buffered_inputs": self._buffered_inputs if self._step % every else None,
            "metrics": {k: list(v) for k, v in self._metrics["train"].items()},
        }
        save_run_state(output_dir, self.args.process_index, state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        state = None if checkpoint is None else load_run_state(checkpoint, self.args.process_index)
        if state is None:
            return
        self._step = state["step"]
        device = self.accelerator.device
        if state["buffered_inputs"] is not None:
            self._buffered_inputs = [
                {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.items()}
                for part in state["buffered_inputs"]
            ]
        for name, values in state["metrics"].items():
            self._metrics["train"][name] = values


def _joined_micro_batches(args: GRPOConfig) -> tuple[GRPOConfig, int]:
    """A copy of the configuration whose micro-batches hold whole groups, and how many of the user's each of them joins."""
    factor, mine = micro_batch_factor(args), copy.copy(args)
    if factor > 1:
        mine.per_device_train_batch_size *= factor
        mine.gradient_accumulation_steps //= factor
        mine.steps_per_generation //= factor
        logger.warning(
            "per_device_train_batch_size %d -> %d and gradient_accumulation_steps %d -> %d, so that groups of %d stay whole "
            "(each prompt is computed once; the loss is unchanged)",
            args.per_device_train_batch_size, mine.per_device_train_batch_size,
            args.gradient_accumulation_steps, mine.gradient_accumulation_steps, args.num_generations,
        )  # fmt: skip
    return mine, factor
