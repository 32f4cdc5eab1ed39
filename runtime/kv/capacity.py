"""How many tokens fit: from the memory that is left after weights, less what graphs will need.

Pure functions of numbers; who measures memory is not their matter. A pool never moves, so what
graphs took is checked after capture and cannot be mended then, only reported with both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, PoolError
from .pool import SubPoolSpec
from .slots import FULL_POOL


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Where the device's memory goes.

    Attributes:
        free_bytes: Free once the weights are loaded.
        graph_bytes: Estimate of what graphs will need, pool and driver.
        margin_bytes: Kept free on top, for activations and for an estimate that is too small.

    Raises:
        ConfigError: A number is negative.
    """

    free_bytes: int
    graph_bytes: int
    margin_bytes: int

    def __post_init__(self) -> None:
        for field in ("free_bytes", "graph_bytes", "margin_bytes"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} must not be negative, got {getattr(self, field)}.")

    @property
    def kv_bytes(self) -> int:
        """Bytes for keys and values."""
        return max(0, self.free_bytes - self.graph_bytes - self.margin_bytes)


@dataclass(frozen=True, kw_only=True)
class KVCapacity:
    """Slots of every sub-pool.

    Attributes:
        num_slots: By sub-pool, the scratch slot not counted.
        kv_bytes: What the buffers take, scratch slots included.
        budget: What it was computed from.
    """

    num_slots: dict[str, int]
    kv_bytes: int
    budget: MemoryBudget


def profile_capacity(
    specs: Sequence[SubPoolSpec],
    budget: MemoryBudget,
    *,
    window_fraction: float = 0.8,
    min_window_slots: int = 1,
    max_slots: int | None = None,
) -> KVCapacity:
    """Returns how many slots every sub-pool gets.

    Args:
        specs: The sub-pools, ``full`` among them.
        budget: The memory.
        window_fraction: Slots of a sliding-window sub-pool for each of the full-attention one;
            in (0, 1].
        min_window_slots: Slots that it gets in any case, as far as the full-attention one has so many: the
            longest request needs them at once where it comes as one prompt.
        max_slots: Upper bound for the full-attention sub-pool; None for what fits.

    Raises:
        ConfigError: No sub-pool ``full``, or a fraction or bound out of range.
        PoolError: Not a single token fits.
    """
    if FULL_POOL not in {spec.name for spec in specs}:
        raise ConfigError(f"specs must hold a sub-pool {FULL_POOL!r}, got {[spec.name for spec in specs]}.")
    if not 0 < window_fraction <= 1:
        raise ConfigError(f"window_fraction must be over 0 and at most 1, got {window_fraction}.")
    if max_slots is not None and max_slots < 1:
        raise ConfigError(f"max_slots must be at least 1, got {max_slots}.")
    scratch_bytes = sum(spec.bytes_per_token for spec in specs)
    num_full, num_window = _full_and_window(
        sum(spec.bytes_per_token for spec in specs if spec.window is None),
        sum(spec.bytes_per_token for spec in specs if spec.window is not None),
        budget.kv_bytes - scratch_bytes,
        window_fraction,
        min_window_slots,
        max_slots,
    )
    num_slots = {spec.name: num_full if spec.window is None else num_window for spec in specs}
    if min(num_slots.values()) < 1:
        raise PoolError(
            f"No KV cache fits: {budget.free_bytes} bytes are free after the weights, "
            f"{budget.graph_bytes} are for graphs and {budget.margin_bytes} for the margin, and one token "
            f"takes {scratch_bytes}. Use a smaller model, fewer capture sizes or a smaller margin."
        )
    kv_bytes = sum(spec.bytes_per_token * (num_slots[spec.name] + 1) for spec in specs)
    return KVCapacity(num_slots=num_slots, kv_bytes=kv_bytes, budget=budget)


def _full_and_window(
    full_bytes: int, window_bytes: int, kv_bytes: int, fraction: float, at_least: int, max_slots: int | None
) -> tuple[int, int]:
    """Returns the slots of full-attention sub-pools and of those with a window, from the bytes of a token in each."""

    def bounded(num_full: float) -> int:
        return math.floor(num_full if max_slots is None else min(num_full, max_slots))

    num_full = bounded(kv_bytes / (full_bytes + fraction * window_bytes))
    num_window = math.floor(num_full * fraction)
    if num_window >= min(num_full, at_least):
        return num_full, num_window
    num_full = bounded((kv_bytes - at_least * window_bytes) / full_bytes)
    if num_full >= at_least:
        return num_full, at_least
    # Not even one request as long as may be: its tokens, and no more, in each.
    num_full = bounded(kv_bytes / (full_bytes + window_bytes))
    return num_full, num_full


@dataclass(frozen=True, kw_only=True)
class CapacityCheck:
    """What graphs took, beside what was set aside for them.

    Attributes:
        estimated_bytes: The estimate.
        measured_bytes: What capture took, pool and driver.
        free_bytes: Free now.
        margin_bytes: What was to stay free.
    """

    estimated_bytes: int
    measured_bytes: int
    free_bytes: int
    margin_bytes: int

    @property
    def unused_bytes(self) -> int:
        """Bytes that a better estimate would have given to the KV cache; negative if none."""
        return self.free_bytes - self.margin_bytes


def verify_after_capture(capacity: KVCapacity, *, measured_bytes: int, free_bytes: int) -> CapacityCheck:
    """Checks the capacity once all graphs are captured.

    Args:
        capacity: What the pools were built from.
        measured_bytes: What graphs took, pool and driver.
        free_bytes: Free now.

    Returns:
        Both sides, for the report and for a better estimate next time.

    Raises:
        PoolError: Graphs took so much that the margin is gone: the next large batch would run out.
    """
    budget = capacity.budget
    check = CapacityCheck(
        estimated_bytes=budget.graph_bytes,
        measured_bytes=measured_bytes,
        free_bytes=free_bytes,
        margin_bytes=budget.margin_bytes,
    )
    is_over_margin = measured_bytes - budget.graph_bytes > budget.margin_bytes
    # A pool that was bounded by more than memory leaves room for graphs of any size.
    if free_bytes <= 0 or (is_over_margin and free_bytes < budget.margin_bytes):
        raise PoolError(
            f"Graphs took {measured_bytes} bytes, {budget.graph_bytes} were estimated and the margin is "
            f"{budget.margin_bytes}; {free_bytes} bytes are free. A pool cannot shrink: start again with "
            f"an estimate of at least {measured_bytes} bytes, or with fewer capture sizes."
        )
    return check
