"""Streams of a recording: which operation waits for which, and the orders a replay may take.

A CUDA graph is a DAG; the device may run what is not ordered by it in any order. The emulated
device keeps the same DAG and replays in orders chosen to hurt: whatever a stream did without
being waited for comes as late, or as early, as it is allowed to. This module must not know what
the operations are.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable

CAPTURE_STREAM = 0
_NUM_RANDOM_ORDERS = 2


class StreamOrder:
    """The DAG of one recording.

    Args:
        forked: Streams that take part from the start, besides the capture stream.
    """

    def __init__(self, forked: Iterable[int] = ()) -> None:
        self._streams: list[int] = []
        self._dependencies: list[frozenset[int]] = []
        self._next: dict[int, frozenset[int]] = {CAPTURE_STREAM: frozenset()}
        self._joined_into: dict[int, int] = {}
        self._last_draw: int | None = None
        for stream in forked:
            self._next[stream] = frozenset()

    def is_member(self, stream: int) -> bool:
        """Tells whether work on the stream is part of this recording."""
        return stream in self._next

    def has_forks(self) -> bool:
        """Tells whether another stream than the capture stream takes part."""
        return len(self._next) > 1

    def place(self, stream: int, *, draws_random: bool = False) -> None:
        """Appends an operation to a member stream.

        Args:
            stream: Where it was issued.
            draws_random: Whether it draws from a generator. Draws keep their order in every
                replay: CUDA fixes each one's place in the random sequence when it is captured.
        """
        index = len(self._streams)
        dependencies = self._next[stream]
        if draws_random:
            if self._last_draw is not None:
                dependencies |= {self._last_draw}
            self._last_draw = index
        self._streams.append(stream)
        self._dependencies.append(dependencies)
        self._next[stream] = frozenset((index,))
        self._joined_into.pop(stream, None)

    def position(self, stream: int) -> frozenset[int]:
        """Returns the operations that whatever comes next on the stream waits for."""
        return self._next[stream]

    def wait(self, stream: int, operations: frozenset[int], *, awaited: int | None) -> None:
        """Makes what comes next on ``stream`` wait for more; forks the stream if it is new here.

        Args:
            stream: The stream that waits.
            operations: What it waits for.
            awaited: The stream those are on, None if they are over already.
        """
        self._next.setdefault(stream, frozenset())
        if awaited is not None and operations == self._next[awaited] and awaited != stream:
            self._joined_into[awaited] = stream
        add_edges(self._next, stream, operations)

    def join_all(self) -> list[int]:
        """Joins every stream into the capture stream, as the end of a graph does.

        Returns:
            The streams that were forked and not joined.
        """
        ordered = self._with_ancestors(self._next[CAPTURE_STREAM])
        unjoined = [
            stream
            for stream, operations in self._next.items()
            if not (self._reaches_capture_stream(stream) and operations <= ordered)
        ]
        for stream in unjoined:
            self._next[CAPTURE_STREAM] |= self._next[stream]
        return unjoined

    def _reaches_capture_stream(self, stream: int) -> bool:
        """Tells whether the stream was waited for, directly or by way of others."""
        seen: set[int] = set()
        while stream != CAPTURE_STREAM and stream not in seen:
            seen.add(stream)
            stream = self._joined_into.get(stream, stream)
        return stream == CAPTURE_STREAM

    def _with_ancestors(self, operations: frozenset[int]) -> set[int]:
        """Returns the operations and all that they wait for."""
        seen: set[int] = set()
        pending = list(operations)
        while pending:
            index = pending.pop()
            if index not in seen:
                seen.add(index)
                pending.extend(self._dependencies[index])
        return seen

    def orders(self) -> list[list[int]]:
        """Returns orders that respect every wait, for replays to take in turn.

        The capture stream as late as possible, as early as possible, and some drawn at random;
        for a single stream its one order.
        """
        count = len(self._streams)
        if len(set(self._streams)) <= 1:
            return [list(range(count))]
        draw = random.Random(count)
        choices: list[Callable[[int], float]] = [
            lambda index: float(self._streams[index] == CAPTURE_STREAM),
            lambda index: float(self._streams[index] != CAPTURE_STREAM),
        ]
        for _ in range(_NUM_RANDOM_ORDERS):
            weights = [draw.random() for _ in range(count)]
            choices.append(weights.__getitem__)
        return [self._sorted(choice) for choice in choices]

    def _sorted(self, priority: Callable[[int], float]) -> list[int]:
        """Sorts topologically, lowest priority number first among what is ready."""
        waiting = [len(dependencies) for dependencies in self._dependencies]
        followers: list[list[int]] = [[] for _ in waiting]
        for index, dependencies in enumerate(self._dependencies):
            for dependency in dependencies:
                followers[dependency].append(index)
        ready = [(priority(index), index) for index, number in enumerate(waiting) if not number]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            index = heapq.heappop(ready)[1]
            order.append(index)
            for follower in followers[index]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (priority(follower), follower))
        return order


def add_edges(positions: dict[int, frozenset[int]], stream: int, operations: frozenset[int]) -> None:
    """Adds waits to a stream's position (apart, so that a test can leave it out)."""
    positions[stream] = positions.get(stream, frozenset()) | operations
