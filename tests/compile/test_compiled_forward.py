"""The compiled forward whose entry is ours: one trace for all sizes, freezing, guards, capture in one line."""

from __future__ import annotations

import gc
import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.compiler.forward import CompiledForward
from sgl_piecewise.compiler.trace_size import sizes_in_use, trace_size
from sgl_piecewise.entry import cell_name
from sgl_piecewise.runtime.errors import CompileError, ConfigError, MovedAddressError, RecompileError

WIDTH = 8


@eager_on_graph(fake=torch.empty_like)
def marked(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.factor = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return marked(self.net(x)) * self.factor + x


class Model(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.flag = True

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x + y if y is not None else x
        return x + 1 if self.flag else x - 1


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        return Model().eval().requires_grad_(False)


def inputs(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed))


def traced(model: nn.Module) -> CompiledForward:
    forward = CompiledForward(model, options={"piece_compiler": "fx"})
    forward.trace((inputs(7),), {}, {0: 0})
    return forward


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Replays are padded, and a matrix product may differ by its number of rows."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, WIDTH, 7, 1000])
def test_one_trace_serves_every_size(model: Model, size: int) -> None:
    """Zero, one, the size of another dimension, the size of the trace, and one that is over all."""
    forward = traced(model)
    assert_equal(forward(inputs(size)), model(inputs(size)))
    assert (forward.counts.num_traces, forward.counts.num_layer_traces) == (1, 1)


def test_tensors_of_any_origin_need_no_trace_of_their_own(model: Model) -> None:
    """Views, slices with other strides excepted, and tensors made in or outside inference mode."""
    forward = traced(model)
    whole = inputs(20)
    with torch.inference_mode(False), torch.no_grad():
        normal = torch.ones(20, WIDTH)
    for x in (whole[:5], whole.view(-1)[: 3 * WIDTH].view(3, WIDTH), normal, normal[2:4], normal.detach()):
        assert_equal(forward(x), model(x))
    assert forward.counts.num_traces == 1


def test_trace_size_is_no_other_dimension(model: Model) -> None:
    assert trace_size((4, 8, 16), {3, 5}) == 16
    assert trace_size((4, 8, 16), {16, 64}) == 8
    assert trace_size((4,), {4}) == 3
    assert trace_size((2,), {2}) == 3
    assert trace_size((1,), set()) == 2
    assert trace_size((1, 2, 3), {2, 3, 4, 6}) == 5
    assert sizes_in_use(model, [torch.ones(3, 4)]) >= {WIDTH, 3, 4}


def test_size_that_the_forward_bakes_in_is_an_error() -> None:
    class Numbering(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + int(x.shape[0])  # Not baked in: the number stays symbolic.

    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(7, WIDTH) + 1

    with pytest.raises(
        CompileError, match=r"(?s)specialized it to be a constant \(7\).*reshape.*if it bakes a size in"
    ):
        traced(Fixed())
    assert_equal(traced(Numbering())(inputs(5)), Numbering()(inputs(5)))


# Guards --------------------------------------------------------------------------------------------


def test_what_the_model_is_changed_to_is_noticed(model: Model) -> None:
    """Outside a build every call checks the guards: of the forward, and of each layer."""
    forward = traced(model)
    model.flag = False
    assert_equal(forward(inputs(3)), model(inputs(3)))
    assert forward.counts.num_traces == 2
    model.layers[1].factor = 0.25
    assert_equal(forward(inputs(3)), model(inputs(3)))
    assert forward.counts.num_layer_traces == 2
    model.layers[1].factor = 1.5
    with torch.inference_mode(False):
        model.layers[2].net[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    assert_equal(forward(inputs(3)), model(inputs(3)))
    assert forward.counts.num_layer_traces == 2
    torch.compiler.reset()
    assert_equal(forward(inputs(3)), model(inputs(3)))


def test_builds_trust_calls_like_an_earlier_one_and_no_others(model: Model) -> None:
    forward = traced(model)
    with forward.trusting():
        for size in (4, 4, 9, 1):
            assert_equal(forward(inputs(size)), model(inputs(size)))
        assert_equal(forward(inputs(4), inputs(4, seed=2)), model(inputs(4), inputs(4, seed=2)))
    model.layers[0].factor = 3.0
    assert_equal(forward(inputs(4)), model(inputs(4)))
    with forward.trusting():
        assert_equal(forward(inputs(4)), model(inputs(4)))


# Freezing ------------------------------------------------------------------------------------------


def test_frozen_forward_raises_and_says_what_differs(model: Model) -> None:
    forward = traced(model)
    forward.freeze()
    assert_equal(forward(inputs(5)), model(inputs(5)))
    with pytest.raises(RecompileError, match=r"Model was frozen.*never compiled for.*y"):
        forward(inputs(5), inputs(5))
    model.layers[1].factor = 0.25
    with pytest.raises(RecompileError, match=r"Layer was frozen.*factor"):
        forward(inputs(5))
    assert (forward.counts.num_traces, forward.counts.num_layer_traces) == (1, 1)


def test_frozen_forward_can_run_uncompiled_and_counts_it(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    forward = traced(model)
    forward.freeze("eager")
    model.layers[1].factor = 0.25
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        for _ in range(2):
            assert_equal(forward(inputs(5)), model(inputs(5)))
            assert_equal(forward(inputs(5), inputs(5)), model(inputs(5), inputs(5)))
    assert forward.fallbacks == {"Layer": 2, "Model": 2}
    assert [record.levelname for record in caplog.records if "sgl_piecewise" in record.name] == [
        "WARNING"
    ] * 2
    assert (forward.counts.num_traces, forward.counts.num_layer_traces) == (1, 1)


def test_frozen_before_anything_was_compiled(model: Model) -> None:
    forward = CompiledForward(model, options={"piece_compiler": "fx"})
    forward.freeze()
    with pytest.raises(RecompileError, match="nothing was compiled"):
        forward(inputs(2))
    with pytest.raises(ConfigError, match="did you mean 'error'"):
        forward.freeze("eror")


# Capture in one line -------------------------------------------------------------------------------


def test_capture_compiles_in_one_line(model: Model) -> None:
    captured = capture(model, (inputs(8),), compile="fx", capture_sizes=(2, 4, 8), on_recompile="error")
    assert captured.fn.counts.num_traces == 1
    for size in (8, 1, 3, 30, 0):
        assert_close(captured(inputs(size)), model(inputs(size)))
    assert captured.fn.counts.num_traces == 1
    assert captured.fallbacks == {"size_over_largest": 1, "size_zero": 1}
    build = captured.build
    assert build is not None
    assert build.strategy == "fx_piecewise"
    assert {"trace", "compile_pieces", "first_run", "warm_up", "capture"} <= set(build.phases_s)
    assert build.unattributed_s <= 0.1 * build.total_s


def test_replay_reaches_nothing_of_the_compiler(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(model, (inputs(8),), compile="fx", capture_sizes=(4, 8))

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a replay called the compiled forward")

    monkeypatch.setattr(CompiledForward, "__call__", refuse)
    assert_close(captured(inputs(3)), model(inputs(3)))


def test_keyword_arguments_are_traced_as_they_will_be_passed(model: Model) -> None:
    captured = capture(
        model, (inputs(8),), {"y": inputs(8)}, compile="fx", capture_sizes=(4, 8), on_recompile="error"
    )
    assert_close(captured(inputs(3), y=inputs(3)), model(inputs(3), y=inputs(3)))
    assert_close(captured(x=inputs(5), y=inputs(5)), model(inputs(5), inputs(5)))
    assert captured.fn.counts.num_traces == 1


def test_other_dimensions_can_follow_the_size() -> None:
    def fn(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return marked(x * scale).sum(0) + 1

    captured = capture(
        fn,
        (torch.ones(3, 8), torch.ones(3, 1)),
        compile="fx",
        capture_sizes=(4, 8),
        dynamic_dims={"x": 1},
        on_recompile="error",
    )
    x = torch.arange(15.0).view(3, 5)
    assert_close(captured(x, torch.full((3, 1), 2.0)), fn(x, torch.full((3, 1), 2.0)))


def test_methods_and_functions_are_compiled_and_their_parameters_watched(model: Model) -> None:
    class Wrapped(Model):
        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x) * 2

    wrapped = Wrapped().eval().requires_grad_(False)
    captured = capture(wrapped.hidden, (inputs(4),), compile="fx")
    assert_close(captured(inputs(4)), wrapped.hidden(inputs(4)))
    assert captured.fn.counts.num_layer_traces == 1
    wrapped.layers[0].net[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    with pytest.raises(MovedAddressError, match=r"layers\.0\.net\.0\.weight"):
        captured.check_static_addresses()


def test_inputs_written_in_place_are_written_back(model: Model) -> None:
    def fn(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(marked(x).sum(0))
        return x + total

    captured = capture(fn, (inputs(4), torch.zeros(WIDTH)), compile="fx", capture_sizes=(2, 4))
    ours, eager = torch.zeros(WIDTH), torch.zeros(WIDTH)
    for size in (4, 2, 4):
        assert_close(captured(inputs(size), ours), fn(inputs(size), eager))
    assert_equal(ours, eager)


@pytest.mark.parametrize("entry", ["ours", "torch.compile"])
def test_garbage_is_not_collected_while_compiling_and_is_afterwards(model: Model, entry: str) -> None:
    """A collection looks at all that PyTorch has imported, which took 0.2 s where it was measured."""
    seen: list[bool] = []

    def compiler(piece: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(gc.isenabled())
        if len(seen) > 1:
            raise ValueError("no more")
        return piece.forward

    def build() -> None:
        if entry == "ours":
            capture(model, (inputs(4),), compile=compiler)
        else:
            torch.compile(model, backend="sgl_piecewise", options={"piece_compiler": compiler})(inputs(4))

    assert gc.isenabled()
    with torch.no_grad(), pytest.raises(Exception, match="no more"):
        build()
    assert seen == [False, False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"compile": "fx", "compile_options": {"piece_compiler": "inductor"}}, "leave it out"),
        ({"compile": "inductr"}, "did you mean 'inductor'"),
        ({"compile_options": {"inductor_config": {}}}, "nothing is compiled"),
        ({"on_recompile": "error"}, "nothing is compiled"),
        ({"compile": "fx", "on_recompile": "never"}, "on_recompile"),
    ],
)
def test_options_that_cannot_be_met(model: Model, given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        capture(model, (inputs(4),), **given)


def test_names_of_cells() -> None:
    assert [cell_name("inductor", strategy) for strategy in ("none", "full", "breakable")] == [
        "tc",
        "tc_full",
        "tc_piecewise",
    ]
    assert cell_name("openvino", "full") == "openvino_full"
    assert cell_name(torch.relu, "none") == "relu"


def test_capture_shows_all_its_options() -> None:
    names = list(inspect.signature(capture).parameters)
    assert {"compile", "on_recompile", "strategy", "capture_sizes", "debug"} <= set(names)
    assert "options" not in names
