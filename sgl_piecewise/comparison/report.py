"""What a comparison found, as typed facts, and its JSON file.

Records only: nothing here measures or prints. A float that is not finite is held as None, so
that every report is strict JSON. The layout is versioned by `SCHEMA` and described by
``sgl_piecewise/data/compare.schema.json``.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sgl_piecewise.runtime.atomic_file import write_atomically
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.records import BuildRecord, PoolEstimate, estimate_ratio

from .intervals import Median
from .plain import from_plain, to_plain

SCHEMA = "sgl_piecewise.compare/3"

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


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was compared.

    Attributes:
        name: As the user gave it.
        description: What was loaded, in words.
        dtype: Of its parameters.
        num_parameters: Elements of its parameters, shared ones once.
        load_s: Seconds to load it, which no build time holds.
    """

    name: str
    description: str
    dtype: str
    num_parameters: int | None
    load_s: float | None


@dataclass(frozen=True, kw_only=True)
class InputFacts:
    """What the model was run on.

    Attributes:
        source: For example the title of the text.
        num_tokens: How many different tokens in a row there were.
        is_repeated: Whether they were repeated to fill the largest case.
        is_random: Whether they are random numbers in place of a text.
    """

    source: str
    num_tokens: int | None
    is_repeated: bool
    is_random: bool


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """What the device reported of itself at one moment.

    Attributes:
        when: ``before`` or ``after`` the measurement.
        sm_mhz: Clock of the multiprocessors.
        memory_mhz: Clock of the memory.
        power_w: Power drawn.
        temperature_c: Of the chip.
    """

    when: str
    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where it was measured.

    Attributes:
        device: The graph device's name.
        torch_device: For example ``cuda:0``.
        is_emulated: True where the times say nothing about a GPU.
        platform: Operating system and processor.
        num_cpu_threads: Threads of PyTorch's operators.
        versions: By package; also ``python``, and ``cuda`` and ``driver`` where there are some.
        clocks: What the device reported; empty where it reports nothing.
    """

    device: str
    torch_device: str
    is_emulated: bool
    platform: str
    num_cpu_threads: int
    versions: dict[str, str]
    clocks: tuple[Clocks, ...]


@dataclass(frozen=True, kw_only=True)
class EagerSweep:
    """One eager forward at each capture size: what a build is to be measured against.

    Attributes:
        first_s: The first pass, which also loads kernels.
        warm_s: A second pass.
        num_forwards: Forwards in each.
    """

    first_s: float
    warm_s: float
    num_forwards: int


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Everything that a comparison found.

    Attributes:
        created: Date and time, ISO 8601 with zone.
        command: The command line, or None when called from Python.
        options: The options in force, defaults included.
        environment: Where it was measured.
        model: What was compared.
        inputs: What it was run on.
        capture_sizes: Ascending.
        cases: The token counts, ascending.
        eager_sweep: One eager forward at each capture size.
        first_capture_s: Seconds of the process's first capture, of next to nothing; in no build.
        strategies: Eager first, then in the order asked for.
        verdict: The findings in words.
        schema: Name and version of this layout.
    """

    created: str
    command: tuple[str, ...] | None
    options: dict[str, Any]
    environment: Environment
    model: ModelFacts
    inputs: InputFacts
    capture_sizes: tuple[int, ...]
    cases: tuple[Case, ...]
    eager_sweep: EagerSweep
    first_capture_s: float
    strategies: tuple[StrategyReport, ...]
    verdict: str
    schema: str = SCHEMA

    @property
    def has_failed(self) -> bool:
        """Whether any strategy is wrong or could not be built."""
        return any(strategy.has_failed for strategy in self.strategies)

    @property
    def eager(self) -> StrategyReport:
        """The reference."""
        return self.strategies[0]

    def to_json(self) -> str:
        """Returns the report as strict JSON."""
        plain = to_plain(self)
        return json.dumps({"schema": plain.pop("schema"), **plain}, indent=1, allow_nan=False) + "\n"


def report_from_json(text: str) -> ComparisonReport:
    """Reads what `ComparisonReport.to_json` wrote.

    Raises:
        ConfigError: Not JSON, another schema or version, or a field that is missing or of another
            type (with its path).
    """
    try:
        plain = json.loads(text)
    except json.JSONDecodeError as err:
        raise ConfigError(
            f"Not a comparison report: {err}. Give the file that --json or write_report wrote."
        ) from err
    found = plain.get("schema") if isinstance(plain, dict) else None
    if found != SCHEMA:
        raise ConfigError(
            f"Not a comparison report of this version: schema {found!r}, expected {SCHEMA!r}. Read it with the "
            "version that wrote it, or compare again."
        )
    report: ComparisonReport = from_plain(ComparisonReport, plain)
    return report


def check_can_write(path: Path) -> None:
    """Finds out before long work whether ``path`` can be written, leaving no trace.

    Raises:
        ConfigError: It is a folder, its folder is missing, or its folder cannot be written to.
    """
    if path.is_dir():
        raise ConfigError(f"The report cannot be written to {path}: it is a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"The report cannot be written to {path}: {path.parent} is no folder. Make it first."
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as err:
        raise ConfigError(f"The report cannot be written to {path}: {err.strerror or err}.") from err


def write_report(report: ComparisonReport, path: Path) -> None:
    """Writes the report as JSON; the file is there whole or not at all."""
    write_atomically(path, report.to_json())
