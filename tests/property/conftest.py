"""Prints what the random programs covered at the end of a run."""

from __future__ import annotations

import pytest

REPORTS = pytest.StashKey[list[tuple[str, str]]]()


@pytest.fixture
def coverage_reports(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """(title, table) pairs for the end of the run."""
    return request.config.stash.setdefault(REPORTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the tables."""
    for title, table in config.stash.get(REPORTS, []):
        terminalreporter.section(f"random programs, {title}")
        terminalreporter.write_line(table)
