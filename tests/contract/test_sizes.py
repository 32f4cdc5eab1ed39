"""Point 5: capture sizes, the ladder, and memory that all sizes share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.support import WAYS, assert_equal, ramp
from sgl_piecewise.runtime.capture.captured import NO_GRAPH, SIZE_OVER_LARGEST, SIZE_ZERO
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.capture.sizes import default_capture_sizes, padded_size, validate_capture_sizes
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def forward(x: torch.Tensor) -> torch.Tensor:
    return double(x + 1) - x


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ([], "empty"),
        ([0, 4], "0"),
        ([-1, 4], "-1"),
        ([4, 4], "more than once"),
        ([8, 4], "ascend"),
        ([2.0, 4], "integers"),
        ([True, 4], "integers"),
        (["4"], "integers"),
    ],
)
def test_bad_sizes_are_refused_before_anything_runs(
    graph_device: GraphDevice, sizes: list[Any], why: str
) -> None:
    ran: list[int] = []

    def never(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x

    with pytest.raises(ConfigError, match=why):
        capture(never, (ramp(graph_device, 4),), capture_sizes=sizes, device=graph_device)
    assert not ran


@given(st.integers(min_value=1, max_value=20000))
def test_ladder_is_valid_and_ends_in_its_maximum(maximum: int) -> None:
    sizes = default_capture_sizes(maximum)
    assert validate_capture_sizes(sizes) == tuple(sizes)
    assert sizes[-1] == maximum


@given(st.integers(min_value=1, max_value=8192), st.data())
def test_ladder_pads_every_size_by_little(maximum: int, data: st.DataObject) -> None:
    real = data.draw(st.integers(min_value=1, max_value=maximum))
    padded = padded_size(real, default_capture_sizes(maximum))
    assert padded is not None
    assert padded >= real
    assert padded - real < max(4, real / 2)


def test_ladder_to_4096_has_42_sizes() -> None:
    """The published measurements are of this ladder."""
    sizes = default_capture_sizes(4096)
    assert (len(sizes), sizes[0], sizes[-1]) == (42, 4, 4096)


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(0, 400))
def test_padded_size_is_the_smallest_that_holds(sizes: set[int], real: int) -> None:
    expected = min((size for size in sizes if size >= real), default=None)
    assert padded_size(real, sorted(sizes)) == expected


@pytest.mark.parametrize("maximum", [0, -3, 2.5, True])
def test_ladder_refuses_a_maximum_that_is_no_size(maximum: Any) -> None:
    with pytest.raises(ConfigError):
        default_capture_sizes(maximum)


@pytest.mark.parametrize("way", WAYS)
def test_every_real_size_runs_in_the_smallest_graph(graph_device: GraphDevice, way: str) -> None:
    captured = capture(
        forward, (ramp(graph_device, 8, 2),), capture_sizes=[1, 3, 8], device=graph_device, **WAYS[way]
    )
    for real in range(1, 9):
        x = ramp(graph_device, real, 2, start=float(real))
        assert_equal(captured(x), forward(x))
    assert not captured.fallbacks


def test_sizes_are_captured_largest_first(graph_device: GraphDevice) -> None:
    seen: list[tuple[str, int, int]] = []
    captured = capture(
        forward,
        (ramp(graph_device, 8),),
        capture_sizes=[2, 4, 8],
        device=graph_device,
        on_progress=lambda *step: seen.append(step),
    )
    assert captured.build is not None
    assert [entry.size for entry in captured.build.sizes] == [8, 4, 2]
    assert seen == [("capture", done, 3) for done in range(4)]


def test_what_no_graph_holds_runs_eager_with_a_counted_reason(graph_device: GraphDevice) -> None:
    captured = capture(forward, (ramp(graph_device, 8),), capture_sizes=[4, 8], device=graph_device)
    for real in (9, 0, 100, 4):
        x = ramp(graph_device, real)
        assert_equal(captured(x), forward(x))
    assert captured.fallbacks == {SIZE_OVER_LARGEST: 2, SIZE_ZERO: 1}
    captured.reset()
    x = ramp(graph_device, 4)
    assert_equal(captured(x), forward(x))
    assert captured.fallbacks[NO_GRAPH] == 1


def test_memory_of_many_sizes_stays_close_to_the_largest(graph_device: GraphDevice) -> None:
    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = double(x + 1) + x * 0.5
        return x

    # CUDA's allocator takes memory in large steps; the emulated arena does not.
    example = ramp(graph_device, 2048, 8 if graph_device.is_emulated else 512)

    def reserved(sizes: list[int]) -> int:
        captured = capture(layers, (example,), capture_sizes=sizes, device=graph_device, outputs="view")
        return captured.pool.memory().reserved_bytes

    assert reserved([600, 768, 1024, 1300, 1536, 1800, 2048]) <= 1.15 * reserved([2048])


def test_recordings_may_share_a_pool(graph_device: GraphDevice) -> None:
    pool = graph_device.new_pool()
    x = ramp(graph_device, 8)
    one = capture(forward, (x,), device=graph_device, pool=pool)
    other = capture(lambda t: double(t * 3) + 1, (x,), device=graph_device, pool=pool)
    for _ in range(2):
        assert_equal(one(x), forward(x))
        assert_equal(other(x), x * 6 + 1)
    assert one.pool is other.pool is pool


def test_pool_stays_usable_when_one_of_its_recordings_is_reset(graph_device: GraphDevice) -> None:
    pool = graph_device.new_pool()
    x = ramp(graph_device, 8)
    one = capture(forward, (x,), device=graph_device, pool=pool)
    other = capture(lambda t: double(t * 3) + 1, (x,), device=graph_device, pool=pool)
    one.reset()
    third = capture(lambda t: double(t * 5) + 1, (x,), device=graph_device, pool=pool)
    assert_equal(other(x), x * 6 + 1)
    assert_equal(third(x), x * 10 + 1)
    assert_equal(other(x), x * 6 + 1)
