"""What traces leave out because nothing hangs on it: it stays left out, and only there."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards, symbolic_convert
from torch._inductor import codecache
from torch._logging._internal import trace_log

from sgl_piecewise import eager_on_graph
from sgl_piecewise.compiler.forward import CompiledForward
from sgl_piecewise.passes.pipeline import pipeline, run_passes
from sgl_piecewise.passes.run_on_fakes import run_on_fakes
from sgl_piecewise.passes.split_at_marks import pieces_of
from sgl_piecewise.passes.validate import FINDINGS
from sgl_piecewise.runtime import torch_private, torch_private_compiling, tree
from sgl_piecewise.runtime.mark_results import Results
from sgl_piecewise.runtime.torch_private_entries import one_compile_for_all_sizes
from sgl_piecewise.runtime.torch_private_trace_cost import plain_traces


@eager_on_graph(fake=torch.empty_like)
def marked(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_only_plain_traces_go_without_timings_and_names() -> None:
    scope = {"x": 1}

    def times_guards() -> float:
        return guards.profile_guard_manager(guards.RootGuardManager(), scope, 1)

    def name_of_this() -> str | None:
        return symbolic_convert.get_funcname(__file__, times_guards.__code__.co_firstlineno)

    assert times_guards() > 0
    assert name_of_this() is not None
    with plain_traces(keeps_shapes=True):
        assert times_guards() == 0
        assert name_of_this() is None
    assert times_guards() > 0


def test_names_are_looked_up_for_who_reads_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic_convert.trace_call_log, "isEnabledFor", lambda level: level == logging.DEBUG)
    with plain_traces(keeps_shapes=True):
        assert symbolic_convert.get_funcname(__file__, marked.fn.__code__.co_firstlineno + 1) == "marked"


def test_keys_are_described_for_who_reads_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Details:
        part: str

    graph = torch.fx.Graph()
    graph.output(())
    pickler = codecache.FxGraphCachePickler(torch.fx.GraphModule(torch.nn.Module(), graph))
    details: Any = Details("one")
    assert len(pickler.debug_lines(details)) == 1
    monkeypatch.setattr(trace_log, "handlers", [])  # Where nobody asked for TORCH_TRACE.
    with plain_traces(keeps_shapes=True):
        assert pickler.debug_lines(details) == []
        monkeypatch.setattr(codecache.log, "isEnabledFor", lambda level: level == logging.DEBUG)
        assert len(pickler.debug_lines(details)) == 1


@pytest.mark.parametrize(("shares_layers", "keeps"), [(True, False), (False, True)])
def test_shapes_are_kept_where_one_trace_has_equal_layers(shares_layers: bool, keeps: bool) -> None:
    seen: list[bool] = []

    def piece_compiler(piece: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        seen.append(dynamo_config.fake_tensor_cache_enabled)
        return piece.forward

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            for layer in self.layers:
                x = layer(x)
            return x

    forward = CompiledForward(
        Stack(), options={"piece_compiler": piece_compiler}, shares_layers=shares_layers
    )
    with torch.inference_mode():
        forward(torch.randn(3, 4))
    assert set(seen) == {keeps}


def test_a_layer_runs_once_for_its_results_though_a_size_is_learnt_in_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two inputs have a size each until the first layer adds them; the second layer's are one size."""
    num_runs = 0
    run_body = Results.run_body

    def counted(self: Results, *args: Any) -> tree.Spec:
        nonlocal num_runs
        num_runs += 1
        return run_body(self, *args)

    monkeypatch.setattr(Results, "run_body", counted)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + y

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(5))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, y)
            return x

    model = Stack()
    forward = CompiledForward(model, options={"piece_compiler": "fx"})
    with torch.inference_mode():
        forward.trace((torch.randn(7, 4), torch.randn(7, 4)), {}, {0: 0, 1: 0})
        assert num_runs == 1
        for size in (7, 3):
            args = torch.randn(size, 4), torch.randn(size, 4)
            assert torch.equal(forward(*args), model(*args))


def split_of(fn: Callable[..., Any], *args: torch.Tensor) -> Any:
    """Calls the rest of the test on the split module while Dynamo's trace is in progress."""

    def traced(check: Callable[[torch.fx.GraphModule], None]) -> None:
        def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            check(run_passes(gm, example_inputs, pipeline()))
            return gm.forward

        for one in args:
            torch._dynamo.mark_dynamic(one, 0)
        torch.compile(fn, backend=backend, fullgraph=True)(*args)

    return traced


def test_pieces_run_at_the_sizes_of_the_trace_as_numbers() -> None:
    """The same operators, and no symbolic size among them."""

    def check(split: torch.fx.GraphModule) -> None:
        call = next(node for node in split.graph.nodes if node.op == "call_module")
        values = [used.meta["example_value"] for used in call.args]
        operators: list[list[str]] = []
        shapes: list[Any] = []
        for examples in (
            torch_private_compiling.examples_at_hints(values),
            torch_private_compiling.example_inputs(values),
        ):
            assert examples is not None
            names: list[str] = []

            def observe(
                node: Any, func: Any, args: Any, kwargs: Any, result: Any, names: list[str] = names
            ) -> None:
                names.append(str(func))
                shapes.append(tuple(result.shape))

            run_on_fakes(pieces_of(split)["piece_0"], examples, observe)
            operators.append(names)
        assert operators[0] == operators[1]
        half = len(operators[0])
        assert all(type(size) is int for shape in shapes[:half] for size in shape)
        assert any(type(size) is torch.SymInt for shape in shapes[half:] for size in shape)

    x = torch.randn(7, 4)
    split_of(lambda x: marked(torch.relu(x) @ x.new_ones(4, 2) + x.size(0)) - 1, x)(check)


