"""The grid: every cell of compile x capture on a two-layer model gives eager's values and eager's breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sgl_piecewise import capture
from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.segments import EagerSegment
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context

from .support import compiled, noted_breaks

# Inductor's own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

SIZES = (4, 8)


@pytest.fixture(autouse=True)
def attention() -> Iterator[None]:
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        yield


def model_on(device: torch.device) -> Decoder:
    return random_decoder(named_shape("tiny"), device=device, dtype=torch.float32)


def tokens(num: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (num,), generator=generator)
    return ids.to(device), torch.arange(num, device=device)


def assert_equal_values(piece_compiler: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Inductor fuses and rounds otherwise; the operators of FX are eager's."""
    tolerance = 0.0 if piece_compiler == "fx" else 1e-4
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("piece_compiler", ["fx", "inductor"])
def test_compiled_model_gives_values_and_breaks_of_eager(piece_compiler: str) -> None:
    device = torch.device("cpu")
    model = model_on(device)
    fn = compiled(model, piece_compiler=piece_compiler)
    for num in (8, 5, 8):
        with noted_breaks() as expected_names:
            expected = model(*tokens(num, device))
        with noted_breaks() as names:
            assert_equal_values(piece_compiler, fn(*tokens(num, device)), expected)
        assert names == expected_names == ["attend", "attend"]


@pytest.mark.parametrize("strategy", ["full", "breakable"])
@pytest.mark.parametrize("piece_compiler", ["fx", "inductor"])
def test_captured_compiled_model_gives_values_and_breaks_of_eager(
    graph_device: GraphDevice, piece_compiler: str, strategy: str
) -> None:
    """Padded sizes are compared with eager at the padded size: matrix products may differ by the row count."""
    device = graph_device.torch_device
    model = model_on(device)
    options: dict[str, Any] = {"strategy": strategy, "capture_sizes": SIZES, "device": graph_device}
    captured = capture(compiled(model, piece_compiler=piece_compiler), tokens(8, device), **options)
    plain = capture(model, tokens(8, device), **options)
    for key, recording in captured.recordings.items():
        names = [segment.mark.name for segment in recording.segments if isinstance(segment, EagerSegment)]
        assert names == (["attend", "attend"] if strategy == "breakable" else [])
        other = plain.recordings[key]
        assert recording.num_breaks == other.num_breaks
        assert recording.num_graph_segments == other.num_graph_segments
    for num, padded in ((8, 8), (3, 4), (4, 4), (7, 8), (1, 4)):
        ids, positions = tokens(num, device, seed=num)
        padding = torch.zeros(padded - num, dtype=ids.dtype, device=device)
        expected = model(torch.cat([ids, padding]), torch.cat([positions, padding]))[:num]
        assert_equal_values(piece_compiler, captured(ids, positions), expected)
    assert not captured.fallbacks


@pytest.mark.parametrize("shares_layers", [True, False], ids=["layers shared", "whole model"])
@pytest.mark.parametrize("strategy", ["full", "breakable"])
@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_capture_that_compiles_gives_values_and_breaks_of_eager(
    graph_device: GraphDevice, compiler: str, strategy: str, shares_layers: bool
) -> None:
    """The entry that is ours: one trace serves all sizes, and no call after the build needs another."""
    device = graph_device.torch_device
    model = model_on(device)
    captured = capture(
        model,
        tokens(8, device),
        compile=compiler,
        shares_layers=shares_layers,
        on_recompile="error",
        strategy=strategy,
        capture_sizes=SIZES,
        device=graph_device,
    )
    for recording in captured.recordings.values():
        names = [segment.mark.name for segment in recording.segments if isinstance(segment, EagerSegment)]
        assert names == (["attend", "attend"] if strategy == "breakable" else [])
    for num, padded in ((8, 8), (3, 4), (7, 8), (1, 4), (20, 20)):
        ids, positions = tokens(num, device, seed=num)
        padding = torch.zeros(padded - num, dtype=ids.dtype, device=device)
        expected = model(torch.cat([ids, padding]), torch.cat([positions, padding]))[:num]
        assert_equal_values(compiler, captured(ids, positions), expected)
    assert captured.fallbacks == {"size_over_largest": 1}
    counts = captured.fn.counts
    assert (counts.num_traces, counts.num_layer_traces) == (1, int(shares_layers))
