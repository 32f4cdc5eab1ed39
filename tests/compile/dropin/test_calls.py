"""What may change from call to call without a shape changing: numbers, objects, modes, weights, threads."""

from __future__ import annotations

import copy
import gc
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from sgl_piecewise import eager_on_graph
from sgl_piecewise.runtime.capture.emulated.graph import EmulatedCopy
from sgl_piecewise.runtime.capture.flat_inputs import FlatInputs

from .support import assert_like_eager, assert_same, drop_in, tensors, total, without_graph

X = tensors((3, 4))[0]


@eager_on_graph(fake=lambda x, factor: torch.empty_like(x))
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


class Settings:
    """An object that a marked call reads."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


@eager_on_graph(fake=lambda x, settings: torch.empty_like(x))
def scaled_by(x: torch.Tensor, settings: Settings) -> torch.Tensor:
    return x * settings.factor


@eager_on_graph
def doubled_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


@eager_on_graph
def sum_and_difference(x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"sum": x + y, "rest": (x - y, 3)}


def test_number_at_a_mark_is_never_stale() -> None:
    """Compiled code does not look at it, so nothing guards on it; a recording holds it."""

    class Model(nn.Module):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(x + 1, self.factor)

    model = Model()
    compiled = drop_in(model)
    for number in range(15):
        model.factor = float(number // 5)
        assert_same(compiled(X), (X + 1) * model.factor)
    assert total("num_replays") >= 5


def test_object_at_a_mark_may_be_swapped_or_changed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled_by(x + 1, self.settings)

    model = Model()
    compiled = drop_in(model)
    for number in range(16):
        if number % 8 == 4:
            model.settings = Settings(float(number))
        model.settings.factor += 1
        assert_same(compiled(X), (X + 1) * model.settings.factor)
    assert total("num_replays") >= 5


def test_result_of_a_mark_that_is_its_argument() -> None:
    def fn(x: torch.Tensor) -> Any:
        own = x + 1
        return doubled_in_place(x), doubled_in_place(own), own

    assert_like_eager(fn, [(X,), (X + 1,)])


def test_nested_results_and_repeated_outputs() -> None:
    def fn(x: torch.Tensor) -> Any:
        found = sum_and_difference(x, x.t().contiguous().t() + 1)
        total_, (rest, factor) = found["sum"], found["rest"]
        return total_, total_, rest * factor, total_.chunk(2, 1), total_[:, :1].expand(3, 5)

    assert_like_eager(fn, [(X,), (X + 1,)])


def test_lists_of_tensors_that_are_written() -> None:
    def fn(x: torch.Tensor, caches: list[torch.Tensor]) -> Any:
        for cache in caches:
            cache.add_(x.sum())
        return scaled(x, 2.0) + caches[0][0]

    assert_like_eager(fn, [(X, [torch.zeros(2, 4) for _ in range(3)])])


def test_inference_tensor_written_by_a_mark_outside_inference_mode() -> None:
    x = torch.ones(3, 4)
    assert x.is_inference()
    compiled = drop_in(lambda x: scaled(x, 2.0) + 1)
    with torch.inference_mode(False), torch.no_grad():
        for _ in range(4):
            assert_same(compiled(x), x * 2 + 1)
    assert total("num_replays") == 2


def test_autocast_around_the_call() -> None:
    model = nn.Linear(4, 4)
    compiled = drop_in(model)
    for number in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 0):
            assert_same(compiled(X), model(X))
    assert total("num_replays") == 4


def test_seeds_between_calls() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return scaled(x + torch.rand(3, 4), 2.0) + torch.randn(4)

    compiled = drop_in(fn)
    for seed in range(5):
        torch.manual_seed(seed)
        actual = compiled(X)
        torch.manual_seed(seed)
        assert_same(actual, fn(X))
    assert total("num_replays") == 3


def test_tied_weights_and_weights_as_outputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.embedding(ids)), self.head.weight, self.embedding.weight.t()

    assert_like_eager(Model(), [(torch.tensor([1, 2]),), (torch.tensor([3, 0, 2]),)])


def test_two_sets_of_weights_in_turns_have_a_recording_each() -> None:
    model = nn.Linear(4, 4)
    compiled = drop_in(model)
    sets = [model.weight.data, torch.randn(4, 4)]
    for number in range(30):
        model.weight.data = sets[number // 5 % 2]
        assert_same(compiled(X), model(X))
    assert total("num_captures") == 2
    assert total("num_replays") >= 20


def test_state_dict_loaded_in_place_and_by_assignment() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4).state_dict()
    compiled = drop_in(model)
    for _ in range(3):
        compiled(X)
    model.load_state_dict(other)
    assert_same(compiled(X), model(X))
    assert total("num_replays") == 2
    model.load_state_dict({name: value * 2 for name, value in other.items()}, assign=True)
    for _ in range(5):
        assert_same(compiled(X), model(X))
    assert without_graph()["static_input_changed"] == 2


def test_hooks_that_come_and_go_are_seen_where_dynamo_is_told_to_look() -> None:
    """pytorch/pytorch#117758: by default nothing guards on hooks; docs/compiling.md says how to have it so."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    eager = copy.deepcopy(model)
    compiled = drop_in(model)

    def assert_equal_to_eager() -> None:
        for _ in range(3):
            assert_same(compiled(X), eager(X))

    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        assert_equal_to_eager()
        handles = [one[0].register_forward_hook(lambda *given: given[-1] * 2) for one in (model, eager)]
        assert_equal_to_eager()
        for handle in handles:
            handle.remove()
        assert_equal_to_eager()
    assert total("num_replays") >= 3


