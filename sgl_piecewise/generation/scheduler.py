"""Which requests run next, and how many tokens of each: continuous batching with chunked prefill.

Requests that decode go first, one token each; what is left of the budget goes to prompts, in the
order they came, cut into chunks. Where the pool is full, requests wait; where those that run
cannot go on, the last one to come gives its slots back and is computed again later.

A forward may be decided before the tokens of the one in flight are read. Such a request counts as
going on, unless the token in flight is the last it may have: it then waits for its end.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass

from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.schedule_batch import ScheduleBatch
from sgl_piecewise.runtime.batch.scheduling import can_schedule, release, schedule
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.kv.allocator import KVSlotAllocator
from sgl_piecewise.runtime.kv.req_to_token import ReqToTokenPool

from .in_flight import StepInFlight
from .requests import RunningRequest


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Limits of one forward.

    Attributes:
        max_requests: Requests that run at once.
        max_tokens: New tokens of one extend.
        chunk_tokens: New tokens of one prompt in one forward.
        mixes: Whether prompts and decoding requests share a forward.

    Raises:
        ConfigError: A limit under one, or a chunk over the forward's limit.
    """

    max_requests: int
    max_tokens: int
    chunk_tokens: int
    mixes: bool = True

    def __post_init__(self) -> None:
        if type(self.chunk_tokens) is not int or not 1 <= self.chunk_tokens <= self.max_tokens:
            raise ConfigError(
                f"chunk_tokens must be from 1 to {self.max_tokens}, the tokens of one extend; got "
                f"{self.chunk_tokens!r}."
            )
        if self.mixes and self.max_tokens <= self.max_requests:
            raise ConfigError(
                f"One extend has {self.max_tokens} tokens (max_extend_tokens): with {self.max_requests} decoding "
                "requests a mixed forward would have no room for a prompt. Raise it, or lower max_requests."
            )


