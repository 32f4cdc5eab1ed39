"""A marked call is one node to Dynamo, with any argument and any result, and one trace serves equal layers."""

from __future__ import annotations

import collections
import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sgl_piecewise import break_graph, eager_on_graph
from sgl_piecewise.runtime.errors import CompileError, MarkResultError
from sgl_piecewise.runtime.mark_handles import num_handles

from .support import Traces, noted_breaks

Pair = collections.namedtuple("Pair", "left right")


@dataclass
class Parts:
    a: torch.Tensor
    b: int = 2


@dataclass(frozen=True)
class Constants:
    factor: int
    offset: float = 0.5


class Holder:
    def __init__(self, factor: int) -> None:
        self.factor = factor


class Layer(torch.nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.holder = Holder(factor)
        self.number = factor
        self.linear = torch.nn.Linear(4, 4)
        self.kv = torch.zeros(3, 4)
        self.seen: list[int] = []
        self.total = torch.zeros(4)

    @eager_on_graph
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.number)
        self.total = self.total + x.sum(0)
        return self.linear(x) * self.number

    @eager_on_graph
    def write(self, x: torch.Tensor) -> None:
        self.kv[: x.shape[0]] = x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return times_holder(self.linear(x), self.holder, self.number) + 1


@eager_on_graph(fake=lambda x, holder, number: torch.empty_like(x))
def times_holder(x: torch.Tensor, holder: Holder, number: int) -> torch.Tensor:
    return x * float(holder.factor * 10 + number)


