"""Decoding ops in plain torch against what they stand for: plain attention, known words, exact distributions; and bad input."""

import pytest
import torch
from torch.nn import functional as F

from longreach.kernels.decode_attention import DecodePlan, decode_attention
from longreach.kernels.decode_experts import choose_experts, decode_experts
from longreach.kernels.decode_ops import decode_add_norm, decode_qkv, decode_sample, decode_swiglu
from longreach.kernels.few_row_matmul import few_row_matmul
from longreach.kernels.fourbit_matmul import FourBitRows, fourbit_matmul
from longreach.kernels.philox import philox

from . import decode_cases


def integers(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 4, 9])
def test_attention_is_that_of_the_joined_sequence(window: int | None) -> None:
    torch.manual_seed(0)
    p, n, H, K, D, P = 21, 6, 4, 2, 8, 16
    keys, values, q = (torch.randn(s, dtype=torch.float64) for s in ((p + n, K, D), (p + n, K, D), (1, H, D)))
    k_pages, v_pages = torch.full((4, P, K, D), torch.nan).double(), torch.full((4, P, K, D), torch.nan).double()
    for pages, x in ((k_pages, keys), (v_pages, values)):
        pages[2], pages[0, : p - P], pages[3, :n] = x[:P], x[P:p], x[p:]
    plan = DecodePlan(
        integers([3]), integers(n), integers(0), integers([2, 0]), integers(p), integers([0]),
        heads=H, kv_heads=K, head_dim=D, page=P, window=window,
    )  # fmt: skip
    plan.update()
    first = 0 if window is None else p + n - window
    kk, vv = (x[first:].repeat_interleave(H // K, 1).transpose(0, 1)[None] for x in (keys, values))
    expected = F.scaled_dot_product_attention(q.transpose(0, 1)[None], kk, vv, scale=0.3)[0].transpose(0, 1)
    torch.testing.assert_close(decode_attention(q, k_pages, v_pages, plan, scale=0.3), expected)


def test_random_words_are_those_of_the_paper() -> None:
    """Known answers of the authors' own library for a counter and key of zeros and of ones."""
    words = philox(torch.tensor(0), torch.tensor(0), torch.tensor(0))
    assert [int(w) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_samples_have_the_distribution(temperature: float) -> None:
    rows = 20_000
    logits = torch.tensor([1.0, -0.5, 2.0, 0.3, -torch.inf, 1.1, -2.0])
    ids, logprob = decode_sample(
        logits.expand(rows, -1), torch.full((rows,), temperature), torch.arange(rows), torch.full((rows,), 5)
    )
    p = torch.softmax(logits / temperature, -1)
    torch.testing.assert_close(logprob, p.log()[ids])
    seen = torch.bincount(ids, minlength=7)
    assert seen[4] == 0
    expected = rows * p[p > 0]
    statistic = ((seen[p > 0] - expected).square() / expected).sum()
    assert statistic < 20.5  # chi-square with 5 degrees of freedom: one in a thousand


def test_temperature_zero_is_the_largest() -> None:
    logits = torch.randn(5, 40)
    ids, logprob = decode_sample(logits, torch.zeros(5), torch.arange(5), torch.arange(5))
    assert torch.equal(ids, logits.argmax(-1))
    torch.testing.assert_close(logprob, torch.log_softmax(logits, -1).max(-1).values)


def test_a_row_is_sampled_as_if_alone() -> None:
    logits, seed = torch.randn(6, 500), torch.arange(6) * 77
    given = torch.ones(6), seed, torch.arange(6)
    together, _ = decode_sample(logits, *given)
    alone = [decode_sample(logits[b : b + 1], *(x[b : b + 1] for x in given))[0] for b in range(6)]
    assert torch.equal(together, torch.cat(alone))


ROWS = decode_cases.fourbit_rows("nf4", 8, 64, 64, False, 0, "cpu")
CODES, X = torch.zeros(32, dtype=torch.uint8), torch.zeros(2, 64)
Y, H2 = torch.zeros(2, 24), torch.zeros(2, 8)
TABLES = {"cos_SR": torch.zeros(4, 4), "sin_SR": torch.zeros(4, 4), "position_B": integers(0, 0),
          "own_pages_BN": integers([0], [0]), "own_length_B": integers(1, 1)}  # fmt: skip
PAGES = torch.zeros(3, 16, 1, 4)
PLAN = (
    integers([0]),
    integers(1),
    integers(-1),
    torch.zeros(0, 1, dtype=torch.int32),
    integers(),
    integers([]).view(0, 1),
)
SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 4, "page": 16}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: DecodePlan(*PLAN, **{**SHAPE, "page": 24}), "page=24: expected a power of two"),
        (lambda: DecodePlan(*PLAN, **{**SHAPE, "heads": 3, "kv_heads": 2}), "heads=3: expected a multiple of kv_heads=2"),
        (lambda: DecodePlan(*PLAN, **SHAPE, window=0), "window=0"),
        (lambda: DecodePlan(PLAN[0].long(), *PLAN[1:], **SHAPE), "own_pages is torch.int64"),
        (lambda: decode_attention(torch.zeros(2, 2, 4), PAGES, PAGES, DecodePlan(*PLAN, **SHAPE), scale=1), r"q has shape \(2,"),
        (lambda: FourBitRows("int4", 8, 8, CODES, CODES), "kind='int4': expected one of nf4, mxfp4"),
        (lambda: FourBitRows("nf4", 8, 96, CODES, CODES), "block=64: .* divides columns=96"),
        (lambda: FourBitRows("nf4", 8, 64, CODES, CODES), r"codes has shape \(32,\)"),
        (lambda: fourbit_matmul(X, [], torch.zeros(2, 8)), "0 parts; expected 1 to 3"),
        (lambda: fourbit_matmul(X, [ROWS], torch.zeros(2, 7)), "out has shape"),
        (lambda: fourbit_matmul(X, [ROWS], torch.zeros(2, 9), a_RI=torch.zeros(1, 63)), r"a has shape \(1, 63\)"),
        (lambda: few_row_matmul(X, torch.zeros(3, 63)), r"weight has shape \(3, 63\)"),
        (lambda: decode_swiglu(Y, activation="relu"), "activation='relu'"),
        (lambda: decode_swiglu(Y, lora_b_Or=torch.zeros(3, 2)), r"lora_b has shape \(3, 2\)"),
        (lambda: decode_add_norm(H2.half(), Y, torch.ones(8), 1e-6), "h is torch.float16"),
        (lambda: decode_qkv(Y, 4, 1, 4, k_pages=PAGES, v_pages=PAGES, **{**TABLES, "cos_SR": X[:, :3]}), "cos is 3 wide"),
        (lambda: decode_qkv(Y, 4, 1, 4, k_pages=PAGES, v_pages=PAGES, q_norm_D=torch.ones(4), **TABLES), "k_norm is None"),
        (lambda: decode_sample(Y, torch.ones(2), torch.zeros(2), torch.zeros(2).long()), "seed is torch.float32"),
        (lambda: choose_experts(Y, 25), "k=25"),
        (lambda: decode_experts(X, integers([0], [0]), X[:, :1], gate_up_codes=torch.zeros(2, 128, 2, 16), gate_up_scales=X,
                                down_codes=X, down_scales=X), "gate_up_codes is torch.float32"),
    ],
)  # fmt: skip
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
