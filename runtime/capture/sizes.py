"""Capture sizes (which padded sizes have a graph) and the shape key that finds a recording."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

# Upper bound of each stretch and its step. With a maximum of 4096 this gives 42 sizes from 4.
_LADDER = ((32, 4), (256, 16), (512, 32), (1024, 128), (2048, 256))
_LADDER_LAST_STEP = 512


@dataclass(frozen=True, kw_only=True)
class ShapeKey:
    """What decides which recording replays.

    Attributes:
        size: Capture size of the dynamic dimension; None where all shapes are fixed.
    """

    size: int | None

    def __str__(self) -> str:
        return "fixed" if self.size is None else f"size={self.size}"


def validate_capture_sizes(sizes: Sequence[int], what: str = "capture_sizes") -> tuple[int, ...]:
    """Checks capture sizes and returns them as given, ascending.

    Args:
        sizes: Padded sizes, strictly ascending, each at least one.
        what: What they are called, for errors.

    Raises:
        ConfigError: Empty, not integers, zero or negative, unsorted or repeated.
    """
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise ConfigError(
            f"{what} must be a list of integers, got {sizes!r}; write [{sizes}] for one size."
            if isinstance(sizes, int)
            else f"{what} must be a list of integers, got {sizes!r}."
        )
    given = [_integer(size) for size in sizes]
    if not given:
        raise ConfigError(f"{what} is empty; give at least one size, for example [16, 64].")
    for size in given:
        if size < 1:
            raise ConfigError(f"{what} holds {size}; every size must be at least 1.")
    for smaller, larger in itertools.pairwise(given):
        if smaller == larger:
            raise ConfigError(f"{what} holds {smaller} more than once; name each size once.")
        if smaller > larger:
            raise ConfigError(f"{what} must ascend, but {larger} stands after {smaller}. Sort the list.")
    return tuple(given)


def _integer(size: Any) -> int:
    try:
        if not isinstance(size, bool):
            return operator.index(size)  # Integers of numpy as well.
    except TypeError:
        pass
    raise ConfigError(f"capture_sizes holds {size!r}; sizes are integers.")


def default_capture_sizes(maximum: int) -> list[int]:
    """Returns a ladder of sizes that always ends in ``maximum``, denser where sizes are small.

    Steps of 4 to 32, 16 to 256, 32 to 512, 128 to 1024, 256 to 2048, then 512: relative padding
    stays near or below a quarter.

    Args:
        maximum: The largest size; always captured (`vllm#40734`: an off-ladder maximum fell back
            exactly at peak load).

    Raises:
        ConfigError: ``maximum`` is not a positive integer.
    """
    validate_capture_sizes([maximum])
    sizes: list[int] = []
    size = 0
    while size < maximum:
        step = next((step for bound, step in _LADDER if size < bound), _LADDER_LAST_STEP)
        size += step
        sizes.append(min(size, maximum))
    return sizes


def padded_size(num_real: int, sizes: Sequence[int]) -> int | None:
    """Returns the smallest of the ascending ``sizes`` that holds ``num_real``, or None."""
    index = bisect.bisect_left(sizes, num_real)
    return sizes[index] if index < len(sizes) else None
