"""Programs as users write them: what a graph could get wrong about inputs, outputs and state."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sgl_piecewise import eager_on_graph

from .support import (
    Call,
    assert_like_eager,
    assert_same,
    drop_in,
    failures,
    only_stats,
    tensors,
    total,
    without_graph,
)

# Inductor's own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

X = tensors((3, 4))[0]


@eager_on_graph
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@eager_on_graph
def add_one_in_place(x: torch.Tensor) -> None:
    x.add_(1)


@dataclasses.dataclass
class Output:
    """As model outputs of libraries are."""

    first: torch.Tensor
    second: torch.Tensor | None = None


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def views_of_input(x: torch.Tensor) -> Any:
    return x, x[1:], x.t(), x[:, 1:3], x.view(torch.int32), doubled(x + 1)


def shared_outputs(x: torch.Tensor) -> Any:
    y = doubled(x.sin()) + 1
    return y, y[0], y.t(), y.sum().expand(2, 3), y[:, ::2]


def writes_input(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.mul_(2)
    y.add_(1)
    return doubled(x) + y


def writes_slice_and_returns_it(x: torch.Tensor) -> Any:
    x[1:].mul_(3)
    return x[1:], x.sum()


def mark_writes_argument(x: torch.Tensor) -> Any:
    add_one_in_place(x)
    y = x * 2
    add_one_in_place(y)
    return y, x


def mark_writes_view_of_argument(x: torch.Tensor) -> Any:
    add_one_in_place(x[0])
    return x * 2


def returns_dataclass(x: torch.Tensor) -> Any:
    return Output(doubled(x) + 1)


def returns_named_tuple_in_dict(x: torch.Tensor) -> Any:
    return {"pair": Pair(x * 2, doubled(x)), "none": None, "number": 3, "list": [x + 1]}


def without_tensors_computed(x: torch.Tensor) -> Any:
    return x


def makes_its_own(x: torch.Tensor) -> Any:
    return torch.ones(3, 4, device=x.device) * x + torch.tensor(2.0)


def complex_result(x: torch.Tensor) -> Any:
    z = torch.complex(x, x + 1)
    return z.conj(), torch.view_as_real(z), z.imag


def random_numbers(x: torch.Tensor) -> Any:
    return doubled(x + torch.rand_like(x)) + torch.randn(3, 4, device=x.device)


def integers(x: torch.Tensor) -> Any:
    return x.argsort(dim=-1), x > 0, x.to(torch.float16), torch.arange(x.shape[0], device=x.device)


def empty_results(x: torch.Tensor) -> Any:
    return x[:0] * 2, x.new_zeros(0, 4), x + 1


def in_place_on_own(x: torch.Tensor) -> Any:
    y = x.clone()
    y[0] = 5
    y[:, 1].mul_(y[:, 2])
    y.index_fill_(1, torch.arange(2, device=x.device), 7.0)
    return y


PROGRAMS = [
    views_of_input,
    shared_outputs,
    writes_slice_and_returns_it,
    mark_writes_argument,
    mark_writes_view_of_argument,
    returns_dataclass,
    returns_named_tuple_in_dict,
    makes_its_own,
    complex_result,
    random_numbers,
    integers,
    empty_results,
    in_place_on_own,
]


@pytest.mark.parametrize("capture", ["breakable", "full"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_behaves_as_in_eager(program: Any, capture: str, device: torch.device) -> None:
    calls = [(X,), (X + 1,), (X.t().contiguous().t(),)]
    assert_like_eager(program, calls, capture=capture, device=device)


@pytest.mark.parametrize("program", [*PROGRAMS, writes_input])
def test_view_outputs_behave_as_in_eager_until_the_next_call(program: Any) -> None:
    compiled = drop_in(program, outputs="view")
    args = (X, X + 1) if program is writes_input else (X,)
    for _ in range(4):
        state = torch.get_rng_state()
        expected = program(*[one.clone() for one in args])
        torch.set_rng_state(state)
        actual = compiled(*[one.clone() for one in args])
        assert_same(actual, expected)
    assert total("num_replays"), failures()


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        X[:, 1:],
        X[1:],
        torch.randn(4, 1).expand(4, 5),
        torch.randn(1, 4).expand(3, 4).t(),
        torch.randn(8)[1::2],
        torch.randn(0, 4),
        torch.tensor(2.5),
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn(3, 4).bfloat16(),
    ],
    ids=[
        "channels_last",
        "strided",
        "offset",
        "expanded",
        "expanded_t",
        "step",
        "empty",
        "scalar",
        "f64",
        "bf16",
    ],
)
def test_forms_of_inputs(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> Any:
        return doubled(x + 1), x.sum(), x * 3, x

    assert_like_eager(fn, [(x,), (x * 2,)])


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_batch_sizes_in_random_order(dynamic: bool | None) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    sizes = [3, 7, 3, 1, 5, 7, 1, 2, 3, 5, 2, 7, 1, 3]
    assert_like_eager(model, [(torch.randn(size, 4),) for size in sizes], num_rounds=2, dynamic=dynamic)
    assert not failures()


def test_keyword_and_none_inputs() -> None:
    def fn(
        x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0, flag: bool = False
    ) -> Any:
        y = x * scale if mask is None else x * mask
        return doubled(y) if flag else y + 1

    calls: list[Call] = [
        ((X,), {}),
        ((X,), {"mask": X > 0}),
        ((X,), {"mask": None, "flag": True}),
        ((X,), {"scale": 2.0}),
        ((X,), {"scale": 3.0}),
        ((), {"x": X, "mask": X + 1}),
    ]
    assert_like_eager(fn, calls)


def test_changing_numbers_are_part_of_the_shape() -> None:
    """Integers and floats are graph inputs once they change; a graph holds their values."""

    def fn(x: torch.Tensor, n: int) -> Any:
        return doubled(x + n) + n, n * 2

    assert_like_eager(fn, [(X, n) for n in (2, 3, 5, 3, 2)])

    def scaled(x: torch.Tensor, f: float) -> Any:
        return doubled(x) * f

    # The emulated device cannot tell the float from a device tensor that the host reads, and refuses.
    assert_like_eager(scaled, [(X, f) for f in (0.5, 0.25, 1.5, 0.25)], min_replays=0)


def test_scalar_tensor_inputs_change_value() -> None:
    def fn(x: torch.Tensor, scale: torch.Tensor) -> Any:
        return doubled(x * scale)

    assert_like_eager(fn, [(X, torch.tensor(2.0)), (X, torch.tensor(3.0))])


# Inputs that alias each other ----------------------------------------------------------------------


def test_which_inputs_share_memory_is_part_of_the_shape(device: torch.device) -> None:
    base = tensors((6, 4))[0].to(device)
    x = X.to(device)
    calls = [
        (x, x + 1),
        (x, x),
        (base[:3], base[3:]),
        (base[:3], base[2:5]),
        (base[1:4], base[:3]),
        (base[:3], base[:3].t().t()),
    ]
    assert_like_eager(writes_input, calls, num_rounds=5, device=device)


def test_inputs_that_overlap_only_after_the_compile() -> None:
    """pytorch/pytorch#139789: nothing guards on it, and a compiler read the other input as if it lay elsewhere."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(2)
        return x + y

    base = torch.arange(8.0)
    calls = [(torch.ones(4), torch.ones(4)), (base[:4], base[2:6]), (base[:4], base[4:])]
    assert_like_eager(fn, calls, num_rounds=3, piece_compiler="aot_eager")


