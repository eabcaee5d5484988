"""Maths rewards: one strict final answer, numbers as exact fractions, everything else by math-verify under limits.

What is refused although the right value can be seen in it: several different final answers, an answer denied by its own
sentence, chains and claims (``x=41=42``), choices and ranges, sets larger than the reference, unevaluated arithmetic
where the reference is a number, an echo of the prompt where the reference is an expression, and rounded decimals where
the reference is exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from longreach.rewards import exact
from longreach.rewards.answer import SLOTS, SlotName, final_answer, prompt_text
from longreach.rewards.equivalence import Comparator
from longreach.rewards.result import RewardResult, completion_text, to_rewards

Number = int | float | Fraction


@dataclass(frozen=True)
class MathReward:
    """The reward function `math_reward` and `numeric_reward` return; see there for the fields.

    Called with TRL's arguments it returns a list of floats; `grade` returns the same judgements as `RewardResult`
    with their reasons.
    """

    answer: str
    slot: SlotName
    right: float
    wrong: float
    numeric_only: bool
    relative_tolerance: Fraction
    seconds: float
    max_answer_chars: int
    __name__: str  # trainers log a reward under its name

    def __post_init__(self) -> None:
        if self.slot not in SLOTS:
            raise ValueError(f"slot: got {self.slot!r}; it must be one of {', '.join(SLOTS)}")
        if not self.right > self.wrong:
            raise ValueError(f"right: got {self.right} with wrong={self.wrong}; the right answer must pay more")
        if not 0 <= self.relative_tolerance < 1:
            raise ValueError(f"relative_tolerance: got {self.relative_tolerance}; it must be in [0, 1)")
        if self.max_answer_chars < 1:
            raise ValueError(f"max_answer_chars: got {self.max_answer_chars}; it must be at least 1")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return to_rewards(self.grade(prompts, completions, **columns))

    def grade(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[RewardResult]:
        """One `RewardResult` a completion.

        Raises:
            ValueError: if the answer column is missing, of another length, or holds a reference that cannot be read.
            InfrastructureError: if the comparison process fails repeatedly.
        """
        golds = answer_column(columns, self.answer, len(completions))
        return [self._judge(p, c, gold) for p, c, gold in zip(prompts, completions, golds)]

    def _judge(self, prompt: Any, completion: Any, gold: Any) -> RewardResult:
        extraction = final_answer(completion_text(completion), self.slot, max_chars=self.max_answer_chars)
        reference = reference_answer(gold, self.answer)
        if self.numeric_only and exact.quantity(reference) is None:
            raise ValueError(f"{self.answer}: got {gold!r}; a numeric reward needs a number literal as the reference")
        if extraction.text is None:
            return RewardResult.wrong(extraction.reason, reward=self.wrong)
        equal, reason = self._equal(exact.clean(extraction.text), reference, prompt)
        if equal:
            return RewardResult.ok(self.right, reason, checks_passed=1, checks_total=1)
        return RewardResult.wrong(reason, reward=self.wrong, checks_total=1)

    def _equal(self, answer: str, reference: str, prompt: Any) -> tuple[bool, str]:
        if exact.is_words(reference):
            return exact.same_words(answer, reference), f"words, expected {reference!r}"
        answer, reference = exact.assigned(answer), exact.assigned(reference)
        several = len(exact.parts(reference)) > 1
        if several:
            answer, reference = (re.sub(r"\s+and\s+", ", ", text) for text in (answer, reference))
        extra = exact.marks(answer) - exact.marks(reference) - ({"\\pm"} if several else set())
        if extra and answer != reference:
            return False, f"not one value: {' '.join(sorted(extra))}"
        expected = exact.quantity(reference)
        if expected is not None:
            return self._equal_number(answer, expected, prompt)
        return self._equal_expression(answer, reference, prompt)

    def _equal_number(self, answer: str, expected: exact.Quantity, prompt: Any) -> tuple[bool, str]:
        given = exact.quantity(answer)
        if given is None:
            return False, "not a number literal"
        if "^" in answer and _key(answer) in _key(exact.clean(prompt_text(prompt))):
            return False, "an echo of the prompt"
        if given.unit and expected.unit and given.unit != expected.unit:
            return False, f"unit {given.unit!r} instead of {expected.unit!r}"
        if abs(given.value - expected.value) > self.relative_tolerance * abs(expected.value):
            return False, "another number"
        return True, ""

    def _equal_expression(self, answer: str, reference: str, prompt: Any) -> tuple[bool, str]:
        counts = len(exact.parts(answer)), len(exact.parts(reference))
        if counts[0] != counts[1] and "\\pm" not in answer + reference:
            return False, f"{counts[0]} values instead of {counts[1]}"
        answer_key, reference_key = _key(answer), _key(reference)
        if answer_key == reference_key:
            return True, ""
        if _brackets(answer) != _brackets(reference):
            return False, "other brackets than the reference"
        question = _key(exact.clean(prompt_text(prompt)))
        if len(answer_key) > 1 and answer_key in question and reference_key not in question:
            return False, "an echo of the prompt"
        verdict = _comparator(self.seconds).compare(exact.exact_decimals(reference), exact.exact_decimals(answer))
        if verdict.verdict == "unreadable":
            raise ValueError(f"{self.answer}: {verdict.detail}; give a number, an expression in LaTeX or plain words")
        return verdict.verdict == "equal", verdict.detail or verdict.verdict


def math_reward(
    *,
    answer: str = "answer",
    slot: SlotName = "any",
    right: float = 1.0,
    wrong: float = 0.0,
    seconds: float = 2.0,
    max_answer_chars: int = 400,
) -> MathReward:
    """A reward function for mathematical answers, with TRL's signature.

    Args:
        answer: name of the dataset column with the reference: a number, a LaTeX expression or words, or a worked
            solution that ends in a ``\\boxed{}`` or ``####`` answer. A row without one is an error.
        slot: where the completion's answer must stand: ``"boxed"``, ``"tag"`` (``<answer>``), ``"hash"`` (``####``) or
            ``"any"`` of these.
        right, wrong: the two rewards.
        seconds: limit of one symbolic comparison; an answer that needs longer is wrong.
        max_answer_chars: longest accepted answer, in characters.

    A reference that is a number must be answered by that number as a literal, exactly: no arithmetic left to do, no
    rounding. Other references are compared by math-verify, in a process of its own.
    """
    return MathReward(answer, slot, right, wrong, False, Fraction(0), seconds, max_answer_chars, "math_reward")


def numeric_reward(
    *,
    answer: str = "answer",
    slot: SlotName = "any",
    right: float = 1.0,
    wrong: float = 0.0,
    relative_tolerance: Number | str = 0,
    max_answer_chars: int = 400,
) -> MathReward:
    """A reward for answers that are one rational number, compared as exact fractions; starts no process.

    Args:
        relative_tolerance: largest accepted ``|given - expected| / |expected|``, read exactly (``"0.01"`` or
            ``Fraction(1, 100)`` is one hundredth; a float is what its binary digits say). 0 means equal.

    The others are those of `math_reward`. Raises ValueError where a reference is not a number literal.
    """
    tolerance = Fraction(relative_tolerance)
    return MathReward(answer, slot, right, wrong, True, tolerance, 2.0, max_answer_chars, "numeric_reward")


def answer_column(columns: dict[str, Any], name: str, count: int) -> Sequence[Any]:
    """The reference answers of a batch. Raises ValueError if the column is missing or of another length."""
    if name not in columns:
        have = ", ".join(sorted(columns)) or "none"
        raise ValueError(f"{name}: the dataset has no such column (columns given: {have}); name the right one")
    values = columns[name]
    if isinstance(values, str) or len(values) != count:
        raise ValueError(f"{name}: got {len(values)} values for {count} completions; each completion needs one")
    return values


def reference_answer(gold: Any, column: str) -> str:
    """The cleaned reference of a row: a number, a bare answer, or the final slot of a worked solution."""
    if isinstance(gold, bool) or not isinstance(gold, str | int | float | Fraction):
        raise ValueError(f"{column}: got {gold!r}; a reference is a string or a number")
    text = repr(gold) if isinstance(gold, float) else str(gold)
    if "\\boxed" in text or "####" in text:
        slot: SlotName = "boxed" if "\\boxed" in text else "hash"
        extraction = final_answer(text, slot, max_chars=10_000)
        if extraction.text is None:
            raise ValueError(f"{column}: the worked solution {text[-80:]!r} has no single final answer")
        text = extraction.text
    text = exact.clean(text)
    if not text:
        raise ValueError(f"{column}: got {gold!r}; the reference is empty")
    return text


def _key(text: str) -> str:
    return re.sub(r"\s+|\\cdot|\*", "", text)


def _brackets(text: str) -> tuple[str, str]:
    """The outer brackets of a list-like answer; braces of a set count as none, since a bare list means a set."""
    if len(exact.parts(text)) < 2:
        return "", ""
    first, last = text[0], text[-1]
    return (first if first in "([" else "", last if last in ")]" else "")


@cache
def _comparator(seconds: float) -> Comparator:
    return Comparator(seconds=seconds)
