"""What memory a tensor covers, asked of its strides and address alone."""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.runtime.capture.extents import overlaps_itself, share_bytes, span_bytes

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


@pytest.mark.parametrize(
    ("tensor", "num_bytes"),
    [
        (WHOLE, 96),
        (WHOLE[:, 1], 4 * 19),  # from element 1 to element 19
        (WHOLE[1:1], 0),
        (WHOLE[2, 3], 4),
        (WHOLE[0].expand(5, 6), 24),
    ],
)
def test_a_span_runs_from_the_first_element_to_the_last(tensor: torch.Tensor, num_bytes: int) -> None:
    assert span_bytes(tensor) == num_bytes


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (WHOLE[:2], WHOLE[1:], True),
        (WHOLE[:2], WHOLE[2:], False),
        (WHOLE[:, 0], WHOLE[:, 1], True),  # spans are asked, not elements
        (WHOLE, WHOLE[1:1], False),  # an empty view lies nowhere
        (WHOLE, WHOLE.clone(), False),
    ],
)
def test_tensors_share_bytes_where_their_spans_meet(
    one: torch.Tensor, other: torch.Tensor, expected: bool
) -> None:
    assert share_bytes(one, other) is expected
    assert share_bytes(other, one) is expected


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (WHOLE, False),
        (WHOLE.t(), False),
        (WHOLE[:, ::2], False),
        (WHOLE[0].expand(5, 6), True),
        (WHOLE.as_strided((3, 4), (1, 1)), True),
        (WHOLE[:1].expand(1, 6), False),
    ],
)
def test_an_index_that_names_an_element_twice_is_an_overlap(tensor: torch.Tensor, expected: bool) -> None:
    assert overlaps_itself(tensor) is expected
