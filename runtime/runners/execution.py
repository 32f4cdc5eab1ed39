"""What ran, how and why: one record per forward, counted and kept for a while."""

from __future__ import annotations

import collections
import enum
import functools
from dataclasses import dataclass

from ..batch.forward_mode import ForwardMode


class Reason(enum.Enum):
    """Why a runner could not take a batch."""

    MODE = "mode_not_served"
    """The runner has nothing for this mode."""
    SWITCHED_OFF = "switched_off"
    """The plan has no graphs for this mode."""
    ROWS_PER_REQUEST = "other_rows_per_request"
    """Graphs of this mode have another number of tokens for each request."""
    NO_GRAPH = "no_graph_for_size"
    """The size that fits has no graph: its capture failed, or nothing was captured."""
    SIZE_OVER_LARGEST = "size_over_largest"
    """No capture size is as large."""
    PADDING_TOO_LARGE = "padding_too_large"
    """The size that fits is too much larger than the batch."""
    TOO_MANY_REQUESTS = "more_requests_than_slots"
    """A whole extend graph has a fixed number of request slots."""
    NO_TOKENS = "no_tokens"
    """There is nothing to compute."""
    REQUEST_READS = "reads_per_request"
    """The model reads hidden states by request (pooling), which the graph cannot hold."""
    RANK_LOCAL = "rank_local_layout"
    """Rows are divided among ranks in a layout that the graph cannot hold."""
    OTHER_RANKS = "another_rank_cannot"
    """This rank could, and another one cannot: all run alike."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Sizes of one forward, real and as run.

    Attributes:
        num_requests: Real requests.
        num_tokens: Real tokens.
        padded_requests: Requests as run.
        padded_tokens: Tokens as run.
    """

    num_requests: int
    num_tokens: int
    padded_requests: int
    padded_tokens: int


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One runner's no.

    Attributes:
        runner: Whose.
        reason: The code.
        detail: What a reader wants to know beside it: sizes, an error; may be empty.
    """

    runner: str
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.runner}: {self.reason.value}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How one forward ran.

    Attributes:
        mode: The batch's mode.
        runner: Who ran it.
        strategy: The capture strategy: ``eager``, ``none`` (padded eager), ``full``, ``breakable``.
        extent: Its sizes.
        refusals: Runners that were asked before, and why they did not.
    """

    mode: ForwardMode
    runner: str
    strategy: str
    extent: Extent
    refusals: tuple[Refusal, ...] = ()

    @functools.cached_property
    def count_key(self) -> CountKey:
        """What it is counted by."""
        fallback = self.fallback
        return CountKey(
            mode=self.mode,
            runner=self.runner,
            strategy=self.strategy,
            size=self.extent.padded_tokens,
            fallback=None if fallback is None else fallback.reason.value,
        )

    @property
    def has_graph(self) -> bool:
        """Whether a graph was replayed."""
        return self.strategy in ("full", "breakable")

    @property
    def fallback(self) -> Refusal | None:
        """The refusal that sent the batch elsewhere; None where the planned runner ran it.

        A mode that the plan runs eager is no fallback.
        """
        told = [one for one in self.refusals if one.reason not in (Reason.MODE, Reason.SWITCHED_OFF)]
        return told[-1] if told else None

    def __str__(self) -> str:
        extent = self.extent
        text = (
            f"{self.mode.value}: {extent.num_requests} requests, {extent.num_tokens} tokens -> {self.runner} "
            f"{self.strategy}"
        )
        if (extent.padded_requests, extent.padded_tokens) != (extent.num_requests, extent.num_tokens):
            text += f", padded to {extent.padded_requests} requests, {extent.padded_tokens} tokens"
        told = [str(refusal) for refusal in self.refusals if refusal.reason is not Reason.MODE]
        if told:
            text += "; not " + ", not ".join(told)
        return text


@dataclass(frozen=True, kw_only=True)
class CountKey:
    """What forwards are counted by.

    Attributes:
        mode: The batch's mode.
        runner: Who ran it.
        strategy: The capture strategy.
        size: Padded tokens.
        fallback: Reason code of the fallback; None for none.
    """

    mode: ForwardMode
    runner: str
    strategy: str
    size: int
    fallback: str | None


@functools.lru_cache(maxsize=1024)
def execution_of(
    mode: ForwardMode,
    runner: str,
    strategy: str,
    num_requests: int,
    num_tokens: int,
    padded_requests: int,
    padded_tokens: int,
) -> Execution:
    """Returns the record of a forward that nobody refused; equal ones are one object, as every step makes one.

    Args:
        mode: As in `Execution`.
        runner: Likewise.
        strategy: Likewise.
        num_requests: As in `Extent`.
        num_tokens: Likewise.
        padded_requests: Likewise.
        padded_tokens: Likewise.
    """
    extent = Extent(
        num_requests=num_requests,
        num_tokens=num_tokens,
        padded_requests=padded_requests,
        padded_tokens=padded_tokens,
    )
    return Execution(mode=mode, runner=runner, strategy=strategy, extent=extent)


class ExecutionLog:
    """Counts all forwards and keeps the last ones.

    Args:
        num_kept: How many.

    Attributes:
        counts: Forwards so far.
        last: The last ones, oldest first.
    """

    def __init__(self, num_kept: int = 64) -> None:
        self.counts: collections.Counter[CountKey] = collections.Counter()
        self.last: collections.deque[Execution] = collections.deque(maxlen=num_kept)

    def note(self, execution: Execution) -> None:
        """Adds a forward."""
        self.last.append(execution)
        self.counts[execution.count_key] += 1

    def total(
        self, *, mode: ForwardMode | None = None, runner: str | None = None, fallback: str | None = None
    ) -> int:
        """Returns how many forwards match all that is given."""
        return sum(
            count
            for key, count in self.counts.items()
            if (mode is None or key.mode is mode)
            and (runner is None or key.runner == runner)
            and (fallback is None or key.fallback == fallback)
        )

    def explain(self, num_last: int = 8) -> str:
        """Returns one line for each of the last forwards: what ran it, and why not another."""
        return "\n".join(str(execution) for execution in list(self.last)[-num_last:]) or "No forward has run."

    def summary(self) -> str:
        """Returns forwards by mode, runner and fallback in one line."""
        merged: collections.Counter[str] = collections.Counter()
        for key, count in self.counts.items():
            how = key.runner if key.strategy == key.runner else f"{key.runner} {key.strategy}"
            merged[
                f"{key.mode.value} by {how}" + ("" if key.fallback is None else f", fallback {key.fallback}")
            ] += count
        return "; ".join(f"{count} {what}" for what, count in sorted(merged.items())) or "none"
