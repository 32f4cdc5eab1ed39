"""Capacity in numbers: what fits, what does not, and the check after capture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_piecewise.runtime.errors import ConfigError, PoolError
from sgl_piecewise.runtime.kv.capacity import MemoryBudget, profile_capacity, verify_after_capture
from sgl_piecewise.runtime.kv.pool import KVPool, KVSubPool, SubPoolSpec
from sgl_piecewise.runtime.kv.slots import FULL_POOL, WINDOW_POOL

GIB = 1 << 30


def spec(name: str, num_layers: int, window: int | None = None) -> SubPoolSpec:
    first = 0 if window is None else 100
    return SubPoolSpec(
        name=name,
        layer_ids=tuple(range(first, first + num_layers)),
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        window=window,
    )


FULL = spec(FULL_POOL, 36)
HYBRID = [spec(FULL_POOL, 5), spec(WINDOW_POOL, 25, window=512)]


def test_qwen3_8b_on_what_an_h200_has_left() -> None:
    """36 layers of 8 heads of 128 in bf16 are 147,456 bytes a token."""
    budget = MemoryBudget(free_bytes=120 * GIB, graph_bytes=2 * GIB, margin_bytes=4 * GIB)
    capacity = profile_capacity([FULL], budget)
    assert FULL.bytes_per_token == 147_456
    assert capacity.num_slots == {FULL_POOL: 114 * GIB // 147_456 - 1}


def test_a_hybrid_has_two_capacities_in_the_given_ratio() -> None:
    budget = MemoryBudget(free_bytes=10 * GIB, graph_bytes=GIB, margin_bytes=GIB)
    capacity = profile_capacity(HYBRID, budget, window_fraction=0.25)
    full, window = capacity.num_slots[FULL_POOL], capacity.num_slots[WINDOW_POOL]
    assert window == full // 4
    everything = profile_capacity(HYBRID, budget, window_fraction=1.0).num_slots[FULL_POOL]
    assert full > 2.5 * everything


@given(
    st.integers(0, 1 << 34),
    st.integers(0, 1 << 32),
    st.integers(0, 1 << 32),
    st.floats(0.01, 1.0),
    st.integers(1, 1 << 16),
)
def test_never_more_than_there_is_and_not_a_token_less(
    free: int, graph: int, margin: int, ratio: float, longest: int
) -> None:
    budget = MemoryBudget(free_bytes=free, graph_bytes=graph, margin_bytes=margin)
    token_bytes = sum(one.bytes_per_token for one in HYBRID)
    try:
        capacity = profile_capacity(HYBRID, budget, window_fraction=ratio, min_window_slots=longest)
    except PoolError:
        # One slot of the window may ask for many of the full sub-pool.
        assert budget.kv_bytes < token_bytes * (1 / ratio + 2)
        return
    full, window = capacity.num_slots[FULL_POOL], capacity.num_slots[WINDOW_POOL]
    assert min(full, longest) <= window <= full
    assert capacity.kv_bytes <= budget.kv_bytes < capacity.kv_bytes + 2 * token_bytes


def test_kv_bytes_are_those_of_the_buffers() -> None:
    budget = MemoryBudget(free_bytes=3 << 20, graph_bytes=0, margin_bytes=0)
    small = [
        SubPoolSpec(name=FULL_POOL, layer_ids=(0, 1), num_kv_heads=2, head_dim=8, dtype=torch.float32),
        SubPoolSpec(
            name=WINDOW_POOL, layer_ids=(2,), num_kv_heads=1, head_dim=8, dtype=torch.float16, window=4
        ),
    ]
    capacity = profile_capacity(small, budget, max_slots=100)
    assert capacity.num_slots == {FULL_POOL: 100, WINDOW_POOL: 80}
    pool = KVPool(
        KVSubPool(one, num_slots=capacity.num_slots[one.name], device=torch.device("cpu")) for one in small
    )
    assert sum(tensor.nbytes for tensor in pool.static_tensors().values()) == capacity.kv_bytes


def test_nothing_fits() -> None:
    budget = MemoryBudget(free_bytes=3 * GIB, graph_bytes=2 * GIB, margin_bytes=2 * GIB)
    assert budget.kv_bytes == 0
    with pytest.raises(PoolError, match=f"{3 * GIB} bytes are free.*{2 * GIB} are for graphs"):
        profile_capacity([FULL], budget)


def test_settings_out_of_range() -> None:
    budget = MemoryBudget(free_bytes=GIB, graph_bytes=0, margin_bytes=0)
    for ratio in (0.0, 1.5):
        with pytest.raises(ConfigError, match="window_fraction"):
            profile_capacity(HYBRID, budget, window_fraction=ratio)
    with pytest.raises(ConfigError, match="max_slots"):
        profile_capacity(HYBRID, budget, max_slots=0)
    with pytest.raises(ConfigError, match="'full'"):
        profile_capacity(HYBRID[1:], budget)
    with pytest.raises(ConfigError, match="margin_bytes must not be negative"):
        MemoryBudget(free_bytes=GIB, graph_bytes=0, margin_bytes=-1)


def test_after_capture_both_sides_are_reported() -> None:
    budget = MemoryBudget(free_bytes=20 * GIB, graph_bytes=2 * GIB, margin_bytes=GIB)
    capacity = profile_capacity([FULL], budget)
    check = verify_after_capture(capacity, measured_bytes=GIB, free_bytes=2 * GIB)
    assert (check.estimated_bytes, check.measured_bytes, check.unused_bytes) == (2 * GIB, GIB, GIB)
    # A little over the estimate is what the margin is for.
    over = verify_after_capture(capacity, measured_bytes=3 * GIB, free_bytes=1)
    assert over.unused_bytes < 0


def test_graphs_over_the_estimate_are_no_error_while_the_margin_is_free() -> None:
    budget = MemoryBudget(free_bytes=20 * GIB, graph_bytes=2 * GIB, margin_bytes=GIB)
    capacity = profile_capacity([FULL], budget, max_slots=16)
    assert verify_after_capture(capacity, measured_bytes=9 * GIB, free_bytes=GIB).unused_bytes == 0


@pytest.mark.parametrize(("measured", "free"), [(3 * GIB + 1, GIB - 1), (GIB, 0)])
def test_after_capture_a_margin_that_is_gone_raises(measured: int, free: int) -> None:
    budget = MemoryBudget(free_bytes=20 * GIB, graph_bytes=2 * GIB, margin_bytes=GIB)
    capacity = profile_capacity([FULL], budget)
    with pytest.raises(PoolError, match=f"Graphs took {measured} bytes, {2 * GIB} were estimated"):
        verify_after_capture(capacity, measured_bytes=measured, free_bytes=free)
