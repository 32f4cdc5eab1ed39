"""Random programs do captured what they do eager, bit for bit, on every graph device.

A program is data (``program``), drawn so that it is always legal (``strategies``, ``inference``), and runs
as an ordinary function (``world``). Every call of it is compared with padded eager (``comparison``), and
what all programs together covered is counted: the test fails when something is missing (``coverage``).

Normal runs are the same every time. The second tier draws other programs at every run and prints its seed;
``SGL_PIECEWISE_PROPERTY_PROGRAMS`` and ``SGL_PIECEWISE_PROPERTY_SEED`` set how many, and repeat a run.
"""

from __future__ import annotations

import logging
import os
import random

import hypothesis
import pytest

from sgl_piecewise.runtime.capture.device import GraphDevice

from .comparison import check_program
from .coverage import Coverage
from .program import Program
from .strategies import programs

NUM_PROGRAMS = {"emulated": 400, "cuda": 60}
NUM_PROGRAMS_SLOW = {"emulated": 2000, "cuda": 300}
# Which programs a seed gives depends on the version of hypothesis: what the first ones left out is looked for in more.
NUM_PROGRAMS_MORE = 150
MAX_MORE = 8

Reports = list[tuple[str, str]]


def _run(device: GraphDevice, num_programs: int, seed: int | None, coverage: Coverage) -> None:
    """Draws and checks programs; a seed makes a run of its own, None the same run every time."""

    @hypothesis.settings(
        max_examples=num_programs,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        # Without the explain phase: its line tracer costs as much as the programs.
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    @hypothesis.given(programs())
    def check(program: Program) -> None:
        check_program(program, device, coverage)

    if seed is not None:
        check = hypothesis.seed(seed)(check)
    check()


def _cover(
    device: GraphDevice, num_programs: int, seed: int | None, reports: Reports, *, is_complete: bool
) -> None:
    """Checks programs; a complete run goes on while a fact is not covered, and fails when one stays so."""
    coverage = Coverage()
    logger = logging.getLogger("sgl_piecewise")
    level = logger.level
    logger.setLevel(logging.ERROR)  # Calls over the largest size warn, as they should.
    try:
        _run(device, num_programs, seed, coverage)
        for more in range(MAX_MORE if is_complete else 0):
            if not coverage.missing(device):
                break
            _run(device, NUM_PROGRAMS_MORE, (seed or 0) + 1 + more, coverage)
    finally:
        logger.setLevel(level)
        reports.append((device.name if seed is None else f"{device.name}, seed {seed}", coverage.table()))
    assert coverage.num_programs >= num_programs
    assert not (is_complete and coverage.missing(device)), coverage.table()


@pytest.mark.timeout(600)  # A failure takes minutes to be shrunk.
def test_random_programs_are_replayed_as_they_run_eager(
    graph_device: GraphDevice, coverage_reports: Reports
) -> None:
    kind = "emulated" if graph_device.is_emulated else "cuda"
    _cover(graph_device, NUM_PROGRAMS[kind], None, coverage_reports, is_complete=graph_device.is_emulated)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_random_programs(graph_device: GraphDevice, coverage_reports: Reports) -> None:
    default = NUM_PROGRAMS_SLOW["emulated" if graph_device.is_emulated else "cuda"]
    num_programs = int(os.environ.get("SGL_PIECEWISE_PROPERTY_PROGRAMS", default))
    seed = int(os.environ.get("SGL_PIECEWISE_PROPERTY_SEED", random.SystemRandom().randrange(2**32)))
    _cover(graph_device, num_programs, seed, coverage_reports, is_complete=True)
