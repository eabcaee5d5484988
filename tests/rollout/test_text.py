"""Texts: stop strings across token boundaries, constraints, prompts given as text."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longreach.rollout import RolloutOptions, SamplingParams, generate

from ..trainers import tiny

SMALL = RolloutOptions(rows=8, page=16)


@pytest.fixture(scope="module")
def letters():
    """A byte-level tokenizer with single letters and some pairs, so that strings end inside tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["ab", "bc", "cd", "a}", '{"', '":']
    vocab = {t: i for i, t in enumerate(["<pad>", "<s>", "</s>", *alphabet, *pairs])}
    inner = Tokenizer(models.BPE(vocab, [tuple(p) for p in pairs]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def model(letters):
    return tiny.model(vocab_size=len(letters)).eval()


@pytest.mark.parametrize("stop", ["abc", "cab", "bb", "ba"])
def test_stop_strings_are_found_across_token_boundaries(model, letters, stop):
    allowed = "[abc]{40}"  # few letters, so that the strings come
    sampling = SamplingParams(max_new_tokens=40, stop=(stop,), regex=allowed, stop_ids=())
    out = generate(model, ["x"] * 12, sampling=sampling, tokenizer=letters, options=SMALL)
    found = 0
    for c in out:
        text = letters.decode(c.ids)
        if stop in text:
            found += 1
            assert c.finish_reason == "stop" and c.text == text[: text.index(stop)]
            assert stop not in letters.decode(c.ids[:-1])  # it ended with the token that completed the string
        else:
            assert c.text == text
    assert found >= 6


def test_a_regular_expression_is_followed_to_its_end(model, letters):
    pattern = r"(ab|cd){2,4}-[0-9]{3}"
    out = generate(
        model,
        ["x", "yz"] * 4,
        sampling=SamplingParams(regex=pattern, max_new_tokens=60),
        tokenizer=letters,
        options=SMALL,
    )
    assert all(re.fullmatch(pattern, c.text) and c.finish_reason == "stop" for c in out)
    assert len({c.text for c in out}) > 3


def test_a_json_schema_is_followed(model, letters):
    schema = {
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"], "additionalProperties": False,
    }  # fmt: skip
    out = generate(
        model,
        ["x"] * 4,
        sampling=SamplingParams(json_schema=schema, max_new_tokens=200),
        tokenizer=letters,
        options=SMALL,
    )
    for c in (c for c in out if c.finish_reason == "stop"):
        assert set(json.loads(c.text)) == {"n", "ok"}
    assert any(c.finish_reason == "stop" for c in out)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "("}, r"regex='\(' can't be followed: .*unclosed group"),
        ({"regex": "(?<=a)b"}, r"regex='\(\?<=a\)b' can't be followed: .*look-around"),
        ({"json_schema": "{a"}, r"json_schema=\{a can't be followed: key must be a string"),
        ({"json_schema": {"type": "nonsense"}}, r"can't be followed: Invalid type: nonsense"),
        ({"json_schema": {"enum": {1, 2}}}, r"json_schema=.* is not JSON"),
    ],
)
def test_a_constraint_that_cannot_be_followed_is_named_when_it_is_made(given, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        SamplingParams(**given)


def test_constraints_without_their_library_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"longreach\[constraints\]"):
        SamplingParams(regex="aaa?")


def test_texts_in_texts_out(model, letters):
    ids = letters("xab")["input_ids"]
    sampling = SamplingParams(max_new_tokens=9, seed=1)
    by_text = generate(model, ["xab"], sampling=sampling, tokenizer=letters, options=SMALL)
    by_ids = generate(model, [torch.tensor(ids)], sampling=sampling, options=SMALL)
    assert by_text[0].ids == by_ids[0].ids and by_ids[0].text is None
    assert by_text[0].text == letters.decode(by_text[0].ids, skip_special_tokens=True)
