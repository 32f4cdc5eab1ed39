"""What runtime/torch_private.py makes up for in PyTorch, shown on imitations that run without a GPU."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch

from sgl_piecewise.runtime import torch_private


@pytest.mark.parametrize("num_stolen", [0, 1])
def test_pool_numbers_survive_a_snapshot_that_gives_references_away(
    monkeypatch: pytest.MonkeyPatch, num_stolen: int
) -> None:
    """PyTorch drops a reference to each number of a pool id that it does not own: a process crashed."""
    pool_id = (1 << 40, (1 << 40) + 1)

    def snapshot(given: tuple[int, int], **options: Any) -> list[dict[str, Any]]:
        assert given == pool_id
        for _ in range(num_stolen):
            for number in given:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
        return [{"segment_pool_id": pool_id}, {"segment_pool_id": (0, 1)}]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    before = [sys.getrefcount(number) for number in pool_id]
    for _ in range(100):
        assert torch_private.pool_segments(pool_id) == [{"segment_pool_id": pool_id}]
    assert [sys.getrefcount(number) for number in pool_id] == before


def test_copies_of_mixed_dtypes_and_sizes() -> None:
    """Grouped by dtype, because a mixed group would fall back to one launch each; empty ones are left alone."""
    into = [torch.ones(4, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int64)]
    torch_private.copy_all(
        (tensor[:size], torch.full((size,), 7, dtype=tensor.dtype))
        for tensor, size in zip(into, (2, 0, 4), strict=True)
    )
    assert [tensor.tolist() for tensor in into] == [[7, 7, 1, 1], [1, 1, 1, 1], [7, 7, 7, 7]]
    torch_private.copy_all([])
