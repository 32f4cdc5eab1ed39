"""What a replay costs the host in this library's own Python: its frames are counted, a GPU's host times follow them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from sgl_piecewise import eager_on_graph

from .support import assert_same, drop_in, tensors, total

X, Y = tensors((3, 4), (3, 4))


def own_frames(call: Callable[[], Any]) -> list[str]:
    """Lists the frames of this library in a call, without what stands for a GPU's work."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _module(frame).startswith("sgl_piecewise.") and not _is_emulation(frame):
            found.append(f"{_module(frame).removeprefix('sgl_piecewise.')}.{frame.f_code.co_name}")

    call()
    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(previous)
    # In builds without CUDA, addresses are compared in Python.
    return [name for name in found if name != "runtime.torch_private._lie_at"]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_emulation(frame: FrameType | None) -> bool:
    while frame is not None:
        if _module(frame).startswith("sgl_piecewise.runtime.capture.emulated"):
            return True
        frame = frame.f_back
    return False


def replayed(fn: Any, *args: Any, **options: Any) -> list[str]:
    """Lists the frames of one replay of a compiled function, whose values are checked too."""
    compiled = drop_in(fn, **options)
    expected = fn(*args)
    for _ in range(4):
        assert_same(compiled(*args), expected)
    before = total("num_replays")
    frames = own_frames(lambda: compiled(*args))
    assert total("num_replays") == before + 2
    return frames


@pytest.mark.parametrize("capture", ["full", "breakable"])
def test_a_replay_of_one_input_and_one_output_is_two_frames(capture: str) -> None:
    """The checks, and the replay; the graph's launch is the device's."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))).requires_grad_(False)
    assert len(replayed(model, X, capture=capture)) == 2


def test_inputs_and_outputs_are_copied_in_one_frame_however_many() -> None:
    """Outputs that are all copies need none."""
    one = len(replayed(lambda x, y: (x + y, x - y), X, Y))
    three = len(replayed(lambda x, y, z: (x + y, x - y, z + 1, z * 2), X, Y, X + Y))
    assert one == three == 3


def test_a_size_that_varies_costs_no_frame() -> None:
    compiled = drop_in(lambda x: x * 2 + 1, dynamic=True)
    for size in (2, 3, 2, 3, 2, 3):
        x = torch.randn(size, 4)
        assert_same(compiled(x), x * 2 + 1)
    assert len(own_frames(lambda: compiled(x))) == 2


@eager_on_graph(fake=torch.empty_like)
def passed_on(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_break_costs_its_frames_and_no_more_elsewhere() -> None:
    """A break: its arguments handed to the body, and its result to the next graph."""

    def chain(num_breaks: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def fn(x: torch.Tensor) -> torch.Tensor:
            for _ in range(num_breaks):
                x = passed_on(x * 2)
            return x * 3

        return fn

    one, three = (len(replayed(chain(number), X)) for number in (1, 3))
    # Beside the two frames above: the mark's handle, what looks at modes, what loops over the steps.
    assert one <= 5 + 4
    assert three - one <= 2 * 4


def test_a_frozen_model_in_grad_mode_costs_one_frame_more() -> None:
    """What its parameters require is looked at each time: PyTorch 2.11 has no guard on it."""
    with torch.inference_mode(False), torch.enable_grad():
        model = nn.Linear(4, 4).requires_grad_(False)
        assert len(replayed(model, torch.ones(3, 4))) == 3
