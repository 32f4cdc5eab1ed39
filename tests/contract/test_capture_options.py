"""What ``capture`` is asked for is checked before anything runs, and each error says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from contract.support import assert_equal, ramp
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import ConfigError

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sizes_are_one_number": ({"capture_sizes": 8}, "capture_sizes must be a list of integers, got 8"),
    "sizes_are_a_word": ({"capture_sizes": "48"}, "capture_sizes must be a list of integers, got '48'"),
    "strategy_is_none": ({"strategy": None}, "Unknown capture strategy None"),
    "outputs_are_none": ({"outputs": None}, "Unknown outputs mode None"),
    "warm_ups_are_a_word": ({"num_warm_ups": "2"}, "num_warm_ups is '2'"),
    "warm_ups_are_broken": ({"num_warm_ups": 1.5}, "num_warm_ups is 1.5"),
    "warm_ups_are_a_bool": ({"num_warm_ups": True}, "num_warm_ups is True"),
    "device_is_unknown": ({"device": "gpu"}, "'gpu' is no device"),
    "device_is_a_number_with_a_point": ({"device": 3.5}, "3.5 is no device"),
    "pool_is_a_handle": ({"pool": (0, 1)}, "pool must be a GraphPool"),
    "dynamic_dims_are_a_list": ({"dynamic_dims": ["x"]}, "dynamic_dims must map argument paths"),
    "dynamic_dim_is_a_word": (
        {"capture_sizes": [4, 8], "dynamic_dims": {"x": "0"}},
        "dynamic_dims['x'] is '0'; a dimension is an integer",
    ),
    "dynamic_dim_is_none": (
        {"capture_sizes": [4, 8], "dynamic_dims": {"x": None}},
        "dynamic_dims['x'] is None; a dimension is an integer",
    ),
    "dynamic_dims_without_sizes": ({"dynamic_dims": {"x": 0}}, "dynamic_dims needs capture_sizes"),
    "pad_values_are_a_number": ({"pad_values": 3}, "pad_values must map argument paths"),
    "pad_values_without_sizes": ({"pad_values": {"x": 1}}, "pad_values needs capture_sizes"),
    "pad_value_is_a_word": (
        {"capture_sizes": [4, 8], "pad_values": {"x": "a"}},
        "pad_values['x'] is 'a'; a pad value is a number",
    ),
    "pad_value_is_none": (
        {"capture_sizes": [4, 8], "pad_values": {"x": None}},
        "pad_values['x'] is None; a pad value is a number",
    ),
    "pad_value_of_a_fixed_argument": (
        {"capture_sizes": [4, 8], "pad_values": {"fixed": 1}},
        "pad_values['fixed'] is never used: no dimension of fixed follows the size",
    ),
    "static_tensors_are_a_list": ({"static_tensors": [1]}, "static_tensors must map names"),
}


def add(x: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    return x + fixed


@pytest.mark.parametrize("case", REFUSED)
def test_option_that_cannot_be_accepted_is_named(graph_device: GraphDevice, case: str) -> None:
    options, message = REFUSED[case]
    x, fixed = ramp(graph_device, 8, 4), ramp(graph_device, 4)
    with pytest.raises(ConfigError, match=re.escape(message)):
        capture(add, (x, fixed), **{"device": graph_device, **options})
    assert_equal(capture(add, (x, fixed), device=graph_device)(x, fixed), x + fixed)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: {"x": x}], ids=["tensor", "dict"])
def test_examples_that_are_no_tuple_are_not_taken_apart(
    graph_device: GraphDevice, make: Callable[[torch.Tensor], Any]
) -> None:
    """A tensor of one row was captured at the shape of its row."""
    with pytest.raises(ConfigError, match=r"example_args must be a tuple of positional arguments, got"):
        capture(lambda x: x + 1, make(ramp(graph_device, 1, 4)), device=graph_device)


def test_example_kwargs_that_are_no_mapping_are_refused(graph_device: GraphDevice) -> None:
    with pytest.raises(ConfigError, match="example_kwargs must map names to arguments, got list"):
        capture(lambda x: x + 1, (), [ramp(graph_device, 4)], device=graph_device)  # type: ignore[arg-type]


@pytest.mark.parametrize("thing", [3, None, "forward"])
def test_what_cannot_be_called_cannot_be_captured(graph_device: GraphDevice, thing: Any) -> None:
    with pytest.raises(ConfigError, match="capture takes a function or module, got"):
        capture(thing, (ramp(graph_device, 4),), device=graph_device)


def test_sizes_may_be_numpy_integers(graph_device: GraphDevice) -> None:
    captured = capture(
        lambda x: x + 1, (ramp(graph_device, 8),), capture_sizes=np.array([4, 8]), device=graph_device
    )
    assert [key.size for key in captured.recordings] == [8, 4]
    assert all(type(key.size) is int for key in captured.recordings)


def _nested(device: GraphDevice) -> torch.Tensor:
    return torch.nested.nested_tensor([ramp(device, 3), ramp(device, 2)], layout=torch.jagged)


class Labelled(torch.Tensor):
    """A subclass that sees the operators on it, as quantised and distributed tensors do."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_nested, id="nested"),
        pytest.param(lambda device: ramp(device, 4).as_subclass(Labelled), id="subclass"),
        pytest.param(lambda device: ramp(device, 4).to_sparse(), id="sparse"),
    ],
)
def test_argument_that_is_no_plain_memory_is_named(
    graph_device: GraphDevice, make: Callable[[GraphDevice], torch.Tensor]
) -> None:
    with pytest.raises(ConfigError, match=r"Argument t (is|has) .*; only .* tensors can be captured"):
        capture(lambda t: t * 2, (make(graph_device),), device=graph_device)