def test_inputs_of_two_storages_that_lie_in_one_memory() -> None:
    """Memory that came back from NumPy has a storage of its own."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y

    compiled = drop_in(fn, capture="none", piece_compiler="aot_eager")
    assert_same(compiled(torch.ones(4), torch.ones(4)), torch.full((4,), 3.0))
    x = torch.ones(4)
    assert_same(compiled(x, torch.from_numpy(x.numpy())), torch.full((4,), 4.0))


def test_input_that_is_a_view_of_a_buffer() -> None:
    """Such an input must see the write into the buffer, and no copy of it does."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3, 4))

        def forward(self, x: torch.Tensor) -> Any:
            self.cache.add_(1)
            return x * 2 + self.cache

    model = Model()
    compiled = drop_in(model)
    for _ in range(4):
        compiled(torch.ones(3, 4))
    model.cache.zero_()
    for number in range(1, 4):
        assert torch.equal(compiled(model.cache[:]), torch.full((3, 4), 3.0 * number))
    assert torch.equal(compiled(torch.ones(3, 4)), torch.full((3, 4), 6.0))
    assert without_graph()["input_shares_memory_with_a_static_tensor"] >= 2


def test_output_of_one_call_is_input_of_the_next() -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> Any:
        state = doubled(state) + x
        return state.sum(), state

    for outputs in ("copy", "view"):
        torch.compiler.reset()
        compiled = drop_in(step, outputs=outputs)
        ours = eager = torch.zeros(3, 4)
        for number in range(6):
            x = X + number
            total_ours, ours = compiled(x, ours)
            total_eager, eager = step(x, eager)
            assert torch.equal(total_ours, total_eager)
            assert torch.equal(ours, eager)
        assert total("num_replays")


