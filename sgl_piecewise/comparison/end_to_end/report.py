"""What was found of execution plans, as typed facts: part of the comparison's report.

Records only; nothing here measures or prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..intervals import Median
from ..records import CaseProblem, CaseTimes, CaseValues, FirstDifference

PlanStatus = Literal["reference", "equal", "close", "wrong", "failed", "left_out"]


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase of serving under one plan: first tokens of prompts, or decoding.

    Attributes:
        values: How logits differ; one entry per prompt length, or per batch size (as ``num_tokens``).
        first_difference: Where they went wrong, or None.
        times: Seconds from scheduling to the token on the host; one entry per prompt length, or of one decode step
            per batch size. Empty unless the plan's values are right.
        problems: Prompt lengths or batch sizes that could not run as planned.
    """

    values: tuple[CaseValues, ...] = ()
    first_difference: FirstDifference | None = None
    times: tuple[CaseTimes, ...] = ()
    problems: tuple[CaseProblem, ...] = ()

    def times_at(self, size: int) -> CaseTimes | None:
        """Returns the entry of one prompt length or batch size, or None."""
        return next((entry for entry in self.times if entry.num_tokens == size), None)

    def problem_at(self, size: int) -> CaseProblem | None:
        """Returns the entry of one prompt length or batch size, or None."""
        return next((entry for entry in self.problems if entry.num_tokens == size), None)


@dataclass(frozen=True, kw_only=True)
class DecodeRate:
    """How fast one plan decodes.

    Attributes:
        batch_size: Requests that decode together.
        tokens_per_s: Of all of them.
    """

    batch_size: int
    tokens_per_s: Median


@dataclass(frozen=True, kw_only=True)
class PlanBuild:
    """What the graphs of one plan took.

    Attributes:
        total_s: Seconds to build the model runner: pools, compiled forwards and graphs.
        import_s: Seconds before that, importing compilers; not part of the build.
        graphs_s: Of ``total_s``, the graphs.
        num_graphs: Shapes that have a graph.
        pool_bytes: Reserved by PyTorch's allocator for the graph pool.
        driver_bytes: The driver's own memory beside that, or None where it does not say.
        failures: Shapes without a graph, and why.
    """

    total_s: float
    import_s: float
    graphs_s: float
    num_graphs: int
    pool_bytes: int
    driver_bytes: int | None
    failures: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class PlanAttention:
    """Attention backends of one plan, by name.

    Attributes:
        prompts: Of forwards with several new tokens.
        decode: Of decoding.
    """

    prompts: str
    decode: str


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """One execution plan's part of the comparison.

    Attributes:
        plan: Its name: the cell of decoding, ``+``, the cell of prompts; or the one of both.
        attention: The attention backends that it came to.
        status: ``reference`` (eager), ``equal`` (to padded eager, bit for bit), ``close`` (within the tolerance),
            ``wrong``, ``failed`` (not built), or ``left_out`` (the attention backend cannot).
        failure: Why it failed or was left out, or None.
        build: What it took; None for what was not built.
        first_token: Prompts, from scheduling to their first token.
        decode: Decoding, step by step.
        decode_rates: Tokens per second by batch size.
    """

    plan: str
    attention: PlanAttention
    status: PlanStatus
    failure: str | None = None
    build: PlanBuild | None = None
    first_token: PhaseReport = PhaseReport()
    decode: PhaseReport = PhaseReport()
    decode_rates: tuple[DecodeRate, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether the plan is wrong or could not be built."""
        return self.status in ("wrong", "failed")

    @property
    def phases(self) -> tuple[PhaseReport, PhaseReport]:
        """First tokens, then decoding."""
        return (self.first_token, self.decode)

    def rate_at(self, batch_size: int) -> DecodeRate | None:
        """Returns the rate of one batch size, or None."""
        return next((entry for entry in self.decode_rates if entry.batch_size == batch_size), None)


@dataclass(frozen=True, kw_only=True)
class EndToEndReport:
    """The model under execution plans, through the engine; or why there are none.

    Attributes:
        why_none: Why no plan ran; None where some did.
        prompt_lengths: Of the prompts whose first token was timed, ascending.
        batch_sizes: Requests that decoded together, ascending.
        context_tokens: Tokens of every prompt before its decoding was timed.
        plans: Eager first, then in the order asked for.
    """

    why_none: str | None
    prompt_lengths: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    context_tokens: int | None = None
    plans: tuple[PlanReport, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether any plan is wrong or could not be built."""
        return any(plan.has_failed for plan in self.plans)
