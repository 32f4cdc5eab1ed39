"""A test of the tests: each seeded defect turns a named check red, which is green without it.

The checks are those of the suite, called as functions on the emulated device; a defect is put into
the engine for the duration of one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contract import (
    test_ownership,
    test_static_inputs,
    test_streams,
    test_undefined_memory,
)
from faults import test_aliasing, test_padding

from sgl_piecewise.runtime import torch_private, tree
from sgl_piecewise.runtime.capture import session, static_inputs
from sgl_piecewise.runtime.capture.boundary import BreakOutputs
from sgl_piecewise.runtime.capture.emulated import arena, streams
from sgl_piecewise.runtime.capture.emulated.device import EmulatedDevice
from sgl_piecewise.runtime.capture.placement import PlacedResult

Check = Callable[[EmulatedDevice], None]


def no_boundary_copy(patch: pytest.MonkeyPatch) -> None:
    """Replay drops what a marked function returns."""
    patch.setattr(BreakOutputs, "receiver", lambda self: lambda result: None)


def owner_freed_early(patch: pytest.MonkeyPatch) -> None:
    """Captured code gets an alias of a break's result that does not keep its memory."""
    place = session.place_result

    def place_without_owner(*args: Any, **kwargs: Any) -> PlacedResult:
        placed = place(*args, **kwargs)
        leaves, spec = tree.flatten(placed.result)
        aliases = [
            torch_private.alias_without_owning(leaf) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        return dataclasses.replace(placed, result=tree.unflatten(spec, aliases), copied=[])

    patch.setattr(session, "place_result", place_without_owner)


def stale_pad_tail(patch: pytest.MonkeyPatch) -> None:
    """Rows past the real ones keep what the last batch left there."""
    patch.setattr(static_inputs, "fill_tail", lambda tail, pad_value: None)


def skipped_poison(patch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote keeps what happened to be there."""
    patch.setattr(arena, "poison_range", lambda address, num_bytes, is_bool: None)


def dropped_wait(patch: pytest.MonkeyPatch) -> None:
    """A stream that waits for another does not."""

    def drop(positions: dict[int, frozenset[int]], stream: int, operations: frozenset[int]) -> None:
        positions.setdefault(stream, frozenset())

    patch.setattr(streams, "add_edges", drop)


def _padded_rows(device: EmulatedDevice) -> None:
    test_padding.test_row_019_020_no_input_keeps_the_tail_of_a_larger_batch(device, [8, 3])


def _ownership(device: EmulatedDevice) -> None:
    test_ownership.test_allocations_between_a_mark_and_the_use_of_its_result(device, "breakable")


# Every defect is found by more than one check, so that deleting one test does not hide it.
CHECKS: list[tuple[Callable[[pytest.MonkeyPatch], None], Check]] = [
    (no_boundary_copy, test_aliasing.test_row_004_break_returning_a_fresh_tensor_is_copied),
    (no_boundary_copy, test_ownership.test_every_size_is_right_after_all_others_ran),
    (owner_freed_early, _ownership),
    (owner_freed_early, test_aliasing.test_row_001_buckets_survive_churn_and_random_order),
    (stale_pad_tail, test_static_inputs.stale_tail),
    (stale_pad_tail, _padded_rows),
    (skipped_poison, test_undefined_memory.uninitialised_read),
    (skipped_poison, test_undefined_memory.read_after_free),
    (dropped_wait, test_streams.fork_and_join),
    (dropped_wait, test_streams.test_fork_and_join_by_events),
]


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("defect", "check"), CHECKS, ids=[f"{defect.__name__}-{check.__name__}" for defect, check in CHECKS]
)
def test_seeded_defect_turns_a_check_red(
    defect: Callable[[pytest.MonkeyPatch], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(EmulatedDevice())
    with monkeypatch.context() as patch:
        defect(patch)
        with pytest.raises(AssertionError):
            check(EmulatedDevice())
    check(EmulatedDevice())
