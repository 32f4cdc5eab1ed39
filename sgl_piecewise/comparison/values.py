"""How two outputs differ: bit for bit, by how much, and in the next token.

Rows are tokens (dim 0). Equality is of bits, so NaN equals the same NaN and 0.0 differs from
-0.0. This module must not know where outputs come from.
"""

from __future__ import annotations

import math

import torch


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the index of the first element (row-major) whose bits differ, or None.

    Args:
        expected: Any shape and dtype.
        got: The same shape and dtype.
    """
    expected_bytes = expected.contiguous().reshape(-1).view(torch.uint8)
    got_bytes = got.contiguous().reshape(-1).view(torch.uint8)
    if torch.equal(expected_bytes, got_bytes):
        return None
    first_byte = int((expected_bytes != got_bytes).to(torch.uint8).argmax())
    flat_index = first_byte // expected.element_size()
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_index), expected.shape))


def max_abs_difference(expected: torch.Tensor, got: torch.Tensor) -> float | None:
    """Returns the largest absolute difference in float32 or wider; None where one is not finite."""
    if expected.numel() == 0:
        return 0.0
    wide = torch.promote_types(torch.promote_types(expected.dtype, got.dtype), torch.float32)
    largest = 0.0
    for expected_row, got_row in zip(_row_blocks(expected), _row_blocks(got), strict=True):
        # `max` keeps a NaN, so that it cannot hide behind a large difference.
        difference = float((expected_row.to(wide) - got_row.to(wide)).abs().max())
        if not math.isfinite(difference):
            return None
        largest = max(largest, difference)
    return largest


def next_token_agreement(expected_TV: torch.Tensor, got_TV: torch.Tensor) -> float | None:
    """Returns the part of rows with the largest logit in the same place; None unless ``[T, V]``."""
    if expected_TV.dim() != 2 or expected_TV.shape[0] == 0 or expected_TV.dtype.is_complex:
        return None
    same_T = expected_TV.argmax(dim=-1) == got_TV.argmax(dim=-1)
    return float(same_T.sum()) / expected_TV.shape[0]


def _row_blocks(tensor: torch.Tensor, max_elements: int = 1 << 26) -> tuple[torch.Tensor, ...]:
    """Blocks of rows, so that the wide copies of large logits stay small."""
    if tensor.dim() == 0:
        return (tensor,)
    row_elements = max(1, tensor.numel() // tensor.shape[0])
    return tensor.split(max(1, max_elements // row_elements))
