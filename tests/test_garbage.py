"""Python's collector is off while anything is captured or compiled, whichever thread does it."""

from __future__ import annotations

import gc

from sgl_piecewise.runtime.garbage import collection_paused


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
