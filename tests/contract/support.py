"""What contract tests share: exact inputs, exact comparison, streams of either device."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy  # noqa: F401 - torch imports it at some first use, and importing it changes the warnings filters
import torch

from sgl_piecewise.runtime import tree
from sgl_piecewise.runtime.capture.breakable import BreakableCUDAGraph, BreakableCUDAGraphCapture
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.device import GraphDevice, GraphPool
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import active_capture

# Every way to make a captured callable; the contract's values hold for each.
WAYS: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    "breakable": {"strategy": "breakable"},
    "debug": {"debug": True},
}


def ramp(
    device: GraphDevice, *shape: int, start: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns start, start + 1, ...: small integers, so that sums are exact in any order."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, device=device.torch_device) + start).to(dtype).reshape(shape)


def assert_equal(actual: Any, expected: Any) -> None:
    """Compares nested values bit by bit; NaN equals NaN."""
    actual_leaves, actual_spec = tree.flatten(actual)
    expected_leaves, expected_spec = tree.flatten(expected)
    assert actual_spec == expected_spec, tree.difference(expected_spec, actual_spec, "result")
    for one, other in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


def assert_like_eager(
    device: GraphDevice,
    fn: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    **options: Any,
) -> CapturedCallable:
    """Captures ``fn`` on the first call's arguments and compares every call with eager, twice round."""
    expected = [fn(*args) for args in calls]
    captured = capture(fn, calls[0], device=device, **options)
    for _ in range(2):
        for args, want in zip(calls, expected, strict=True):
            assert_equal(captured(*args), want)
    assert not captured.fallbacks
    return captured


def record(
    fn: Callable[[], Any], *, graph: BreakableCUDAGraph | None = None, **options: Any
) -> tuple[BreakableCUDAGraph, Any]:
    """Captures one call of ``fn`` without warm-up; options are those of ``BreakableCUDAGraphCapture``."""
    graph = BreakableCUDAGraph() if graph is None else graph
    with BreakableCUDAGraphCapture(graph, **options):
        result = fn()
    return graph, result


def stream_api(device: GraphDevice) -> Any:
    """Returns the namespace with ``Stream``, ``Event``, ``stream`` and ``current_stream``."""
    return torch.cpu if device.torch_device.type == "cpu" else torch.cuda


def random_state(device: GraphDevice) -> torch.Tensor:
    """Returns the state of the device's default generator."""
    if device.torch_device.type == "cpu":
        return torch.get_rng_state()
    return torch.cuda.get_rng_state(device.torch_device)


def churn(device: GraphDevice, *shapes: tuple[int, ...]) -> None:
    """Allocates and fills many tensors of these shapes, so that freed memory is handed out again."""
    gc.collect()
    kept = [torch.full(shape, -99.0, device=device.torch_device) for shape in shapes for _ in range(16)]
    del kept[::2]
    for shape in shapes:
        kept.append(torch.full(shape, -77.0, device=device.torch_device))


@contextlib.contextmanager
def untouched(
    device: GraphDevice, pool: GraphPool | None = None, *, is_random: bool = False
) -> Iterator[None]:
    """Asserts that the block leaves the world outside as it was, an exception included."""
    api = stream_api(device)
    num_frozen = gc.get_freeze_count()
    before = (
        gc.isenabled(),
        list(warnings.filters),
        torch.is_grad_enabled(),
        api.current_stream(),
    )
    state = random_state(device)
    try:
        yield
    finally:
        after = (
            gc.isenabled(),
            list(warnings.filters),
            torch.is_grad_enabled(),
            api.current_stream(),
        )
        assert after == before, (before, after)
        # What `tests/conftest.py` froze may die, a few at a time.
        assert 0.9 * num_frozen <= gc.get_freeze_count() <= num_frozen, (num_frozen, gc.get_freeze_count())
        assert is_random or torch.equal(random_state(device), state)
        assert active_capture() is None
        if device.torch_device.type == "cuda":
            assert not torch.cuda.is_current_stream_capturing()
        if pool is not None:
            assert not pool.is_held()
