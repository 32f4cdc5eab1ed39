"""What was found of one strategy: its values, its times, what it could not do.

Records only, in the words of `ComparisonReport`, which holds them; nothing here measures or prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_piecewise.runtime.records import BuildRecord, PoolEstimate, estimate_ratio

from .intervals import Median

Status = Literal["reference", "equal", "close", "wrong", "failed"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One token count that every strategy runs.

    Attributes:
        num_tokens: Real tokens.
        capture_size: The smallest capture size that holds them.
        num_inputs: Different inputs that were rotated through.
    """

    num_tokens: int
    capture_size: int
    num_inputs: int


@dataclass(frozen=True, kw_only=True)
class CaseValues:
    """How the outputs of one strategy differ at one token count, over all inputs of the case.

    Attributes:
        num_tokens: Real tokens.
        padded_size: Rows that the strategy computed.
        max_diff_to_padded_eager: Largest absolute difference on the real rows to eager run at
            ``padded_size``; None where one is not finite.
        max_diff_to_eager: The same to eager run on the real tokens alone.
        next_token_agreement: Part of the real rows whose largest logit is where eager (on the
            real tokens alone) has it; None for outputs that are not ``[T, V]``.
        max_error: Largest absolute difference to the model in a wider dtype, run at ``padded_size``; None
            where values must be bit-equal, or where one is not finite.
        eager_error: The same of eager at ``padded_size``.
        num_excused: Rows with another largest logit than padded eager's, excused as ties of the wide model.
        num_rows: Real rows over all inputs of the case.
    """

    num_tokens: int
    padded_size: int
    max_diff_to_padded_eager: float | None
    max_diff_to_eager: float | None
    next_token_agreement: float | None
    max_error: float | None = None
    eager_error: float | None = None
    num_excused: int = 0
    num_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first place where outputs are wrong: not bit-equal to padded eager, or beyond the tolerance.

    Attributes:
        num_tokens: Token count of the run.
        padded_size: Rows that the strategy computed.
        input_index: Which of the case's inputs.
        index: Index into the output: the row, then the column (and so on).
        expected: Padded eager's value, as text (it may be ``nan``).
        got: The strategy's value; or, with an empty ``index``, its shape and dtype.
    """

    num_tokens: int
    padded_size: int
    input_index: int
    index: tuple[int, ...]
    expected: str
    got: str


@dataclass(frozen=True, kw_only=True)
class CaseTimes:
    """How long one strategy takes at one token count.

    Attributes:
        num_tokens: Real tokens.
        padded_size: Rows that the strategy computed.
        latency_s: From an idle device to the last result.
        host_s: How long the host was busy with the call.
        ratio_to_eager: Median over the rounds of this strategy's latency over eager's in the same
            round; None for eager itself.
        samples_s: Latency of every round, in order.
    """

    num_tokens: int
    padded_size: int
    latency_s: Median
    host_s: Median
    ratio_to_eager: Median | None
    samples_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class CaseProblem:
    """A token count that a strategy could not run from a graph.

    Attributes:
        num_tokens: Real tokens.
        reason: For example out of memory.
    """

    num_tokens: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class GraphMemory:
    """What the graphs of one strategy hold.

    Attributes:
        allocator_bytes: Reserved by PyTorch's allocator for the graph pool.
        largest_alone_bytes: Of those, reserved once the largest size alone was captured.
        driver_bytes: The driver's own memory beside that, or None where it does not say.
        estimate: What was estimated of the pool; None for strategies that are not estimated.
    """

    allocator_bytes: int
    largest_alone_bytes: int
    driver_bytes: int | None
    estimate: PoolEstimate | None = None

    @property
    def estimate_ratio(self) -> float | None:
        """The estimate over `allocator_bytes`; None where there is none."""
        return estimate_ratio(self.estimate, self.allocator_bytes)


@dataclass(frozen=True, kw_only=True)
class StrategyReport:
    """One strategy's part of the comparison.

    Attributes:
        strategy: Its name, a cell of the grid.
        status: ``reference`` (eager), ``equal`` (bit for bit), ``close`` (within the tolerance), ``wrong`` or
            ``failed`` (not built).
        failure: Why it could not be built, or None.
        build: What the build took; None for eager and for what failed.
        memory: What its graphs hold; None likewise.
        break_names: The marked calls of one forward, in order.
        values: One entry per token count that ran.
        first_difference: Where it went wrong, or None.
        times: One entry per token count; empty unless the values are right.
        problems: Token counts that could not run from a graph.
    """

    strategy: str
    status: Status
    failure: str | None = None
    build: BuildRecord | None = None
    memory: GraphMemory | None = None
    break_names: tuple[str, ...] = ()
    values: tuple[CaseValues, ...] = ()
    first_difference: FirstDifference | None = None
    times: tuple[CaseTimes, ...] = ()
    problems: tuple[CaseProblem, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether the strategy is wrong or could not be built."""
        return self.status in ("wrong", "failed")

    def times_at(self, num_tokens: int) -> CaseTimes | None:
        """Returns the entry of one token count, or None."""
        return next((entry for entry in self.times if entry.num_tokens == num_tokens), None)

    def problem_at(self, num_tokens: int) -> CaseProblem | None:
        """Returns the entry of one token count, or None."""
        return next((entry for entry in self.problems if entry.num_tokens == num_tokens), None)