@eager_on_graph
def total(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Adds the tensors among anything."""
    found = [value for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor)]
    return torch.stack(found).sum(0)


@eager_on_graph
def add_one_(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x


def assert_traced_like_eager(fn: Callable[..., Any], *args: Any, num_marks: int = 1) -> Traces:
    """Compares two compiled calls with eager ones, and counts marks in the trace."""
    traces = Traces()
    expected = fn(*copy.deepcopy(args))
    traced = torch.compile(fn, backend=traces, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(traced(*copy.deepcopy(args)), expected, rtol=0, atol=0)
    assert traces.num_marked_calls == [num_marks]
    return traces


X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        (None, 3, 2.5, True, "text", torch.float16, torch.device("cpu")),
        ({"k": X, "n": 1}, [X, [None]], (X, 2)),
        (torch.relu, len, Holder, torch.nn.Linear(2, 2), Holder(3)),
        (slice(1, 2), range(3), {1, 2}, torch.Size([2])),
        (Pair(X, 1), Parts(X), Constants(2)),
    ],
    ids=["scalars", "containers", "objects", "odd constants", "records"],
)
def test_any_argument(arguments: tuple[Any, ...]) -> None:
    assert_traced_like_eager(lambda x: total(x, *arguments, last=x * 2) + 1, X)


def test_records_made_in_traced_code() -> None:
    @eager_on_graph
    def scale(parts: Parts, pair: Any, *, constants: Constants) -> torch.Tensor:
        return parts.a * parts.b * constants.factor + pair.left

    assert_traced_like_eager(lambda x: scale(Parts(x + 1, 3), Pair(x, None), constants=Constants(2)), X)


def test_a_plain_object_made_in_traced_code_is_refused() -> None:
    with pytest.raises(CompileError, match=r"argument 1 is a Holder that the compiled function makes"):
        torch.compile(lambda x: total(x, Holder(2)), backend="eager")(X)


def test_an_object_changed_in_traced_code_is_refused() -> None:
    """The change would reach the object after the graph has run, and the body would see the old value."""
    holder = Holder(1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        holder.factor = 5
        return times_holder(x, holder, 0)

    with pytest.raises(CompileError, match="changed before"):
        torch.compile(fn, backend="eager")(X)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x + 1, None, 3, "s"),
        lambda x: [x + 1, {"k": (x * 2, 1.5)}],
        lambda x: Pair(x + 1, [x * 2]),
        lambda x: Parts(x + 1, 7),
        lambda x: None,
        lambda x: collections.OrderedDict(k=x + 1),
    ],
    ids=["tuple", "nested", "named tuple", "dataclass", "None", "ordered dict"],
)
def test_results_keep_their_structure(make: Callable[[torch.Tensor], Any]) -> None:
    @eager_on_graph
    def marked(x: torch.Tensor) -> Any:
        return make(x)

    traces = Traces()
    result = torch.compile(marked_call(marked), backend=traces, fullgraph=True)(X)
    expected = marked(X)
    assert type(result) is type(expected)
    assert repr(result) == repr(expected)
    assert traces.num_marked_calls == [1]


def marked_call(mark: Any) -> Callable[[torch.Tensor], Any]:
    def fn(x: torch.Tensor) -> Any:
        return mark(x)

    return fn


def test_argument_returned_is_the_argument() -> None:
    """A later write through the result changes the argument, as in eager."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + 1
        y = add_one_(x)
        y.mul_(2)
        return x, y

    for backend in ("eager", "aot_eager", "sgl_piecewise"):
        options = {"piece_compiler": "fx"} if backend == "sgl_piecewise" else None
        got = torch.compile(fn, backend=backend, options=options)(X)
        torch.testing.assert_close(got, fn(X), rtol=0, atol=0)
    assert_traced_like_eager(fn, X)


def test_view_of_an_argument_is_refused() -> None:
    @eager_on_graph
    def tail(x: torch.Tensor) -> torch.Tensor:
        return x[1:]

    with pytest.raises(CompileError, match="returns a view of an argument"):
        torch.compile(lambda x: tail(x) + 1, backend="eager")(X)


def test_outside_tensor_returned_is_refused() -> None:
    constant = torch.ones(3, 4)

    @eager_on_graph
    def outside(x: torch.Tensor) -> torch.Tensor:
        return constant

    with pytest.raises(CompileError, match="existed before the call"):
        torch.compile(lambda x: outside(x) + 1, backend="eager")(X)


def test_methods_and_side_effects_of_a_body() -> None:
    """The run on fake tensors that finds the shapes leaves nothing behind."""
    layer, same = Layer(3), Layer(3)
    same.load_state_dict(layer.state_dict())
    traces = Traces()

    def fn(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        y = layer.scaled(x)
        layer.write(y)
        return y + 1

    traced = torch.compile(fn, backend=traces, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(traced(layer, X), fn(same, X), rtol=0, atol=0)
    assert layer.seen == same.seen == [3, 3]
    torch.testing.assert_close(layer.total, same.total, rtol=0, atol=0)
    torch.testing.assert_close(layer.kv, same.kv, rtol=0, atol=0)
    assert traces.num_marked_calls == [2]


def test_equal_layers_with_own_objects_and_integers_trace_once() -> None:
    traces = Traces()
    layers = [Layer(index) for index in range(12)]
    for layer in layers:
        torch.testing.assert_close(
            torch.compile(layer, backend=traces, fullgraph=True)(X), layer(X), rtol=0, atol=0
        )
    assert len(traces.graphs) == 1


def test_equal_layers_with_own_objects_trace_once_without_fake() -> None:
    class Plain(torch.nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.holder = Holder(factor)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return by_holder(x, self.holder)

    @eager_on_graph
    def by_holder(x: torch.Tensor, holder: Holder) -> torch.Tensor:
        return x * holder.factor

    traces = Traces()
    for factor in range(12):
        layer = Plain(factor)
        copied = copy.deepcopy(layer)
        copied.holder.factor = 100
        torch.testing.assert_close(torch.compile(layer, backend=traces)(X), X * factor, rtol=0, atol=0)
        torch.testing.assert_close(torch.compile(copied, backend=traces)(X), X * 100, rtol=0, atol=0)
    assert len(traces.graphs) == 1


def test_another_mark_at_the_same_place_traces_again() -> None:
    double, triple = (eager_on_graph(lambda x, n=n: x * n) for n in (2, 3))
    traces = Traces()
    traced = torch.compile(lambda mark, x: mark(x) + 1, backend=traces)
    torch.testing.assert_close(traced(double, X), X * 2 + 1)
    torch.testing.assert_close(traced(triple, X), X * 3 + 1)
    torch.testing.assert_close(traced(double, X), X * 2 + 1)
    assert len(traces.graphs) == 2


def test_fake_is_guarded_on_what_it_reads() -> None:
    class Width:
        def __init__(self, width: int) -> None:
            self.width = width

    @eager_on_graph(fake=lambda x, width: x.new_empty(x.shape[0] * 2, width.width))
    def widen(x: torch.Tensor, width: Width) -> torch.Tensor:
        return torch.ones(x.shape[0] * 2, width.width)

    traces = Traces()
    traced = torch.compile(lambda x, width: widen(x, width) + 1, backend=traces, fullgraph=True)
    for width in (5, 7, 5, 7):
        assert traced(X, Width(width)).shape == (6, width)
    assert len(traces.graphs) == 2


def test_result_sizes_follow_symbolic_inputs() -> None:
    @eager_on_graph
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])[: x.shape[0] * 2 - 1].contiguous()

    traces = Traces()
    traced = torch.compile(lambda x: doubled(doubled(x)) + 1, backend=traces, fullgraph=True)
    for rows in (3, 5, 9, 4, 17):
        x = torch.ones(rows, 4)
        torch.testing.assert_close(traced(x), doubled(doubled(x)) + 1, rtol=0, atol=0)
    assert len(traces.graphs) == 2


def test_body_that_cannot_run_on_fake_tensors_asks_for_fake() -> None:
    @eager_on_graph
    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    with pytest.raises(CompileError) as caught:
        torch.compile(marked_call(through_numpy), backend="eager")(X)
    assert "@eager_on_graph(fake=lambda x, *args, **kwargs: torch.empty_like(x))" in str(caught.value)
    assert "def " in str(caught.value)
    assert "through_numpy" in str(caught.value)


def test_result_size_that_only_the_data_gives_is_refused() -> None:
    @eager_on_graph
    def where(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()

    with pytest.raises(CompileError, match=r"where' returns a tensor of shape"):
        torch.compile(lambda x: where(x) + 1, backend="eager")(X)


def test_host_reads_in_a_body_are_no_matter() -> None:
    @eager_on_graph
    def clipped(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=x.mean().item())

    assert_traced_like_eager(lambda x: clipped(x) + 1, X)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(marked_call(clipped), backend="eager")(X), clipped(X))


def test_sizes_that_only_the_data_gives_may_stand_inside_a_body() -> None:
    @eager_on_graph
    def count_large(x: torch.Tensor) -> torch.Tensor:
        return x[x > 3].sum().reshape(1)

    assert_traced_like_eager(lambda x: count_large(x) + 1, X)


@pytest.mark.parametrize(
    ("fake", "body", "what"),
    [
        (torch.empty_like, lambda x: x[:2] * 1, r"result: traced \(\(3, 4\)"),
        (torch.empty_like, lambda x: x.double(), "float64"),
        (torch.empty_like, lambda x: (x + 1, x), "result: traced a single value, now tuple"),
        (lambda x: (torch.empty_like(x), 3), lambda x: (x + 1, 4), r"result\[1\]: traced 3, now 4"),
        (torch.empty_like, lambda x: x, "shares memory with an argument"),
        (lambda x: x, lambda x: x + 1, "traced tensor argument 0 itself"),
        (torch.empty_like, lambda x: None, "traced a tensor, now None"),
    ],
    ids=["shape", "dtype", "structure", "scalar", "argument", "no argument", "None"],
)
def test_fake_that_lies_is_found_when_the_call_runs(
    fake: Callable[..., Any], body: Callable[..., Any], what: str
) -> None:
    mark = eager_on_graph(fake=fake)(body)
    with pytest.raises(MarkResultError, match=what):
        torch.compile(marked_call(mark), backend="eager")(X)


def test_strides_that_tracing_was_told_hold() -> None:
    """Compiled code indexes by them."""
    mark = eager_on_graph(fake=torch.empty_like)(lambda x: (x.t() + 0.0).t())
    result = torch.compile(marked_call(mark), backend="eager")(X)
    assert result.stride() == (4, 1)
    torch.testing.assert_close(result, X)


def test_changed_list_argument_is_refused() -> None:
    @eager_on_graph
    def fill(x: torch.Tensor, into: list[torch.Tensor]) -> None:
        into.append(x)

    def fn(x: torch.Tensor) -> torch.Tensor:
        into: list[torch.Tensor] = []
        fill(x, into)
        return x + len(into)

    with pytest.raises(CompileError, match="changed a list argument"):
        torch.compile(fn, backend="eager")(X)


def test_autograd_is_refused() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(3, 4, requires_grad=True)
        with pytest.raises(CompileError, match="autograd records"):
            torch.compile(marked_call(total), backend="eager")(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_keep_breaks_and_values(backend: str) -> None:
    """Functionalization neither drops nor swaps marked calls, with or without results."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        break_graph()
        add_one_(x)
        break_graph()
        y = total(x, x)
        break_graph()
        return y * 2

    with noted_breaks() as expected:
        values = fn(X)
    with noted_breaks() as names:
        torch.testing.assert_close(torch.compile(fn, backend=backend)(X), values, rtol=0, atol=0)
    assert names == expected == ["break_graph", "add_one_", "break_graph", "total", "break_graph"]


def test_handles_die_with_their_objects() -> None:
    gc.collect()
    before = num_handles()
    layer = Layer(2)
    torch.compile(layer, backend="eager")(X)
    assert num_handles() > before
    torch.compiler.reset()
    del layer
    gc.collect()
    assert num_handles() <= before + 1  # That of the mark, which lives on.


def test_run_eager_is_traced_through() -> None:
    assert_traced_like_eager(lambda x: total.run_eager(x, x), X, num_marks=0)


@pytest.mark.parametrize("of_shape", [lambda x: x.shape, lambda x: x.shape[0], lambda x: x.numel()])
def test_size_among_the_results_is_refused_where_sizes_vary(of_shape: Callable[[torch.Tensor], Any]) -> None:
    """Eager returns an integer there, and the error spoke of a SymInt, which no code of the user's has."""

    @eager_on_graph
    def with_size(x: torch.Tensor) -> Any:
        return x * 2, of_shape(x)

    def forward(x: torch.Tensor) -> Any:
        return with_size(x + 1)

    options = {"piece_compiler": "fx"}
    compiled = torch.compile(forward, backend="sgl_piecewise", dynamic=True, options=options)
    with pytest.raises(CompileError, match=r"follows from a size .* outside the marked function"):
        compiled(torch.randn(3, 4))
