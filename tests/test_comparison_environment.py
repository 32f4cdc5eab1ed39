"""The stopwatch of each device, and what a device is asked about itself."""

from __future__ import annotations

import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_piecewise.comparison.environment import seen_clocks, seen_environment
from sgl_piecewise.runtime.capture.devices import graph_device_for
from sgl_piecewise.runtime.stopwatch import stopwatch_for

CUDA = torch.device("cuda", 0)


def test_wall_stopwatch_times_the_whole_call() -> None:
    sample = stopwatch_for(torch.device("cpu")).measure(lambda: time.sleep(0.02))
    assert sample.latency_s == sample.host_s
    assert sample.latency_s >= 0.02


@pytest.mark.gpu
def test_cuda_stopwatch_tells_host_from_device() -> None:
    """Large products keep the device busy after the call returned; a sleep keeps it idle within."""
    stopwatch = stopwatch_for(CUDA)
    matrix = torch.randn(8192, 8192, device=CUDA)
    stopwatch.measure(lambda: matrix @ matrix)
    queued = stopwatch.measure(lambda: [matrix @ matrix for _ in range(20)])
    assert queued.host_s < 0.5 * queued.latency_s
    asleep = stopwatch.measure(lambda: time.sleep(0.02))
    assert asleep.host_s >= 0.02
    assert asleep.latency_s == pytest.approx(asleep.host_s, rel=0.2)


def test_environment_of_the_emulated_device_says_so() -> None:
    environment = seen_environment(graph_device_for("cpu"), seen_clocks(torch.device("cpu"), "before"))
    assert environment.is_emulated
    assert environment.device == "emulated"
    assert environment.versions["torch"] == torch.__version__
    assert environment.clocks == ()


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[list[str]]:
    """Stands in for the driver's tool; returns the commands it was called with."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    return commands


def test_clocks_are_asked_by_uuid_and_unknown_ones_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES renumbers devices for PyTorch, not for the driver's tool."""
    commands = answer_with(monkeypatch, "1980, 3201, [N/A], 41\n")
    (clocks,) = seen_clocks(CUDA, "after")
    assert (clocks.when, clocks.sm_mhz, clocks.memory_mhz, clocks.power_w) == ("after", 1980.0, 3201.0, None)
    assert commands[0][-1] == "--id=GPU-12-34"


@pytest.mark.parametrize(
    "answer", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10), "no devices\n"]
)
def test_a_device_that_does_not_answer_has_no_clocks(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    answer_with(monkeypatch, answer)
    assert seen_clocks(CUDA, "before") == ()
