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
NUM_PROGRAMS_SLOW = 3000

Reports = list[tuple[str, str]]


def _run(device: GraphDevice, num_programs: int, seed: int | None, reports: Reports) -> Coverage:
    """Draws and checks programs; a seed makes a run of its own, None the same run every time."""
    coverage = Coverage()
    logging.getLogger("sgl_piecewise").setLevel(
        logging.ERROR
    )  # Calls over the largest size warn, as they should.

    @hypothesis.settings(
        max_examples=num_programs,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(programs())
    def check(program: Program) -> None:
        check_program(program, device, coverage)

    if seed is not None:
        check = hypothesis.seed(seed)(check)
    try:
        check()
    finally:
        reports.append((device.name if seed is None else f"{device.name}, seed {seed}", coverage.table()))
    return coverage


@pytest.mark.timeout(600)  # A failure takes minutes to be shrunk.
def test_random_programs_are_replayed_as_they_run_eager(
    graph_device: GraphDevice, coverage_reports: Reports
) -> None:
    num_programs = NUM_PROGRAMS["emulated" if graph_device.is_emulated else "cuda"]
    coverage = _run(graph_device, num_programs, None, coverage_reports)
    assert coverage.num_programs >= num_programs
    if graph_device.is_emulated:
        assert not coverage.missing(), coverage.table()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_random_programs(graph_device: GraphDevice, coverage_reports: Reports) -> None:
    num_programs = int(os.environ.get("SGL_PIECEWISE_PROPERTY_PROGRAMS", NUM_PROGRAMS_SLOW))
    seed = int(os.environ.get("SGL_PIECEWISE_PROPERTY_SEED", random.SystemRandom().randrange(2**32)))
    coverage = _run(graph_device, num_programs, seed, coverage_reports)
    assert not coverage.missing(), coverage.table()
