"""Times of calls on one device, in turns, with their spread; and the floors that they are held against.

A call is timed in three ways. Its *latency* runs from an idle device to its last result. Its *host*
time runs until it returns, the device still at work. *Queued*, several follow one another without a
wait, and their latency is divided by their number: what a caller sees who never waits in between.
Its *gap* is the part of the latency in which the device did not compute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sgl_piecewise.runtime.stopwatch import stopwatch_for
from sgl_piecewise.runtime.torch_private import keep_device_busy

Call = Callable[[], Any]
Spread = dict[str, float]

NUM_QUEUED = 10
_MOST_SPINS = 5


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
class Gap:
    """How much of one call from an idle device the device spends without work.

    Attributes:
        wall_s: Seconds of the call from an idle device to its last result; median.
        device_s: The same behind other work, so that the device never waits for the host; median. Measured in turns
            with ``wall_s``, each from a device that has rested: one that has been at work computes slower.
        busy_part: The part of ``device_s`` in which a kernel or a copy ran, by a profiler's times on the device.
    """

    wall_s: float
    device_s: float
    busy_part: float

    @property
    def gap(self) -> float:
        """The part of the wall time in which the device did not compute."""
        return 1 - self.device_s * self.busy_part / self.wall_s


def measure_gap(call: Call, device: torch.device, num_rounds: int) -> Gap | None:
    """Measures what the host, and waits between kernels, add to the device's own time of a call.

    Times under a profiler would not do for the first: it delays the launch. Nor would the time of calls that follow
    one another: the clock rate of the device falls under load.

    Args:
        call: What is measured; called a few times more.
        device: Where it runs; None is returned for what is no GPU.
        num_rounds: How often each time is taken.
    """
    if device.type != "cuda":
        return None
    call()
    stopwatch = stopwatch_for(device)
    samples, behind = [], []
    for _ in range(num_rounds):
        samples.append(stopwatch.measure(call))
        behind.append(_seconds_behind_work(call, device, 2 * max(sample.host_s for sample in samples)))
    return Gap(
        wall_s=statistics.median(sample.latency_s for sample in samples),
        device_s=statistics.median(behind),
        busy_part=statistics.median(busy_part(spans_on_device(call, device)) for _ in range(5)),
    )


def busy_part(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the part of the time from the first begin to the last end that is in a span; spans may overlap.

    A call that launched nothing left the device idle: 0.
    """
    ordered = sorted(spans)
    if not ordered:
        return 0.0
    begin = end = ordered[0][0]
    busy = 0.0
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - begin)


def _seconds_behind_work(call: Call, device: torch.device, spin_s: float) -> float:
    """Returns the device's time of a call that was launched while the device was kept at work."""
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_MOST_SPINS):
        torch.cuda.synchronize(device)
        keep_device_busy(spin_s)
        begin.record(stream)
        call()
        end.record(stream)
        was_ahead = not begin.query()
        end.synchronize()
        if was_ahead:
            return begin.elapsed_time(end) / 1e3
        spin_s *= 2
    raise RuntimeError(
        f"The call waits for the device, or takes the host over {spin_s / 2:.3f} s: its time on the device alone "
        "cannot be measured."
    )


def spans_on_device(call: Call, device: torch.device) -> list[tuple[float, float]]:
    """Returns begin and end of each kernel and copy of a call, in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize(device)
    # Without `acc_events` a first profile warns, of what happens after more than one cycle.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize(device)
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


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
