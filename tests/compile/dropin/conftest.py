"""Every test here counts only its own compiled forwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from .support import forget_earlier_forwards


@pytest.fixture(autouse=True)
def nothing_captured(nothing_compiled: None) -> Iterator[None]:
    gc.collect()
    forget_earlier_forwards()
    yield
    gc.collect()
