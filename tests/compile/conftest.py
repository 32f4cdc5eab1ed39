"""Every test here begins and ends with nothing compiled, in inference mode."""

from __future__ import annotations

import gc
import importlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

KEPT_BETWEEN_RUNS = Path(tempfile.gettempdir()) / "sgl-piecewise-tests"
"""Where tests that do not ask what the cache holds find what earlier runs compiled."""


@pytest.fixture(autouse=True, scope="session")
def compilers_imported() -> None:
    """Left out of collections, as what `tests/conftest.py` leaves out: with them each takes 0.3 s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own, some of them deprecations.
        for name in ("torch._dynamo", "torch._inductor.compile_fx"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SGL_PIECEWISE_CACHE", str(KEPT_BETWEEN_RUNS))
    torch.compiler.reset()
    with torch.inference_mode():
        yield
    torch.compiler.reset()
