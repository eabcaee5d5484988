"""Supervised fine-tuning on long contexts: TRL's trainer, whose model runs in exact chunks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import trl
from datasets import IterableDataset

from ..model_name import model_place
from .checkpoint import Resuming
from .config import SFTConfig
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
from .prompts import check_rows, without_rows
from .stepping import Stepping

logger = logging.getLogger(__name__)

WAY_OUT = "Raise max_length, shorten the row, or set on_overlong='drop' or 'truncate'"


class OverlongSequenceError(ValueError):
    """A training sequence is longer than `max_length`."""


class SFTTrainer(Planned, Stepping, Resuming, trl.SFTTrainer):
    """`trl.SFTTrainer` for long sequences: same arguments, same numbers, memory that hardly grows with the context.

    Padded, packed and padding-free batches, completion-only and assistant-only losses, and every `loss_type` are TRL's;
    padding is left out of the computation. Sequences longer than `max_length` are counted and reported, and treated as
    `on_overlong` says. Extra metric with fp16: `overflow_steps` (number so far).

    Raises:
        ValueError: bad data, before any long work: an empty dataset, an over-long sequence with `on_overlong="error"`
            (:class:`OverlongSequenceError`), an architecture that cannot be run exactly (`UnsupportedModelError`), a
            failed comparison with stock attention (`ParityError`), a largest step that does not fit the machine
            (`PlanError`).
    """

    args: Any
    accelerator: Any
    neftune_noise_alpha: float | None

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        require_config(args, SFTConfig, "SFTTrainer")
        # a copy: what is changed here does not reach the user's object
        mine = SFTConfig(default_output_dir(model, "SFT")) if args is None else copy.copy(args)
        model = model_place(model) if isinstance(model, str) else model
        settle_router_loss(check_architecture(model, mine), mine)
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if dataset is not None:
                check_rows(dataset, name, columns=[])
        if processing_class is None:
            processing_class = load_tokenizer(model, mine)
        if isinstance(model, str) and wants_longreach_load(mine, kwargs.get("quantization_config")):
            model = load_model(model, mine, peft_config=kwargs.get("peft_config"))
            mine.model_init_kwargs = None
        super().__init__(
            model=model,
            args=mine,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        settle_adapters(self.model, mine)
        enable_engine(self.model, mine, self._make_plan(self.model))
        self._prepare_stepping()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._scale_noise(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _scale_noise(self, inputs: dict[str, Any]) -> None:
        """NEFTune's noise falls with the length of the rows; here the embedding sees them packed into one."""
        embedding = self.accelerator.unwrap_model(self.model).get_input_embeddings()
        if self.neftune_noise_alpha is None or not hasattr(embedding, "neftune_noise_alpha"):
            return
        ids_BS, mask_BS = inputs["input_ids"], inputs.get("attention_mask")
        packed = ids_BS.numel() if mask_BS is None else int(mask_BS.sum())
        embedding.neftune_noise_alpha = self.neftune_noise_alpha * (packed / ids_BS.shape[1]) ** 0.5

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Callable[..., Any] | None,
        dataset_name: str,
    ) -> Any:
        """TRL's preparation in two steps: tokenized and labelled, then counted against `max_length`, cut and packed."""
        if args.max_length is None:
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        dataset = super()._prepare_dataset(dataset, processing_class, whole, False, formatting_func, dataset_name)
        # these packing strategies carry what does not fit on into the next sequence
        if not (packing and args.packing_strategy in ("bfd_split", "wrapped")):
            dataset = _without_overlong(dataset, args, f"{dataset_name}_dataset")
        return super()._prepare_dataset(dataset, processing_class, args, packing, None, dataset_name)


def _without_overlong(dataset: Any, args: SFTConfig, name: str) -> Any:
    """Count the sequences longer than `max_length` and treat them as `on_overlong` says."""
    limit = args.max_length
    assert limit is not None
    if isinstance(dataset, IterableDataset):
        return _stream_without_overlong(dataset, args.on_overlong, limit, name)
    lengths = [len(ids) for ids in dataset["input_ids"]]
    over = [i for i, length in enumerate(lengths) if length > limit]
    if not over:
        return dataset
    count = f"{len(over)} of the {len(lengths)} sequences of {name} are longer than max_length={limit} tokens"
    if args.on_overlong == "error":
        raise OverlongSequenceError(f"{count}: row {over[0]} has {lengths[over[0]]}. {WAY_OUT}")
    if args.on_overlong == "truncate":
        logger.warning("%s (longest %d): truncated (%s)", count, max(lengths), args.truncation_mode)
        return dataset
    return without_rows(dataset, over, f"{count} (longest {max(lengths)})", limit)


def _stream_without_overlong(dataset: IterableDataset, policy: str, limit: int, name: str) -> IterableDataset:
    """The same for rows that come one by one: they cannot be counted before training starts."""

    def refuse(row: dict[str, Any]) -> dict[str, Any]:
        if len(row["input_ids"]) > limit:
            raise OverlongSequenceError(
                f"a sequence of {name} has {len(row['input_ids'])} tokens, more than max_length={limit}. {WAY_OUT}"
            )
        return row

    if policy == "error":
        return dataset.map(refuse)
    logger.warning("%s is streamed: what is longer than max_length=%d tokens is not counted (%s)", name, limit, policy)
    return dataset.filter(lambda row: len(row["input_ids"]) <= limit) if policy == "drop" else dataset
