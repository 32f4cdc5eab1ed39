"""Every test here begins and ends with nothing compiled, in inference mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    with torch.inference_mode():
        yield
    torch.compiler.reset()
