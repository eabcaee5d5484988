"""The zoo's tokenizer: every word of the tasks is one token, anything else falls back to characters and bytes.

A Unigram model whose scores make the longest known piece win, so no text gives an unknown token and every text without
the character U+2581 comes back from its tokens unchanged.
"""

from __future__ import annotations

import random
import re

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from longreach.zoo.task import Task
from longreach.zoo.words import FUNCTIONS, HOSTS, NUMBERS, SERVICES, TWO_DIGITS, USERS, VARIABLES

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPACE = "▁"
_WORD = re.compile(r"[A-Za-z]+")
_WORD_SCORE, _CHARACTER_SCORE = -5.0, -10.0


def build_tokenizer(tasks: tuple[Task, ...], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the tasks' words; the same tasks give the same ids."""
    words = _words(tasks)
    pieces: dict[str, float] = {}
    for name in (PAD, END, UNKNOWN, *ROLES):
        pieces[name] = 0.0
    for word in words:
        pieces[_SPACE + word] = _WORD_SCORE
        if word[0].isupper() or word in ("let", "call", "wait", "if", "repeat"):
            pieces[word] = _WORD_SCORE
    for digits in TWO_DIGITS:
        pieces[digits] = _WORD_SCORE
        pieces[_SPACE + digits] = _WORD_SCORE
    for character in ("\n", _SPACE, *map(chr, range(33, 127))):
        pieces[character] = _CHARACTER_SCORE
        if not character.isalnum() and character not in ("\n", _SPACE):
            pieces[_SPACE + character] = _WORD_SCORE
    for byte in range(256):
        pieces[f"<0x{byte:02X}>"] = -20.0
    tokenizer = Tokenizer(Unigram(list(pieces.items()), unk_id=list(pieces).index(UNKNOWN), byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _words(tasks: tuple[Task, ...]) -> list[str]:
    """The name lists, then the words of the tasks' sentences, in the order in which they first appear."""
    words = dict.fromkeys((*SERVICES, *HOSTS, *VARIABLES, *USERS, *FUNCTIONS, "Answer"))
    for task in tasks:
        rng = random.Random(0)
        links, keys = task.build_links(rng, 8)
        lines = [task.intro, task.question(keys[0]), *(task.write_link(link) for link in links)]
        lines += [task.write_filler(rng, links) for _ in range(2000)]
        for line in lines:
            words.update(dict.fromkeys(_WORD.findall(line)))
    return [word for word in words if word not in NUMBERS]
