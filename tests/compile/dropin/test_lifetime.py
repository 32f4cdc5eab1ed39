"""Models come and go: what is freed, what is shared, and that compiling leaves a module as it was."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sgl_piecewise import eager_on_graph
from sgl_piecewise.compiler.layer_sharing import compile_layers_once
from sgl_piecewise.compiler.traced_function import TracedFunction
from sgl_piecewise.runtime.capture.call_replay import CapturedCall
from sgl_piecewise.runtime.capture.device import GraphPool
from sgl_piecewise.runtime.capture.on_call import OnCallCapture
from sgl_piecewise.runtime.capture.recording import Recording
from sgl_piecewise.runtime.mark_handles import num_handles

from .support import (
    assert_like_eager,
    assert_same,
    drop_in,
    failures,
    only_stats,
    tensors,
    total,
    without_graph,
)

X = tensors((3, 4))[0]


class Scaled(nn.Module):
    """A layer whose mark takes the layer itself, so that graphs meet an object."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.scale = scale
        self.calls = 0

    @eager_on_graph(fake=lambda self, x: torch.empty_like(x))
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.scaled(self.linear(x)) + self.seen


def living(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(one), kind) for one in gc.get_objects())


def test_deleting_a_compiled_model_frees_handles_graphs_and_pool(device: torch.device) -> None:
    before = living(GraphPool), living(Recording), num_handles()
    model = nn.Sequential(Scaled(2.0), Scaled(3.0)).to(device)
    compiled, x = drop_in(model), X.to(device)
    for _ in range(4):
        compiled(x)
    assert total("num_replays") == 2
    assert living(GraphPool) == before[0] + 1
    gone = weakref.ref(model), weakref.ref(model[0].linear.weight)
    del model, compiled
    gc.collect()
    assert [one() for one in gone] == [None, None]
    # The mark itself lives on, and its handle with it.
    assert (living(GraphPool), living(Recording)) == before[:2]
    assert num_handles() <= before[2] + 1


def test_deleting_a_model_frees_it_although_another_shares_its_code() -> None:
    first, second = Scaled(2.0), Scaled(3.0)
    compiled = [drop_in(first), drop_in(second)]
    for _ in range(8):
        for one in compiled:
            one(X)
    recordings = living(Recording)
    gone = weakref.ref(first)
    del first, compiled[0], one
    gc.collect()
    assert gone() is None
    assert living(Recording) == recordings - 1
    assert_same(compiled[0](X), second.scaled.run_eager(second.linear(X)) + second.seen)


class Layered(nn.Module):
    """Equal layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_deleting_a_model_with_shared_layers_frees_what_its_layers_were_compiled_to(
    device: torch.device,
) -> None:
    """Dynamo's guards of a layer would else hold the forward that holds the layer's own code."""
    before = living(GraphPool), living(Recording), living(TracedFunction)
    model = compile_layers_once(Layered().to(device))
    compiled, x = drop_in(model), X.to(device)
    for _ in range(4):
        assert_same(compiled(x), model(x))
    assert living(TracedFunction) == before[2] + 1
    gone = weakref.ref(model), weakref.ref(model.layers[0]), weakref.ref(model.layers[2][0].weight)
    del model, compiled
    gc.collect()
    assert [one() for one in gone] == [None, None, None]
    assert (living(GraphPool), living(Recording), living(TracedFunction)) == before


def test_a_capture_traces_no_layer_again() -> None:
    """Captures switch autocast's cache off, and guards would tell."""
    torch._dynamo.utils.counters.clear()
    compiled = drop_in(compile_layers_once(Layered()))
    compiled(X)
    num_traces = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        compiled(X)
    assert total("num_replays") == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_traces == 2


