"""Writes docs/faults-covered.md from the names and docstrings of the tests in tests/faults.

A test names the rows it covers (``test_row_019_020_...``); the first line of its docstring names the
public report and what went wrong there. ``make format`` runs this; a test compares.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "faults-covered.md"
_NAME = re.compile(r"test_row((?:_\d{3})+)_")
_HEAD = """# Faults of systems like this one, and the tests that would have found them

Public reports (GitHub issues and pull requests) of what went wrong elsewhere with graphs that are captured in pieces.
The row is a number in our catalogue of such reports; tests carry it in their names. Written by
`scripts/faults_covered.py` from the tests, do not edit.

| row | report, and what went wrong | test |
|---|---|---|
"""


def covered() -> Iterator[tuple[int, str, str]]:
    """Yields (row, first docstring line, test) for every row that a test names.

    Raises:
        ValueError: A test of a row has no docstring that begins with a report.
    """
    for path in sorted((ROOT / "tests" / "faults").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or not (found := _NAME.match(node.name)):
                continue
            said = (ast.get_docstring(node) or "").split("\n")[0]
            if "#" not in said.split(":")[0]:
                raise ValueError(
                    f"{path.name}: the docstring of {node.name} must begin with `project#number: `"
                )
            for row in found[1].split("_")[1:]:
                yield int(row), said, f"{path.relative_to(ROOT).as_posix()}::{node.name}"


def document() -> str:
    """Returns the document as it should be now."""
    return _HEAD + "".join(f"| {row} | {said} | `{test}` |\n" for row, said, test in sorted(covered()))


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
