"""Compiled code inside an emulated recording: one opaque operation, never half of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_support import capture, is_poisoned, recording

from sgl_piecewise.runtime.capture.emulated import EmulatedDevice
from sgl_piecewise.runtime.capture.emulated.opaque import record_opaque
from sgl_piecewise.runtime.errors import CaptureForbiddenError

# Inductor's own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def program(x: torch.Tensor, w: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> tuple[Any, ...]:
    """Fused kernels, a write through an argument, a view of an input, results that share a storage."""
    y = (x @ w + 1).relu() * x
    kv.index_put_((slots,), y)
    return y, x[1:], y[:, 1:], y.t(), torch.sin(y)


def static_inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 8), torch.randn(8, 8), torch.zeros(9, 8), torch.arange(4)]


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_compiled_function_replays_whole(backend: str, is_warm: bool) -> None:
    """Also compiled for the first time inside the capture."""
    inputs = static_inputs()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    with torch.no_grad():
        if is_warm:
            compiled(*inputs)
            inputs[2].zero_()
        graph, found = capture(lambda: compiled(*inputs))
        assert not inputs[2].any(), "recording executes nothing"
        assert is_poisoned(found[0])
        for seed in range(3):
            torch.manual_seed(seed)
            for tensor in inputs[:2]:
                tensor.normal_()
            inputs[3].copy_(torch.randperm(9)[:4])
            copies = [tensor.clone() for tensor in inputs]
            expected = compiled(*copies)
            graph.replay()
            for left, right in zip([*found, inputs[2]], [*expected, copies[2]], strict=True):
                assert torch.equal(left, right)
        assert found[1].data_ptr() == inputs[0][1:].data_ptr()
        assert found[2].untyped_storage().data_ptr() == found[0].untyped_storage().data_ptr()
    if backend == "inductor":
        assert graph.op_names() == ["inductor graph"]


def test_capture_does_not_recompile() -> None:
    inputs = static_inputs()
    compiled = torch.compile(program, fullgraph=True)
    with torch.no_grad():
        compiled(*inputs)
    torch._dynamo.utils.counters.clear()
    capture(lambda: compiled(*inputs))
    with torch.no_grad():
        compiled(*inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_compiled_random_numbers_follow_the_seed() -> None:
    compiled = torch.compile(lambda x: torch.rand_like(x) + 1)
    x = torch.ones(4)
    with torch.no_grad():
        compiled(x)
    graph, y = capture(lambda: compiled(x))
    torch.manual_seed(3)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(first, y)


def test_compiled_code_reads_undefined_indices_safely() -> None:
    """An index out of range ends the process in a compiled kernel; while recording there are no values."""
    table, x = torch.arange(6.0), torch.tensor([2.0, 0.0, 1.0])
    compiled = torch.compile(lambda table, order: table[order] + 1)
    pool = EmulatedDevice().new_pool()
    with torch.no_grad():
        compiled(table, torch.arange(3))
        with pool.capture_scope():
            with recording(pool) as first:
                order = x.argsort()
            with recording(pool) as second:
                y = compiled(table, order)
        first.replay()
        second.replay()
    assert torch.equal(y, torch.tensor([2.0, 3.0, 1.0]))


def _fill(inputs: list[Any]) -> list[Any]:
    """Writes its first input behind the dispatcher's back."""
    inputs[0].numpy()[:] = inputs[1].numpy() * 2
    return [inputs[0], inputs[1][1:], torch.from_numpy(inputs[1].numpy() + 1)]


@pytest.mark.parametrize("mutated", [None, [0]])
def test_record_opaque(mutated: list[int] | None) -> None:
    target, source = torch.zeros(3), torch.ones(3)
    graph, results = capture(lambda: record_opaque(_fill, [target, source], name="fill", mutated=mutated))
    assert not target.any()
    assert results[0] is target
    source.fill_(4)
    graph.replay()
    assert torch.equal(target, torch.full((3,), 8.0))
    assert torch.equal(results[1], torch.full((2,), 4.0))
    assert torch.equal(results[2], torch.full((3,), 5.0))
    assert graph.op_names() == ["fill"]


def test_record_opaque_outside_capture_is_a_call() -> None:
    target = torch.zeros(3)
    record_opaque(_fill, [target, torch.ones(3)], name="fill")
    assert torch.equal(target, torch.full((3,), 2.0))


def test_opaque_code_keeps_its_own_result() -> None:
    """Compiled code may return a constant that it keeps: that one must not be moved into the pool."""
    constant = torch.ones(3)
    address = constant.data_ptr()
    graph, result = capture(lambda: record_opaque(lambda inputs: constant, [], name="constant"))
    graph.replay()
    assert constant.data_ptr() == address
    assert torch.equal(result, constant)


def test_break_inside_compiled_code_is_refused() -> None:
    pool = EmulatedDevice().new_pool()

    def break_here(inputs: list[Any]) -> list[Any]:
        graph.end()
        return inputs

    with pool.capture_scope():
        graph = pool.new_graph()
        graph.begin()
        with pytest.raises(CaptureForbiddenError, match="break inside my code"):
            record_opaque(break_here, [torch.ones(2)], name="my code")
        graph.abort()


def test_compiled_function_in_a_break_is_ordinary() -> None:
    pool, x = EmulatedDevice().new_pool(), torch.ones(4)
    compiled: Callable[..., torch.Tensor] = torch.compile(lambda x: (x + 1).relu() * 2)
    with torch.no_grad(), pool.capture_scope():
        with recording(pool):
            x + 1
        assert compiled(x).tolist() == [4.0] * 4
        with recording(pool):
            x + 1
