"""Trees and scores of what is no list of token ids, or of another tokenizer's: one clear error each."""

from __future__ import annotations

import pytest
import torch

from longreach import TokenTree, token_logprobs
from longreach.context.tree import IGNORE, Segment

from ..trainers import tiny

SEEN = 97  # ids of the tiny model's vocabulary


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("hello", [[5]])], r"the prompt of group 0 is a text, 'hello': give token ids, tokenizer\(text\)"),
        ([([5], [[6]]), ([5], [[6], "wo"])], r"completion 1 of group 1 is a text, 'wo'"),
        ([([5], "wo")], r"the completions of group 0 are 'wo': give a list of completions, each a list of token ids"),
        ([([5], [6, 7])], r"the completions of group 0 are \[6, 7\]: give a list of completions"),
        ([([5], torch.tensor([6, 7]))], "give a list of completions"),
        ([([5], 6)], r"the completions of group 0 are 6"),
        ([[5, 6]], r"group 0 is \[5, 6\]: give pairs \(prompt_ids, \[completion_ids, ...\]\)"),
        ([5, 6], r"group 0 is 5: give pairs"),
        (["ab"], r"group 0 is 'ab': give pairs"),
        ([([5, 6.5], [[1]])], r"the prompt of group 0 is of torch.float32: token ids are whole numbers"),
        ([([5], [[True, False]])], r"completion 0 of group 0 is of torch.bool"),
        ([([5], [["a"]])], r"completion 0 of group 0 is \['a'\]: give token ids"),
        ([([5], [[5, IGNORE]])], r"completion 0 of group 0 holds -100: .*leave padding and masked tokens out"),
        ([([[5]], [[5]])], r"the prompt of group 0 has the shape \(1, 1\)"),
        ([([], [[5]])], r"the prompt of group 0 is empty"),
        ([([5], [])], r"the completions of group 0: there are none"),
        ([], "no segments"),
    ],
)
def test_groups(groups, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.from_groups(groups)


def test_sequences() -> None:
    with pytest.raises(ValueError, match=r"from_sequences: sequence 1 is a text, 'abc'"):
        TokenTree.from_sequences([[5, 6], "abc"])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            TokenTree.from_groups([([5, 6], [[SEEN + 3]])]),
            rf"segment 1 of the tree holds token id 100 \(ids\[1\]\).* has {SEEN}",
        ),
        (TokenTree.from_groups([([SEEN, 6], [[5]])]), r"segment 0 of the tree holds token id 97 \(ids\[0\]\)"),
        (TokenTree([Segment(torch.tensor([5]), torch.tensor([200]))]), r"segment 0 .* token id 200 \(labels\[0\]\)"),
        ([[5, 6]], r"tree is a list; make one with TokenTree.from_groups"),
    ],
)
def test_tokens_that_the_vocabulary_does_not_have(tree, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprobs(tiny.model(), tree)


@pytest.mark.parametrize("temperature", ["a", None, 0, -1.0, float("nan"), True])
def test_temperatures(temperature) -> None:
    with pytest.raises(ValueError, match=r"temperature=.*it divides the logits"):
        token_logprobs(tiny.model(), TokenTree.from_groups([([5, 6], [[7]])]), temperature=temperature)


@pytest.mark.parametrize("prompt", [[5], [5, 6]])
def test_completions_that_are_empty_have_no_log_probs(prompt: list[int]) -> None:
    model = tiny.model()
    alone = token_logprobs(model, TokenTree.from_groups([(prompt, [[], []])]))
    assert [tuple(values.shape) for values in alone] == [(0,), (0,)]
    mixed = token_logprobs(model, TokenTree.from_groups([(prompt, [[], [7]]), (prompt, [[]])]))
    assert [len(values) for values in mixed] == [0, 1, 0]
    only = token_logprobs(model, TokenTree.from_groups([(prompt, [[7]])]))
    assert torch.allclose(mixed[1], only[0])