def test_module_converted_to_another_type() -> None:
    model = nn.Linear(4, 4)
    compiled = drop_in(model)
    for x in (X, X.double()):
        model.to(x.dtype)
        for _ in range(4):
            assert_same(compiled(x), model(x))
    assert total("num_replays") == 4


def test_threads_that_make_the_first_calls() -> None:
    compiled = drop_in(lambda x: scaled(x.sin(), 2.0) + 1)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            with torch.inference_mode():
                for number in range(15):
                    x = torch.full((3, 4), float(seed * 50 + number))
                    assert_same(compiled(x), x.sin() * 2 + 1)
        except (AssertionError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_view_of_graph_memory_outlives_its_model() -> None:
    model = nn.Linear(4, 4)
    compiled = drop_in(model, outputs="view")
    for _ in range(4):
        output = compiled(X)
    expected = model(X)
    del model, compiled
    torch.compiler.reset()
    gc.collect()
    assert_same(output, expected)


@pytest.mark.parametrize("capture", ["full", "breakable"])
def test_views_of_graph_memory_come_back_as_inputs(capture: str) -> None:
    """Each input is read before anything is left where it lies, the copies of other inputs included."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return y + 1, x - y

    compiled = drop_in(fn, outputs="view", capture=capture)
    x, y = expected = tensors((3, 4), (3, 4))
    with torch.no_grad():
        for _ in range(8):
            (x, y), expected = compiled(x, y), fn(*expected)
            assert_same(x, expected[0])
            assert_same(y, expected[1])
    assert total("num_replays") == 6


@pytest.mark.parametrize("num_inputs", [1, 2])
@pytest.mark.parametrize("end", ["source", "target"])
def test_interrupt_while_an_end_is_set_leaves_no_wrong_end(
    monkeypatch: pytest.MonkeyPatch, num_inputs: int, end: str
) -> None:
    """Python raises it as the call returns that set the end, before anything can be noted of it."""
    interrupts_at, results = 0, list[torch.Tensor]()
    set_ends, empty_like = EmulatedCopy._set_ends, torch.empty_like

    def interrupted(copy: EmulatedCopy, target: int, source: int, *rest: int) -> int:
        error = set_ends(copy, target, source, *rest)
        if interrupts_at in (target, source):
            signal.raise_signal(signal.SIGINT)
        return error

    def result_like(tensor: torch.Tensor) -> torch.Tensor:
        return results[0] if results else empty_like(tensor)

    def fn(*inputs: torch.Tensor) -> Any:
        return sum(inputs) * 2

    monkeypatch.setattr(EmulatedCopy, "_set_ends", interrupted)
    compiled = drop_in(fn)
    old, new, other = tensors((3, 4), (3, 4), (3, 4))
    rest = [other][: num_inputs - 1]
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", result_like)
        for _ in range(3):
            compiled(old, *rest)
        result, later = torch.empty(3, 4), torch.empty(3, 4)
        results[:] = [result]
        compiled(old, *rest)
        results[:] = [later]
        interrupts_at = new.data_ptr() if end == "source" else later.data_ptr()
        with pytest.raises(KeyboardInterrupt):
            compiled(new, *rest)
        results[:], interrupts_at = [result.zero_()], 0
        assert_same(compiled(old, *rest), fn(old, *rest))


@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_that_overlap_at_one_call_may_lie_apart_at_the_next(dynamic: bool) -> None:
    """A text and the same one moved by a token, as a language model's loss takes them."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * 2, y * 3, x[1:], y

    compiled = drop_in(fn, dynamic=dynamic)
    for number in range(8):
        text, apart, other = tensors((5, 4), (4, 4), (4, 4), seed=number)
        shifted = text[:-1], text[1:]
        others = (apart, other), (text[1:], text[:-1]), (apart, apart)
        for x, y in (shifted, *(others if number > 3 else ())):  # The first are captured.
            assert_same(compiled(x, y), fn(x, y))
    assert total("num_replays") >= 10


def test_empty_outputs_are_views_and_results_like_others() -> None:
    """PyTorch gives an empty tensor the address 0, which is no place in anybody's memory."""

    def fn(x: torch.Tensor, start: torch.Tensor) -> Any:
        y = x * 2
        return x[:0], y, y[:0], y[1:1].t(), start.view(torch.int32), start

    compiled = drop_in(fn)
    for number in range(4):
        x, start = tensors((3, 4), seed=number)[0], torch.empty(0)
        actual, expected = compiled(x, start), fn(x, start)
        for one, other in zip(actual, expected, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert_same(one, other)
        assert actual[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert actual[5] is start
    assert total("num_replays") == 2


def test_a_refusal_names_the_users_line_and_none_of_the_compiler(caplog: Any) -> None:
    compiled = drop_in(lambda x: torch.nn.functional.one_hot(x, 5))
    for _ in range(3):
        compiled(torch.tensor([1, 2, 4]))
    (message,) = {
        record.getMessage() for record in caplog.records if "cannot be captured" in record.getMessage()
    }
    assert __file__ in message


def test_a_number_that_became_a_variable_is_named_and_not_a_host_read_that_nobody_wrote(caplog: Any) -> None:
    compiled = drop_in(lambda x, scale: x * scale)
    for number in range(5):
        x, scale = X + number, number + 0.5
        assert_same(compiled(x, scale), x * scale)
    message = " ".join(record.getMessage() for record in caplog.records)
    assert "The number 'scale' cannot be captured" in message
    assert "specialize_float" in message


@pytest.mark.parametrize(
    "program",
    [lambda x: x * 2 + 1, lambda x: (x * 2, x + 1), lambda x: (x[:0] * 2, x + 1), lambda x: x.add_(1)],
)
def test_buffers_live_as_long_as_their_recording(
    program: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies inside graphs go to addresses: what lies there must stay the recording's."""
    buffers: list[weakref.ref[torch.Tensor]] = []
    initialise = FlatInputs.__init__

    def note(inputs: FlatInputs, *args: Any, **kwargs: Any) -> None:
        initialise(inputs, *args, **kwargs)
        buffers.extend(map(weakref.ref, inputs._targets))

    monkeypatch.setattr(FlatInputs, "__init__", note)
    x = X.to(device)
    compiled = drop_in(program)
    for _ in range(4):
        compiled(x)
    gc.collect()
    assert total("num_replays")
    assert buffers
    assert all(buffer() is not None for buffer in buffers)
