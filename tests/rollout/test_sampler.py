"""What is drawn is the distribution that the options define, exactly; the same seed draws the same."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longreach.kernels.decode_ops import decode_sample
from longreach.rollout.sampler import RowOptions, SamplingParams, sample, shape_logits

V = 12
DRAWS = 10_000
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(3)) * 1.7


def options_of(params, rows, counts=None, seen=None, stops=(), allowed=None):
    return RowOptions(
        torch.full((rows,), float(params.temperature)),
        torch.arange(rows) * 7919 + 5,
        [params] * rows,
        [stops] * rows,
        None if counts is None else counts.expand(rows, V),
        None if seen is None else seen.expand(rows, V),
        allowed,
    )


def chi_square_p(observed, expected):
    """Probability of a statistic at least this large (Wilson-Hilferty), over the tokens that can come."""
    possible = expected > 0
    assert observed[~possible].sum() == 0
    o, e = observed[possible].double(), expected[possible].double()
    degrees = int(possible.sum()) - 1
    if degrees == 0:
        return 1.0
    statistic = float(((o - e) ** 2 / e).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def exact(params, counts, seen):
    """The distribution by Transformers' own processors, and OpenAI's definition of the two penalties it does not have."""
    scores = LOGITS.double()[None].clone()
    ids = torch.cat([torch.arange(V).repeat_interleave(counts.long()), seen.nonzero().flatten()])[None]
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = scores - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain(ids, scores).softmax(-1)[0]


CASES = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.6},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -0.3},
    "all": {
        "temperature": 0.9, "top_k": 9, "top_p": 0.93, "min_p": 0.03, "repetition_penalty": 1.2, "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_draws_have_the_exact_distribution(name):
    params = SamplingParams(**CASES[name])
    counts = torch.tensor([0, 2, 0, 1, 0, 0, 3, 0, 1, 0, 0, 1], dtype=torch.int32)
    seen = torch.zeros(V, dtype=torch.bool)
    seen[[0, 3, 7]] = True
    want = exact(params, counts, seen)
    options = options_of(params, DRAWS, counts, seen)
    ids, logprobs = sample(LOGITS.expand(DRAWS, V), options, torch.zeros(DRAWS, dtype=torch.int64))
    assert torch.allclose(logprobs.double(), want.log()[ids], atol=1e-5)
    assert chi_square_p(torch.bincount(ids, minlength=V), want * DRAWS) > 1e-4
    # draws of one seed, one after the other
    one = options_of(params, 1, counts, seen)
    one.seed_B = torch.tensor([77])
    numbers = [int(sample(LOGITS[None], one, torch.tensor([n]))[0]) for n in range(500)]
    assert chi_square_p(torch.bincount(torch.tensor(numbers), minlength=V), want * len(numbers)) > 1e-4


def test_the_kernel_draws_as_the_general_sampler():
    params = SamplingParams(temperature=0.8)
    options = options_of(params, 3000)
    count = torch.arange(3000)
    ids, logprobs = sample(LOGITS.expand(3000, V), options, count)
    fused, fused_logprobs = decode_sample(
        LOGITS.expand(3000, V).contiguous(), options.temperature_B, options.seed_B, count
    )
    assert torch.equal(ids, fused) and torch.allclose(logprobs, fused_logprobs, atol=1e-6)


def test_zero_temperature_takes_the_likeliest_whatever_else_is_set():
    for extra in ({}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}):
        ids, logprobs = sample(
            LOGITS.expand(5, V),
            options_of(SamplingParams(temperature=0, **extra), 5),
            torch.zeros(5, dtype=torch.int64),
        )
        assert ids.tolist() == [int(LOGITS.argmax())] * 5
        assert torch.allclose(logprobs, LOGITS.log_softmax(-1).max().expand(5))


def test_log_probs_before_truncation_on_request():
    params = SamplingParams(temperature=0.7, top_k=3, logprobs="model")
    ids, logprobs = sample(LOGITS.expand(50, V), options_of(params, 50), torch.zeros(50, dtype=torch.int64))
    assert torch.allclose(logprobs, (LOGITS / 0.7).log_softmax(-1)[ids])


def test_rows_with_different_options_share_a_step():
    params = [SamplingParams(**kw) for kw in (*CASES.values(), {"temperature": 0.0})]
    rows = len(params)
    counts = torch.ones(rows, V, dtype=torch.int32)
    seen = torch.zeros(rows, V, dtype=torch.bool)
    together = RowOptions(
        torch.tensor([p.temperature for p in params]), torch.arange(rows), params, [()] * rows, counts, seen
    )
    z = shape_logits(LOGITS.expand(rows, V), together, torch.zeros(rows, dtype=torch.int64))
    for i, p in enumerate(params[:-1]):
        assert torch.allclose(z[i].softmax(-1).double(), exact(p, counts[0], seen[0]), atol=1e-6)


def test_stop_ids_wait_for_the_minimum():
    params = SamplingParams(min_new_tokens=3)
    options = options_of(params, 2, stops=(4, 5))
    z = shape_logits(LOGITS.expand(2, V), options, torch.tensor([2, 3]))
    assert z[0, [4, 5]].isneginf().all() and z[1].isfinite().all()


def test_only_allowed_tokens_are_drawn():
    allowed = torch.zeros(400, V, dtype=torch.bool)
    allowed[:, [2, 9]] = True
    options = options_of(SamplingParams(regex="x"), 400, allowed=allowed)
    ids, logprobs = sample(LOGITS.expand(400, V), options, torch.zeros(400, dtype=torch.int64))
    assert set(ids.tolist()) == {2, 9}
    assert torch.allclose(logprobs, LOGITS[ids] - LOGITS[[2, 9]].logsumexp(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1}, "temperature=-1 is out of range"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_p": 0.0}, "top_p=0.0 is out of range.*up to 1"),
        ({"top_p": 1.1}, "top_p=1.1 is out of range"),
        ({"min_p": 2}, "min_p=2 is out of range"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is out of range"),
        ({"presence_penalty": float("inf")}, "presence_penalty=inf"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens=5 is more than max_new_tokens=4"),
        ({"stop_ids": (3, -1)}, "-1 is no token id"),
        ({"stop": ("",)}, "is no string to stop at"),
        ({"seed": "x"}, "seed='x'"),
        ({"regex": "a", "json_schema": {}}, "both given"),
        ({"json_schema": 3}, "json_schema=3"),
        ({"logprobs": "raw"}, "logprobs='raw'.*'sampled', 'model'"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


def test_a_lone_stop_is_a_tuple_of_one():
    params = SamplingParams(stop="end", stop_ids=3)
    assert params.stop == ("end",) and params.stop_ids == (3,)


def test_a_subclass_may_have_arguments_of_its_own():
    class Mine(SamplingParams):
        def __init__(self, mine, **options):
            super().__init__(**options)

    assert Mine(mine=2, top_k=3).top_k == 3
