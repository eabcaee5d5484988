"""Loss and every gradient of the chunked engine against stock eager Transformers run as separate padded rows."""

from __future__ import annotations

import contextlib

import pytest
import torch

from longreach.context.install import enable
from longreach.context.logprob import token_logprobs
from longreach.context.tree import IGNORE, Segment, TokenTree

from .models import CONFIGS, build, gradients, true_fp64, worst

PROMPT, COMPLETIONS = 21, (9, 14, 1, 11)


def ids(n: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(seed))


def one() -> tuple[TokenTree, list[torch.Tensor]]:
    """One sequence: (tree, rows as (tokens, first labelled token))."""
    return TokenTree.from_sequences([ids(45, 1)]), [(ids(45, 1), 1)]


def group():
    prompt, completions = ids(PROMPT, 2), [ids(n, 10 + n) for n in COMPLETIONS]
    return TokenTree.from_groups([(prompt, completions)]), [(torch.cat([prompt, c]), PROMPT) for c in completions]


def deep():
    """Root, two children, three grandchildren; labels only in the leaves, a leaf directly under the root too."""
    root, a, b, *leaves = (ids(n, 30 + n) for n in (13, 6, 9, 8, 5, 1, 7))
    nobody = lambda t: torch.full_like(t, IGNORE)  # noqa: E731
    segments = [Segment(root, nobody(root)), Segment(a, nobody(a), 0), Segment(b, nobody(b), 0)]
    rows, path = [], {0: root, 1: torch.cat([root, a]), 2: torch.cat([root, b])}
    for leaf, parent in zip(leaves, (1, 1, 2, 0)):
        leaf = torch.cat([ids(1, 99), leaf])
        segments.append(Segment(leaf, torch.cat([leaf[1:], torch.tensor([IGNORE])]), parent))
        rows.append((torch.cat([path[parent], leaf]), len(path[parent]) + 1))
    return TokenTree(segments), rows


def packing():
    sequences = [ids(n, 50 + n) for n in (17, 2, 23, 8)]
    return TokenTree.from_sequences(sequences), [(s, 1) for s in sequences]


TREES = {"one": one, "group": group, "deep": deep, "packing": packing}


def stock(model, rows, dtype):
    """Right-padded rows with a 2-D mask through plain Transformers: list of log-probs."""
    longest = max(len(r) for r, _ in rows)
    batch = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(batch)
    for i, (row, _) in enumerate(rows):
        batch[i, : len(row)], mask[i, : len(row)] = row, 1
    logits = model(input_ids=batch, attention_mask=mask, use_cache=False).logits.to(dtype)
    out = []
    for i, (row, first) in enumerate(rows):
        logp = torch.log_softmax(logits[i, first - 1 : len(row) - 1], -1)
        out.append(logp.gather(-1, row[first:, None]).squeeze(-1))
    return out


def loss_of(logprobs, dtype):
    flat = torch.cat(list(logprobs))
    weights = torch.randn(len(flat), dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(
        flat.device, dtype
    )
    return (flat * weights).sum() / len(flat)


def compare(name, lora, tree_name, chunks, dtype):
    tree, rows = TREES[tree_name]()
    reference = build(name, dtype, lora=lora)
    expected = loss_of(stock(reference, rows, dtype), dtype)
    expected.backward()
    for chunk in chunks:
        model = build(name, dtype, lora=lora)
        enable(model, chunk=chunk, offload="none" if chunk != 16 else "host", parity_check=False)
        loss = loss_of(token_logprobs(model, tree), dtype)
        loss.backward()
        loss, expected = loss.detach(), expected.detach()
        error, where = worst(gradients(reference), gradients(model))
        yield chunk, abs(float(loss - expected)) / abs(float(expected)), error, where


@pytest.mark.parametrize("tree_name", TREES)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_fp64(name, lora, tree_name):
    with true_fp64():
        for chunk, loss, error, where in compare(name, lora, tree_name, (7, 16, 1000), torch.float64):
            assert loss <= 1e-11, f"chunk {chunk}: loss off by {loss:.1e}"
            assert error <= 1e-11, f"chunk {chunk}: gradient of {where} off by {error:.1e}"


@pytest.mark.parametrize("tree_name", ["group", "packing"])
@pytest.mark.parametrize("name", CONFIGS)
def test_fp32(name, tree_name):
    """Against fp64: within 1e-5, or within twice stock's own fp32 error where that is larger."""
    tree, rows = TREES[tree_name]()
    with true_fp64():
        exact = build(name, torch.float64, lora=True)
        logprobs = stock(exact, rows, torch.float64)
        size = float(torch.cat(logprobs).detach().abs().mean())  # the loss itself may cancel to almost nothing
        expected = loss_of(logprobs, torch.float64)
        expected.backward()
    errors, losses = {}, {}
    for kind in ("stock", "chunked"):
        model = build(name, torch.float32, lora=True)
        if kind == "chunked":
            enable(model, chunk=7, parity_check=False)
        logprobs = token_logprobs(model, tree) if kind == "chunked" else stock(model, rows, torch.float32)
        loss = loss_of(logprobs, torch.float32)
        loss.backward()
        losses[kind] = abs(float(loss.detach()) - float(expected.detach())) / size
        errors[kind] = worst(gradients(exact), {n: g.double() for n, g in gradients(model).items()})
    assert losses["chunked"] <= max(1e-5, 2 * losses["stock"]), losses
    assert errors["chunked"][0] <= max(1e-5, 2 * errors["stock"][0]), errors


def test_the_comparison_can_fail():
    """A tree whose branch continues from the wrong parent must not pass."""
    tree, rows = group()
    rows[0] = (torch.cat([ids(PROMPT, 3), rows[0][0][PROMPT:]]), PROMPT)
    with true_fp64(), contextlib.ExitStack():
        reference = build("qwen3", torch.float64, lora=True)
        expected = loss_of(stock(reference, rows, torch.float64), torch.float64)
        model = build("qwen3", torch.float64, lora=True)
        enable(model, chunk=7, parity_check=False)
        assert abs(float(loss_of(token_logprobs(model, tree), torch.float64) - expected)) > 1e-3
