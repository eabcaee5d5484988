"""Very many requests through a tiny model: none lost or mixed up, every stop heeded, everything given back."""

from __future__ import annotations

import gc
import random

import psutil
import pytest
import torch

from longreach.attention.boundaries import on_device
from longreach.rollout import RolloutOptions, SamplingParams, generate, rollout_engine
from longreach.rollout.cache import PagePool

from ..trainers import tiny

OPTIONS = RolloutOptions(rows=192, page=16)
PER_ROWS = 4  # tensors that a step keeps for each number of rows in use that it has met
ALONE = 40  # requests that are drawn again by themselves
KEPT = 4096  # bytes of a finished request and its callback's record that may stay: the completion itself


class Traffic:
    """Requests of random lengths, options and prompts, some shared, some cancelled; and what was seen of each."""

    def __init__(self, total: int, seed: int) -> None:
        draw = random.Random(seed)
        self.tokenizer = tiny.tokenizer()
        common = [self._prompt(draw) for _ in range(max(1, total // 50))]
        self.prompts = [draw.choice(common) if draw.random() < 0.7 else self._prompt(draw) for _ in range(total)]
        self.params = [self._params(draw, number) for number in range(total)]
        self.cancelled = {n: draw.randrange(1, 4) for n in range(total) if draw.random() < 0.03}
        self.seen = [0] * total
        self.memory: list[int] = []
        self.tokens = 0

    @staticmethod
    def _prompt(draw: random.Random) -> list[int]:
        return [draw.randrange(3, tiny.WORDS) for _ in range(draw.choice((1, 2, 16, 17, draw.randrange(1, 41))))]

    @staticmethod
    def _params(draw: random.Random, number: int) -> SamplingParams:
        new = draw.randrange(1, 13)
        return SamplingParams(
            max_new_tokens=new,
            min_new_tokens=draw.choice((0, 0, 0, min(2, new))),
            temperature=draw.choice((1.0, 1.0, 0.7, 0.0)),
            stop_ids=tuple(draw.sample(range(3, tiny.WORDS), draw.randrange(8))),
            stop=(f"w{draw.randrange(90)} ", f"w{draw.randrange(9)}") if draw.random() < 0.02 else (),
            seed=number,
        )

    def watch(self, number: int, ids: list[int]) -> bool:
        """Each token comes once and in its order; False cancels."""
        self.seen[number] += 1
        assert self.seen[number] == len(ids), number
        self.tokens += 1
        if self.tokens % 20_000 == 0:
            self.memory.append(psutil.Process().memory_info().rss)
        return self.cancelled.get(number) != len(ids)

    def check(self, number: int, completion) -> None:
        """The completion ended as its options say, at the first token that could end it."""
        params, ids = self.params[number], completion.ids
        assert self.seen[number] == len(ids) == len(completion.logprobs) >= 1
        ends = [self._ends(params, ids[: n + 1]) for n in range(len(ids))]
        assert not any(ends[:-1]), number
        assert all(token not in params.stop_ids for token in ids[: params.min_new_tokens])
        if ends[-1]:
            assert completion.finish_reason == "stop"
        elif len(ids) == params.max_new_tokens:
            assert completion.finish_reason == "length"
        else:
            assert completion.finish_reason == "cancelled" and self.cancelled[number] == len(ids)

    def _ends(self, params: SamplingParams, ids: list[int]) -> bool:
        if ids[-1] in params.stop_ids:
            return True
        text = self.tokenizer.decode(ids, skip_special_tokens=False) if params.stop else ""
        return any(string in text for string in params.stop)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list:
    """The page allocators of every run."""
    made: list = []
    allocators = PagePool.allocators

    def kept(self: PagePool):
        found = allocators(self)
        made.extend(pool for pools in found for pool in pools.values())
        return found

    monkeypatch.setattr(PagePool, "allocators", kept)
    return made


def live_tensors() -> int:
    """Without those that a cache of bounded size keeps on purpose."""
    on_device.cache_clear()
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def stress(total: int, kind: str, pools: list, seed: int = 0) -> Traffic:
    model = tiny.model(kind, hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8).eval()
    traffic = Traffic(total, seed)
    options = {"sampling": traffic.params, "tokenizer": traffic.tokenizer, "options": OPTIONS}
    generate(
        model, traffic.prompts[:500], **options | {"sampling": traffic.params[:500]}
    )  # memory for all rows is made
    before = live_tensors()
    out = generate(model, traffic.prompts, on_token=traffic.watch, **options)
    assert live_tensors() <= before + PER_ROWS * OPTIONS.rows
    assert len(out) == total and all(pool.free == pool.pages for pool in pools)
    for number, completion in enumerate(out):
        traffic.check(number, completion)
    reasons = [completion.finish_reason for completion in out]
    assert min(reasons.count(reason) for reason in ("stop", "length", "cancelled")) > total / 100
    assert rollout_engine(model).stats.tokens == traffic.tokens == sum(len(c.ids) for c in out)
    for number in random.Random(seed).sample(range(total), ALONE):
        alone = generate(model, [traffic.prompts[number]], **options | {"sampling": traffic.params[number]})[0]
        assert alone.ids[: len(out[number].ids)] == out[number].ids, number
    return traffic


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("mistral", marks=pytest.mark.slow)])
def test_two_thousand_requests(kind: str, pools: list) -> None:
    stress(2_000, kind, pools)


@pytest.mark.slow
def test_a_hundred_thousand_requests(pools: list) -> None:
    """Minutes on two cores. What the process holds grows by what it gives back, and by nothing else."""
    total = 100_000
    memory = stress(total, "qwen3", pools, seed=1).memory
    early = memory[len(memory) // 4]
    assert memory[-1] - early < total * KEPT


@pytest.mark.parametrize("after", [1, 700])
def test_cancelling_all_of_them_midway_frees_everything(after: int, pools: list) -> None:
    model = tiny.model(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8).eval()
    traffic = Traffic(1_000, seed=2)
    given = 0

    def until(number: int, ids: list[int]) -> bool:
        nonlocal given
        given += 1
        return given < after

    options = {"sampling": traffic.params, "tokenizer": traffic.tokenizer, "options": OPTIONS}
    out = generate(model, traffic.prompts, on_token=until, **options)
    assert len(out) == 1_000 and all(pool.free == pool.pages for pool in pools)
    late = [completion for completion in out if completion.finish_reason == "cancelled"]
    assert len(late) > 800 and all(len(completion.ids) >= 1 for completion in out)
    again = generate(model, traffic.prompts[:50], **options | {"sampling": traffic.params[:50]})
    fresh = tiny.model(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8).eval()
    expected = generate(fresh, traffic.prompts[:50], **options | {"sampling": traffic.params[:50]})
    assert [c.ids for c in again] == [c.ids for c in expected]
