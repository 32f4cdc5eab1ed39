"""Prepared models (`compile_layers_once`) whose layers change after a recording: no guard of Dynamo looks there."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from sgl_piecewise import capture, compile_layers_once, eager_on_graph
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


class Numbered(nn.Module):
    """A layer with a number of its own, which a marked function and captured code read."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + doubled(self.inner(x)) * self.number


@eager_on_graph
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_number_in_which_layers_differ_is_looked_at() -> None:
    """One trace serves all of them with the number as an input, which no guard compares: a replay kept the old one."""
    torch.manual_seed(0)
    model = Stack()
    model.layers = nn.ModuleList(Numbered(number) for number in range(2, 6))
    compiled = drop_in(compile_layers_once(model))
    for number in (7, 8):
        model.layers[1].number = number
        before = total("num_replays")
        for _ in range(4):
            x = torch.randn(2, 4)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        assert total("num_replays") > before


class Settings:
    """What layers are given, with all kinds of things that they read and that may change."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.count = 2
        self.is_shifted = False
        self.extra: torch.Tensor | None = None
        self.listed = [1]


class Obeying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, settings: Settings) -> torch.Tensor:
        y = self.inner(x) * settings.factor * settings.count + len(settings.listed)
        y = y if settings.extra is None else y + settings.extra
        return y + 1 if settings.is_shifted else y


SETTINGS: dict[str, Callable[[Settings], Any]] = {
    "float": lambda settings: setattr(settings, "factor", 2.5),
    "integer": lambda settings: setattr(settings, "count", 5),
    "flag": lambda settings: setattr(settings, "is_shifted", True),
    "tensor where there was none": lambda settings: setattr(settings, "extra", fixed(4)),
    "length of a list": lambda settings: settings.listed.append(1),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_what_an_object_says_that_layers_are_given_is_looked_at(change: str) -> None:
    """Guards on arguments were left out as a whole, since tensors among them are others at every call."""
    torch.manual_seed(0)
    model = ReadingStack()
    model.layers = nn.ModuleList(Obeying() for _ in range(3))
    model.store = Settings()
    compiled = drop_in(compile_layers_once(model))
    for is_changed in (False, True):
        if is_changed:
            SETTINGS[change](model.store)
        before = total("num_replays")
        for _ in range(4):
            x = torch.randn(2, 4)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        assert total("num_replays") > before


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *args: Any, mask: Any = None) -> torch.Tensor:
        y = self.inner(x)
        for part in (args, mask):
            for leaf in pytree.tree_leaves(part):
                y = y if leaf is None else y + leaf
        return y


ARGUMENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, dict[str, Any]]]] = {
    "by name": lambda x, y: ((), {"mask": y}),
    "one tensor twice": lambda x, y: ((y, [y, x]), {}),
    "named tuple": lambda x, y: ((Pair(x, y),), {"mask": Pair(y, y)}),
    "dict": lambda x, y: (({"a": y, "b": 2.0},), {"mask": {1: x}}),
}


@pytest.mark.parametrize("form", ARGUMENTS)
def test_tensors_that_are_others_at_every_call_are_not_taken_for_changes(form: str) -> None:
    """A tensor given twice, or in a named tuple, was: every call recorded anew, and nothing replayed."""

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Adding() for _ in range(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            args, kwargs = ARGUMENTS[form](x, y)
            for layer in self.layers:
                x = layer(x, *args, **kwargs)
            return x

    torch.manual_seed(0)
    model = Calling()
    compiled = drop_in(compile_layers_once(model))
    for _ in range(5):
        x, y = torch.randn(2, 4), torch.randn(2, 4)
        torch.testing.assert_close(compiled(x, y), model(x, y), rtol=0, atol=0)
    assert total("num_captures") == 1
    assert total("num_replays") == 3


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
