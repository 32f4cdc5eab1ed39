"""Equal layers are traced and compiled once, whatever their number, the capture sizes and what they carry."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from sgl_piecewise import capture, compile_layers_once, eager_on_graph
from sgl_piecewise.compiler.forward import CompiledForward
from sgl_piecewise.compiler.layer_sharing import repeated_layers, restore_layers
from sgl_piecewise.runtime import torch_private
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.segments import EagerSegment
from sgl_piecewise.runtime.capture.session import is_session_open
from sgl_piecewise.runtime.errors import CompileError, ConfigError, MarkResultError
from sgl_piecewise.runtime.mark_handles import handle_of, num_handles

from .support import noted_breaks

WIDTH = 16
SIZES = (1, 2, 8)


class Holder:
    def __init__(self, factor: int) -> None:
        self.factor = factor


@eager_on_graph(fake=lambda x, holder, number: torch.empty_like(x))
def scaled(x: torch.Tensor, holder: Holder, number: int) -> torch.Tensor:
    return x * (holder.factor + number)


class Block(nn.Module):
    """A layer with a mark that gets a number and an object of the layer's own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.holder = Holder(index)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + scaled(self.down(torch.relu(self.up(x))), self.holder, self.index) / 4


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x.cos()


def stack_of(layers: list[nn.Module]) -> Stack:
    return Stack(layers).eval().requires_grad_(False)


def blocks(num: int) -> Stack:
    torch.manual_seed(0)
    return stack_of([Block(index) for index in range(num)])


def inputs(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed))


def compiled(model: nn.Module, **options: Any) -> CompiledForward:
    """Compiles without a code generator, which keeps every bit."""
    forward = CompiledForward(model, options={"piece_compiler": "fx"}, **options)
    forward.trace((inputs(7),), {}, {0: 0})
    return forward


def assert_equal_to_eager(forward: Any, model: nn.Module, sizes: tuple[int, ...] = (7, 3, 1, 20)) -> None:
    for size in sizes:
        x = inputs(size, seed=size)
        torch.testing.assert_close(forward(x), model(x), rtol=0, atol=0)


def captured_breaks(captured: CapturedCallable) -> list[list[str]]:
    return [
        [segment.mark.name for segment in recording.segments if isinstance(segment, EagerSegment)]
        for recording in captured.recordings.values()
    ]


# Counts ------------------------------------------------------------------------------------------


def test_traces_pieces_and_compiles_are_constant_in_layers_and_sizes() -> None:
    counts = []
    for num_layers, sizes in ((2, (4, 8)), (6, (4, 8)), (6, (1, 2, 3, 5, 8, 16))):
        model = blocks(num_layers)
        captured = capture(model, (inputs(sizes[-1]),), compile="fx", capture_sizes=sizes)
        counts.append(captured.fn.counts)
    assert counts[0] == counts[1] == counts[2]
    assert (counts[0].num_traces, counts[0].num_layer_traces, counts[0].num_compiled_pieces) == (1, 1, 4)


def test_captures_of_a_build_ask_no_guards_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode guards want each tensor of a layer made anew, which took a fifth of a compiled layer's call."""
    made: list[bool] = []
    plain = torch_private.as_normal_tensors

    def as_normal_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made.append(is_session_open())
        return plain(tensors)

    monkeypatch.setattr(torch_private, "as_normal_tensors", as_normal_tensors)
    model = blocks(3)
    with torch.inference_mode():
        captured = capture(model, (inputs(8),), compile="fx", capture_sizes=(2, 4, 8))
        assert made.count(False) >= 9, "each layer at each size, in the warm-up"
        assert made.count(True) == 3, "the input of the forward, once a size"
        assert_equal_to_eager(captured, model, sizes=(8, 4, 2))


def test_twelve_layers_with_a_number_and_an_object_each_compile_once() -> None:
    model = blocks(12)
    forward = compiled(model)
    assert_equal_to_eager(forward, model)
    assert (forward.counts.num_layer_traces, forward.counts.num_compiled_pieces) == (1, 4)


