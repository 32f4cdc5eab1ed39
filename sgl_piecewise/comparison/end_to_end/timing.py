"""Times of plans whose logits are right: first tokens of prompts, steps of decoding, all plans in turn.

What is timed is the engine: scheduling, the batch, the forward, sampling, the token on the host and its text. Decode
steps are timed several at once where the engine overlaps them. A timed prompt must give the token that the checked
logits gave, or the plan is wrong and has no times.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.stopwatch import Stopwatch

from ..records import FirstDifference
from ..timing import case_times, sample_in_turns
from .candidate import Phase, PlanCandidate
from .checking import CheckedCase


class PlanTimer:
    """Times plans.

    Args:
        candidates: Eager among them.
        stopwatch: Of the device.
        num_rounds: Samples per plan and case.
        num_warm_ups: Untimed calls before them.
        seed: Of the order within rounds.
    """

    def __init__(
        self,
        candidates: Sequence[PlanCandidate],
        stopwatch: Stopwatch,
        *,
        num_rounds: int,
        num_warm_ups: int,
        seed: int,
    ) -> None:
        self._candidates = candidates
        self._stopwatch = stopwatch
        self._num_rounds = num_rounds
        self._num_warm_ups = num_warm_ups
        self._order = random.Random(seed)

    def time_first_tokens(self, prompts: Sequence[CheckedCase], on_progress: ProgressCallback) -> None:
        """Times prompts from scheduling to their first token.

        Args:
            prompts: Of the lengths to be timed, as they were checked; those of one length are rotated through.
            on_progress: Told after every length.
        """
        for done, case in enumerate(prompts):
            on_progress("end to end: first tokens", done, len(prompts))
            phases = {one.name: one.first_token for one in self._candidates}

            def call(
                candidate: PlanCandidate, round_index: int, case: CheckedCase = case
            ) -> Callable[[], None]:
                return functools.partial(_first_token, candidate, case, round_index % len(case.groups))

            self._time_case(case.size, phases, call)
        on_progress("end to end: first tokens", len(prompts), len(prompts))

    def time_decoding(
        self,
        batches: Sequence[CheckedCase],
        context_tokens: int,
        on_progress: ProgressCallback,
        *,
        steps_per_sample: int,
    ) -> None:
        """Times steps in which all requests of a batch decode.

        Args:
            batches: As they were checked; the first group of each is decoded.
            context_tokens: Tokens of its requests that are their prompts.
            on_progress: Told after every batch size.
            steps_per_sample: Steps in a row whose time is divided by their number.
        """
        for done, case in enumerate(batches):
            on_progress("end to end: decoding", done, len(batches))
            prompts = [sequence[:context_tokens] for sequence in case.groups[0]]
            num_steps = (self._num_warm_ups + self._num_rounds) * steps_per_sample
            begun = [one for one in self._candidates if self._can_run(one, one.decode, case.size)]
            try:
                for candidate in begun:
                    begin = functools.partial(candidate.arm.begin_decoding, prompts, num_steps)
                    candidate.run(candidate.decode, case.size, begin)

                def call(candidate: PlanCandidate, _: int, case: CheckedCase = case) -> Callable[[], None]:
                    return functools.partial(_decode_steps, candidate, case.size, steps_per_sample)

                phases = {one.name: one.decode for one in self._candidates}
                self._time_case(case.size, phases, call, num_parts=steps_per_sample)
            finally:
                for candidate in begun:
                    candidate.arm.end_decoding()
        on_progress("end to end: decoding", len(batches), len(batches))

    @staticmethod
    def _can_run(candidate: PlanCandidate, phase: Phase, size: int) -> bool:
        return candidate.takes_part and size not in phase.problems

    def _time_case(
        self,
        size: int,
        phases: dict[str, Phase],
        call: Callable[[PlanCandidate, int], Callable[[], None]],
        num_parts: int = 1,
    ) -> None:
        """Times one case; a call has so many parts, and the time of one is noted."""
        taking_part = [one for one in self._candidates if self._can_run(one, phases[one.name], size)]
        for candidate in taking_part:
            for index in range(self._num_warm_ups):
                if self._can_run(candidate, phases[candidate.name], size):
                    candidate.run(phases[candidate.name], size, call(candidate, index))
        taking_part = [one for one in taking_part if self._can_run(one, phases[one.name], size)]
        before = {one.name: one.arm.fallbacks(phases[one.name].mode) for one in taking_part}
        samples = sample_in_turns(
            {one.name: functools.partial(call, one) for one in taking_part},
            self._stopwatch,
            num_rounds=self._num_rounds,
            order=self._order,
        )
        samples = {name: [one.divided(num_parts) for one in found] for name, found in samples.items()}
        eager = next((samples[one.name] for one in taking_part if one.plan.is_reference), None)
        for candidate in taking_part:
            phase = phases[candidate.name]
            candidate.note_fallbacks(phase, size, before[candidate.name])
            if self._can_run(candidate, phase, size):
                times = case_times(
                    samples[candidate.name],
                    None if candidate.plan.is_reference else eager,
                    num_tokens=size,
                    padded_size=candidate.arm.padded_tokens(),
                )
                phase.times.append(times)


def _first_token(candidate: PlanCandidate, case: CheckedCase, index: int) -> None:
    """Runs a prompt; a token that is not the checked one makes the plan wrong."""
    token = candidate.arm.first_token(case.groups[index][0])
    expected = candidate.first_token.tokens[case.size, index]
    if token != expected:
        candidate.first_token.first_difference = FirstDifference(
            num_tokens=case.size,
            padded_size=candidate.arm.padded_tokens(),
            input_index=index,
            index=(case.size - 1,),
            expected=f"token {expected}, by the checked logits",
            got=f"token {token}, when it was timed",
        )


def _decode_steps(candidate: PlanCandidate, batch_size: int, num_steps: int) -> None:
    """Runs steps; one that does not give every request a token is a problem of the batch size."""
    for _ in range(num_steps):
        num_tokens = candidate.arm.decode_step()
        if num_tokens != batch_size:
            candidate.decode.problems[batch_size] = (
                f"a step gave {num_tokens} tokens to {batch_size} requests"
            )
