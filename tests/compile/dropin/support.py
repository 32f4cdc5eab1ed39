"""What tests of drop-in capture share: a model run beside its own eager copy, all that shows compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sgl_piecewise.runtime import tree
from sgl_piecewise.runtime.capture.on_call import capture_stats
from sgl_piecewise.runtime.records import CallStats

CPU = torch.device("cpu")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def drop_in(fn: Any, *, dynamic: bool | None = None, **options: Any) -> Any:
    """Compiles as a user would, with graphs on the emulated device and pieces that keep every bit."""
    options = {"capture": "breakable", "piece_compiler": "fx", **options}
    return torch.compile(fn, backend="sgl_piecewise", dynamic=dynamic, options=options)


_EARLIER = {"num_forwards": 0}


def forget_earlier_forwards() -> None:
    """Leaves out what is alive now from the counts below.

    PyTorch keeps compiled code alive in which other compiled code ran.
    """
    _EARLIER["num_forwards"] = len(capture_stats())


def stats_now() -> tuple[CallStats, ...]:
    """Returns the statistics of this test's compiled forwards."""
    return capture_stats()[_EARLIER["num_forwards"] :]


def total(what: str) -> int:
    """Adds up one count of ``capture_stats`` over all compiled forwards."""
    return sum(getattr(stats, what) for stats in stats_now())


def without_graph() -> dict[str, int]:
    """Adds up why calls ran without a graph."""
    reasons: dict[str, int] = {}
    for stats in stats_now():
        for reason, count in stats.without_graph.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return reasons


def failures() -> list[str]:
    """Lists why shapes could not be captured."""
    return [message for stats in stats_now() for message in stats.failures]


def only_stats() -> CallStats:
    """Returns the statistics of the one compiled forward there is."""
    (stats,) = stats_now()
    return stats


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Lists the tensors of a nested value."""
    return [leaf for leaf in tree.flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def assert_same(actual: Any, expected: Any, *, tolerance: float = 0.0) -> None:
    """Compares nested values: types of containers, values, strides, dtypes."""
    leaves, spec = tree.flatten(actual)
    wanted, wanted_spec = tree.flatten(expected)
    assert spec == wanted_spec, tree.difference(wanted_spec, spec, "result")
    for one, other in zip(leaves, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(
                one, other, rtol=0, atol=tolerance, equal_nan=True, check_stride=tolerance == 0
            )
        else:
            assert one == other


def on_device(value: Any, device: torch.device) -> Any:
    """Returns a module or nested value with its tensors on a device; what is there already stays as it is."""
    if isinstance(value, torch.nn.Module):
        return value.to(device)
    leaves, spec = tree.flatten(value)
    moved = [
        leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.device.type != device.type else leaf
        for leaf in leaves
    ]
    return tree.unflatten(spec, moved)


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of a device's random numbers."""
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Puts back what `random_state` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def aliases(result: Any, *given: Any) -> list[tuple[Any, ...]]:
    """Says of each tensor of a result what it is of the given tensors and of those before it."""
    known = [tensor for value in given for tensor in tensors_of(value)]
    found: list[tuple[Any, ...]] = []
    for tensor in tensors_of(result):
        relation: tuple[Any, ...] = ("fresh",)
        for index, other in enumerate(known):
            if tensor is other:
                relation = ("is", index)
                break
            if tensor.numel() and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
                relation = ("view", index, tensor.data_ptr() - other.data_ptr())
                break
        found.append(relation)
        known.append(tensor)
    return found


def assert_like_eager(
    fn: Any,
    calls: Sequence[Call | tuple[Any, ...]],
    *,
    num_rounds: int = 4,
    tolerance: float = 0.0,
    min_replays: int = 1,
    dynamic: bool | None = None,
    before_call: Callable[[Any, int], None] | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> Any:
    """Runs a model beside an eager copy of it and compares all that a user can see, call by call.

    Those are: outputs with their strides and what they alias, arguments that were written, the module's
    state, the random state, and that earlier outputs stay as they were.

    Args:
        fn: A module or function.
        calls: Arguments, or (arguments, keyword arguments).
        num_rounds: How often all calls are made.
        tolerance: Of values; 0 asks for equal bits and strides.
        min_replays: Calls that must have been served by a graph.
        dynamic: As of ``torch.compile``.
        before_call: Called with the model (each of the two) and the number of the call.
        device: Where the model and the arguments go.
        options: Of the backend.

    Returns:
        The compiled function.
    """
    fn = on_device(fn, device) if isinstance(fn, torch.nn.Module) else fn
    eager = copy.deepcopy(fn)
    compiled = drop_in(fn, dynamic=dynamic, **options)
    kept: list[tuple[Any, Any]] = []
    replays = total("num_replays")
    number = 0
    for _ in range(num_rounds):
        for call in calls:
            is_pair = len(call) == 2 and isinstance(call[0], tuple) and isinstance(call[1], dict)
            args, kwargs = call if is_pair else (call, {})
            args, kwargs = on_device((args, kwargs), device)
            ours, others = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
            if before_call is not None:
                before_call(eager, number)
                before_call(fn, number)
            state = random_state(device)
            expected = eager(*others[0], **others[1])
            state_after = random_state(device)
            set_random_state(state, device)
            actual = compiled(*ours[0], **ours[1])
            assert torch.equal(random_state(device), state_after), "the random state differs"
            assert_same(actual, expected, tolerance=tolerance)
            relations = aliases(actual, ours, _state(fn)), aliases(expected, others, _state(eager))
            assert relations[0] == relations[1], f"call {number}: ours {relations[0]}, eager {relations[1]}"
            assert_same(ours, others, tolerance=tolerance)
            assert_same(_state(fn), _state(eager), tolerance=tolerance)
            if not any(relation[0] != "fresh" for relation in relations[0]):
                kept.append((actual, copy.deepcopy(actual)))
            number += 1
    for actual, before in kept:
        assert_same(actual, before)
    assert total("num_replays") - replays >= min_replays, (without_graph(), failures())
    return compiled


def _state(fn: Any) -> dict[str, torch.Tensor]:
    if not isinstance(fn, torch.nn.Module):
        return {}
    return {**dict(fn.named_parameters()), **dict(fn.named_buffers())}


def tensors(*shapes: Iterable[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Returns random tensors."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tuple(shape), generator=generator) for shape in shapes)
