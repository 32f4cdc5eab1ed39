"""Prepared models (`compile_layers_once`) whose layers change after a recording: no guard of Dynamo looks there."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sgl_piecewise import capture, compile_layers_once
from sgl_piecewise.runtime.torch_private_entries import CompiledEntry

from .support import drop_in, failures, total


class Block(nn.Module):
    """A layer of parts, with a number and a name that decide what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.factor = 1.0
        self.activation = "relu"
        self.added: nn.Module | None = None
        self.listed = [torch.ones(4), torch.ones(4)]
        self.named = {"bias": torch.ones(4)}
        self.settings = types.SimpleNamespace(bias=torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = getattr(torch, self.activation)(self.inner(x)) * self.factor
        y = y + self.listed[1] + self.named["bias"] + self.settings.bias
        return x + y if self.added is None else x + y + self.added(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def fixed(*shape: int) -> torch.Tensor:
    """Returns the same numbers each time, on the default device."""
    on_host = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), device="cpu")
    return on_host.to(torch.get_default_device())


def doubles(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def new_linear(**options: Any) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 4, **options)


def inner_replaced_at_its_address(layer: nn.Module) -> None:
    """Python gives the memory of a module that died to the next one, so its `id` may be that of the new one."""
    del layer.inner
    layer.inner = new_linear()


CHANGES: dict[str, Callable[[Block], Any]] = {
    "number": lambda layer: setattr(layer, "factor", 3.0),
    "name": lambda layer: setattr(layer, "activation", "tanh"),
    "weight given other memory": lambda layer: setattr(layer.inner.weight, "data", fixed(4, 4)),
    "weight replaced": lambda layer: setattr(layer.inner, "weight", nn.Parameter(fixed(4, 4))),
    "bias gone": lambda layer: setattr(layer.inner, "bias", None),
    "module replaced": lambda layer: setattr(layer, "inner", new_linear()),
    "module gone before it is replaced": inner_replaced_at_its_address,
    "tensor in a list": lambda layer: layer.listed.__setitem__(1, fixed(4)),
    "tensor in a dict": lambda layer: layer.named.update(bias=fixed(4)),
    "tensor of an object": lambda layer: setattr(layer.settings, "bias", fixed(4)),
    "module added": lambda layer: setattr(layer, "added", new_linear(bias=False)),
    "hook inside": lambda layer: layer.inner.register_forward_hook(doubles),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changed_is_not_replayed_as_it_was(change: str, device: torch.device) -> None:
    """huggingface/diffusers#9279, chengzeyi/stable-fast#75, pytorch/pytorch#117758: adapters that were swapped in,
    weights that were given other memory, and hooks did nothing to a model that was compiled already."""
    torch.manual_seed(0)
    with device:
        model = Stack()
    eager = copy.deepcopy(model)
    compiled = drop_in(compile_layers_once(model))

    def assert_equal_to_eager() -> None:
        before = total("num_replays")
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
        assert total("num_replays") > before

    assert_equal_to_eager()
    for one in (model, eager):
        with device:
            CHANGES[change](one.layers[1])
    assert_equal_to_eager()


def test_a_layer_that_did_not_change_is_replayed_at_every_size_and_recorded_once() -> None:
    """Guards that compare sizes are asked without the tensors: those of a replay's layers exist inside graphs only."""
    torch.manual_seed(0)
    model = Stack()
    eager = copy.deepcopy(model)
    compiled = drop_in(compile_layers_once(model))
    for size in (2, 3, 5) * 4:
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
    assert total("num_captures") == 3
    assert total("num_replays") == 5  # The first call of all had a compile of its own, for its size alone.


def test_a_layer_is_looked_at_once_however_many_sizes_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards asked for each recorded size would make a call slower with each."""
    asked: list[object] = []
    plain = CompiledEntry.check_without

    def check_without(entry: CompiledEntry, parameters: Any) -> Any:
        check = plain(entry, parameters)
        return lambda values: asked.append(entry) or check(values)

    monkeypatch.setattr(CompiledEntry, "check_without", check_without)
    compiled = drop_in(compile_layers_once(Stack()), dynamic=True)
    for size in (2, 3, 5) * 4:
        compiled(torch.randn(size, 4))
    assert total("num_captures") == 3
    asked.clear()
    compiled(torch.randn(3, 4))
    assert len(asked) == len(Stack().layers)


class Store:
    """What a layer is given beside tensors."""

    def __init__(self) -> None:
        self.bias = torch.ones(4)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, store: Store) -> torch.Tensor:
        return self.inner(x) + store.bias


class ReadingStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reading() for _ in range(3))
        self.store = Store()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.store)
        return x


def test_an_object_that_layers_are_given_is_looked_into_and_not_held() -> None:
    """It may be a cache of many tensors."""
    torch.manual_seed(0)
    model = ReadingStack()
    compiled = drop_in(compile_layers_once(model))
    x = torch.randn(2, 4)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert total("num_replays") > 0
    model.store.bias = fixed(4)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    old = weakref.ref(model.store)
    model.store = Store()
    for _ in range(4):
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    gc.collect()
    assert old() is None


def test_layers_that_are_equal_but_for_a_hook_do_not_share_a_trace() -> None:
    """pytorch/pytorch#117758: hooks are not guarded on, so layers with and without one looked equal."""
    torch.manual_seed(0)
    model = Stack()
    model.layers[1].inner.register_forward_hook(doubles)
    x = torch.randn(2, 4)
    expected = model(x)
    torch.testing.assert_close(capture(model, (x,), compile="fx")(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(drop_in(compile_layers_once(model))(x), expected, rtol=0, atol=0)


class Counting(nn.Module):
    """A layer that changes itself whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.num_calls = 0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.last = self.inner(x)
        return x + self.last


def test_what_a_layer_does_besides_computing_is_not_left_out_by_a_replay() -> None:
    """pytorch/pytorch#114844: an attribute kept the tensor of the capture; here it and a counter are those of eager."""
    torch.manual_seed(0)
    model = Stack()
    model.layers = nn.ModuleList(Counting() for _ in range(3))
    eager = copy.deepcopy(model)
    compiled = drop_in(compile_layers_once(model))
    for count in range(1, 5):
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
        for layer, expected in zip(model.layers, eager.layers, strict=True):
            assert layer.num_calls == expected.num_calls == count
            torch.testing.assert_close(layer.last, expected.last, rtol=0, atol=0)
    assert failures()
    assert all("num_calls" in message and "replay" in message for message in failures())
