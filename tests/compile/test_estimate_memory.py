"""The symbolic memory estimate, by hand on small graphs and against the measured pool on a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.compiler.memory import memory_estimate, pool_estimates
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.passes.memory_estimate import MemoryEstimate
from sgl_piecewise.passes.symbolic_bytes import SymbolicBytes
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.cuda_pool_model import CudaPoolModel
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.emulated.device import EmulatedDevice
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
    """Within 15% at every size, with pieces that run as FX; on CUDA where the pool is large enough to tell."""
    device = graph_device.torch_device
    shape, size = ("tiny", num_tokens) if graph_device.is_emulated else ("smollm2-135m", 8 * num_tokens)
    sizes = [size // 2, size]
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        model = random_decoder(named_shape(shape), device=device, dtype=torch.float32)
        tokens = torch.arange(size, device=device)
        estimate = memory_estimate(model, (tokens[:37] % 200, tokens[:37]), shares_layers=False)
        captured = capture(
            compiled(model, piece_compiler="fx"),
            (tokens % 200, tokens),
            capture_sizes=sizes,
            device=graph_device,
        )
    check_close(estimate, captured, sizes, graph_device)


@pytest.mark.parametrize("num_tokens", [64, 512])
def test_estimate_of_shared_layers_is_close_to_the_measured_pool(
    graph_device: GraphDevice, num_tokens: int
) -> None:
    """The inputs of a layer live until it has run, which takes more than a trace of the whole forward."""
    device = graph_device.torch_device
    shape, size = ("tiny", num_tokens) if graph_device.is_emulated else ("smollm2-135m", 8 * num_tokens)
    sizes = [size // 2, size]
    with torch.inference_mode(), use_forward_context(ForwardContext(attention=CausalAttention())):
        model = random_decoder(named_shape(shape), device=device, dtype=torch.float32)
        tokens = torch.arange(size, device=device)
        estimate = memory_estimate(model, (tokens[:37] % 200, tokens[:37]))
        captured = capture(
            model, (tokens % 200, tokens), compile="fx", capture_sizes=sizes, device=graph_device
        )
    check_close(estimate, captured, sizes, graph_device)
    assert [(one.name, one.num_calls) for one in estimate.breaks] == [("attend", model.config.num_layers)]
    assert {one.num_calls for one in estimate.pieces} == {1, model.config.num_layers}


def check_close(
    estimate: MemoryEstimate, captured: CapturedCallable, sizes: list[int], device: GraphDevice
) -> None:
    """Compares after each size, largest first."""
    assert captured.build is not None
    for size, built in zip(reversed(sizes), captured.build.sizes, strict=True):
        estimated = estimate.reserved_after_each(sizes, device)[size]
        assert 0.85 <= estimated / built.reserved_bytes <= 1.15, (estimated, built.reserved_bytes)


def test_estimate_of_a_cuda_pool_is_what_was_measured_on_one() -> None:
    """Measured on an H200 with PyTorch 2.11, SmolLM2-135M's shape in float32; three layers need what thirty do."""
    config = dataclasses.replace(named_shape("smollm2-135m"), num_layers=3)
    tokens = torch.arange(37)
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        model = random_decoder(config, device="cpu", dtype=torch.float32)
        estimate = memory_estimate(model, (tokens, tokens), shares_layers=False)
    for size, measured in ((512, 123_731_968), (4096, 989_855_744)):
        assert estimate.reserved_bytes(size, CudaInNumbers()) == measured


class CudaInNumbers(EmulatedDevice):
    """A device that is asked for nothing but the model of a CUDA pool."""

    def new_pool_model(self) -> Any:
        return CudaPoolModel(edits_graphs=self.edits_graphs)


def test_staging_is_counted_where_graphs_copy() -> None:
    """One row is a block: a value, its boundary buffer, and what waits for the graph that copies it."""
    estimate = memory_estimate(lambda x: marked(x.sin()).cos(), (torch.ones(7, 128),))
    assert estimate.peak.at(10) == 2 * 10 * BLOCK
    assert estimate.reserved_bytes(10, EmulatedDevice(edits_graphs=True)) == 3 * 10 * BLOCK
    assert estimate.reserved_bytes(10, EmulatedDevice(edits_graphs=False)) == 2 * 10 * BLOCK


def test_sizes_are_captured_largest_first_into_one_pool() -> None:
    estimate = memory_estimate(lambda x: x.sin() + x.cos(), (torch.ones(7, 128),))
    after_each = estimate.reserved_after_each([2, 40, 10], EmulatedDevice())
    assert after_each == {40: 3 * 40 * BLOCK, 10: 3 * 40 * BLOCK, 2: 3 * 40 * BLOCK}
    assert list(after_each) == [40, 10, 2]
    assert estimate.reserved_bytes(0, EmulatedDevice()) == 0
    with pytest.raises(ConfigError, match="sizes is empty"):
        estimate.reserved_bytes([], EmulatedDevice())


def test_compiled_pieces_keep_nothing_inside_on_the_emulated_device() -> None:
    estimate = memory_estimate(lambda x: x.sin().cos().sin(), (torch.ones(7, 128),))
    assert estimate.reserved_bytes(10, EmulatedDevice()) == 2 * 10 * BLOCK
    assert estimate.reserved_bytes(10, EmulatedDevice(), pieces_run="compiled") == 10 * BLOCK


def test_pool_estimates_say_why_there_is_none() -> None:
    x = torch.ones(8, 4)

    (good,) = pool_estimates(torch.sin, (x,), compilers=["fx"], capture_sizes=[4, 8], device=EmulatedDevice())
    assert (good.reserved_bytes, good.is_upper_bound, good.missing_because) == (BLOCK, False, None)
    (bad,) = pool_estimates(
        lambda x: print(x + 1),  # noqa: T201
        (x,),
        compilers=["inductor"],
        capture_sizes=[8],
        device=EmulatedDevice(),
    )
    assert bad.reserved_bytes is None
    assert "Dynamo cannot trace" in str(bad.missing_because)


def test_sharing_for_an_estimate_leaves_the_model_as_it_was() -> None:
    with torch.inference_mode(), use_forward_context(ForwardContext(attention=CausalAttention())):
        model = random_decoder(named_shape("tiny"), device="cpu", dtype=torch.float32)
        tokens = torch.arange(37)
        classes = [type(layer) for layer in model.layers]
        memory_estimate(model, (tokens, tokens))
    assert [type(layer) for layer in model.layers] == classes