def test_two_models_alternate_and_share_one_compile(device: torch.device) -> None:
    models = [Scaled(factor).to(device) for factor in (2.0, 3.0, 4.0)]
    x = X.to(device)
    eager = copy.deepcopy(models)
    compiled = [drop_in(model) for model in models]
    for number in range(24):
        which = number % 3
        assert_same(compiled[which](x + number), eager[which](x + number))
    stats = only_stats()
    assert stats.num_captures == 3
    assert stats.num_replays >= 9
    for model, other in zip(models, eager, strict=True):
        assert model.calls == other.calls
        assert_same(dict(model.named_buffers()), dict(other.named_buffers()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # Theirs, at their first recording.
@pytest.mark.parametrize("piece_compiler", ["fx", "inductor"])
def test_graphs_of_pytorch_in_the_same_process_leave_ours_whole(piece_compiler: str) -> None:
    """At every recording they forget the workspaces of cuBLAS, those that our graphs write to as well."""
    device = torch.device("cuda")
    models = [nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(device) for _ in range(2)]
    ours = drop_in(models[0], piece_compiler=piece_compiler)
    theirs = torch.compile(models[1], mode="reduce-overhead")
    x = torch.randn(16, 256, device=device)
    expected = [model(x) for model in models]
    for fn, want in (*[(ours, expected[0])] * 4, *[(theirs, expected[1])] * 4, *[(ours, expected[0])] * 2):
        assert_same(fn(x).clone(), want, tolerance=1e-4)
    torch.cuda.empty_cache()
    others = [torch.zeros(1 << 22, dtype=torch.uint8, device=device) for _ in range(64)]
    for fn, want in ((ours, expected[0]), (theirs, expected[1])) * 3:
        assert_same(fn(x).clone(), want, tolerance=1e-4)
    assert not any(bool(other.any()) for other in others)


def test_number_of_graphs_is_bounded() -> None:
    fn = drop_in(lambda x: x * 2 + 1, dynamic=True, max_graphs=3)
    for _ in range(3):
        for size in range(2, 9):
            x = torch.randn(size, 4)
            assert_same(fn(x), x * 2 + 1)
    assert only_stats().num_graphs == 3
    assert without_graph()["max_graphs_reached"] > 0


def test_recaptures_of_one_shape_do_not_pile_up() -> None:
    model = nn.Linear(4, 4)
    compiled = drop_in(model, max_graphs=2)
    for number in range(60):
        if number % 12 == 0:
            model.weight.data = torch.full((4, 4), float(number))
        assert_same(compiled(X), model(X))
    assert only_stats().num_graphs <= 2


def test_only_listed_sizes_get_graphs() -> None:
    fn = drop_in(lambda x: x * 2 + 1, dynamic=True, capture_sizes=[4, 8])
    for _ in range(3):
        for size in (3, 4, 5, 8):
            fn(torch.randn(size, 16))
    assert only_stats().num_graphs == 2
    assert without_graph()["not_in_capture_sizes"] == 6


def test_capture_after_counts_calls_of_a_shape() -> None:
    fn = drop_in(lambda x: x * 2 + 1, capture_after=3)
    for _ in range(6):
        fn(X)
    assert without_graph() == {"shape_is_new": 3, "captured_by_this_call": 1}
    assert total("num_replays") == 2


# A module is left as it was ------------------------------------------------------------------------


def test_module_state_deepcopy_and_pickle_are_unchanged() -> None:
    model = Scaled(2.0)
    names, attributes = list(model.state_dict()), dict(vars(model))
    plain = pickle.dumps(model.state_dict())
    model(X)  # Counts as many calls as below.
    compiled = drop_in(model)
    for _ in range(4):
        compiled(X)
    assert list(model.state_dict()) == names
    plainly = Scaled(2.0)
    torch.compile(plainly, backend="eager")(X)
    assert set(vars(model)) == set(vars(plainly))
    assert set(attributes) <= set(vars(model))
    assert pickle.dumps(model.state_dict()) != plain  # The buffer counted.
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    for other in (twin, loaded):
        assert vars(other).keys() == vars(model).keys()
        assert_same(dict(other.state_dict()), dict(model.state_dict()))
        assert_same(other(X), model(X))
        model.seen.sub_(1)
    other_compiled = drop_in(twin)
    twin.scale = 7.0
    for _ in range(4):
        expected = twin.scaled.run_eager(twin.linear(X)) + (twin.seen + 1)
        assert_same(other_compiled(X), expected)


def test_deepcopy_of_the_compiled_module_is_another_model() -> None:
    compiled = drop_in(Scaled(2.0))
    for _ in range(4):
        compiled(X)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        twin.linear.weight.zero_()
    twin.linear.bias.zero_()
    twin.seen.zero_()
    for number in range(1, 5):
        assert_same(twin(X), torch.full((3, 4), float(number)))


# Side effects --------------------------------------------------------------------------------------


def test_call_that_captures_applies_effects_once() -> None:
    log: list[int] = []

    @eager_on_graph
    def noted(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        log.append(1)
        cache.add_(1)
        return x + cache

    def fn(x: torch.Tensor, cache: torch.Tensor) -> Any:
        y = noted(x * 2, cache)
        cache.mul_(2)
        return y.sum() + cache

    compiled = drop_in(fn)
    ours, eager = torch.zeros(3, 4), torch.zeros(3, 4)
    for number in range(1, 7):
        log.clear()
        actual = compiled(X, ours)
        assert len(log) == (1 if number > 1 else len(log))
        assert_same(actual, fn(X, eager))
        assert_same(ours, eager)
    assert total("num_replays") == 4


@pytest.mark.parametrize("capture", ["breakable", "full"])
def test_python_effects_of_marked_functions_happen_once_while_capturing(capture: str) -> None:
    model = Scaled(2.0)
    compiled = drop_in(model, capture=capture)
    compiled(X)
    before = model.calls
    compiled(X)  # captures
    assert total("num_captures") == 1
    assert model.calls == before + 1


def test_error_in_a_marked_function_leaves_everything_usable() -> None:
    is_bad = [False]

    @eager_on_graph(fake=torch.empty_like)
    def checked(x: torch.Tensor) -> torch.Tensor:
        if is_bad[0]:
            raise ValueError("bad input")
        return x + 1

    compiled = drop_in(lambda x: checked(x * 2) * 3)
    for number in range(6):
        is_bad[0] = number in (1, 3)
        if is_bad[0]:
            with pytest.raises(ValueError, match="bad input"):
                compiled(X)
        else:
            assert_same(compiled(X), (X * 2 + 1) * 3)
    assert total("num_replays")


def test_what_cannot_be_captured_runs_without_a_graph_and_says_why() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x[x > 0].sum() + x

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        compiled = drop_in(fn)
        for number in range(4):
            assert_same(compiled(X + number), fn(X + number))
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
    assert without_graph()["capture_failed"] == 2
    assert any("CaptureForbiddenError" in message for message in failures())


def test_marked_function_that_calls_the_same_compiled_model() -> None:
    """The pool is in use then; the inner call runs without a graph."""
    compiled: Any = None
    depth = [0]

    @eager_on_graph(fake=torch.empty_like)
    def again(x: torch.Tensor) -> torch.Tensor:
        if depth[0]:
            return x + 1
        depth[0] += 1
        try:
            return compiled(x)
        finally:
            depth[0] -= 1

    def fn(x: torch.Tensor) -> torch.Tensor:
        return again(x * 2) - 3

    compiled = drop_in(fn)
    for _ in range(5):
        assert_same(compiled(X), ((X * 2) * 2 + 1 - 3) - 3)
    assert total("num_replays")


def test_marked_function_that_calls_another_compiled_model() -> None:
    inner = drop_in(lambda x: x.sin() * 2)

    @eager_on_graph(fake=torch.empty_like)
    def calls_inner(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    compiled = drop_in(lambda x: calls_inner(x + 1) * 3)
    for _ in range(6):
        assert_same(compiled(X), (X + 1).sin() * 2 * 3)
    assert total("num_replays") >= 6


# Threads -------------------------------------------------------------------------------------------


def test_two_threads_use_one_compiled_model(device: torch.device) -> None:
    model = nn.Sequential(Scaled(2.0), nn.Linear(4, 4)).to(device)
    compiled = drop_in(model)
    weight = model[1].weight
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.inference_mode():
                for number in range(20):
                    x = torch.full((3, 4), float(seed * 100 + number), device=device)
                    seen = compiled(x)
                    layer = model[0]
                    low = layer.linear(x) * layer.scale
                    # The counter moves under both threads; what it added is a whole number per call.
                    added = torch.linalg.lstsq(weight, (seen - model[1](low)).t()).solution
                    torch.testing.assert_close(added, added.round(), rtol=0, atol=0.05)
        except (AssertionError, RuntimeError) as error:
            errors.append(error)

    with torch.inference_mode():
        compiled(X.to(device))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    # How many calls of one thread run while the other captures is chance; every call is one or the other.
    assert total("num_replays") > 0
    assert total("num_replays") + sum(without_graph().values()) == 41


def newest_forward() -> Any:
    return max((one for one in gc.get_objects() if type(one) is OnCallCapture), key=lambda one: one.number)


def test_a_recording_that_another_thread_freed_meanwhile_is_not_launched() -> None:
    """A call finds its recording before it has the pool, and what it would launch then may be gone."""
    compiled = drop_in(lambda x: x * 2 + 1)
    for _ in range(4):
        compiled(X)
    before = total("num_replays")
    (captured,) = (one for one in gc.get_objects() if type(one) is CapturedCall)
    captured.recording.reset()
    assert_same(compiled(X), X * 2 + 1)
    assert total("num_replays") == before


def test_a_recording_is_not_freed_while_it_is_replayed() -> None:
    """Neither by the call that another thread captures meanwhile, on a new pool, nor by the replaying thread itself."""
    calls: list[Callable[[], None]] = []

    @eager_on_graph(fake=torch.empty_like)
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        for call in calls:
            call()
        return x + 1

    compiled = drop_in(lambda x: interrupted(x * 2) * 3, dynamic=True)
    for _ in range(4):
        assert_same(compiled(X), (X * 2 + 1) * 3)
    captured = newest_forward()

    def capture_elsewhere() -> None:
        wider = torch.cat([X, X])
        for _ in range(4):
            compiled(wider)

    def in_a_thread() -> None:
        calls.clear()  # The thread's own calls run the body too.
        captured.forget_recordings()
        thread = threading.Thread(target=capture_elsewhere)
        thread.start()
        thread.join()

    calls.append(captured.forget_recordings)
    assert_same(compiled(X), (X * 2 + 1) * 3)
    calls.clear()
    for _ in range(4):
        compiled(X)
    calls.append(in_a_thread)
    assert_same(compiled(X), (X * 2 + 1) * 3)


def test_what_was_recorded_while_all_was_forgotten_is_not_used() -> None:
    """What another thread had forgotten may be in it."""
    compiled = drop_in(lambda x: x * 2 + 1)
    compiled(X)
    captured = newest_forward()
    record = captured._record

    def record_and_forget(*args: Any) -> Any:
        found = record(*args)
        captured.forget_recordings()
        return found

    captured._record = record_and_forget
    compiled(X)
    assert only_stats().num_captures == 1
    assert only_stats().num_graphs == 0
    captured._record = record
    for _ in range(3):
        assert_same(compiled(X), X * 2 + 1)
    assert only_stats().num_graphs == 1


# Gradients and outer captures ----------------------------------------------------------------------


def test_grad_mode_is_refused_with_what_to_do() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        compiled = drop_in(nn.Linear(4, 4))
        with pytest.raises(Exception, match=r"under torch\.inference_mode"):
            compiled(torch.ones(3, 4))


def test_frozen_module_is_captured_in_grad_mode() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        model = nn.Linear(4, 4).requires_grad_(False)
        assert_like_eager(model, [(torch.ones(3, 4),)])


def test_model_captured_without_autograd_is_not_replayed_with_it() -> None:
    """Dynamo guards on the mode, and the next compile is refused."""
    x = torch.ones(3, 4)
    with torch.inference_mode(False):
        model = nn.Linear(4, 4)
        compiled = drop_in(model)
        with torch.no_grad():
            for _ in range(4):
                compiled(x)
        with torch.enable_grad(), pytest.raises(Exception, match=r"under torch\.inference_mode"):
            compiled(x)
        with torch.no_grad():
            assert_same(compiled(x), model(x))
    assert total("num_replays") == 3


@pytest.mark.parametrize("capture", ["breakable", "none"])
@pytest.mark.parametrize("piece_compiler", ["fx", "inductor"])
@pytest.mark.parametrize("what", ["parameter", "attribute", "input", "closure"])
def test_frozen_model_that_thaws_is_refused_not_replayed(
    what: str, piece_compiler: str, capture: str
) -> None:
    """A replay has no gradients, and PyTorch 2.11 does not guard on what parameters require."""
    with torch.inference_mode(False), torch.enable_grad():
        x, scale = torch.ones(3, 4), torch.ones(4)
        model = nn.Linear(4, 4).requires_grad_(False)
        model.plain = torch.ones(4)

        def fn(x: torch.Tensor) -> torch.Tensor:
            return model(x) * model.plain * scale

        compiled = drop_in(fn, piece_compiler=piece_compiler, capture=capture)
        for _ in range(4):
            torch.testing.assert_close(compiled(x), fn(x))
        thawed = {"parameter": model.weight, "attribute": model.plain, "input": x, "closure": scale}[what]
        thawed.requires_grad_(True)
        with pytest.raises(Exception, match=r"under torch\.inference_mode"):
            compiled(x)
        thawed.requires_grad_(False)
        torch.testing.assert_close(compiled(x), fn(x))


def test_captured_by_capture_instead() -> None:
    from sgl_piecewise import capture

    compiled = drop_in(Scaled(2.0))
    model = compiled._orig_mod
    captured = capture(compiled, (X,))
    assert captured.describe().count("break ") == 1
    for _ in range(3):
        expected = model.scaled.run_eager(model.linear(X)) + (model.seen + 1)
        assert_same(captured(X), expected)
    assert total("num_captures") == 0
    assert set(without_graph()) == {"inside_another_capture"}


def test_plain_compile_on_a_cpu_captures_nothing() -> None:
    compiled = torch.compile(Scaled(2.0), backend="sgl_piecewise", options={"piece_compiler": "fx"})
    for _ in range(4):
        compiled(X)
    assert total("num_captures") == 0
