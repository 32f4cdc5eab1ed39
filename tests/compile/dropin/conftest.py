"""Every test here begins with no compiled forward alive, so that counts are its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_captured(nothing_compiled: None) -> Iterator[None]:
    torch._dynamo.utils.clear_compilation_metrics()
    gc.collect()
    yield
    gc.collect()
