"""Who decodes where and when: requests in, rows and pages out. Plain Python; it touches no tensor.

Requests with equal prompts share one `Prompt`: its keys are computed and stored once. Prompts are served in the order in which
they came, all completions of one before the first of the next, so nobody starves and a prompt's pages are held no longer than
needed. A request gets its row only together with all pages that it can come to need: it never stops half-way for lack of memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .cache import Kind, Limits, PageAllocator
from .sampler import SamplingParams


@dataclass(eq=False)
class Request:
    """One completion to be drawn.

    Attributes:
        number: the caller's, unique.
        prompt: token ids, at least one.
        seed: 64-bit key of its random numbers.
        stops: ids that end it.
        ids, logprobs: what has been drawn.
        finish_reason: "stop", "length" or "cancelled" once it has ended.
        row: where it decodes; -1 while it waits and after it has ended.
    """

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    stops: frozenset[int] = frozenset()
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    row: int = -1
    pages: dict[Kind, list[int]] = field(default_factory=dict)
    entry: Entry | None = None


@dataclass(eq=False)
class Prompt:
    """A distinct prompt with requests alive."""

    ids: tuple[int, ...]
    key: tuple[object, ...]
    pages: dict[Kind, list[int]] | None = None
    waiting: deque[Request] = field(default_factory=deque)
    entries: list[Entry] = field(default_factory=list)
    active: int = 0


@dataclass(eq=False)
class Entry:
    """Up to `members` rows that share one read of a prompt's keys; `index` is its line in the device's tables."""

    prompt: Prompt
    index: int
    rows: list[int]


@dataclass
class Admission:
    """What `admit` decided: prompts whose keys must be computed now, and requests that got a row."""

    prompts: list[Prompt] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.requests)


class Scheduler:
    """Rows and pages of a rollout.

    Args:
        limits: sizes.
        pages: free pages by kind of layer.
        prompt_pages: those of prompts, where they are others.
        share: store equal prompts once; False computes and stores them once per request (for comparison).
        prefill: tokens of prompts admitted at a time; a longer prompt comes alone.
    """

    def __init__(
        self,
        limits: Limits,
        pages: dict[Kind, PageAllocator],
        prompt_pages: dict[Kind, PageAllocator] | None = None,
        *,
        share: bool = True,
        prefill: int = 32768,
    ) -> None:
        self.limits, self.pages, self.share, self.prefill = limits, pages, share, prefill
        self.prompt_pages = pages if prompt_pages is None else prompt_pages
        self.prompts: dict[tuple[object, ...], Prompt] = {}
        self.order: deque[Prompt] = deque()  # prompts with waiting requests
        self.rows: list[Request | None] = [None] * limits.rows
        self._free_rows = list(range(limits.rows))
        self._free_entries = list(range(limits.rows))
        self.changed_entries: set[int] = set()
        self.entries: list[Entry | None] = [None] * limits.rows

    @property
    def active(self) -> list[Request]:
        return [r for r in self.rows if r is not None]

    @property
    def extent(self) -> int:
        """One more than the highest row or entry in use."""
        return 1 + max(self._last(self.rows), self._last(self.entries))

    @property
    def busy(self) -> bool:
        return bool(self.order) or any(r is not None for r in self.rows)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raises ValueError for one that could never be admitted."""
        for request in requests:
            self._check(request)
            key = self._key(request)
            prompt = self.prompts.get(key)
            if prompt is None:
                prompt = self.prompts[key] = Prompt(request.prompt, key)
            if not prompt.waiting:
                self.order.append(prompt)
            prompt.waiting.append(request)

    def _key(self, request: Request) -> tuple[object, ...]:
        """What requests with one `Prompt` have in common."""
        return request.prompt if self.share else (request.number, *request.prompt)

    def _check(self, request: Request) -> None:
        limits, length, new = self.limits, len(request.prompt), request.params.max_new_tokens
        if not 1 <= length <= limits.prompt:
            raise ValueError(
                f"request {request.number}: its prompt has {length} tokens; between 1 and {limits.prompt} fit"
            )
        if new > limits.new:
            raise ValueError(
                f"request {request.number}: max_new_tokens={new}; this engine was planned for {limits.new}"
            )
        for kind, pool in self.pages.items():
            own, shared = limits.own_pages(kind, new), len(limits.prefix_pages(kind, length))
            apart = self.prompt_pages[kind] is not pool
            if shared > self.prompt_pages[kind].pages or own + (0 if apart else shared) > pool.pages:
                raise ValueError(
                    f"request {request.number} needs {own} pages of keys and values and its prompt {shared}; the pool has "
                    f"{pool.pages}"
                )

    def admit(self) -> Admission:
        """Give rows to waiting requests, first come first served, as far as rows and pages reach."""
        out, tokens = Admission(), 0
        while self.order and self._free_rows:
            prompt = self.order[0]
            fresh = prompt.pages is None
            if fresh and tokens and tokens + len(prompt.ids) > self.prefill:
                break
            if fresh and not self._store(prompt, prompt.waiting[0]):
                break
            admitted = 0
            while prompt.waiting and self._free_rows and self._start(prompt, prompt.waiting[0]):
                out.requests.append(prompt.waiting.popleft())
                admitted += 1
            if fresh:
                assert admitted  # `_store` made sure of the first one's pages
                out.prompts.append(prompt)
                tokens += len(prompt.ids)
            if prompt.waiting:
                break
            self.order.popleft()
        return out

    def _store(self, prompt: Prompt, first: Request) -> bool:
        """Pages for a prompt, if there are enough for it and its first request."""
        wanted = {kind: len(self.limits.prefix_pages(kind, len(prompt.ids))) for kind in self.pages}
        for kind, pool in self.prompt_pages.items():
            own = self.limits.own_pages(kind, first.params.max_new_tokens)
            if self.pages[kind].free < own or pool.free < wanted[kind] + (own if pool is self.pages[kind] else 0):
                return False
        prompt.pages = {kind: pool.take(wanted[kind]) or [] for kind, pool in self.prompt_pages.items()}
        return True

    def _start(self, prompt: Prompt, request: Request) -> bool:
        wanted = {kind: self.limits.own_pages(kind, request.params.max_new_tokens) for kind in self.pages}
        if any(pool.free < wanted[kind] for kind, pool in self.pages.items()):
            return False
        request.pages = {kind: pool.take(wanted[kind]) or [] for kind, pool in self.pages.items()}
        request.row = heapq.heappop(self._free_rows)
        self.rows[request.row] = request
        prompt.active += 1
        if len(prompt.ids) > 1:
            entry = next((e for e in prompt.entries if len(e.rows) < self.limits.members), None)
            if entry is None:
                entry = Entry(prompt, heapq.heappop(self._free_entries), [])
                prompt.entries.append(entry)
                self.entries[entry.index] = entry
            entry.rows.append(request.row)
            request.entry = entry
            self.changed_entries.add(entry.index)
        return True

    def finish(self, request: Request, reason: str) -> int:
        """End a request; its row, pages and, after the last of its prompt, the prompt's pages are free. Returns the row (-1)."""
        if request.finish_reason is not None:
            raise RuntimeError(f"request {request.number} has ended already ({request.finish_reason})")
        request.finish_reason = reason
        prompt, row = self.prompts[self._key(request)], request.row
        if row < 0:
            prompt.waiting.remove(request)
            if not prompt.waiting:
                self.order.remove(prompt)
        else:
            self.rows[row] = None
            heapq.heappush(self._free_rows, row)
            self._give(self.pages, request.pages)
            prompt.active -= 1
            self._leave(request)
        request.row, request.pages, request.entry = -1, {}, None
        if not prompt.active and not prompt.waiting:
            self._give(self.prompt_pages, prompt.pages or {})
            del self.prompts[prompt.key]
        return row

    def _leave(self, request: Request) -> None:
        entry = request.entry
        if entry is None:
            return
        entry.rows.remove(request.row)
        self.changed_entries.add(entry.index)
        if not entry.rows:
            entry.prompt.entries.remove(entry)
            self.entries[entry.index] = None
            heapq.heappush(self._free_entries, entry.index)

    @staticmethod
    def _give(pools: dict[Kind, PageAllocator], pages: dict[Kind, list[int]]) -> None:
        for kind, numbers in pages.items():
            pools[kind].give(numbers)

    def compact(self) -> list[tuple[int, int]]:
        """Move requests from the highest rows into holes below: (from, to) in the order to carry out. Entries likewise."""
        moves = []
        while self._free_rows and self._free_rows[0] < (last := self._last(self.rows)):
            hole, request = heapq.heapreplace(self._free_rows, last), self.rows[last]
            assert request is not None
            self.rows[hole], self.rows[last], request.row = request, None, hole
            if request.entry is not None:
                request.entry.rows[request.entry.rows.index(last)] = hole
                self.changed_entries.add(request.entry.index)
            moves.append((last, hole))
        while self._free_entries and self._free_entries[0] < (last := self._last(self.entries)):
            hole, entry = heapq.heapreplace(self._free_entries, last), self.entries[last]
            assert entry is not None
            self.entries[hole], self.entries[last], entry.index = entry, None, hole
            self.changed_entries |= {last, hole}
        return moves

    @staticmethod
    def _last(slots: Sequence[object]) -> int:
        return next((i for i in range(len(slots) - 1, -1, -1) if slots[i] is not None), -1)
