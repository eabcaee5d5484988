"""No request lost or twice, no page leaked, whatever comes and goes."""

from __future__ import annotations

import random

import pytest

from longreach.rollout.cache import Limits, PageAllocator
from longreach.rollout.sampler import SamplingParams
from longreach.rollout.scheduler import Request, Scheduler

KINDS = (None, 48)
PARAMS = {new: SamplingParams(max_new_tokens=new) for new in range(1, 65)}


def scheduler(rows=8, prompt=200, new=64, prompts=4, members=3, share=True, host=False):
    limits = Limits(rows, prompt, new, prompts, page=16, members=members, host_prompts=host)
    own = {kind: PageAllocator(limits.pages(kind)) for kind in KINDS}
    apart = {k: PageAllocator(limits.prompt_pages(k)) if limits.apart(k) else own[k] for k in KINDS}
    return Scheduler(limits, own, apart, share=share, prefill=256)


def request(number, prompt=(1, 2, 3), new=8):
    return Request(number, tuple(prompt), PARAMS[new])


def check(s):
    """Every page is where exactly one prompt or request says, every row and entry is consistent."""
    held = {}
    for kind, pool in s.pages.items():
        shared = held.setdefault(id(s.prompt_pages[kind]), (s.prompt_pages[kind], []))[1]
        shared += [p for prompt in s.prompts.values() for p in (prompt.pages or {}).get(kind, [])]
        held.setdefault(id(pool), (pool, []))[1].extend(p for r in s.active for p in r.pages[kind])
    for pool, pages in held.values():
        assert len(pages) == len(set(pages)) == pool.pages - pool.free
    for row, r in enumerate(s.rows):
        assert r is None or r.row == row
    for i, e in enumerate(s.entries):
        if e is not None:
            assert e.index == i and 1 <= len(e.rows) <= s.limits.members
            assert all(s.rows[row].entry is e and s.rows[row].prompt == e.prompt.ids for row in e.rows)
    for r in s.active:
        assert (r.entry is None) == (len(r.prompt) == 1)


def under_way(s, numbers):
    """Requests by number that have not ended, waiting or running."""
    waiting = [r for prompt in s.order for r in prompt.waiting]
    return [r for r in (*s.active, *waiting) if r.number in numbers]


def stress(total, seed, **how):
    draw = random.Random(seed)
    s = scheduler(**how)
    waiting = []
    for number in range(total):
        length = draw.choice((1, 2, 17, 33, draw.randrange(1, 200)))
        prompt = (draw.randrange(40), *range(length - 1))  # few distinct ones: groups come and go
        waiting.append(request(number, prompt, draw.randrange(1, 64)))
    left = {r.number: draw.randrange(1, r.params.max_new_tokens + 1) for r in waiting}
    everyone, ended, step = list(waiting), [], 0
    while waiting or s.busy:
        if waiting and draw.random() < 0.4:
            count = draw.randrange(1, 30)
            s.add(waiting[:count])
            del waiting[:count]
        prefilled = {p.key for p in s.prompts.values() if p.pages is not None}
        admission = s.admit()
        assert not prefilled & {p.key for p in admission.prompts}  # computed once
        if draw.random() < 0.3:
            for source, target in s.compact():
                assert source > target
            assert s.extent <= max(len(s.active), 1 + max((e.index for e in s.entries if e), default=-1))
        for r in s.active:
            r.ids.append(0)
            if len(r.ids) == left[r.number]:
                s.finish(r, "length")
                ended.append(r.number)
        if draw.random() < 0.1:
            for r in under_way(s, draw.sample(range(total), min(total, 3))):
                s.finish(r, "cancelled")
                ended.append(r.number)
        if step % 50 == 0:
            check(s)
        step += 1
        assert s.active or not s.order or waiting  # never stuck
    assert sorted(ended) == list(range(total))
    assert all(r.finish_reason in ("length", "cancelled") and r.row == -1 for r in everyone)
    pools = (*s.pages.values(), *s.prompt_pages.values())
    assert not s.prompts and all(pool.free == pool.pages for pool in pools)
    assert s.extent == 0


@pytest.mark.parametrize("how", [{}, {"share": False}, {"host": True}])
def test_thousands_of_requests(how):
    stress(4000, seed=1, **how)


@pytest.mark.slow
def test_a_hundred_thousand_requests():
    stress(100_000, seed=2)


def test_equal_prompts_are_stored_once_and_members_split():
    s = scheduler()
    s.add(request(i) for i in range(7))
    admission = s.admit()
    assert len(admission.prompts) == 1 and len(admission.requests) == 7
    assert [len(e.rows) for e in s.entries if e] == [3, 3, 1]
    check(s)


def test_a_waiting_prompt_is_not_passed_by():
    s = scheduler(rows=2, prompts=1)
    s.add([request(0, range(1, 150), 64), request(1, range(2, 150), 64), request(2, (5,), 1)])
    assert [r.number for r in s.admit().requests] == [0]  # one long prompt fits
    assert not s.admit()
    s.finish(s.active[0], "stop")
    assert next(r.number for r in s.admit().requests) == 1


def test_window_layers_keep_only_their_window():
    limits = Limits(8, 1000, 500, 2, page=16, members=4)
    assert len(limits.prefix_pages(48, 1000)) <= 48 // 16 + 1 and limits.own_pages(48, 500) == 48 // 16 + 1
    assert limits.pages(48) < limits.pages(None) / 8


def test_cancelling_frees_everything():
    s = scheduler()
    s.add(request(i, (i % 5, 2, 3)) for i in range(30))
    s.admit()
    for r in under_way(s, range(30)):
        s.finish(r, "cancelled")
    assert not s.busy and not s.prompts and all(pool.free == pool.pages for pool in s.pages.values())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Request(0, (), PARAMS[1]), "prompt has 0 tokens"),
        (Request(4, tuple(range(201)), PARAMS[1]), "request 4: its prompt has 201 tokens; between 1 and 200"),
        (Request(0, (1,), SamplingParams(max_new_tokens=65)), "max_new_tokens=65.*planned for 64"),
    ],
)
def test_requests_that_never_fit_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        scheduler().add([made])


def test_pages_cannot_be_given_twice():
    pages = PageAllocator(4)
    taken = pages.take(3)
    assert pages.take(2) is None
    pages.give(taken)
    with pytest.raises(RuntimeError, match="given back but was not taken"):
        pages.give(taken[:1])
