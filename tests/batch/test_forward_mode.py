"""The table of modes, cell by cell, as the design lists it."""

from __future__ import annotations

import pytest

from sgl_piecewise.runtime.batch.forward_mode import CaptureHiddenMode, ForwardMode

M = ForwardMode


def modes(predicate: str, *args: bool) -> set[ForwardMode]:
    return {mode for mode in ForwardMode if getattr(mode, predicate)(*args)}


def test_there_are_nine_modes() -> None:
    assert len(ForwardMode) == 9


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        ("is_extend", {M.EXTEND, M.MIXED, M.TARGET_VERIFY, M.SPLIT_PREFILL, M.DLLM_EXTEND}),
        ("is_extend_without_speculative", {M.EXTEND, M.MIXED, M.SPLIT_PREFILL, M.DLLM_EXTEND}),
        ("is_cuda_graph", {M.DECODE, M.TARGET_VERIFY, M.IDLE, M.DLLM_EXTEND}),
        ("is_cpu_graph", {M.DECODE}),
        ("is_decode_or_idle", {M.DECODE, M.IDLE}),
    ],
)
def test_predicates_of_the_table(predicate: str, expected: set[ForwardMode]) -> None:
    assert modes(predicate) == expected


def test_draft_extend_counts_as_extend_and_has_graphs_where_it_is_included() -> None:
    assert modes("is_cuda_graph", True) - modes("is_cuda_graph") == {M.DRAFT_EXTEND_V2}
    assert modes("is_extend", True) - modes("is_extend") == {M.DRAFT_EXTEND_V2}


@pytest.mark.parametrize("mode", ForwardMode)
def test_every_mode_but_extend_has_a_predicate_of_its_own(mode: ForwardMode) -> None:
    """``is_extend()`` is the family."""
    if mode is not M.EXTEND:
        assert modes(f"is_{mode.value}") == {mode}


def test_hidden_modes_are_ordered() -> None:
    """One graph that hands out more serves a batch that needs less."""
    assert CaptureHiddenMode.NULL < CaptureHiddenMode.LAST < CaptureHiddenMode.FULL
