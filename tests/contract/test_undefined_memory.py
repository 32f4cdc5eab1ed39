"""The emulated device poisons memory that nobody wrote, so that a stale read shows at every replay."""

from __future__ import annotations

import torch

from contract.support import ramp
from sgl_piecewise.runtime import torch_private
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.emulated.device import EmulatedDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def uninitialised_read(device: GraphDevice) -> None:
    """A read of fresh memory gives NaN at every replay (a seeded defect's check)."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        filled = torch.ones(8, device=x.device)  # Its memory is next, so without poison the read gives 1.
        del filled
        empty = torch.empty(8, device=x.device)
        empty[:4] = x
        return double(empty) + 1

    captured = capture(forward, (ramp(device, 4),), device=device)
    for _ in range(3):
        result = captured(ramp(device, 4))
        assert not result[:4].isnan().any()
        assert result[4:].isnan().all()


def read_after_free(device: GraphDevice) -> None:
    """A read of memory that captured code had freed gives NaN (a seeded defect's check)."""
    stale: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        first = x + 1
        alias = torch_private.alias_without_owning(first)
        stale.append(alias)
        del first
        return alias * 2 + torch.zeros(256, device=x.device)[: x.shape[0]]

    captured = capture(forward, (ramp(device, 4),), device=device)
    for _ in range(3):
        assert captured(ramp(device, 4)).isnan().all()


def test_uninitialised_memory_reads_as_nan_at_every_replay() -> None:
    uninitialised_read(EmulatedDevice())


def test_freed_memory_reads_as_nan_at_every_replay() -> None:
    read_after_free(EmulatedDevice())


def test_integers_get_a_sentinel_that_is_no_index() -> None:
    device = EmulatedDevice()
    captured = capture(
        lambda x: double(torch.empty(4, dtype=torch.int64)) // 2 + x,
        (torch.zeros(4, dtype=torch.int64),),
        device=device,
    )
    for _ in range(2):
        assert captured(torch.zeros(4, dtype=torch.int64)).abs().min() > 1 << 30
