"""Point 12: what graphs read in place must stay in place; what moved is named."""

from __future__ import annotations

import pytest
import torch

from contract.support import assert_equal, ramp
from sgl_piecewise.runtime.capture.breakable import BreakableCUDAGraph, BreakableCUDAGraphCapture
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import ConfigError, MovedAddressError, SglPiecewiseError
from sgl_piecewise.runtime.mark import eager_on_graph


class Scaled(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.weight = torch.nn.Parameter(torch.full((4,), 2.0, device=device))
        self.register_buffer("shift", torch.ones(4, device=device))

    @eager_on_graph
    def shifted(self, t: torch.Tensor) -> torch.Tensor:
        return t + self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shifted(x * self.inner.weight) * 2


def test_update_in_place_is_seen_by_the_graphs(graph_device: GraphDevice) -> None:
    module, x = Scaled(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(module, (x,), device=graph_device)
    module.inner.weight.copy_(torch.full_like(x, 5.0))
    module.shift.fill_(7)
    assert_equal(captured(x), (x * 5 + 7) * 2)
    module.load_state_dict({"inner.weight": torch.full_like(x, 3.0), "shift": torch.zeros_like(x)})
    assert_equal(captured(x), x * 6)


@pytest.mark.parametrize("name", ["inner.weight", "shift"])
def test_rebound_tensor_of_a_module_raises_on_the_first_replay(graph_device: GraphDevice, name: str) -> None:
    module, x = Scaled(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(module, (x,), device=graph_device)
    if name == "shift":
        module.shift = torch.zeros(4, device=graph_device.torch_device)
    else:
        module.inner.weight = torch.nn.Parameter(torch.zeros(4, device=graph_device.torch_device))
    with pytest.raises(MovedAddressError, match=name):
        captured(x)
    with pytest.raises(MovedAddressError, match=name):
        captured(x)  # Not only once: nothing was found right.


def test_data_of_a_parameter_may_be_written_while_capturing(graph_device: GraphDevice) -> None:
    """pytorch/pytorch#183313: a layer that masks its own weights by `data` met an error about graph memory."""

    class Masked(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner.weight.data *= self.shift
            return x * self.inner.weight

    module, x = Masked(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(module, (x,), device=graph_device)
    module.shift[1] = 0
    assert_equal(captured(x), x * torch.tensor([2.0, 0.0, 2.0, 2.0], device=x.device))
    assert_equal(module.inner.weight[1], torch.zeros_like(x[1]))


def test_data_swap_counts_as_a_move(graph_device: GraphDevice) -> None:
    module, x = Scaled(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(module, (x,), device=graph_device)
    module.inner.weight.data = torch.zeros(4, device=graph_device.torch_device)
    with pytest.raises(MovedAddressError, match=r"inner\.weight"):
        captured(x)


def test_deleted_buffer_raises(graph_device: GraphDevice) -> None:
    module, x = Scaled(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(module, (x,), device=graph_device)
    del module.shift
    with pytest.raises(MovedAddressError, match=r"shift.*gone"):
        captured(x)


def test_later_moves_are_found_when_asked(graph_device: GraphDevice) -> None:
    module, x = Scaled(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(module, (x,), device=graph_device)
    captured(x)
    captured.check_static_addresses()
    module.shift = torch.zeros(4, device=graph_device.torch_device)
    with pytest.raises(MovedAddressError, match="shift"):
        captured.check_static_addresses()


def test_bound_method_of_a_module_registers_its_tensors(graph_device: GraphDevice) -> None:
    module, x = Scaled(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(module.forward, (x,), device=graph_device)
    module.shift = torch.zeros(4, device=graph_device.torch_device)
    with pytest.raises(MovedAddressError, match="shift"):
        captured(x)


class Cache:
    """Rebinds its tensor when it grows, as workspaces and KV pools do."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(4, device=device)

    def grow(self) -> None:
        self.tensor = torch.zeros(8, device=self.tensor.device)


def test_cache_that_grew_is_named(graph_device: GraphDevice) -> None:
    """Its owner is asked again at every check: the tensor registered at capture never moves itself."""
    cache, x = Cache(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(
        lambda t: cache.tensor.add_(t) * 2,
        (x,),
        device=graph_device,
        static_tensors={"kv": lambda: cache.tensor},
    )
    cache.tensor.zero_()
    assert_equal(captured(x), x * 2)
    cache.grow()
    with pytest.raises(MovedAddressError, match="kv"):
        captured.check_static_addresses()


def test_rebinding_in_the_given_dict_is_named(graph_device: GraphDevice) -> None:
    tensors = {"kv": torch.zeros(4, device=graph_device.torch_device)}
    x = ramp(graph_device, 4)
    captured = capture(lambda t: tensors["kv"] + t, (x,), device=graph_device, static_tensors=tensors)
    tensors["kv"] = torch.zeros(4, device=graph_device.torch_device)
    with pytest.raises(MovedAddressError, match="kv"):
        captured(x)


def test_breakable_graph_checks_on_its_first_replay(graph_device: GraphDevice) -> None:
    cache, x, graph = Cache(graph_device.torch_device), ramp(graph_device, 4), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, device=graph_device, static_tensors={"kv": lambda: cache.tensor}):
        cache.tensor + x
    cache.grow()
    with pytest.raises(MovedAddressError, match="kv"):
        graph.replay()


def test_every_size_checks_on_its_own_first_replay(graph_device: GraphDevice) -> None:
    module, x = Scaled(graph_device.torch_device), torch.ones(8, 4, device=graph_device.torch_device)
    captured = capture(module, (x,), capture_sizes=[2, 8], device=graph_device)
    captured(x)
    module.shift = torch.zeros(4, device=graph_device.torch_device)
    with pytest.raises(MovedAddressError, match="shift"):
        captured(x[:2])


@pytest.mark.parametrize("value", [None, 3, "kv"])
def test_static_tensor_that_is_none_is_refused(graph_device: GraphDevice, value: object) -> None:
    with pytest.raises(ConfigError, match="'kv'"):
        capture(lambda t: t, (ramp(graph_device, 4),), device=graph_device, static_tensors={"kv": value})  # type: ignore[dict-item]


def test_callable_that_gives_no_tensor_is_refused(graph_device: GraphDevice) -> None:
    with pytest.raises(SglPiecewiseError, match="'kv'"):
        capture(
            lambda t: t, (ramp(graph_device, 4),), device=graph_device, static_tensors={"kv": lambda: None}
        )  # type: ignore[dict-item, return-value]


class WithPlainTensors(torch.nn.Module):
    """Keeps one tensor as a plain attribute, and binds another at every call."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table
        self.last = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return self.last + self.table


def test_plain_attribute_rebound_after_capture_is_noticed(graph_device: GraphDevice) -> None:
    """The graphs read the old tensor, which nothing keeps."""
    table = torch.ones(4, device=graph_device.torch_device)
    module = WithPlainTensors(table)
    captured = capture(module, (table.clone(),), device=graph_device)
    module.table = table * 3
    with pytest.raises(MovedAddressError, match="'table' moved"):
        captured(table)


def test_attribute_that_the_forward_binds_itself_is_no_static_tensor(graph_device: GraphDevice) -> None:
    table = torch.ones(4, device=graph_device.torch_device)
    module = WithPlainTensors(table)
    captured = capture(module, (table.clone(),), device=graph_device)
    assert torch.equal(captured(table), table * 3)
    captured.check_static_addresses()
