"""Python's collector is off while anything is captured or compiled, and walks no old objects during a build."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from sgl_piecewise import capture
from sgl_piecewise.runtime.garbage import collection_paused, full_collections_put_off


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_blocks_of_two_threads_that_overlap_keep_it_off_till_the_last_ends() -> None:
    """Each used to put back what it had found, so the first to begin switched it on in the middle of the other."""
    first, second = collection_paused(), collection_paused()
    assert gc.isenabled()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_who_had_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collection_paused(), collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_full_collections_are_put_off_till_the_last_block_ends(thresholds: tuple[int, int, int]) -> None:
    first, second = full_collections_put_off(), full_collections_put_off()
    with first:
        second.__enter__()
        assert gc.get_threshold()[:2] == thresholds[:2]
        assert gc.get_threshold()[2] > 10**9
    assert gc.get_threshold()[2] > 10**9
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds


def test_thresholds_that_someone_sets_in_the_block_stay() -> None:
    with full_collections_put_off():
        gc.set_threshold(500, 5, 7)
    assert gc.get_threshold() == (500, 5, 7)


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def test_a_build_frees_young_cycles_and_walks_no_old_objects(thresholds: tuple[int, int, int]) -> None:
    """Cycles that a forward leaves would else hold its memory until the build ends."""
    gc.collect()
    gc.set_threshold(50, 2, 1)
    left: list[weakref.ref[_Cycle]] = []
    old_walks: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        left.append(weakref.ref(_Cycle()))
        return x + 1

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            old_walks.append(len(left))

    gc.callbacks.append(note)
    try:
        capture(forward, (torch.zeros(64, 4),), capture_sizes=range(1, 65))
    finally:
        gc.callbacks.remove(note)
    assert len(left) > 64
    assert [one() for one in left[: len(left) // 2]] == [None] * (len(left) // 2)
    assert old_walks == []
    assert gc.get_threshold() == (50, 2, 1)
