"""The FlashInfer backend: the error where it is absent, and on a GPU the values of the other backends."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.attention.flashinfer_paged import FlashInferAttention
from sgl_piecewise.runtime.attention.plan import PlanLimits
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.errors import MissingExtraError

from .support import Request, World, spec
from .test_captured import BATCHES, check_replays
from .test_values import DECODE, EXTEND, LAYERS, VERIFY, check

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs the package flashinfer"),
    # It compiles its kernels at their first use.
    pytest.mark.timeout(900),
]
SUPPORTED = [name for name, layer in LAYERS.items() if layer.head_dim in (64, 128, 256)]


def test_its_absence_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    limits = PlanLimits(max_requests=1, max_tokens=1, max_context=1)
    with pytest.raises(MissingExtraError, match=r"sgl-piecewise\[flashinfer\]"):
        FlashInferAttention([spec()], limits=limits)


def world(layer: AttentionSpec) -> World:
    return World(layer, backend="flashinfer", device=torch.device("cuda"), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in SUPPORTED])
@pytest.mark.parametrize(
    ("mode", "requests"),
    [
        (ForwardMode.EXTEND, EXTEND),
        (ForwardMode.DECODE, DECODE),
        (ForwardMode.TARGET_VERIFY, VERIFY),
        (ForwardMode.MIXED, [Request(2, 64, 50), Request(4, 90, 1), Request(0, 3, 1)]),
    ],
)
def test_values(name: str, mode: ForwardMode, requests: list[Request]) -> None:
    check(world(LAYERS[name]), mode, requests)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=on_gpu) for mode in BATCHES])
def test_replays(mode: ForwardMode) -> None:
    """flashinfer#411: a launch of the captured, short batch must reach a long and ragged one."""
    from sgl_piecewise.runtime.capture.cuda_device import CudaDevice

    layer = spec(num_heads=8, num_kv_heads=2, head_dim=64, window=150)
    check_replays(world(layer), "full", mode, CudaDevice())


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=on_gpu) for mode in BATCHES])
def test_a_dirty_workspace_changes_nothing(mode: ForwardMode) -> None:
    """flashinfer#5176: surplus blocks read what an earlier use left in the workspace."""
    from sgl_piecewise.runtime.capture.cuda_device import CudaDevice

    dirty = world(spec(num_heads=8, num_kv_heads=2))
    check(dirty, ForwardMode.EXTEND, EXTEND)
    for name, tensor in dirty.backend.static_tensors().items():
        if name == "flashinfer.workspace":
            tensor.fill_(0x7F)
    check_replays(dirty, "full", mode, CudaDevice())