# State ---------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Parameters, buffers that count, a plain tensor attribute and a mark that writes a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(8, 4))
        self.plain = torch.ones(4)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Takes the plain attribute along to another device."""
        self.plain = fn(self.plain)
        return super()._apply(fn, recurse)

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> Any:
        self.steps.add_(1)
        self.cache.index_put_((slots,), self.linear(x))
        add_one_in_place(self.cache)
        self.plain.mul_(1.5)
        return doubled(self.cache[slots]) + self.plain, self.cache, self.linear.weight[:2]


SLOTS = torch.tensor([4, 0, 2])


@pytest.mark.parametrize("capture", ["breakable", "full"])
@pytest.mark.parametrize("piece_compiler", ["fx", "inductor"])
def test_buffers_are_updated_in_place_once_per_call(
    capture: str, piece_compiler: str, device: torch.device
) -> None:
    tolerance = 0.0 if piece_compiler == "fx" else 1e-5
    assert_like_eager(
        Stateful(),
        [(X, SLOTS), (X + 1, SLOTS + 1)],
        capture=capture,
        piece_compiler=piece_compiler,
        tolerance=tolerance,
        min_replays=4,
        device=device,
    )


def test_weights_updated_in_place_are_seen(device: torch.device) -> None:
    def update(model: Any, number: int) -> None:
        with torch.no_grad():
            model.linear.weight.fill_(number)

    assert_like_eager(
        Stateful(), [(X, SLOTS)], num_rounds=6, before_call=update, min_replays=4, device=device
    )


@pytest.mark.parametrize("how", ["parameter", "data", "buffer", "attribute", "submodule"])
def test_rebound_tensors_are_noticed(how: str, device: torch.device) -> None:
    def rebind(model: Any, number: int) -> None:
        if number not in (3, 7):
            return
        generator = torch.Generator().manual_seed(number)
        fresh = torch.randn(4, 4, generator=generator).to(device)
        if how == "parameter":
            model.linear.weight = nn.Parameter(fresh, requires_grad=False)
        elif how == "data":
            model.linear.weight.data = fresh
        elif how == "buffer":
            model.cache = torch.zeros(8, 4, device=device)
        elif how == "attribute":
            model.plain = torch.full((4,), 2.0, device=device)
        else:
            model.linear = nn.Linear(4, 4, device=device)
            with torch.no_grad():
                model.linear.weight.copy_(fresh)
                model.linear.bias.zero_()

    assert_like_eager(
        Stateful(), [(X, SLOTS)], num_rounds=12, before_call=rebind, min_replays=2, device=device
    )


def test_moved_tensor_is_counted_and_captured_again() -> None:
    model = nn.Linear(4, 4)
    compiled = drop_in(model)
    for _ in range(3):
        compiled(X)
    model.weight.data = torch.zeros(4, 4)
    for _ in range(5):
        assert torch.equal(compiled(X), model(X))
    stats = only_stats()
    assert stats.without_graph["static_input_changed"] == 2
    assert stats.num_captures == 2


def test_batch_norm_in_train_mode_updates_its_statistics_once() -> None:
    assert_like_eager(nn.BatchNorm1d(4), [(X,), (X * 3,)], num_rounds=4)


def test_dropout_in_eval_and_in_train_mode(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    assert_like_eager(model.eval(), [(X,)], device=device)
    assert_like_eager(model.train(), [(X,)], device=device)


def test_autocast_and_modes() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w.t()
        return doubled(y) + 1

    assert_like_eager(fn, [(X, X)])


def test_functions_over_globals_and_constants() -> None:
    table = torch.arange(4.0)

    def fn(x: torch.Tensor) -> Any:
        return doubled(x) + table, table

    compiled = drop_in(fn)
    for _ in range(4):
        result, same = compiled(X)
        assert torch.equal(result, X * 2 + table)
        assert same is table
        table.add_(1)
    assert total("num_replays")


def test_graph_breaks_of_dynamo() -> None:
    """Two compiled forwards, one feeding the other."""

    def fn(x: torch.Tensor) -> Any:
        y = doubled(x + 1) * 2
        torch._dynamo.graph_break()
        return y * x, y

    assert_like_eager(fn, [(X,), (X * 2,)], min_replays=4)
