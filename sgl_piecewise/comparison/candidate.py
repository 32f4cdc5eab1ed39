"""One strategy on its way through a comparison: built, then checked, then timed.

Collects what the steps find and ends as a `StrategyReport`. Speed of a strategy whose values
differ never gets into a report: that is this module's invariant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.errors import SglPiecewiseError
from sgl_piecewise.runtime.records import BuildRecord

from .arms import Arm
from .options import REFERENCE
from .records import (
    CaseProblem,
    CaseTimes,
    CaseValues,
    FirstDifference,
    GraphMemory,
    Status,
    StrategyReport,
)
from .tolerance import excused_in_words


@dataclass
class Candidate:
    """A strategy and what is known of it so far.

    Attributes:
        strategy: Its name.
        arm: Runs it.
        failure: Why it cannot take part any more, or None.
        build: What the build took.
        memory: What the graphs hold.
        values: One entry per token count checked.
        first_difference: Where its values went wrong, or None.
        times: One entry per token count timed.
        problems: Reason by token count that cannot run from a graph.
    """

    strategy: str
    arm: Arm
    failure: str | None = None
    build: BuildRecord | None = None
    memory: GraphMemory | None = None
    break_names: tuple[str, ...] = ()
    values: list[CaseValues] = field(default_factory=list)
    first_difference: FirstDifference | None = None
    times: list[CaseTimes] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def is_reference(self) -> bool:
        """Whether the others are compared with this one."""
        return self.strategy == REFERENCE

    @property
    def takes_part(self) -> bool:
        """Whether it was built and nothing was found wrong with it."""
        return self.failure is None and self.first_difference is None

    def build_arm(self, on_progress: ProgressCallback) -> None:
        """Builds the arm and notes what that took, or why it cannot be built."""
        try:
            self.build = self.arm.build(on_progress)
        except (SglPiecewiseError, torch.OutOfMemoryError) as err:
            self.failure = f"{type(err).__name__}: {err}"
            return
        self.memory = self.arm.memory()
        self.break_names = self.arm.break_names

    def can_run(self, num_tokens: int) -> bool:
        """Whether a graph holds this token count; notes the reason where none does."""
        if num_tokens not in self.problems and self.arm.padded_size(num_tokens) is None:
            self.problems[num_tokens] = self._why_no_graph(num_tokens)
        return num_tokens not in self.problems

    def _why_no_graph(self, num_tokens: int) -> str:
        for size in reversed(self.build.sizes if self.build is not None else ()):
            if size.size is not None and size.size >= num_tokens and size.error is not None:
                return size.error
        return "no capture size holds it"

    def run(self, arguments: tuple[object, ...], num_tokens: int) -> torch.Tensor | None:
        """Runs the arm once; None (and the reason noted) where the result is not from a graph."""
        before = self.arm.fallbacks()
        result = None
        try:
            result = self.arm.run(*arguments)
        except torch.OutOfMemoryError as err:
            self.problems[num_tokens] = f"out of memory: {err}"
        except SglPiecewiseError as err:
            self.failure = f"at {num_tokens} tokens: {type(err).__name__}: {err}"
        self.note_fallbacks(before, num_tokens)
        return result if num_tokens not in self.problems else None

    def note_fallbacks(self, before: dict[str, int], num_tokens: int) -> None:
        """Notes a problem if a run since ``before`` (what ``arm.fallbacks()`` said) was not from a graph."""
        for reason, count in self.arm.fallbacks().items():
            if count > before.get(reason, 0):
                self.problems[num_tokens] = f"ran eager: {reason}"

    def judge_excused(self) -> None:
        """Notes a failure where more next tokens were excused as ties than chance makes likely."""
        too_many = excused_in_words(self.values)
        if too_many is not None and self.takes_part:
            self.failure = too_many

    def report(self) -> StrategyReport:
        """Returns what was found; without times unless the values are right."""
        status: Status = "reference" if self.is_reference else "equal" if self.arm.keeps_bits else "close"
        if self.first_difference is not None:
            status = "wrong"
        if self.failure is not None:
            status = "failed"
        is_right = status in ("reference", "equal", "close")
        return StrategyReport(
            strategy=self.strategy,
            status=status,
            failure=self.failure,
            build=self.build,
            memory=self.memory,
            break_names=self.break_names,
            values=tuple(sorted(self.values, key=lambda entry: entry.num_tokens)),
            first_difference=self.first_difference,
            times=tuple(self.times) if is_right else (),
            problems=tuple(
                CaseProblem(num_tokens=count, reason=reason)
                for count, reason in sorted(self.problems.items())
            ),
        )
