"""Fixtures for every test: graph devices, and the skip of GPU tests where there is no GPU."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

# How long an example takes says something of the machine, and of what else runs there.
hypothesis.settings.register_profile("repository", deadline=None)
hypothesis.settings.load_profile("repository")

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, and some test or library might be earlier than ours.
    os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from sgl_piecewise.runtime.capture.device import GraphDevice


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` where CUDA is not available."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Leaves what was imported out of collections: many tests ask for one, and torch alone makes it 0.1 s long."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Libraries complain at the end of what is left of them.


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def graph_device(request: pytest.FixtureRequest) -> GraphDevice:
    """A graph device of each kind: a contract test is written once and runs on both."""
    if request.param == "cuda":
        from sgl_piecewise.runtime.capture.cuda_device import CudaDevice

        return CudaDevice()
    from sgl_piecewise.runtime.capture.emulated.device import EmulatedDevice

    return EmulatedDevice()
