"""Backends by name, and what is said where a package or a device is missing."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys

import pytest
import torch

from sgl_piecewise.runtime.attention.choice import (
    attention_backend_class,
    available_attention_backends,
    build_attention_backend,
    resolve_attention_backend,
)
from sgl_piecewise.runtime.attention.paged import PagedAttention
from sgl_piecewise.runtime.attention.plan import PlanLimits
from sgl_piecewise.runtime.attention.torch_paged import TorchAttention
from sgl_piecewise.runtime.errors import ConfigError, MissingExtraError

from .conftest import needs_triton
from .support import spec

CPU = torch.device("cpu")


def test_names_are_resolved_before_anything_is_built() -> None:
    assert resolve_attention_backend("auto", CPU) == "torch"
    with pytest.raises(ConfigError, match="did you mean 'flashinfer'"):
        resolve_attention_backend("flash_infer", CPU)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_missing_package_is_an_error_that_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert available_attention_backends() == ("torch",)
    with pytest.raises(MissingExtraError, match=name):
        resolve_attention_backend(name, CPU)


def test_a_backend_is_built_by_name() -> None:
    limits = PlanLimits(max_requests=1, max_tokens=1, max_context=1)
    assert isinstance(build_attention_backend("torch", [spec()], limits=limits), TorchAttention)
    with pytest.raises(ConfigError, match="needs the model's attention layers"):
        build_attention_backend("torch", [], limits=limits)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1"):
        PlanLimits(max_requests=1, max_tokens=0, max_context=1)


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=needs_triton), "flashinfer"])
def test_every_backend_is_built_with_the_same_arguments(name: str) -> None:
    """They are chosen by name, where no type checker looks; what one has of its own has a default."""
    parameters = list(inspect.signature(attention_backend_class(name)).parameters.values())
    common = list(inspect.signature(PagedAttention).parameters.values())
    assert parameters[: len(common)] == common
    assert all(one.default is not one.empty for one in parameters[len(common) :])


ON_THE_CPU = """
import torch
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.kernels.kernel_set import kernel_set
kernels = kernel_set("triton", torch.device("cpu"))
try:
    kernels.rms_norm(torch.ones(2, 16), torch.ones(16), 1e-5)
except ConfigError as err:
    assert "TRITON_INTERPRET=1" in str(err)
else:
    raise AssertionError
"""


@needs_triton
def test_compiled_kernels_on_the_cpu_are_refused() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-P", "-c", ON_THE_CPU], check=True, env=environment)


def test_auto_takes_the_fastest_of_those_installed_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer between breaks, where it takes the layers; Triton in graphs (measured: docs/lab-notes.md)."""
    cuda, wide, odd = torch.device("cuda"), [spec(head_dim=128)], [spec(head_dim=80)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    assert resolve_attention_backend("auto", cuda) == "triton"
    assert resolve_attention_backend("auto", cuda, breaks_for=(wide, torch.bfloat16)) == "flashinfer"
    assert resolve_attention_backend("auto", cuda, breaks_for=(wide, torch.float32)) == "triton"
    assert resolve_attention_backend("auto", cuda, breaks_for=(odd, torch.bfloat16)) == "triton"
    assert resolve_attention_backend("auto", CPU, breaks_for=(wide, torch.bfloat16)) == "torch"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == "flashinfer" else object()
    )
    assert resolve_attention_backend("auto", cuda, breaks_for=(wide, torch.bfloat16)) == "triton"
