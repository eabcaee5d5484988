"""GRPO on long contexts: TRL's trainer, with the log-probs of a batch computed from a token tree.

Overridden, and nothing else: loading, generation, how rows become log-probs, and the bookkeeping that keeps the
completions of a prompt together. Losses, importance weights, rewards, tools, environments, callbacks and checkpoints
are TRL's.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_tensor_dict

from ..model_name import model_place
from .checkpoint import ResumableRepeatSampler, Resuming, load_run_state, save_run_state
from .config import GRPOConfig, micro_batch_factor
from .loading import (
    check_architecture,
    default_output_dir,
    enable_engine,
    load_model,
    load_tokenizer,
    require_config,
    settle_adapters,
    settle_router_loss,
    wants_longreach_load,
)
from .planning import Planned
from .prompts import OverlongPromptError, PromptBound, Tokenize, check_rows, separate_channels, tokenizer_of
from .reward_calls import RewardError, checked
from .rollouts import Rollouts
from .stepping import Stepping

logger = logging.getLogger(__name__)


class GRPOTrainer(Planned, Stepping, Resuming, Rollouts):
    """`trl.GRPOTrainer` for long prompts: same arguments, same numbers, memory that hardly grows with the context.

    * The prompt of a group is computed once for all its completions, in chunks, with the exact gradient.
    * Rows whose advantage is zero, where no other term of the loss depends on them, are skipped before any forward.
      The loss and its normalizer stay what they are; the `entropy` metric is then the mean over the rows computed.
    * A group is never split over micro-batches. Where `per_device_train_batch_size` would split it, micro-batches are
      joined for the forward, and each is given the loss that TRL would have given it.
    * A completion for which every reward is None is quarantined: out of the group's statistics, and masked out of the
      loss like TRL masks truncated completions.

    Extra metrics: `skipped/rows` and `skipped/groups` (fraction, number per micro-batch), `quarantined` (fraction),
    `prompts/truncated` (number per generation), `prefill/reused_tokens` (prompt tokens per micro-batch whose forward was the
    rollout's prefill); with fp16 `overflow_steps` (number so far).

    Raises:
        ValueError: bad data, before any long work: an empty dataset, no `prompt` column, with `max_length` an empty prompt or one
            longer than `max_length - max_completion_length` (:class:`OverlongPromptError`), an architecture that cannot be run
            exactly (`UnsupportedModelError`), a failed comparison with stock attention (`ParityError`), a largest step that
            does not fit the machine (`PlanError`).
        RewardError: while training, for rewards that are not one number or None per completion.
    """

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
        model = model_place(model) if isinstance(model, str) else model
        text = check_architecture(model, given)
        args, joined = _joined_micro_batches(given)
        settle_router_loss(text, args)
        if processing_class is None:
            processing_class = load_tokenizer(model, args)
            processing_class.padding_side = processing_class.truncation_side = "left"
        separate_channels(processing_class)
        self._bound = _prompt_bound(args)
        if kwargs.get("environment_factory") is None:  # an environment may make its prompts itself
            tokenize = None
            if kwargs.get("rollout_func") is None:
                tokenize = tokenizer_of(processing_class, kwargs.get("tools"), args.chat_template_kwargs)
            train_dataset = _checked_data(train_dataset, "train_dataset", self._bound, tokenize)
            eval_dataset = _checked_data(eval_dataset, "eval_dataset", self._bound, tokenize)
        if isinstance(model, str) and wants_longreach_load(args, kwargs.get("quantization_config")):
            model = load_model(model, args, peft_config=kwargs.get("peft_config"))
            args.model_init_kwargs = None
        rewards = reward_funcs if isinstance(reward_funcs, list) or reward_funcs is None else [reward_funcs]
        rewards = None if rewards is None else [checked(r) for r in rewards]
        self._joined = joined
        self._quarantined: Tensor | None = None
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
            rows = args.per_device_train_batch_size // self._joined
            raise ValueError(
                f"per_device_train_batch_size={rows} splits groups of num_generations={args.num_generations}, and the "
                "router loss of such parts is not that of the whole group; set per_device_train_batch_size to a "
                f"multiple of {args.num_generations}, or router_aux_loss_coef=0.0"
            )
        settle_adapters(self.model, args)
        self._choose_rollout(args)
        drawn = self._rollout == "engine"
        options = self._make_plan(self.model, engine=drawn, reference=self.ref_model is not None)
        enable_engine(self.model, args, options)
        if self.ref_model is not None:
            enable_engine(self.accelerator.unwrap_model(self.ref_model), args, options, parity_check=False)
        self._settle_reuse(args, self.plan)
        self._prepare_stepping()

    # ---- generation, rewards, batches

    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

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
        self._begin_generation()
        batch = super()._generate_and_score_completions(inputs)
        longest = int((batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).max())
        if self.args.max_length is not None and longest > self.args.max_length:
            raise OverlongPromptError(
                f"a generated row has {longest} tokens (prompt + completion), more than max_length="
                f"{self.args.max_length}; raise max_length or shorten what rollout_func or the environment gives"
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
                f"no completion of this batch has a reward: {', '.join(map(repr, self.reward_func_names))} returned "
                f"None or NaN for all {len(lost)}; at least one must return a number"
            )
        mode = self._mode()
        self._metrics[mode]["quarantined"].append(lost.float().mean().item())
        if bool(lost.any()):  # the same on every process
            first = self.accelerator.process_index * len(prompts)
            self._quarantined = lost[first : first + len(prompts)]
        return rewards

    def _tokenize_prompts(self, prompts: Any) -> Any:
        prompt_ids, *rest = super()._tokenize_prompts(prompts)
        if self._bound is not None:
            prompt_ids, cut = self._bound.cut(prompt_ids)
            mode = self._mode()
            self._metrics[mode]["prompts/truncated"].append(float(cut))
        return prompt_ids, *rest

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


def _prompt_bound(args: GRPOConfig) -> PromptBound | None:
    if args.max_length is None or args.max_prompt_length is None:
        return None
    return PromptBound(args.max_length, args.max_prompt_length, args.on_overlong)


def _checked_data(dataset: Any, name: str, bound: PromptBound | None, tokenize: Tokenize | None) -> Any:
    """The dataset, with rows, a prompt in each, and (where a tokenizer is given) none longer than allowed."""
    if dataset is None:
        return None
    check_rows(dataset, name, columns=["prompt"])
    return dataset if bound is None or tokenize is None else bound.apply(dataset, name, tokenize)


def _joined_micro_batches(args: GRPOConfig) -> tuple[GRPOConfig, int]:
    """A copy of the configuration whose micro-batches hold whole groups, and how many of the user's each one joins."""
    factor = micro_batch_factor(args)
    mine: Any = copy.copy(args)
    if factor > 1:
        mine.per_device_train_batch_size *= factor
        mine.gradient_accumulation_steps //= factor
        mine.steps_per_generation //= factor
        logger.warning(
            "per_device_train_batch_size %d -> %d and gradient_accumulation_steps %d -> %d, so that groups of %d stay "
            "whole (each prompt is computed once; the loss is unchanged)",
            args.per_device_train_batch_size, mine.per_device_train_batch_size,
            args.gradient_accumulation_steps, mine.gradient_accumulation_steps, args.num_generations,
        )  # fmt: skip
    return mine, factor
