"""The examples of docs/compiling.md run, from a file: errors quote its lines."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "compiling.md"


def test_examples_do_what_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    runpy.run_path(str(script))
    assert "pool" in capsys.readouterr().out
