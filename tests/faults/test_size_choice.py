"""Which recording replays: sizes, keys, and calls that no graph serves."""

from __future__ import annotations

import pytest
import torch
from contract.support import assert_equal, ramp
from hypothesis import given
from hypothesis import strategies as st

from sgl_piecewise.runtime.capture.captured import SIZE_OVER_LARGEST
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.capture.sizes import ShapeKey, default_capture_sizes, padded_size
from sgl_piecewise.runtime.errors import ConfigError, InputMismatchError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


@given(st.integers(min_value=1, max_value=10_000))
def test_row_028_configured_maximum_is_always_a_size(maximum: int) -> None:
    """vllm#40734: an off-stride maximum was not in the ladder, and peak load fell off the graphs."""
    sizes = default_capture_sizes(maximum)
    assert sizes[-1] == maximum
    assert padded_size(maximum, sizes) == maximum


@pytest.mark.parametrize("maximum", [1, 2, 3])
def test_row_029_ladder_of_a_small_maximum_holds_no_zero(graph_device: GraphDevice, maximum: int) -> None:
    """tokenspeed#493: a maximum batch of 1 gave a ladder that contained 0."""
    sizes = default_capture_sizes(maximum)
    assert min(sizes) >= 1
    captured = capture(
        lambda x: double(x) + 1, (ramp(graph_device, maximum),), capture_sizes=sizes, device=graph_device
    )
    x = ramp(graph_device, 1)
    assert_equal(captured(x), x * 2 + 1)
    assert not captured.fallbacks


def test_row_031_every_captured_key_is_reached_by_some_call(graph_device: GraphDevice) -> None:
    """vllm#36165: stored and looked-up keys differed, and graphs were never hit."""
    sizes = [1, 3, 4, 8]
    captured = capture(
        lambda x: double(x) + 1, (ramp(graph_device, 8),), capture_sizes=sizes, device=graph_device
    )
    reached = {captured.padded_size(real) for real in range(1, 9)}
    assert {ShapeKey(size=size) for size in reached} == set(captured.recordings)


def test_row_034_two_dynamic_dimensions_must_agree(graph_device: GraphDevice) -> None:
    """pytorch#196781: a symbol missing from the key let a wrong graph replay."""

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return double(x.sum() + y)

    captured = capture(
        forward, (ramp(graph_device, 8), ramp(graph_device, 8)), capture_sizes=[4, 8], device=graph_device
    )
    for one, other in ((3, 5), (5, 3)):
        with pytest.raises(InputMismatchError, match=rf"x has {one}, y has {other}"):
            captured(ramp(graph_device, one), ramp(graph_device, other))


def test_row_035_051_nothing_is_captured_at_call_time(graph_device: GraphDevice) -> None:
    """vllm#43084, vllm#57227: a graph captured lazily, in serving, on whatever stream that was."""
    captured = capture(
        lambda x: double(x) + 1, (ramp(graph_device, 8),), capture_sizes=[4, 8], device=graph_device
    )
    keys = dict(captured.recordings)
    for real in (9, 0, 64, 3):
        x = ramp(graph_device, real)
        assert_equal(captured(x), x * 2 + 1)
    assert captured.recordings == keys


def test_row_041_one_token_over_the_largest_size_runs_eager(graph_device: GraphDevice) -> None:
    """sglang#22299: a batch above the largest bucket killed the scheduler by an assert."""
    captured = capture(
        lambda x: double(x) + 1, (ramp(graph_device, 8),), capture_sizes=[8], device=graph_device
    )
    x = ramp(graph_device, 9)
    assert_equal(captured(x), x * 2 + 1)
    assert captured.fallbacks == {SIZE_OVER_LARGEST: 1}


def test_row_042_a_call_without_a_graph_is_logged_and_counted(
    graph_device: GraphDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """TRT-LLM#6142: speed was lost quietly on one rank; the first time is a warning, every time counts."""
    captured = capture(
        lambda x: double(x) + 1, (ramp(graph_device, 8),), capture_sizes=[8], device=graph_device
    )
    for _ in range(3):
        captured(ramp(graph_device, 9))
    assert [record.levelname for record in caplog.records if SIZE_OVER_LARGEST in record.message] == [
        "WARNING"
    ]
    assert captured.fallbacks[SIZE_OVER_LARGEST] == 3


def test_row_068_warm_call_is_served_by_a_graph(graph_device: GraphDevice) -> None:
    """sglang#37192: captured and never replayed, without a log line."""
    runs: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return double(x) + 1

    captured = capture(forward, (ramp(graph_device, 8),), capture_sizes=[4, 8], device=graph_device)
    runs.clear()
    captured(ramp(graph_device, 5))
    assert runs == []
    assert not captured.fallbacks


def test_row_079_no_ladder_fails_fast(graph_device: GraphDevice) -> None:
    """sglang-omni#1802: a backend was chosen, no bucket could be derived, and everything ran eager."""
    x = ramp(graph_device, 8)
    with pytest.raises(ConfigError, match="empty"):
        capture(double, (x,), capture_sizes=[], device=graph_device)
    with pytest.raises(ConfigError, match="dimension 0"):
        capture(double, (x,), capture_sizes=[4, 16], device=graph_device)
