"""What is asked of CUDA at a replay, and what is not asked twice; CUDA itself is stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_piecewise.runtime import tree
from sgl_piecewise.runtime.capture import cuda_runtime
from sgl_piecewise.runtime.capture.boundary import BreakOutputs, LeafPlan
from sgl_piecewise.runtime.capture.cuda_graph import CudaCopy
from sgl_piecewise.runtime.capture.cuda_runtime import CudaRuntime, copy_setter
from sgl_piecewise.runtime.errors import ReplayError


def runtime_with(set_copy: Any, forget_error: Any = lambda: 0) -> CudaRuntime:
    def unused(*args: Any) -> int:
        raise AssertionError("not part of setting a source")

    return CudaRuntime(
        launch=unused,
        set_copy=set_copy,
        capture_info=unused,
        node_type=unused,
        create_stream=unused,
        error_name=lambda error: b"cudaErrorInvalidValue",
        forget_error=forget_error,
    )


def test_a_source_is_set_where_it_changed_and_kept_for_every_launch() -> None:
    calls: list[tuple[int, ...]] = []
    held: list[torch.Tensor] = []
    target, one, other = torch.zeros(4), torch.ones(4), torch.ones(4)

    def set_copy(*args: int) -> int:
        calls.append(args)
        return 0

    set_source = copy_setter(runtime_with(set_copy), 11, 12, target, held)
    for source, num_calls in ((one, 1), (one, 1), (other, 2), (one, 3), (one, 3)):
        set_source(source)
        assert len(calls) == num_calls
        assert held.pop() is source
        assert calls[-1] == (11, 12, target.data_ptr(), source.data_ptr(), 16, 3)


def test_a_source_that_was_refused_is_set_again() -> None:
    errors = iter((1, 0))
    calls: list[int] = []

    def set_copy(*args: int) -> int:
        calls.append(args[3])
        return next(errors)

    source = torch.ones(4)
    forgotten: list[int] = []
    runtime = runtime_with(set_copy, lambda: forgotten.append(len(calls)))
    set_source = copy_setter(runtime, 11, 12, torch.zeros(4), [])
    with pytest.raises(ReplayError, match="cudaErrorInvalidValue"):
        set_source(source)
    assert forgotten == [1], "the next kernel would be blamed for it"
    set_source(source)
    set_source(source)
    assert calls == [source.data_ptr()] * 2
    assert forgotten == [1]


def test_a_source_is_set_again_after_an_interrupt_as_it_was_set() -> None:
    """The call may have been through; which source the node has is then unknown."""
    calls: list[int] = []

    def set_copy(*args: int) -> int:
        calls.append(args[3])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return 0

    one, other = torch.ones(4), torch.ones(4)
    set_source = copy_setter(runtime_with(set_copy), 11, 12, torch.zeros(4), [])
    set_source(one)
    with pytest.raises(KeyboardInterrupt):
        set_source(other)
    set_source(one)
    assert calls == [one.data_ptr(), other.data_ptr(), one.data_ptr()]


def test_a_result_that_took_the_slow_way_is_not_read_again_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways set one node: were each to remember for itself, the next launch would read the clone of the last."""
    sources: list[int] = []

    def set_copy(*args: int) -> int:
        sources.append(args[3])
        return 0

    monkeypatch.setattr(cuda_runtime, "load", lambda: runtime_with(set_copy))
    target, one = torch.zeros(2, 3), torch.ones(2, 3)
    held: list[torch.Tensor] = []
    graph: Any = SimpleNamespace(executable=lambda: 11, held_sources=held)
    leaf = LeafPlan(
        path="result",
        target=target,
        address=target.data_ptr(),
        shape=target.shape,
        stride=target.stride(),
        dtype=target.dtype,
        device=target.device,
    )
    outputs = BreakOutputs("mark", "segment 1", tree.LEAF, [leaf], [])
    outputs.use_copy(0, CudaCopy(graph, target, one, 12))
    receive = outputs.receiver()
    for result in (one, torch.ones(3, 2).t(), one):
        receive(result)
        assert sources[-1] == held[-1].data_ptr()
    assert sources[-1] == one.data_ptr()
    assert len(sources) == 3
