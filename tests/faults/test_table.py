"""The table of covered rows is written from the tests, and holds the rows that must be there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "faults_covered.py"

# Rows about capture, boundaries, padding, sizes, streams and random numbers that today's code can have.
EXPECTED = {
    *(1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12),
    *(13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27),
    *(28, 29, 30, 31, 32, 34, 35, 36, 37, 38, 41, 42, 51, 68, 79),
    *(54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 65),
    *(74, 75, 76, 82, 84, 85, 92, 103),
}


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults_covered", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_is_up_to_date(script: ModuleType) -> None:
    assert script.DOCUMENT.read_text(encoding="utf-8") == script.document(), "run `make format`"


def test_no_row_was_lost(script: ModuleType) -> None:
    assert {row for row, _, _ in script.covered()} == EXPECTED