class Scheduler:
    """Holds waiting and running requests, and decides the next batch.

    Args:
        options: Limits.
        allocator: Slots.
        table: Rows.

    Attributes:
        waiting: Requests without slots, the next one first.
        running: Requests with slots, in the order they came.
        num_retractions: How often a request gave its slots back before its end.
    """

    def __init__(self, options: SchedulerOptions, allocator: KVSlotAllocator, table: ReqToTokenPool) -> None:
        self.options = options
        self.waiting: collections.deque[RunningRequest] = collections.deque()
        self.running: list[RunningRequest] = []
        self.num_retractions = 0
        self._allocator = allocator
        self._table = table

    def next_batch(
        self, behind: StepInFlight | None = None
    ) -> tuple[ScheduleBatch, list[RunningRequest]] | None:
        """Decides the next forward, and takes its slots.

        Args:
            behind: The step in flight, whose tokens become input ids as they are. Then no request gives its
                slots back: what is in flight of it may be its end, and leave room for the others.

        Returns:
            The decision and its requests; None where nothing is left to do, or nothing before the step in
            flight is read.
        """
        decoding = [one for one in self.running if one.num_missing_tokens == 1 and not one.has_last_token]
        if behind is not None and not self._can((one, 1) for one in decoding):
            return None
        prefilling = [one for one in self.running if one.num_missing_tokens > 1]
        decodes_now = self.options.mixes or not (prefilling or self._admits_next())
        chosen: list[tuple[RunningRequest, int]] = []
        if decodes_now:
            chosen = [(one, 1) for one in self._that_fit(decoding)]
        # A retraction may have made one of them wait.
        prefilling = [one for one in prefilling if one.req.req_pool_index is not None]
        prompts = self._chunks(prefilling, chosen)
        if not decodes_now and not prompts:
            chosen = [(one, 1) for one in self._that_fit(decoding)]
        if prompts:
            mode = ForwardMode.MIXED if chosen else ForwardMode.EXTEND
        elif chosen:
            mode = ForwardMode.DECODE
        elif behind is None:
            return self._batch_of_last_resort()
        else:
            return None
        return self._schedule(mode, chosen + prompts, behind)

    def end(self, one: RunningRequest) -> None:
        """Gives back what a running request holds."""
        release(one.req, self._allocator, self._table)
        if one in self.running:
            self.running.remove(one)

    def drop(self, one: RunningRequest) -> None:
        """Forgets a request, running or waiting, and gives back what it holds."""
        self.end(one)
        if one in self.waiting:
            self.waiting.remove(one)

    def drop_all(self) -> list[RunningRequest]:
        """Gives back everything; returns the requests that had not ended."""
        dropped = [*self.running, *self.waiting]
        for one in list(self.running):
            self.end(one)
        self.waiting.clear()
        return dropped

    def _schedule(
        self,
        mode: ForwardMode,
        chosen: list[tuple[RunningRequest, int]],
        behind: StepInFlight | None = None,
    ) -> tuple[ScheduleBatch, list[RunningRequest]]:
        members = [one for one, _ in chosen]
        try:
            batch = schedule(
                mode,
                [one.req for one in members],
                [num_new for _, num_new in chosen],
                self._allocator,
                self._table,
                input_ids=None if behind is None else behind.input_ids(chosen),
            )
        except Exception:
            # Nothing was taken, and without slots nobody runs.
            for one in reversed(members):
                if one.req.req_pool_index is None:
                    self.running.remove(one)
                    self.waiting.appendleft(one)
            raise
        return batch, members

    def _that_fit(self, decoding: list[RunningRequest]) -> list[RunningRequest]:
        """Returns the requests that decode now; others were retracted until these have slots."""
        while decoding and not self._can((one, 1) for one in decoding):
            if len(self.running) == 1:
                break  # Nobody else to take from; its slots were checked when it came.
            self._retract(self.running[-1])
            decoding = [one for one in decoding if one.req.req_pool_index is not None]
        return decoding

    def _retract(self, one: RunningRequest) -> None:
        """Makes a running request wait, first in line; its tokens are kept and computed again."""
        self.end(one)
        self.waiting.appendleft(one)
        self.num_retractions += 1

    def _chunks(
        self, prefilling: list[RunningRequest], chosen: list[tuple[RunningRequest, int]]
    ) -> list[tuple[RunningRequest, int]]:
        """Returns chunks of prompts for the rest of the budget, admitting waiting requests."""
        left = self.options.max_tokens - len(chosen)
        chunks: list[tuple[RunningRequest, int]] = []
        for one in self._candidates(prefilling):
            num_new = min(one.num_missing_tokens, left, self.options.chunk_tokens)
            is_new = one.req.req_pool_index is None
            if num_new < 1 or not self._can((*chosen, *chunks, (one, num_new))):
                break
            if is_new:
                self.waiting.popleft()
                self.running.append(one)
            chunks.append((one, num_new))
            left -= num_new
        return chunks

    def _candidates(self, prefilling: list[RunningRequest]) -> Iterator[RunningRequest]:
        yield from prefilling
        while self._admits_next():
            yield self.waiting[0]

    def _admits_next(self) -> bool:
        """Whether the next waiting request may come in: there is a row, and room for its whole prompt.

        Room for the prompt alone: what it generates may later cost another one its slots.
        """
        if not self.waiting or len(self.running) >= self.options.max_requests:
            return False
        one = self.waiting[0]
        reserved = sum(other.num_missing_tokens for other in self.running)
        return self._allocator.can_allocate(reserved + one.num_missing_tokens)

    def _batch_of_last_resort(self) -> tuple[ScheduleBatch, list[RunningRequest]] | None:
        """Prompts that run wait for slots of each other: the last to come gives way, until one goes on."""
        while len(self.running) > 1:
            self._retract(self.running[-1])
            chunks = self._chunks([one for one in self.running if one.num_missing_tokens > 1], [])
            if chunks:
                return self._schedule(ForwardMode.EXTEND, chunks)
        return None

    def _can(
        self, chosen: Iterator[tuple[RunningRequest, int]] | tuple[tuple[RunningRequest, int], ...]
    ) -> bool:
        members = list(chosen)
        return can_schedule(
            [one.req for one, _ in members],
            [num_new for _, num_new in members],
            self._allocator,
            self._table,
        )
