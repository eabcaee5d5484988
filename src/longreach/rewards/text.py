"""Rewards for format, length and short text answers. What is easy to fake pays only on top of a right answer.

Paid by themselves, format and length rewards are what a policy learns first and best: empty tags, one-word answers. So
each takes a ``gate``, a reward function that decides whether the answer is right, and pays its own sum only then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longreach.rewards.answer import SLOTS, SlotName, final_answer
from longreach.rewards.exact import clean, same_words
from longreach.rewards.math import answer_column, math_reward
from longreach.rewards.result import RewardResult, completion_text, to_rewards

RewardFunction = Callable[..., list[float | None]]
Style = Literal["think", "think_answer", "boxed"]

_THINK = re.compile(r"\s*<think>(?P<work>(?:(?!</?think>).)*)</think>(?P<rest>(?:(?!</?think>).)*)", re.DOTALL)
_ANSWER = re.compile(r"\s*<answer>(?P<answer>(?:(?!</?answer>).)*)</answer>\s*", re.DOTALL)


@dataclass(frozen=True)
class GatedReward:
    """A bonus paid only on completions whose gate reward reaches ``gate_at``; made by the factories of this module.

    Calling it gives TRL's list of floats, `grade` the reasons. The gate's ``None`` (quarantined) stays ``None``.
    """

    bonus: Callable[[int, Any, dict[str, Any]], tuple[float, str]]  # (index, completion, columns) -> (bonus, reason)
    gate: RewardFunction
    gate_at: float
    __name__: str

    def __post_init__(self) -> None:
        if not callable(self.gate):
            raise ValueError(
                f"gate: got {self.gate!r}; it must be a reward function that says whether the answer is right"
            )
        if not math.isfinite(self.gate_at):
            raise ValueError(f"gate_at: got {self.gate_at}; it must be a finite reward")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return to_rewards(self.grade(prompts, completions, **columns))

    def grade(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[RewardResult]:
        """One `RewardResult` a completion; whatever the gate raises goes through."""
        gates = self.gate(prompts=prompts, completions=completions, **columns)
        if len(gates) != len(completions):
            raise ValueError(f"gate: it returned {len(gates)} rewards for {len(completions)} completions")
        return [self._result(i, c, g, columns) for i, (c, g) in enumerate(zip(completions, gates))]

    def _result(self, index: int, completion: Any, gate: float | None, columns: dict[str, Any]) -> RewardResult:
        if gate is None:
            return RewardResult.quarantined("the gate gave no reward")
        if not gate >= self.gate_at:
            return RewardResult.wrong("the answer is not right, so nothing else pays")
        bonus, reason = self.bonus(index, completion, columns)
        return RewardResult.ok(bonus, reason) if bonus > 0 else RewardResult.wrong(reason)


def format_reward(
    gate: RewardFunction | None = None,
    *,
    style: Style = "think_answer",
    pays: float = 0.2,
    gate_at: float = 1.0,
    min_work_chars: int = 1,
) -> GatedReward:
    """Pays ``pays`` for a well-formed completion whose answer is right, else 0.

    Args:
        gate: reward function that decides whether the answer is right; `math_reward()` if not given.
        style: ``"think"``: one ``<think>...</think>`` and then text; ``"think_answer"``: one ``<think>...</think>`` and
            then one ``<answer>...</answer>`` and nothing else; ``"boxed"``: exactly one final ``\\boxed{...}``.
        gate_at: gate reward from which the answer counts as right.
        min_work_chars: shortest accepted working inside ``<think>``, in characters without spaces at the ends.
    """
    styles = {"think": _is_think, "think_answer": _is_think_answer, "boxed": _is_boxed}
    if style not in styles:
        raise ValueError(f"style: got {style!r}; it must be one of {', '.join(styles)}")
    _positive("pays", pays)
    well_formed = styles[style]

    def bonus(_index: int, completion: Any, _columns: dict[str, Any]) -> tuple[float, str]:
        formed = well_formed(completion_text(completion), min_work_chars)
        return (pays, "") if formed else (0.0, f"not of the form {style!r}")

    return GatedReward(bonus, gate or math_reward(), gate_at, "format_reward")


def length_reward(
    gate: RewardFunction | None = None,
    *,
    full_until: int,
    zero_from: int,
    unit: Literal["chars", "tokens"] = "tokens",
    pays: float = 0.2,
    gate_at: float = 1.0,
) -> GatedReward:
    """Pays for brevity when the answer is right: ``pays`` up to ``full_until``, falling linearly to 0 at ``zero_from``.

    Args:
        gate: reward function that decides whether the answer is right; `math_reward()` if not given.
        full_until, zero_from: lengths in ``unit``.
        unit: ``"tokens"`` takes the lengths of the ``completion_ids`` column, which TRL's trainers pass; ``"chars"``
            those of the text.
    """
    if not 0 < full_until < zero_from:
        raise ValueError(f"zero_from: got {zero_from} with full_until={full_until}; need 0 < full_until < zero_from")
    if unit not in ("chars", "tokens"):
        raise ValueError(f"unit: got {unit!r}; it must be 'chars' or 'tokens'")
    _positive("pays", pays)

    def bonus(index: int, completion: Any, columns: dict[str, Any]) -> tuple[float, str]:
        if unit == "tokens":
            if "completion_ids" not in columns:
                raise ValueError("completion_ids: not given, so tokens cannot be counted; use unit='chars'")
            length = len(columns["completion_ids"][index])
        else:
            length = len(completion_text(completion))
        share = min(1.0, max(0.0, (zero_from - length) / (zero_from - full_until)))
        return pays * share, f"{length} {unit}"

    return GatedReward(bonus, gate or math_reward(), gate_at, "length_reward")


@dataclass(frozen=True)
class TextReward:
    """The reward function `text_reward` returns."""

    answer: str
    slot: SlotName
    right: float
    wrong: float
    __name__: str  # trainers log a reward under its name

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return to_rewards(self.grade(prompts, completions, **columns))

    def grade(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[RewardResult]:
        """One `RewardResult` a completion. Raises ValueError for a missing or empty reference."""
        golds = answer_column(columns, self.answer, len(completions))
        return [self._judge(completion, gold) for completion, gold in zip(completions, golds)]

    def _judge(self, completion: Any, gold: Any) -> RewardResult:
        accepted = [gold] if isinstance(gold, str) else gold
        if (
            not isinstance(accepted, list | tuple)
            or not accepted
            or not all(isinstance(g, str) and g for g in accepted)
        ):
            raise ValueError(f"{self.answer}: got {gold!r}; a reference is a text or a list of accepted texts")
        extraction = final_answer(completion_text(completion), self.slot)
        if extraction.text is None:
            return RewardResult.wrong(extraction.reason, reward=self.wrong)
        if any(same_words(clean(extraction.text), clean(g)) for g in accepted):
            return RewardResult.ok(self.right, checks_passed=1, checks_total=1)
        return RewardResult.wrong("another text", reward=self.wrong, checks_total=1)


def text_reward(
    *, answer: str = "answer", slot: SlotName = "any", right: float = 1.0, wrong: float = 0.0
) -> TextReward:
    """A reward for short text answers: the one final slot must be the reference, but for case and spacing.

    Args:
        answer: column with the reference text, or a list of accepted texts a row.
        slot, right, wrong: as in `math_reward`.

    There is no judge to talk to: an answer with the right words among others is wrong.
    """
    if slot not in SLOTS:
        raise ValueError(f"slot: got {slot!r}; it must be one of {', '.join(SLOTS)}")
    if not right > wrong:
        raise ValueError(f"right: got {right} with wrong={wrong}; the right answer must pay more")
    return TextReward(answer, slot, right, wrong, "text_reward")


def _is_think(text: str, min_work: int) -> bool:
    match = _THINK.fullmatch(text)
    return match is not None and len(match["work"].strip()) >= min_work and bool(match["rest"].strip())


def _is_think_answer(text: str, min_work: int) -> bool:
    match = _THINK.fullmatch(text)
    if match is None or len(match["work"].strip()) < min_work:
        return False
    answer = _ANSWER.fullmatch(match["rest"])
    return answer is not None and bool(answer["answer"].strip())


def _is_boxed(text: str, _min_work: int) -> bool:
    return text.count("\\boxed") == 1 and final_answer(text, "boxed").text is not None


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: got {value}; it must be a positive number")
