"""Point 2: a result of another form than at capture raises at replay, and nothing is copied."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from contract.support import assert_equal, ramp
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import BreakMismatchError
from sgl_piecewise.runtime.mark import eager_on_graph


def _two_views(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return t[:2], t[1:]


# name: (result at capture, result at replay, path in the error, both sides in the error)
MISMATCHES: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, str, str]] = {
    "shape": (lambda t: t * 2, lambda t: t[:3] * 2, "result", "(4, 2)", "(3, 2)"),
    "one_dimension_more": (lambda t: t * 2, lambda t: t[None] * 2, "result", "(4, 2)", "(1, 4, 2)"),
    "same_elements_other_shape": (lambda t: t * 2, lambda t: t.view(2, 4) * 2, "result", "(4, 2)", "(2, 4)"),
    "broadcastable_shape": (lambda t: t * 2, lambda t: t[:1] * 2, "result", "(4, 2)", "(1, 2)"),
    "dtype": (lambda t: t * 2, lambda t: (t * 2).double(), "result", "torch.float32", "torch.float64"),
    "tensor_to_none": (lambda t: t * 2, lambda t: None, "result", "tensor", "None"),
    "none_to_tensor": (lambda t: None, lambda t: t * 2, "result", "None", "tensor"),
    "tensor_to_scalar": (lambda t: t * 2, lambda t: 2.0, "result", "tensor", "float"),
    "tuple_to_list": (lambda t: (t * 2,), lambda t: [t * 2], "result", "tuple", "list"),
    "tuple_to_tensor": (lambda t: (t * 2,), lambda t: t * 2, "result", "tuple", "a single value"),
    "longer_list": (lambda t: [t * 2], lambda t: [t * 2, t], "result", "[0]", "[0, 1]"),
    "other_keys": (lambda t: {"a": t * 2}, lambda t: {"b": t * 2}, "result", "'a'", "'b'"),
    "int": (lambda t: (t * 2, 3), lambda t: (t * 2, 4), "result[1]", "3", "4"),
    "int_to_float": (lambda t: (t * 2, 3), lambda t: (t * 2, 3.0), "result[1]", "3", "3.0"),
    "bool_to_int": (lambda t: (t * 2, True), lambda t: (t * 2, 1), "result[1]", "True", "1"),
    "string": (lambda t: (t * 2, "a"), lambda t: (t * 2, "b"), "result[1]", "'a'", "'b'"),
    "deep": (
        lambda t: {"kv": [(t * 2, t + 1)]},
        lambda t: {"kv": [(t * 2, (t + 1)[:2])]},
        "result['kv'][0][1]",
        "(4, 2)",
        "(2, 2)",
    ),
    "deep_structure": (
        lambda t: {"kv": [(t * 2, t + 1)]},
        lambda t: {"kv": [(t * 2, [t + 1])]},
        "result['kv'][0][1]",
        "a single value",
        "list",
    ),
    "views_parted": (
        lambda t: _two_views(t * 2),
        lambda t: ((t * 2)[:2], (t * 2)[1:]),
        "result[1]",
        "result[0]",
        "one memory",
    ),
    "argument_to_fresh": (lambda t: t, lambda t: t * 2, "result", "argument", "now at"),
}


def _boundaries(captured: CapturedCallable) -> list[torch.Tensor]:
    (outputs,) = next(iter(captured.recordings.values())).break_outputs
    alive = [leaf.target for leaf in outputs.leaves if leaf.target is not None]
    return [target.clone() for target in alive]


@pytest.mark.parametrize("kind", MISMATCHES)
def test_other_result_at_replay_raises_and_copies_nothing(graph_device: GraphDevice, kind: str) -> None:
    at_capture, at_replay, path, captured_side, replay_side = MISMATCHES[kind]
    current = {"make": at_capture}

    @eager_on_graph
    def changing(t: torch.Tensor) -> Any:
        return current["make"](t)

    def forward(x: torch.Tensor) -> torch.Tensor:
        result = changing(x + 1)
        del result
        return x * 2

    x = ramp(graph_device, 4, 2)
    captured = capture(forward, (x,), device=graph_device)
    captured(x)
    before = _boundaries(captured)
    current["make"] = at_replay
    with pytest.raises(BreakMismatchError) as caught:
        captured(ramp(graph_device, 4, 2, start=50.0))
    message = str(caught.value)
    assert changing.name in message
    assert "break 0" in message
    assert re.search(rf"{re.escape(path)}\b|{re.escape(path)}", message)
    assert captured_side in message
    assert replay_side in message
    # The graph after the break did not run and boundary memory is as the last good replay left it.
    assert "nothing was copied" in message
    if kind != "argument_to_fresh":
        assert_equal(_boundaries(captured), before)


@pytest.mark.parametrize("name", ["fake", "capture_stub"])
def test_a_stand_in_that_lies_is_named_and_the_body_is_not_blamed(
    graph_device: GraphDevice, name: str
) -> None:
    stand_in = {name: lambda t: t.new_empty(3)}
    mark = eager_on_graph(**stand_in)(lambda t: t * 2)
    captured = capture(lambda t: mark(t + 1) - 1, (ramp(graph_device, 4),), device=graph_device)
    with pytest.raises(BreakMismatchError, match=rf"its {name} ran in its place.*Make {name} return what"):
        captured(ramp(graph_device, 4))


@pytest.mark.parametrize("name", ["fake", "capture_stub"])
def test_a_stand_in_that_raises_is_named(graph_device: GraphDevice, name: str) -> None:
    """Its arguments are the body's; one that takes others raised an error that told of neither mark nor stand-in."""
    mark = eager_on_graph(**{name: lambda: 3})(lambda t: t * 2)
    with pytest.raises(TypeError, match="positional argument") as caught:
        capture(lambda t: mark(t + 1) - 1, (ramp(graph_device, 4),), device=graph_device)
    assert caught.value.__notes__ == [
        f"Break {mark.name!r} (fixed, break 0): its {name} ran here in place of the body."
    ]


