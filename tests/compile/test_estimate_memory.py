"""The symbolic memory estimate, by hand on small graphs and against the measured pool on a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.compiler.memory import memory_estimate
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.passes.symbolic_bytes import SymbolicBytes
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.errors import CompileError, ConfigError

from .support import compiled


@eager_on_graph(fake=torch.empty_like)
def marked(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def peak_at(fn: Callable[..., Any], rows: int, width: int = 128) -> int:
    """Returns the peak for float32 rows; a row of 128 is one block of the allocator."""
    return memory_estimate(fn, (torch.ones(7, width),)).peak.at(rows)


BLOCK = 512


@pytest.mark.parametrize(
    ("fn", "blocks_per_row"),
    [
        (lambda x: x + 1, 1),
        (lambda x: x.sin().cos().sin(), 2),  # One is freed for the next but one.
        (lambda x: x.sin() + x.cos(), 3),
        (lambda x: x.sin().add_(1).mul_(2), 1),
        (lambda x: x.sin().view(-1).view(-1, 128).t().t()[1:], 1),
        (lambda x: x.view(-1, 64), 0),
        (lambda x: (x + 1).chunk(2, -1)[0] * 2, 1.5),
        (lambda x: torch.cat([x.sin(), x.cos()], -1), 4),
        (marked, 1),
        (lambda x: marked(x.sin()).cos(), 2),
        (lambda x: marked(x.sin()) + marked(x.cos()), 3),
    ],
    ids=[
        "one",
        "chain",
        "two at once",
        "in place",
        "views",
        "view of an input",
        "view keeps all",
        "cat",
        "boundary",
        "boundary between pieces",
        "two boundaries",
    ],
)
def test_peak_counts_what_lives_at_once(fn: Callable[..., Any], blocks_per_row: float) -> None:
    for rows in (2, 10, 4096):
        assert peak_at(fn, rows) == int(blocks_per_row * BLOCK * rows)


def test_small_tensors_take_a_block() -> None:
    assert peak_at(lambda x: x.sum() + x.mean(), 10, width=4) == 3 * BLOCK


def test_composite_operators_count_what_they_allocate_inside() -> None:
    """softmax in float64 makes a cast copy first."""
    assert peak_at(lambda x: torch.softmax(x, -1, dtype=torch.float64), 8) == 4 * BLOCK * 8


def test_estimate_is_an_expression_in_the_token_count() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = marked(x.sin() * 2)
        return x

    estimate = memory_estimate(fn, (torch.ones(7, 128),))
    (symbol,) = estimate.peak.symbols
    assert estimate.peak.expression.subs(symbol, 100) == 3 * BLOCK * 100  # A piece's input lives too.
    (piece,) = estimate.pieces
    assert (piece.name, piece.num_calls, piece.outputs.at(3)) == ("piece_0", 3, 3 * BLOCK)
    (at_break,) = estimate.breaks
    assert (at_break.name, at_break.num_calls, at_break.results.at(3)) == ("marked", 3, 3 * BLOCK)
    assert estimate.describe(3).splitlines() == [
        f"pool {9 * BLOCK} bytes at 3 tokens",
        f"  piece_0 x3: peak {6 * BLOCK}, outputs {3 * BLOCK}",
        f"  break marked x3: results {3 * BLOCK}",
    ]
    assert str(estimate).startswith(f"pool (bytes, in {symbol}): 1536*{symbol}")


def test_several_sizes_want_their_names() -> None:
    a, b = sympy.symbols("a b", positive=True, integer=True)
    size = SymbolicBytes.largest_of([a + b, a])
    assert size.candidates == (a + b,)
    assert size.at({"a": 2, "b": 3}) == 5
    with pytest.raises(ConfigError, match="2 symbolic sizes"):
        size.at(3)
    with pytest.raises(ConfigError, match="No value for b"):
        size.at({"a": 1})


def test_what_cannot_be_asked() -> None:
    x = torch.ones(7, 4)
    with pytest.raises(ConfigError, match="dynamic_dims names dimension 2"):
        memory_estimate(lambda x: x + 1, (x,), dynamic_dims={0: 2})
    assert memory_estimate(lambda x: x, (x,)).peak.at(7) == 0
    with torch.compiler.set_stance("force_eager"), pytest.raises(CompileError, match="was not traced"):
        memory_estimate(lambda x: x + 1, (x,))
    with pytest.raises(CompileError, match=r"Dynamo cannot trace .*test_estimate_memory.py:\d+ \(.*print"):
        memory_estimate(lambda x: print(x + 1), (x,))  # noqa: T201


def test_arguments_that_cannot_be_are_told() -> None:
    x = torch.ones(7, 4)
    with pytest.raises(ConfigError, match=r"args must be a tuple.*got Tensor.*Write \(x,\)"):
        memory_estimate(torch.sin, x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes a function or module, got str"):
        memory_estimate("sin", (x,))  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="computes nothing with tensors"):
        memory_estimate(lambda number: number, (3,))
    peak = memory_estimate(lambda x: x + 1, (x,)).peak
    for count in (-1, 2.5, "3", True, {"s0": -1}):
        with pytest.raises(ConfigError, match="whole number of at least 0"):
            peak.at(count)  # type: ignore[arg-type]


def test_forward_of_one_size_only_is_told() -> None:
    x = torch.ones(7, 8)
    with pytest.raises(
        CompileError, match=r"works at the size of its arguments only(.|\n)*dynamic_dims=\{\}"
    ):
        memory_estimate(lambda x: x + torch.ones(7, 8), (x,))
    assert memory_estimate(lambda x: x + torch.ones(7, 8), (x,), dynamic_dims={}).peak.at(7) > 0


def test_another_dimension_may_follow_the_tokens() -> None:
    estimate = memory_estimate(lambda x: x + 1, (torch.ones(128, 7),), dynamic_dims={0: 1})
    assert estimate.peak.at(10) == 10 * BLOCK


@pytest.mark.parametrize("num_tokens", [64, 512])
def test_estimate_is_close_to_the_measured_pool(graph_device: GraphDevice, num_tokens: int) -> None:
    """Within 15% at the largest size, with pieces that run as FX; on CUDA where the pool is large enough to tell.

    A CUDA pool grows by segments of 2 MiB and more, which a model of a few MiB cannot fill.
    """
    device = graph_device.torch_device
    shape, size = ("tiny", num_tokens) if graph_device.is_emulated else ("smollm2-135m", 8 * num_tokens)
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        model = random_decoder(named_shape(shape), device=device, dtype=torch.float32)
        tokens = torch.arange(size, device=device)
        estimate = memory_estimate(model, (tokens[:37] % 200, tokens[:37]))
        captured = capture(
            compiled(model, piece_compiler="fx"),
            (tokens % 200, tokens),
            capture_sizes=[size // 2, size],
            device=graph_device,
        )
    assert captured.build is not None
    measured = captured.build.sizes[0].reserved_bytes
    assert 0.85 <= estimate.peak.at(size) / measured <= 1.15
