"""Times of strategies whose values are right: one process, interleaved in rounds.

In every round each strategy runs once, in a shuffled order, on the same input; a drift of clocks
or caches meets all of them alike. Ratios are taken within a round and their median is reported.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.stopwatch import Sample, Stopwatch

from .candidate import Candidate
from .inputs import InputSet
from .intervals import median_of
from .report import CaseTimes


def measure_times(
    candidates: Sequence[Candidate],
    input_sets: Sequence[InputSet],
    stopwatch: Stopwatch,
    *,
    num_rounds: int,
    num_warm_ups: int,
    seed: int,
    on_progress: ProgressCallback,
) -> None:
    """Times every candidate that takes part, at every token count that it can run.

    Args:
        candidates: Eager among them.
        input_sets: Ascending by token count.
        stopwatch: Of the device.
        num_rounds: Samples per candidate and token count.
        num_warm_ups: Untimed calls before them.
        seed: Of the order within rounds.
        on_progress: Told after every token count.
    """
    order = random.Random(seed)
    for done, inputs in enumerate(input_sets):
        on_progress("timing", done, len(input_sets))
        _measure_count(candidates, inputs, stopwatch, num_rounds, num_warm_ups, order)
    on_progress("timing", len(input_sets), len(input_sets))


def _measure_count(
    candidates: Sequence[Candidate],
    inputs: InputSet,
    stopwatch: Stopwatch,
    num_rounds: int,
    num_warm_ups: int,
    order: random.Random,
) -> None:
    """Times one token count."""
    count = inputs.num_tokens
    taking_part = [candidate for candidate in candidates if candidate.takes_part and candidate.can_run(count)]
    samples: dict[str, list[Sample]] = {candidate.strategy: [] for candidate in taking_part}
    for _ in range(num_warm_ups):
        for candidate in taking_part:
            candidate.run(inputs.inputs[0], count)
    taking_part = [
        candidate for candidate in taking_part if candidate.takes_part and candidate.can_run(count)
    ]
    before = {candidate.strategy: candidate.arm.fallbacks() for candidate in taking_part}
    for round_index in range(num_rounds):
        arguments = inputs.inputs[round_index % len(inputs.inputs)]
        order.shuffle(taking_part)
        for candidate in taking_part:
            call = functools.partial(candidate.arm.run, *arguments)
            samples[candidate.strategy].append(stopwatch.measure(call))
    eager_s = [
        [sample.latency_s for sample in samples[candidate.strategy]]
        for candidate in taking_part
        if candidate.is_reference
    ]
    for candidate in taking_part:
        candidate.note_fallbacks(before[candidate.strategy], count)
        if candidate.can_run(count):
            times = _times(candidate, count, samples[candidate.strategy], eager_s[0] if eager_s else None)
            candidate.times.append(times)


def _times(candidate: Candidate, count: int, samples: list[Sample], eager_s: list[float] | None) -> CaseTimes:
    latencies = [sample.latency_s for sample in samples]
    ratio = None
    if eager_s is not None and not candidate.is_reference:
        ratio = median_of([own / eager for own, eager in zip(latencies, eager_s, strict=True)])
    padded_size = candidate.arm.padded_size(count)
    assert padded_size is not None, "only what a graph holds is timed"
    return CaseTimes(
        num_tokens=count,
        padded_size=padded_size,
        latency_s=median_of(latencies),
        host_s=median_of([sample.host_s for sample in samples]),
        ratio_to_eager=ratio,
        samples_s=tuple(latencies),
    )
