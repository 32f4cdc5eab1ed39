"""Every test here counts only its own compiled forwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from .support import forget_earlier_forwards


@pytest.fixture(autouse=True)
def nothing_captured(nothing_compiled: None) -> Iterator[None]:
    gc.collect()
    forget_earlier_forwards()
    yield
    gc.collect()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a model and its inputs are: a test that takes this runs on the emulated device and on a GPU."""
    return torch.device("cuda" if request.param == "cuda" else "cpu")