def test_inputs_at_hints_share_memory_as_before() -> None:
    def check(split: torch.fx.GraphModule) -> None:
        nodes = [node for node in split.graph.nodes if node.op == "placeholder"]
        values = [node.meta["example_value"] for node in nodes]
        examples = torch_private_compiling.examples_at_hints(values)
        assert examples is not None
        tensors = [one for one in examples if isinstance(one, torch.Tensor) and one.dim()]  # Not the handle.
        assert [tuple(one.shape) for one in tensors] == [(7, 4), (7, 2)]
        assert torch_private.is_same_storage(*tensors)
        assert tensors[1].storage_offset() == 2
        assert torch_private_compiling.share_memory(examples)

    x = torch.randn(7, 4)
    split_of(lambda x, y: marked(x).sum() + y, x, x[:, 2:])(check)


def test_sizes_that_only_the_data_gives_are_checked_as_symbols() -> None:
    found: list[str] = []

    def check(split: torch.fx.GraphModule) -> None:
        found.extend(one.what for one in split.meta[FINDINGS])

    def fn(x: torch.Tensor) -> torch.Tensor:
        rows = x.nonzero().float() + 1
        return marked(x).sum() + (rows * rows.sum().item()).sum()

    with dynamo_config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        split_of(fn, torch.randn(7, 4))(check)
    assert any("nonzero" in what for what in found)
    assert any("_local_scalar_dense" in what for what in found)


def test_dynamo_is_unwrapped_only_where_it_was_switched_off_last() -> None:
    def plain(x: int) -> int:
        return x + 1

    disabled = torch.compiler.disable(plain)

    def around(x: int) -> int:
        return 10 * disabled(x)

    vars(around).update(vars(disabled))  # As functools.wraps does.
    assert torch_private_compiling.with_dynamo_as_it_is(disabled) is plain
    assert torch_private_compiling.with_dynamo_as_it_is(around) is around
    assert torch_private_compiling.with_dynamo_as_it_is(plain) is plain
    module = torch.nn.Linear(2, 2)
    assert torch_private_compiling.with_dynamo_as_it_is(module) is module


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclasses.dataclass
class Parts:
    part: Any


@pytest.mark.parametrize(
    "other",
    [
        (1, [2, 3], {"a": 4}, Pair(5, 6)),
        [1, [2, 3], {"a": 4}, Pair(5, 6), Parts(7)],
        (1, [2], {"a": 4}, Pair(5, 6), Parts(7)),
        (1, [2, 3], {"b": 4}, Pair(5, 6), Parts(7)),
        (1, [2, 3], {"a": 4}, (5, 6), Parts(7)),
        (1, [2, 3], {"a": 4}, Pair(5, [6]), Parts(7)),
        (1, [2, 3], {"a": 4}, Pair(5, 6), 7),
    ],
)
def test_leaves_are_taken_by_structure_or_not_at_all(other: Any) -> None:
    value = (1, [2, 3], {"a": 4}, Pair(5, 6), Parts(7))
    leaves, spec = tree.flatten(value)
    assert tree.leaves_of(spec, value) == leaves
    assert tree.leaves_of(spec, other) is None
    assert tree.difference(spec, tree.flatten(other)[1], "result") is not None
    assert tree.unflatten(spec, leaves) == value


def test_memory_has_a_name_in_common_where_it_is_shared() -> None:
    x = torch.arange(6.0)
    sparse = torch.eye(2).to_sparse()
    tensors = [x, x[3:], x.view(2, 3).t(), torch.arange(6.0), sparse, torch.eye(2).to_sparse()]
    for one in tensors:
        for other in tensors:
            has_common = not torch_private.memory_of((one,)).isdisjoint(torch_private.memory_of((other,)))
            assert has_common == torch_private.shares_memory(one, other)


def test_settings_are_as_before_when_traces_of_two_threads_overlapped() -> None:
    """On PyTorch 2.11 they are the process's: the second to end put back what the first had set, for good."""
    names = (
        "fake_tensor_cache_enabled",
        "record_runtime_overhead",
        "skip_nnmodule_hook_guards",
        "recompile_limit",
    )

    def now() -> list[Any]:
        return [getattr(dynamo_config, name) for name in names]

    before, inside = now(), list[Any]()
    began, both, ended = (threading.Event() for _ in range(3))

    def first() -> None:
        with plain_traces(keeps_shapes=False), one_compile_for_all_sizes():
            began.set()
            assert both.wait(10)
        ended.set()

    def second() -> None:
        assert began.wait(10)
        with plain_traces(keeps_shapes=False), one_compile_for_all_sizes():
            both.set()
            assert ended.wait(10)
            inside.extend(now())

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside[:3] == [False, False, False]
    assert now() == before
