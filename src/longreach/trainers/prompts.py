"""Checks on the data before any long work: rows, columns, and prompts against the longest allowed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from trl.chat_template_utils import add_response_schema
from trl.data_utils import is_conversational

logger = logging.getLogger(__name__)

HARMONY = ("<|channel|>", "<|message|>", "<|return|>")
BATCH = 64  # prompts tokenized at a time

Tokenize = Callable[[list[Any]], list[list[int]]]


class OverlongPromptError(ValueError):
    """A prompt is longer than `max_length - max_completion_length`."""


def check_rows(dataset: Any, name: str, *, columns: Sequence[str]) -> None:
    """Raise ValueError for a dataset without rows or without one of the columns."""
    if isinstance(dataset, Mapping):
        for key, part in dataset.items():
            check_rows(part, f"{name}[{key!r}]", columns=columns)
        return
    if isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise ValueError(f"{name} is empty; it needs at least one row")
        found = dataset.column_names
    elif isinstance(dataset, IterableDataset):
        first = next(iter(dataset), None)
        if first is None:
            raise ValueError(f"{name} is empty; it needs at least one row")
        found = list(first)
    else:
        return  # TRL names the types that it takes
    for column in columns:
        if column not in found:
            raise ValueError(f"{name} has no column {column!r}; it has {', '.join(map(repr, found))}")


def tokenizer_of(processing_class: Any, tools: Any, chat_template_kwargs: Any) -> Tokenize:
    """Turn prompts (texts or conversations) into token ids the way TRL will."""

    def tokenize(prompts: list[Any]) -> list[list[int]]:
        if not is_conversational({"prompt": prompts[0]}):
            return processing_class(text=prompts)["input_ids"]
        return processing_class.apply_chat_template(
            conversation=prompts,
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **(chat_template_kwargs or {}),
        )["input_ids"]

    return tokenize


def separate_channels(processing_class: Any) -> None:
    """Have TRL read the channels of a harmony completion (gpt-oss): rewards then get a message with `thinking`, the analysis,
    and `content`, the final answer. Without this TRL would strip the channel marks and run both into one text.

    Only for conversations; completions of plain prompts stay one text. Nothing happens for a tokenizer of another format, or
    one that says itself how its responses are read.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    said = getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)
    if said or not all(tokenizer.convert_tokens_to_ids(mark) != tokenizer.unk_token_id for mark in HARMONY):
        return
    try:
        add_response_schema(processing_class)
    except ValueError:
        logger.warning(
            "the tokenizer has harmony's marks (%s) but a chat template that TRL does not know: rewards get analysis and final "
            "answer as one text; set tokenizer.response_template to separate them",
            ", ".join(HARMONY),
        )


def overlong_message(length: int, limit: int, max_length: int, where: str) -> str:
    return (
        f"{where} has {length} tokens; max_length={max_length} leaves {limit} for a prompt beside the completion. "
        "Raise max_length, shorten the prompt, or set on_overlong='drop' or 'truncate_left'"
    )


def without_rows(dataset: Dataset, over: Sequence[int], count: str, max_length: int) -> Dataset:
    """The dataset without its over-long rows; `count` tells how many. Raises ValueError if none is left."""
    logger.warning("%s: dropped", count)
    if len(over) == len(dataset):
        raise ValueError(f"{count}: none is left; raise max_length={max_length}")
    dropped = set(over)
    return dataset.select([i for i in range(len(dataset)) if i not in dropped])


class PromptBound:
    """The longest prompt allowed, and what to do about longer ones.

    Args:
        max_length: longest prompt + completion in tokens.
        limit: longest prompt in tokens.
        policy: "error", "drop" or "truncate_left".
    """

    def __init__(self, max_length: int, limit: int, policy: str) -> None:
        self.max_length, self.limit, self.policy = max_length, limit, policy

    def apply(self, dataset: Any, name: str, tokenize: Tokenize) -> Any:
        """Check a whole dataset; the same dataset, or without its over-long rows.

        An `IterableDataset` is read as it comes: its rows are dropped while streaming, and an error comes when the
        row is reached.

        Raises:
            OverlongPromptError: for the first over-long prompt, with how many there are, if the policy is "error".
            ValueError: for an empty prompt, or if no row is left.
        """
        if isinstance(dataset, Mapping):
            return {k: self.apply(part, f"{name}[{k!r}]", tokenize) for k, part in dataset.items()}
        if isinstance(dataset, IterableDataset):
            if self.policy == "drop":
                return dataset.filter(lambda row: len(tokenize([row["prompt"]])[0]) <= self.limit)
            return dataset
        if not isinstance(dataset, Dataset):
            return dataset
        lengths: list[int] = []
        prompts = dataset.select_columns(["prompt"])
        for start in range(0, len(dataset), BATCH):
            lengths += [len(ids) for ids in tokenize(prompts[start : start + BATCH]["prompt"])]
        empty = [i for i, length in enumerate(lengths) if length == 0]
        if empty:
            raise ValueError(
                f"{len(empty)} of the {len(lengths)} prompts of {name} are empty, the first in row {empty[0]}; a prompt needs "
                "one token"
            )
        over = [i for i, length in enumerate(lengths) if length > self.limit]
        if not over:
            return dataset
        count = f"{len(over)} of the {len(lengths)} prompts of {name} are longer than {self.limit} tokens"
        if self.policy == "error":
            first = overlong_message(lengths[over[0]], self.limit, self.max_length, f"the prompt of row {over[0]}")
            raise OverlongPromptError(f"{count}: {first}")
        if self.policy == "truncate_left":
            logger.warning("%s (longest %d): their first tokens are cut", count, max(lengths))
            return dataset
        return without_rows(dataset, over, f"{count} (longest {max(lengths)})", self.max_length)

    def cut(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], int]:
        """Bound the prompts of one batch: the ids, and how many were cut.

        Raises:
            OverlongPromptError: unless the policy is "truncate_left".
        """
        over = [i for i, ids in enumerate(prompt_ids) if len(ids) > self.limit]
        if over and self.policy != "truncate_left":
            raise OverlongPromptError(
                overlong_message(len(prompt_ids[over[0]]), self.limit, self.max_length, "a prompt of this batch")
            )
        return [ids[-self.limit :] for ids in prompt_ids], len(over)
