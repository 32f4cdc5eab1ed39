"""Every test here begins and ends with nothing compiled, in inference mode."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

KEPT_BETWEEN_RUNS = Path(tempfile.gettempdir()) / "sgl-piecewise-tests"
"""Where tests that do not ask what the cache holds find what earlier runs compiled."""


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SGL_PIECEWISE_CACHE", str(KEPT_BETWEEN_RUNS))
    torch.compiler.reset()
    with torch.inference_mode():
        yield
    torch.compiler.reset()
