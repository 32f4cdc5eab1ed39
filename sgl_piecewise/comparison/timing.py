"""Times of strategies whose values are right: one process, interleaved in rounds.

In every round each strategy runs once, in a shuffled order, on the same input; a drift of clocks
or caches meets all of them alike. Ratios are taken within a round and their median is reported.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence

from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.stopwatch import Sample, Stopwatch

from .candidate import Candidate
from .inputs import InputSet
from .intervals import median_of
from .records import CaseTimes


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
    for _ in range(num_warm_ups):
        for candidate in taking_part:
            candidate.run(inputs.inputs[0], count)
    taking_part = [
        candidate for candidate in taking_part if candidate.takes_part and candidate.can_run(count)
    ]
    before = {candidate.strategy: candidate.arm.fallbacks() for candidate in taking_part}

    def call(candidate: Candidate, round_index: int) -> Callable[[], object]:
        return functools.partial(candidate.arm.run, *inputs.inputs[round_index % len(inputs.inputs)])

    samples = sample_in_turns(
        {candidate.strategy: functools.partial(call, candidate) for candidate in taking_part},
        stopwatch,
        num_rounds=num_rounds,
        order=order,
    )
    eager = next((samples[candidate.strategy] for candidate in taking_part if candidate.is_reference), None)
    for candidate in taking_part:
        candidate.note_fallbacks(before[candidate.strategy], count)
        if candidate.can_run(count):
            padded_size = candidate.arm.padded_size(count)
            assert padded_size is not None, "only what a graph holds is timed"
            times = case_times(
                samples[candidate.strategy],
                None if candidate.is_reference else eager,
                num_tokens=count,
                padded_size=padded_size,
            )
            candidate.times.append(times)


def sample_in_turns(
    calls: Mapping[str, Callable[[int], Callable[[], object]]],
    stopwatch: Stopwatch,
    *,
    num_rounds: int,
    order: random.Random,
) -> dict[str, list[Sample]]:
    """Times calls in rounds: in each, every one once, in a shuffled order.

    Args:
        calls: By name: of the round's index, what is timed in it.
        stopwatch: Of the device.
        num_rounds: Samples of each.
        order: Shuffles.

    Returns:
        By name, the sample of every round, in order.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    names = list(calls)
    for round_index in range(num_rounds):
        order.shuffle(names)
        for name in names:
            samples[name].append(stopwatch.measure(calls[name](round_index)))
    return samples


def case_times(
    samples: Sequence[Sample], eager: Sequence[Sample] | None, *, num_tokens: int, padded_size: int
) -> CaseTimes:
    """Returns what the samples of one case say.

    Args:
        samples: Of the rounds, in order.
        eager: Eager's of the same rounds; None for eager itself, or without it.
        num_tokens: As in `CaseTimes`.
        padded_size: Likewise.
    """
    latencies = [sample.latency_s for sample in samples]
    ratio = None
    if eager is not None:
        ratio = median_of(
            [own / reference.latency_s for own, reference in zip(latencies, eager, strict=True)]
        )
    return CaseTimes(
        num_tokens=num_tokens,
        padded_size=padded_size,
        latency_s=median_of(latencies),
        host_s=median_of([sample.host_s for sample in samples]),
        ratio_to_eager=ratio,
        samples_s=tuple(latencies),
    )
