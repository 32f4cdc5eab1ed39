"""One plan on its way through the comparison: built, then checked, then timed.

Collects what the steps find and ends as a `PlanReport`. Speed of a plan whose logits differ, or whose timed tokens
are not those of the check, never gets into a report: that is this module's invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.errors import SglPiecewiseError

from ..intervals import median_of
from ..records import CaseProblem, CaseTimes, CaseValues, FirstDifference
from ..tolerance import excused_in_words
from .arm import PlanArm
from .plans import NamedPlan
from .report import DecodeRate, PhaseReport, PlanBuild, PlanReport, PlanStatus

Result = TypeVar("Result")


@dataclass
class Phase:
    """What is known of one phase so far: first tokens, or decoding.

    Attributes:
        mode: Of its forwards.
        values: One entry per prompt length or batch size checked.
        first_difference: Where logits went wrong, or None.
        times: One entry per prompt length or batch size timed.
        problems: Reason by prompt length or batch size that cannot run as planned.
        tokens: Of a prompt's length and index, the first token that the checked logits give.
    """

    mode: ForwardMode
    values: list[CaseValues] = field(default_factory=list)
    first_difference: FirstDifference | None = None
    times: list[CaseTimes] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)

    def report(self, is_right: bool) -> PhaseReport:
        """Returns what was found; without times unless the values are right."""
        return PhaseReport(
            values=tuple(sorted(self.values, key=lambda entry: entry.num_tokens)),
            first_difference=self.first_difference,
            times=tuple(self.times) if is_right else (),
            problems=tuple(
                CaseProblem(num_tokens=size, reason=reason) for size, reason in sorted(self.problems.items())
            ),
        )


@dataclass
class PlanCandidate:
    """A plan and what is known of it so far.

    Attributes:
        plan: Its name and strategies.
        arm: Runs it.
        left_out: Why it is not run at all, or None.
        failure: Why it cannot take part any more, or None.
        build: What it took.
        first_token: Prompts up to their first token.
        decode: Decoding.
    """

    plan: NamedPlan
    arm: PlanArm
    left_out: str | None = None
    failure: str | None = None
    build: PlanBuild | None = None
    first_token: Phase = field(default_factory=lambda: Phase(mode=ForwardMode.EXTEND))
    decode: Phase = field(default_factory=lambda: Phase(mode=ForwardMode.DECODE))

    @property
    def name(self) -> str:
        """The plan's name."""
        return self.plan.name

    @property
    def takes_part(self) -> bool:
        """Whether it was built and nothing was found wrong with it."""
        is_wrong = any(phase.first_difference is not None for phase in (self.first_token, self.decode))
        return self.left_out is None and self.failure is None and not is_wrong

    @property
    def keeps_bits(self) -> bool:
        """Whether its logits must equal padded eager's bit for bit; else they are judged by a tolerance."""
        return self.plan.keeps_bits and self.arm.has_bit_keeping_attention

    def build_arm(self, on_progress: ProgressCallback) -> None:
        """Builds the arm and notes what that took, or why it cannot be built."""
        try:
            self.build = self.arm.build(on_progress)
        except (SglPiecewiseError, torch.OutOfMemoryError) as err:
            self.failure = f"{type(err).__name__}: {err}"

    def run(self, phase: Phase, size: int, call: Callable[[], Result]) -> Result | None:
        """Runs one call of a phase; None, and the reason noted, where it did not run as planned.

        Args:
            phase: Of this candidate.
            size: The prompt's length, or the batch size.
            call: Runs the arm.
        """
        before = self.arm.fallbacks(phase.mode)
        result = None
        try:
            result = call()
        except torch.OutOfMemoryError as err:
            phase.problems[size] = f"out of memory: {err}"
        except SglPiecewiseError as err:
            self.failure = f"at size {size}: {type(err).__name__}: {err}"
        self.note_fallbacks(phase, size, before)
        return result if self.takes_part and size not in phase.problems else None

    def note_fallbacks(self, phase: Phase, size: int, before: dict[str, int]) -> None:
        """Notes a problem if a forward since ``before`` (what ``arm.fallbacks`` said) did not run as planned."""
        for reason, count in self.arm.fallbacks(phase.mode).items():
            if count > before.get(reason, 0):
                phase.problems[size] = f"ran eager: {reason}"

    def judge_excused(self) -> None:
        """Notes a failure where more next tokens were excused as ties than chance makes likely."""
        too_many = excused_in_words([*self.first_token.values, *self.decode.values])
        if too_many is not None and self.takes_part:
            self.failure = too_many

    def report(self) -> PlanReport:
        """Returns what was found; without times unless the values are right."""
        status: PlanStatus = "reference" if self.plan.is_reference else "close"
        if self.left_out is not None:
            status = "left_out"
        elif self.failure is not None:
            status = "failed"
        elif not self.takes_part:
            status = "wrong"
        elif not self.plan.is_reference and self.keeps_bits:
            status = "equal"
        is_right = status in ("reference", "equal", "close")
        return PlanReport(
            plan=self.name,
            attention=self.arm.attention,
            status=status,
            failure=self.failure or self.left_out,
            build=self.build,
            first_token=self.first_token.report(is_right),
            decode=self.decode.report(is_right),
            decode_rates=tuple(
                DecodeRate(
                    batch_size=times.num_tokens,
                    tokens_per_s=median_of([times.num_tokens / step_s for step_s in times.samples_s]),
                )
                for times in self.decode.times
                if is_right
            ),
        )
