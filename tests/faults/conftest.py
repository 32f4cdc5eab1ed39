"""Fault tests run without autograd and from one seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
