"""Times of calls on one device, in turns, with their spread; and the floors that they are held against.

A call is timed in three ways. Its *latency* runs from an idle device to its last result. Its *host*
time runs until it returns, the device still at work. *Queued*, several follow one another without a
wait, and their latency is divided by their number: what a caller sees who never waits in between.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sgl_piecewise.runtime.stopwatch import stopwatch_for

Call = Callable[[], Any]
Spread = dict[str, float]

NUM_QUEUED = 10


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


def busy_s(call: Call, device: torch.device) -> float | None:
    """Returns how long the device computed during one call, as its profiler saw; None without a GPU."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total, end = 0.0, 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def gaps(busy: Mapping[str, float | None], latency: Mapping[str, Spread]) -> dict[str, float | None]:
    """Returns the part of each arm's latency in which the device did not compute; None without a GPU."""
    found: dict[str, float | None] = {}
    for name, seconds in busy.items():
        found[name] = None if seconds is None else 1 - seconds / latency[name]["median_s"]
    return found


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
