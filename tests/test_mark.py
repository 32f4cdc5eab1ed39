"""The mark as an object: spellings, binding, copying, threads. What capture does with it is tested there."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_piecewise import break_graph, eager_on_graph
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.mark import MarkedFunction, active_capture, use_capture


class RecordingCapture:
    """An active capture that notes marked calls and runs them as an eager segment does."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def call_marked(self, mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(mark.name)
        with use_capture(None):
            return mark.fn(*args, **kwargs)


def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


@eager_on_graph
def bare(a: int) -> int:
    return a + 1


@eager_on_graph(fake=add, capture_stub=add)
def called(a: int, b: int = 1) -> int:
    return a * 10 + b


class Layer:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    @eager_on_graph
    def method(self, a: int) -> int:
        return a + self.offset

    @staticmethod
    @eager_on_graph
    def static(a: int) -> int:
        return a - 1

    @classmethod
    @eager_on_graph
    def of_class(cls, a: int) -> str:
        return f"{cls.__name__}{a}"


# Spellings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decorate",
    [
        eager_on_graph,
        eager_on_graph(),
        eager_on_graph(enable=True),
        eager_on_graph(True),
        eager_on_graph(None, fake=add),
    ],
    ids=["bare", "called", "enable", "older spelling", "None"],
)
def test_every_spelling_gives_a_mark_that_breaks(decorate: Callable[..., Any]) -> None:
    marked = decorate(add)
    capture = RecordingCapture()
    with use_capture(capture):
        assert marked(2, b=3) == 5
    assert capture.names == ["add"]


@pytest.mark.parametrize("decorate", [eager_on_graph(enable=False), eager_on_graph(False)])
def test_a_disabled_mark_is_the_function_itself(decorate: Callable[..., Any]) -> None:
    assert decorate(add) is add


def test_called_spelling_keeps_fake_and_stub() -> None:
    assert called.fake is add
    assert called.capture_stub is add
    assert bare.fake is None
    assert bare.capture_stub is None


def test_a_mark_looks_like_its_function() -> None:
    marked = eager_on_graph(add)
    assert marked.__name__ == "add"
    assert marked.__doc__ == "Adds."
    assert inspect.signature(marked) == inspect.signature(add)
    assert repr(marked) == "<eager_on_graph add>"


@pytest.mark.parametrize(
    ("arguments", "label"),
    [({"fake": 3}, "fake"), ({"capture_stub": "x"}, "capture_stub")],
)
def test_what_cannot_be_called_is_refused_by_name(arguments: dict[str, Any], label: str) -> None:
    with pytest.raises(ConfigError, match=f"{label} must be callable, got"):
        eager_on_graph(**arguments)(add)


def test_marking_something_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="marked object must be callable, got int"):
        eager_on_graph(3)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_the_wrong_order_of_method_decorators_is_refused(kind: type) -> None:
    """Above ``@staticmethod`` the mark would bind the object and pass it as an argument."""
    with pytest.raises(ConfigError, match=f"put @{kind.__name__} above @eager_on_graph"):
        eager_on_graph(kind(add))


# Calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.nn.Linear, dict])
def test_a_class_is_refused(kind: type) -> None:
    """Making an object was the break, and isinstance(x, TheClass) raised TypeError."""
    with pytest.raises(ConfigError, match=r"cannot mark the class .* Mark the method"):
        eager_on_graph(kind)


def test_outside_capture_a_mark_is_an_ordinary_call() -> None:
    assert active_capture() is None
    assert bare(1) == 2
    assert called(1, b=5) == 15
    assert break_graph() is None


def test_under_capture_every_kind_of_method_breaks_with_its_own_object() -> None:
    capture = RecordingCapture()
    with use_capture(capture):
        assert Layer(5).method(1) == 6
        assert Layer.method(Layer(7), 1) == 8
        assert Layer.static(1) == 0
        assert Layer.of_class(1) == "Layer1"
        break_graph()
    assert capture.names == [
        "Layer.method",
        "Layer.method",
        "Layer.static",
        "Layer.of_class",
        "break_graph",
    ]


def test_run_eager_never_breaks() -> None:
    capture = RecordingCapture()
    with use_capture(capture):
        assert bare.run_eager(1) == 2
        assert Layer(5).method.run_eager(1) == 6
    assert capture.names == []


def test_a_mark_inside_an_eager_segment_is_an_ordinary_call() -> None:
    @eager_on_graph
    def outer(a: int) -> int:
        assert active_capture() is None
        return bare(a) * 2

    capture = RecordingCapture()
    with use_capture(capture):
        assert outer(1) == 4
        assert active_capture() is capture
    assert [name.rpartition(".")[2] for name in capture.names] == ["outer"]


def test_an_error_in_a_marked_function_reaches_the_caller_and_leaves_the_capture_active() -> None:
    @eager_on_graph
    def failing() -> None:
        raise KeyError("inside")

    capture = RecordingCapture()
    with use_capture(capture):
        with pytest.raises(KeyError, match="inside"):
            failing()
        assert active_capture() is capture
    assert active_capture() is None


def test_another_thread_is_not_capturing() -> None:
    """A capture belongs to one thread: a mark called elsewhere meanwhile must not end its segment."""
    capture = RecordingCapture()
    seen: list[Any] = []
    with use_capture(capture):
        thread = threading.Thread(target=lambda: seen.extend([active_capture(), bare(1)]))
        thread.start()
        thread.join()
    assert seen == [None, 2]
    assert capture.names == []


# Copies ------------------------------------------------------------------------------------------


def test_marks_survive_pickling_and_copying_as_themselves() -> None:
    for mark in (bare, called, break_graph, Layer.method):
        assert pickle.loads(pickle.dumps(mark)) is mark
        assert copy.copy(mark) is mark
        assert copy.deepcopy(mark) is mark


def test_a_bound_mark_copies_like_a_bound_method() -> None:
    bound = Layer(5).method
    assert copy.copy(bound)(1) == 6
    assert pickle.loads(pickle.dumps(bound))(1) == 6
    assert copy.deepcopy(bound).__self__ is not bound.__self__


def test_a_module_that_holds_marks_can_be_deep_copied() -> None:
    """Models are copied by quantisation and by tests; a copy's bound mark must see the copy's weights."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.free = bare
            self.own = self.scaled

        @eager_on_graph
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x)

    model = Model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.fill_(3.0)
        assert torch.equal(twin(torch.ones(2)), torch.full((2,), 3.0))
        assert torch.equal(model(torch.ones(2)), torch.ones(2))
    assert twin.free is bare


def test_bound_marks_compare_like_bound_methods() -> None:
    layer = Layer(1)
    assert layer.method == layer.method
    assert hash(layer.method) == hash(layer.method)
    assert layer.method != Layer(1).method


def test_module_instance_cannot_be_marked() -> None:
    """Its parent would no longer list its parameters."""
    with pytest.raises(ConfigError, match=r"instance of Linear.*module\.forward"):
        eager_on_graph(torch.nn.Linear(2, 2))
