"""Times of calls on one device, in turns, with their spread; and the floors that they are held against.

A call is timed in three ways. Its *latency* runs from an idle device to its last result. Its *host*
time runs until it returns, the device still at work. *Queued*, several follow one another without a
wait, and their latency is divided by their number: what a caller sees who never waits in between.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sgl_piecewise.runtime.stopwatch import stopwatch_for

Call = Callable[[], Any]
Spread = dict[str, float]

NUM_QUEUED = 10
_PROFILED = "sgl_piecewise: profiled call"


def spread(times: list[float]) -> Spread:
    """Returns median, least and most of seconds."""
    return {"median_s": statistics.median(times), "least_s": min(times), "most_s": max(times)}


def time_in_turns(calls: Mapping[str, Call], device: torch.device, num_rounds: int) -> dict[str, Any]:
    """Times calls one after the other, round by round, each from an idle device.

    Args:
        calls: By arm; each is called once before.
        device: Where they run.
        num_rounds: How often each is timed.

    Returns:
        ``latency`` and ``host``: spreads by arm.
    """
    stopwatch = stopwatch_for(device)
    latencies: dict[str, list[float]] = {name: [] for name in calls}
    hosts: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(num_rounds):
        for name, call in calls.items():
            sample = stopwatch.measure(call)
            latencies[name].append(sample.latency_s)
            hosts[name].append(sample.host_s)
    return {
        "latency": {name: spread(values) for name, values in latencies.items()},
        "host": {name: spread(values) for name, values in hosts.items()},
    }


def time_queued(calls: Mapping[str, Call], device: torch.device, num_rounds: int) -> dict[str, Spread]:
    """Times calls that follow one another without a wait; spreads by arm, of one call of `NUM_QUEUED`."""

    def several(call: Call) -> Call:
        return lambda: [call() for _ in range(NUM_QUEUED)][-1]

    times = time_in_turns({name: several(call) for name, call in calls.items()}, device, num_rounds)
    return {
        name: {what: seconds / NUM_QUEUED for what, seconds in found.items()}
        for name, found in times["latency"].items()
    }


@dataclass(frozen=True, kw_only=True)
class BusyTime:
    """One call from an idle device, as a profiler saw it.

    Attributes:
        busy_s: Seconds in which the device computed.
        wall_s: Seconds from the call to the end of the last computation.
    """

    busy_s: float
    wall_s: float

    @property
    def gap(self) -> float:
        """The part of the call in which the device did not compute."""
        return 1 - self.busy_s / self.wall_s

    @classmethod
    def of_spans(cls, begin: float, spans: Iterable[tuple[float, float]]) -> BusyTime:
        """Returns what a profile says.

        Args:
            begin: When the call began, in microseconds.
            spans: Begin and end of each computation, in microseconds; they may overlap.
        """
        busy, end = 0.0, begin
        for start, stop in sorted(spans):
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return cls(busy_s=busy / 1e6, wall_s=(end - begin) / 1e6)


def busy_time(call: Call, device: torch.device, num_runs: int = 5) -> BusyTime | None:
    """Returns the run of median gap: its busy and its wall time are of one call, at one clock rate of the device.

    A busy time beside the latency of other runs would not do: a device that was idle computes faster than one that
    has been at work for a while.

    Args:
        call: What is profiled.
        device: Where it runs; None is returned for what is no GPU.
        num_runs: How often.
    """
    if device.type != "cuda":
        return None
    runs = sorted((_profiled(call, device) for _ in range(num_runs)), key=lambda run: run.gap)
    return runs[num_runs // 2]


def _profiled(call: Call, device: torch.device) -> BusyTime:
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(_PROFILED):
            call()
        torch.cuda.synchronize(device)
    events = profile.events()
    is_cuda = [event.device_type == torch.autograd.DeviceType.CUDA for event in events]
    (begin,) = (
        event.time_range.start
        for event, on_device in zip(events, is_cuda, strict=True)
        if event.name == _PROFILED and not on_device
    )
    # The range itself has a span on the device, too.
    return BusyTime.of_spans(
        begin,
        [
            (event.time_range.start, event.time_range.end)
            for event, on_device in zip(events, is_cuda, strict=True)
            if on_device and event.name != _PROFILED
        ],
    )


def measure_floors(device: torch.device) -> dict[str, float]:
    """Returns bytes copied (read and written) and products a second, measured now."""
    is_cuda = device.type == "cuda"
    stopwatch = stopwatch_for(device)

    def seconds(work: Call) -> float:
        return min(stopwatch.measure(work).latency_s for _ in range(10))

    source = torch.zeros((1 << 31) if is_cuda else (1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / seconds(lambda: target.copy_(source))
    size = 8192 if is_cuda else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if is_cuda else torch.float32)
    return {"copy_bytes_per_s": bandwidth, "matrix_flop_per_s": 2 * size**3 / seconds(lambda: a @ a)}