def test_without_sharing_every_layer_is_traced() -> None:
    """The contrast: one trace holds all layers, and only equal pieces are found."""
    model = blocks(6)
    forward = compiled(model, shares_layers=False)
    assert_equal_to_eager(forward, model)
    assert forward.counts.num_layer_traces == 0
    assert forward.counts.num_pieces == 7


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_numbers_that_traced_code_reads_become_inputs(compiler: str) -> None:
    """Not a compile for each layer: Dynamo alone would give up after eight."""

    class Indexed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.index

    model = stack_of([Indexed(index) for index in range(12)])
    captured = capture(model, (inputs(8),), compile=compiler, capture_sizes=(4, 8))
    tolerance = 0.0 if compiler == "fx" else 1e-2
    torch.testing.assert_close(captured(inputs(8)), model(inputs(8)), rtol=0, atol=tolerance)
    assert captured.fn.counts.num_layer_traces <= 3


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_floats_of_layers_are_constants() -> None:
    """As inputs they would be host tensors, which a graph reads once."""

    class Damped(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.damping = 0.5 + index / 10

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.damping

    model = stack_of([Damped(index % 3) for index in range(6)])
    captured = capture(model, (inputs(8),), compile="inductor", capture_sizes=(4, 8))
    torch.testing.assert_close(captured(inputs(8)), model(inputs(8)), rtol=0, atol=1e-4)
    assert captured.fn.counts.num_layer_traces == 3


def test_layers_that_all_differ_are_compiled_each_and_named(caplog: pytest.LogCaptureFixture) -> None:
    class Named(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.label = "x" * index

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + len(self.label)

    model = stack_of([Named(index) for index in range(10)])
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        forward = compiled(model)
    assert_equal_to_eager(forward, model, (7, 3))
    assert forward.counts.num_layer_traces == 10
    assert "Named was traced and compiled 8 times" in caplog.text
    assert "label" in caplog.text


# Whole and regional --------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_breaks_and_values_equal_those_of_the_whole_compile(compiler: str) -> None:
    model = blocks(3)
    example = (inputs(8),)
    plain = capture(model, example, capture_sizes=SIZES)
    shared = capture(model, example, compile=compiler, capture_sizes=SIZES)
    whole = capture(model, example, compile=compiler, shares_layers=False, capture_sizes=SIZES)
    assert captured_breaks(shared) == captured_breaks(whole) == captured_breaks(plain) == [["scaled"] * 3] * 3
    for size in (8, 5, 1):
        x = inputs(size, seed=size)
        tolerance = 0.0 if compiler == "fx" else 1e-4
        torch.testing.assert_close(shared(x), plain(x), rtol=0, atol=tolerance)
        torch.testing.assert_close(whole(x), plain(x), rtol=0, atol=tolerance)
    assert not shared.fallbacks


test_breaks_and_values_equal_those_of_the_whole_compile = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"  # Inductor's own imports.
)(test_breaks_and_values_equal_those_of_the_whole_compile)


def test_one_line_prepares_a_model_for_plain_torch_compile() -> None:
    model = blocks(5)
    pieces: list[Any] = []

    def counting(piece: Any, example_inputs: Any) -> Any:
        pieces.append(piece)
        return piece

    forward = torch.compile(
        compile_layers_once(model), backend="sgl_piecewise", options={"piece_compiler": counting}
    )
    for size in (7, 7):
        x = inputs(size)
        with noted_breaks() as names:
            result = forward(x)
        torch.testing.assert_close(result, restore_layers(copy.deepcopy(model))(x), rtol=0, atol=0)
        assert names == ["scaled"] * 5
    assert len(pieces) == 4


# Kinds of layers -----------------------------------------------------------------------------------


class Plain(nn.Module):
    """No mark at all."""

    def __init__(self, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


@pytest.mark.parametrize("given", [None, "model", torch.sin, nn.Linear])
def test_only_a_model_can_be_prepared(given: Any) -> None:
    with pytest.raises(ConfigError, match="takes a model"):
        compile_layers_once(given)


def test_any_module_list_of_equal_layers() -> None:
    model = stack_of([Plain() for _ in range(4)])
    forward = compiled(model)
    assert_equal_to_eager(forward, model)
    assert forward.counts.num_layer_traces == 1


def test_unequal_layers_are_traced_apart() -> None:
    """Of another width, of another activation, with a part left out, of another class."""
    other = Plain()
    other.net[1] = nn.Tanh()
    less = Plain()
    less.net[1] = nn.Identity()
    model = stack_of([Plain(), Plain(WIDTH), other, Plain(), less, Block(3), Plain(WIDTH)])
    forward = compiled(model)
    assert_equal_to_eager(forward, model)
    assert forward.counts.num_layer_traces == 4  # A single block is traced where it stands.


def test_layers_that_alternate() -> None:
    class Alternating(Plain):
        def __init__(self, is_odd: bool) -> None:
            super().__init__()
            self.is_odd = is_odd

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).neg() if self.is_odd else super().forward(x)

    model = stack_of([Alternating(index % 2 == 1) for index in range(6)])
    forward = compiled(model)
    assert_equal_to_eager(forward, model)
    assert forward.counts.num_layer_traces == 2


class PairBlock(nn.Module):
    """Takes and returns nested values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, pair: tuple[torch.Tensor, Any], *, flag: bool, extra: Any = None) -> tuple[Any, ...]:
        x, state = pair
        y = self.linear(x) if flag else x
        return y + 1, {"sum": state["sum"] + y, "same": x, "text": "kept", "none": extra}


class PairStack(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PairBlock() for _ in range(num))

    def forward(self, x: torch.Tensor) -> Any:
        state: dict[str, Any] = {"sum": torch.zeros_like(x)}
        same = x
        for layer in self.layers:
            x, state = layer((x, state), flag=True)
            same = state["same"] + same
            state = {"sum": state["sum"]}
        return x, state["sum"], same


def test_layers_that_take_and_return_nested_values() -> None:
    model = PairStack(3).eval().requires_grad_(False)
    forward = compiled(model)
    for size in (7, 3):
        x = inputs(size)
        for got, expected in zip(forward(x), model(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert forward.counts.num_layer_traces == 1


def test_tied_layers() -> None:
    """One module at several places, and two that share a parameter."""
    shared, tied = Block(1), Block(2)
    tied.up.weight = shared.up.weight
    model = stack_of([shared, tied, shared, Block(3)])
    forward = compiled(model)
    assert_equal_to_eager(forward, model)
    assert forward.counts.num_layer_traces == 1
    shared.up.weight.data.mul_(2)
    assert_equal_to_eager(forward, model)


def test_buffers_that_layers_write() -> None:
    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.sum(0))
            return super().forward(x) + self.seen

    model = stack_of([Counting() for _ in range(3)])
    forward = CompiledForward(model, options={"piece_compiler": "fx"})
    eager = copy.deepcopy(model)
    for size in (5, 5, 4):
        torch.testing.assert_close(forward(inputs(size)), eager(inputs(size)), rtol=0, atol=0)
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("write", ["add_", "mul_", "sub_"])
def test_tracing_does_not_write_buffers(write: str) -> None:
    class Stepping(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.full((WIDTH,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            getattr(self.steps, write)(
                2
            )  # Nothing of the call is in it: all its tensors are the layer's own.
            return super().forward(x) + self.steps

    model = stack_of([Stepping() for _ in range(3)])
    eager = copy.deepcopy(model)
    forward = CompiledForward(model, options={"piece_compiler": "fx"})
    for size in (5, 4):
        torch.testing.assert_close(forward(inputs(size)), eager(inputs(size)), rtol=0, atol=0)
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_layer_that_cannot_be_a_node_is_traced_where_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    class Viewing(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, WIDTH)

    model = stack_of([Viewing(), Viewing(), Viewing()])
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        forward = compiled(model)
    assert_equal_to_eager(forward, model)
    assert forward.counts.num_layer_traces == 0
    assert "Layer" in caplog.text
    assert "returns a view of an argument" in caplog.text


def test_number_that_decides_what_a_layer_returns_is_an_error() -> None:
    class Cutting(Plain):
        def __init__(self, num_columns: int) -> None:
            super().__init__()
            self.num_columns = num_columns

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : self.num_columns].clone()

    model = stack_of([Cutting(WIDTH), Cutting(WIDTH - 1)])
    with pytest.raises(
        MarkResultError, match=r"Layer '.*Cutting.*' returned another result than .* equal layer"
    ):
        compiled(model)


def test_lists_inside_layers_and_small_modules_are_left_alone() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Plain() for _ in range(2))

    model = nn.Sequential(
        nn.ModuleList(Outer() for _ in range(2)), nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    )
    assert [type(layer).__name__ for layer in repeated_layers(model)] == ["Outer", "Outer"]


# The prepared model --------------------------------------------------------------------------------


class PickledStack(Stack):
    """Classes of a function cannot be pickled."""


def test_prepared_model_copies_and_pickles_as_before() -> None:
    model = PickledStack([Block(1), Block(2)]).eval().requires_grad_(False)
    x = inputs(3)
    expected, keys, text = model(x), list(model.state_dict()), repr(model)
    assert compile_layers_once(model) is model
    assert compile_layers_once(model).layers[0].__class__.__name__ == "Block"
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert list(model.state_dict()) == keys
    assert repr(model) == text
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), restore_layers(model)):
        assert type(other.layers[0]) is Block
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
    buffer = io.BytesIO()
    torch.save(compile_layers_once(model), buffer)
    assert b"shared" not in buffer.getvalue()


def test_deleting_a_compiled_model_frees_its_handles() -> None:
    """Only the mark and small numbers keep theirs: they outlive the model."""
    for lasting in (scaled, 0, 1, 2):
        handle_of(lasting)
    gc.collect()  # Of what earlier tests left, which would go at any moment.
    before = num_handles()
    model = blocks(3)
    forward = compiled(model)
    assert num_handles() > before
    del model, forward
    gc.collect()
    assert num_handles() == before


def test_untraceable_line_is_named_with_what_to_do() -> None:
    class Branching(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(
        CompileError, match=r"(?s)cannot be compiled in one trace.*x\.sum\(\) > 0.*@eager_on_graph"
    ):
        compiled(nn.Sequential(Branching()))


class _TakesAnObject(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, kept: object) -> torch.Tensor:
        return self.linear(x)


class _MakesAnObject(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_TakesAnObject() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = _Made()
        for layer in self.layers:
            x = layer(x, kept)
        return x


class _Made:
    pass


def test_why_equal_layers_are_not_shared_is_said_once_and_of_layers(caplog: pytest.LogCaptureFixture) -> None:
    """A model of 32 layers gave 32 warnings, which called its layers marks."""
    model, x = _MakesAnObject(), torch.ones(3, 2)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        want = model(x)
        prepared = compile_layers_once(model)
        fn = torch.compile(prepared, backend="sgl_piecewise", options={"piece_compiler": "fx"})
        torch.testing.assert_close(fn(x), want)
    told = [one.getMessage() for one in caplog.records if "traced where it stands" in one.getMessage()]
    assert len(told) == 1
    assert "argument kept is a _Made" in told[0] or "argument 1 is a _Made" in told[0]
    assert "mark" not in told[0].lower()
