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
from typing import Any

from sgl_piecewise.runtime.atomic_file import write_atomically
from sgl_piecewise.runtime.errors import ConfigError

from .end_to_end.report import EndToEndReport
from .plain import from_plain, to_plain
from .records import Case, StrategyReport

SCHEMA = "sgl_piecewise.compare/4"


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
        end_to_end: Execution plans through the engine, or why there are none.
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
    end_to_end: EndToEndReport
    verdict: str
    schema: str = SCHEMA

    @property
    def has_failed(self) -> bool:
        """Whether any strategy or plan is wrong or could not be built."""
        return any(strategy.has_failed for strategy in self.strategies) or self.end_to_end.has_failed

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
