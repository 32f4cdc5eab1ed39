"""How long a call takes on a device: the only place where calls are timed.

A sample holds two times of the same call. ``latency_s`` runs from an idle device to the last
result: device events on CUDA, the wall clock on a CPU. ``host_s`` is how long the call kept the
host busy before it returned; where it is nearly as long as the latency, the device waited for
the host. This module must not know what it times.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Times of one call.

    Attributes:
        latency_s: Seconds from an idle device to the last result.
        host_s: Seconds until the call returned to its caller.
    """

    latency_s: float
    host_s: float

    def divided(self, num_parts: int) -> Sample:
        """Returns the times of one of equal parts that the call ran one after the other."""
        return Sample(latency_s=self.latency_s / num_parts, host_s=self.host_s / num_parts)


class Stopwatch(abc.ABC):
    """Times calls on one device."""

    @abc.abstractmethod
    def measure(self, call: Callable[[], Any]) -> Sample:
        """Times one call that begins on an idle device; its result is dropped after the clock stops."""


class WallStopwatch(Stopwatch):
    """Times calls that are done when they return."""

    def measure(self, call: Callable[[], Any]) -> Sample:
        begin = time.perf_counter()
        result = call()
        latency_s = time.perf_counter() - begin
        del result
        return Sample(latency_s=latency_s, host_s=latency_s)


class CudaStopwatch(Stopwatch):
    """Times calls by events on the current stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._begin = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)

    def measure(self, call: Callable[[], Any]) -> Sample:
        stream = torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        self._begin.record(stream)
        host_begin = time.perf_counter()
        result = call()
        host_s = time.perf_counter() - host_begin
        self._end.record(stream)
        self._end.synchronize()
        del result
        return Sample(latency_s=self._begin.elapsed_time(self._end) / 1e3, host_s=host_s)


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Returns the stopwatch of a device: events on CUDA, the wall clock elsewhere."""
    return CudaStopwatch(device) if device.type == "cuda" else WallStopwatch()