def test_replay_works_again_after_a_mismatch(graph_device: GraphDevice) -> None:
    rows = {"count": 4}

    @eager_on_graph
    def head(t: torch.Tensor) -> torch.Tensor:
        return t[: rows["count"]] * 2

    x = ramp(graph_device, 4)
    captured = capture(lambda t: head(t + 1) - 1, (x,), device=graph_device)
    rows["count"] = 3
    with pytest.raises(BreakMismatchError):
        captured(x)
    rows["count"] = 4
    other = ramp(graph_device, 4, start=8.0)
    assert_equal(captured(other), (other + 1) * 2 - 1)


def test_first_of_two_leaves_is_not_copied_when_the_second_differs(graph_device: GraphDevice) -> None:
    current = {"dtype": torch.float32}

    @eager_on_graph
    def two(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return t * 2, (t + 1).to(current["dtype"])

    x = ramp(graph_device, 4)
    captured = capture(lambda t: sum(two(t + 1)), (x,), device=graph_device)
    captured(x)
    before = _boundaries(captured)
    current["dtype"] = torch.float64
    with pytest.raises(BreakMismatchError, match=r"result\[1\]"):
        captured(x + 100)
    assert_equal(_boundaries(captured), before)


def test_baked_nan_stays_the_same_nan(graph_device: GraphDevice) -> None:
    """NaN differs from itself; a baked NaN that stays NaN is no change."""

    @eager_on_graph
    def with_nan(t: torch.Tensor) -> tuple[torch.Tensor, float]:
        return t * 2, float("nan")

    x = ramp(graph_device, 4)
    captured = capture(lambda t: with_nan(t + 1)[0], (x,), device=graph_device)
    assert_equal(captured(x), (x + 1) * 2)


@pytest.mark.gpu
def test_result_on_another_device_raises() -> None:
    from sgl_piecewise.runtime.capture.cuda_device import CudaDevice

    device = CudaDevice()
    on_host = {"now": False}

    @eager_on_graph
    def moving(t: torch.Tensor) -> torch.Tensor:
        return (t * 2).cpu() if on_host["now"] else t * 2

    x = ramp(device, 4)
    captured = capture(lambda t: moving(t + 1) - 1, (x,), device=device)
    on_host["now"] = True
    with pytest.raises(BreakMismatchError, match=r"device.*cuda.*cpu"):
        captured(x)


def test_stub_of_another_form_than_the_body_raises_at_replay(graph_device: GraphDevice) -> None:
    """The stub's results became the boundary buffers; a body that differs must not be taken."""

    def stub(t: torch.Tensor) -> torch.Tensor:
        return torch.zeros(t.shape[0] + 1, device=t.device)

    @eager_on_graph(capture_stub=stub)
    def body(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    x = ramp(graph_device, 4)
    captured = capture(lambda t: body(t + 1).sum() + t, (x,), device=graph_device)
    with pytest.raises(BreakMismatchError, match=r"\(5,\).*\(4,\)"):
        captured(x)
