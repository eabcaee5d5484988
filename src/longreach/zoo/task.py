"""What the zoo's tasks have in common: long documents of live facts, decoys and filler, and questions about them.

A document is built from links. A link says "key leads to value", and each key has one live link (the truth) and one
decoy (a host that was left, an assignment that is commented out). To answer a question one starts at its key and
follows live links until a number is reached; the answer names every stop. Filler lines bring the document to the length
asked for, and may mention the same names, but never in the form of a link.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import datasets

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
MIN_LENGTH = 192
HELDOUT_SHARE = 5
"""One in so many (key, value) pairs is held out."""

TOKEN = re.compile(r" ?[A-Za-z]+| ?[0-9]{2}| ?[^\sA-Za-z0-9]|\n")
_CHAT_TOKENS = 3
"""<|user|> before the prompt, <|end|> and <|assistant|> after it."""


def count_tokens(text: str) -> int:
    """The number of tokens the zoo's own tokenizer makes of a text that is written in the zoo's words."""
    return len(TOKEN.findall(text))


def pair_split(key: str, value: str) -> Split:
    """The split that may ask about this fact: a property of the two words alone, the same in every document."""
    return "heldout" if zlib.crc32(f"{key} {value}".encode()) % HELDOUT_SHARE == 0 else "train"


@dataclass(frozen=True)
class Link:
    """A fact of a document: `key` leads to `value`."""

    key: str
    value: str
    live: bool


@dataclass(frozen=True)
class Document:
    """A long text and what is true in it.

    `live` and `decoy` map each key to where its live link and its decoy lead; `keys` are those a question may ask for.
    """

    text: str
    live: dict[str, str]
    decoy: dict[str, str]
    keys: tuple[str, ...]

    def trace(self, key: str, take_live: Callable[[], bool] = lambda: True) -> tuple[str, ...]:
        """The stops from `key` to a number, by live links, or at each stop by the kind `take_live` says."""
        stops = []
        while key in self.live:
            key = self.live[key] if take_live() else self.decoy[key]
            stops.append(key)
        return tuple(stops)


@dataclass(frozen=True)
class Task:
    """A verifiable long-context task.

    `build_links(rng, size)` draws the links of one document and the keys that may be asked, in an order in which they
    may stand; `write_link` and `write_filler` give one line each; `question(key)` is the text after the document.
    """

    name: str
    description: str
    intro: str
    question: Callable[[str], str]
    build_links: Callable[[random.Random, int], tuple[list[Link], list[str]]]
    write_link: Callable[[Link], str]
    write_filler: Callable[[random.Random, Sequence[Link]], str]
    stamp: Callable[[float], str]

    def document(
        self,
        rng: random.Random,
        length: int,
        split: Split,
        count: Callable[[str], int] = count_tokens,
        size: int | None = None,
    ) -> Document:
        """A document which, with one question and the chat template's tokens, is `length` tokens long (within 5%).

        `size` is how many questions it could answer: by default one for every 64 tokens, at most 8.
        """
        size = size or max(2, min(8, length // 64))
        while True:
            links, candidates = self.build_links(rng, size)
            live = {link.key: link.value for link in links if link.live}
            keys = tuple(key for key in candidates if pair_split(key, live[key]) == split)
            if keys:
                break
        decoy = {link.key: link.value for link in links if not link.live}
        lines = [self.write_link(link) for link in links]
        room = length - count(f"{self.intro}\n{self.question(keys[0])}") - _CHAT_TOKENS
        room -= sum(count(f"{self.stamp(0.0)}{line}\n") for line in lines)
        filler: list[str] = []
        while room > 0:
            line = self.write_filler(rng, links)
            room -= count(f"{self.stamp(0.0)}{line}\n")
            if room > -4:
                filler.append(line)
        places = set(rng.sample(range(len(lines) + len(filler)), len(lines)))
        facts, others = iter(lines), iter(filler)
        merged = [next(facts) if place in places else next(others) for place in range(len(lines) + len(filler))]
        body = "".join(f"{self.stamp(place / len(merged))}{line}\n" for place, line in enumerate(merged))
        return Document(f"{self.intro}\n{body}", live, decoy, keys)

    def prompt(self, document: Document, key: str) -> str:
        """The user's message: the document, then the question about `key`."""
        return f"{document.text}{self.question(key)}"

    def row(
        self, split: Split, length: int, seed: int, index: int, count: Callable[[str], int] | None = None
    ) -> dict[str, Any]:
        """Example `index` of a split: the same arguments give the same example on every machine."""
        rng = random.Random(f"{self.name}/{split}/{length}/{seed}/{index}")
        document = self.document(rng, length, split, count or count_tokens)
        key = rng.choice(document.keys)
        return {
            "prompt": [{"role": "user", "content": self.prompt(document, key)}],
            "answer": " ".join(document.trace(key)),
            "key": key,
            "task": self.name,
        }

    def dataset(
        self,
        split: Split = "train",
        size: int = 256,
        length: int = 2048,
        seed: int = 0,
        count: Callable[[str], int] | None = None,
    ) -> datasets.Dataset:
        """`size` conversational rows (`prompt`, `answer`, `key`, `task`) as a `datasets.Dataset`.

        `length` is in tokens of the whole prompt with its chat template, as the zoo's tokenizer counts them; for
        another model give `count`, which returns the number of tokens of a text. No question of one split is ever
        asked by the other: each (key, first stop) pair belongs to one of them.

        Raises ValueError for an unknown split, a size below 1, a negative seed or a length below `MIN_LENGTH`.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: unknown split; choose one of {', '.join(SPLITS)}")
        if size < 1:
            raise ValueError(f"size={size}: a dataset needs at least 1 row")
        if length < MIN_LENGTH:
            raise ValueError(f"length={length}: a prompt needs at least {MIN_LENGTH} tokens to hold its facts")
        if seed < 0:
            raise ValueError(f"seed={seed}: must be 0 or more")
        from datasets import Dataset

        return Dataset.from_list([self.row(split, length, seed, index, count) for index in range(size)])

    @staticmethod
    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any
    ) -> list[float]:
        """1.0 where the completion is the answer and nothing else, 0.0 elsewhere: TRL's reward signature.

        Spaces around the answer are ignored, since a tokenizer puts one before a word; anything else counts.
        """
        if len(completions) != len(answer):
            raise ValueError(
                f"answer has {len(answer)} values for {len(completions)} completions; they must be as many"
            )
        return [float(completion_text(given).strip(" ") == right) for given, right in zip(completions, answer)]


def completion_text(completion: Any) -> str:
    """The text of a completion, plain or conversational."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)
