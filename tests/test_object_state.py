"""Objects are put back as they were, and what did not change is not written."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from sgl_piecewise.runtime.object_state import unchanged_objects

COUNTS = {"calls": 0}
last: Any = "before"


class Thing:
    def __init__(self) -> None:
        self.number = 1
        self.inner = {"a": [1, 2]}
        self.others = {1}
        self.queue = collections.deque([1])


def change(thing: Thing) -> None:
    global last  # noqa: PLW0603 - what is tested
    last = "after"
    COUNTS["calls"] += 1
    thing.number = 2
    thing.new = 3  # type: ignore[attr-defined]
    thing.inner["a"].append(3)
    thing.inner["b"] = []
    thing.others.add(2)
    thing.queue.popleft()


def test_everything_reachable_is_put_back() -> None:
    thing = Thing()
    before = dict(vars(thing))
    with unchanged_objects(((thing,), {}), change):
        change(thing)
    assert vars(thing) == before
    assert thing.inner == {"a": [1, 2]}
    assert (thing.others, list(thing.queue)) == ({1}, [1])
    assert COUNTS == {"calls": 0}
    assert last == "before"


def test_closures_and_methods_are_reached() -> None:
    total, seen = 0, []

    def add(value: int) -> None:
        nonlocal total
        total += value
        seen.append(value)

    with unchanged_objects((), add):
        add(3)
    assert (total, seen) == (0, [])

    holder: list[Any] = []
    with unchanged_objects((holder.append,), len):
        holder.append(1)
    thing = Thing()
    with unchanged_objects([thing.__init__], len):  # type: ignore[misc]
        thing.number = 5
    assert thing.number == 1


def test_put_back_after_an_error_and_with_cycles() -> None:
    thing = Thing()
    thing.inner["self"] = thing  # type: ignore[assignment]

    def fail() -> None:
        thing.number = 9
        raise RuntimeError

    with pytest.raises(RuntimeError), unchanged_objects((thing,), fail):
        fail()
    assert thing.number == 1
    del thing.inner["self"]


def test_what_did_not_change_is_not_written() -> None:
    """Another thread may be at work on it."""

    class Watched(dict[str, int]):
        def clear(self) -> None:
            raise AssertionError("written")

    class Outer:
        def __init__(self) -> None:
            self.kept = [1]

    outer = Outer()
    kept = outer.kept
    with unchanged_objects((outer, Watched(a=1)), len):
        pass
    assert outer.kept is kept
