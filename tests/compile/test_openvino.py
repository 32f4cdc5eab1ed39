"""OpenVINO as a second piece compiler from outside: values, breaks, captures, and no silent fallback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.segments import EagerSegment
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context

from .support import compiled, noted_breaks

pytest.importorskip("openvino", reason="pip install 'sgl-piecewise[openvino]'")
# Its own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
X = torch.arange(12.0).reshape(3, 4) / 12


@eager_on_graph(fake=torch.empty_like)
def marked(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def with_openvino(fn: Callable[..., Any]) -> Any:
    return compiled(fn, piece_compiler="openvino")


@pytest.fixture(autouse=True)
def attention() -> Iterator[None]:
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        yield


def test_decoder_at_several_sizes_and_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = random_decoder(named_shape("tiny"), device=torch.device("cpu"), dtype=torch.float32)
    fn = with_openvino(model)

    def tokens(num: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(num) * 7 % 200, torch.arange(num)

    with noted_breaks() as expected:
        model(*tokens(8))
    for num in (8, 5):
        with noted_breaks() as names:
            torch.testing.assert_close(fn(*tokens(num)), model(*tokens(num)), rtol=0, atol=1e-4)
        assert names[: len(expected)] == expected
    captured = capture(fn, tokens(8), capture_sizes=[5, 8])
    for num in (8, 3):
        torch.testing.assert_close(captured(*tokens(num)), model(*tokens(num)), rtol=0, atol=1e-4)
    for recording in captured.recordings.values():
        breaks = [one.mark.name for one in recording.segments if isinstance(one, EagerSegment)]
        assert breaks == expected
    assert "OpenVINO" not in caplog.text, "it ran every piece"


def test_results_survive_the_next_call_of_the_same_piece() -> None:
    """The backend hands out memory that its next call overwrites, and equal layers are one piece."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for _ in range(3):
            x = marked(x.sin() * 2)
            parts.append(x * 1)
        return torch.cat(parts)

    torch.testing.assert_close(with_openvino(fn)(X), fn(X), rtol=0, atol=1e-5)
    keep = with_openvino(lambda x: x * 2)
    first = keep(X)
    keep(X + 1)
    torch.testing.assert_close(first, X * 2, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x + 1).t(),
        lambda x: (x, x.sin() + 1),
        lambda x: (x.view(4, 3), x + 1),
        lambda x: (x[1:, ::2], x + 1),
        lambda x: (x + 1).split([1, 2]),
        lambda x: x[:0] + 1,
        lambda x: x.sum() > 0,
    ],
    ids=[
        "transposed",
        "an input",
        "view of an input",
        "strided view",
        "views of one",
        "empty",
        "bool scalar",
    ],
)
def test_outputs_lie_in_memory_as_the_trace_says(fn: Callable[..., Any]) -> None:
    got, expected = with_openvino(fn)(X), fn(X)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    pairs = zip(*((one if isinstance(one, tuple) else (one,)) for one in (got, expected)), strict=True)
    for ours, theirs in pairs:
        assert ours.stride() == theirs.stride()
        is_inputs = theirs.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
        assert (ours.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()) == is_inputs


@pytest.mark.parametrize(
    ("fn", "x", "why"),
    [
        (lambda x: x.add_(1) * 2, X, "writes one"),
        (lambda x: x @ x.t(), X.bfloat16(), "torch.bfloat16"),
        (lambda x: torch.rand_like(x) * 0 + x, X, "random numbers"),
    ],
    ids=["writes its input", "bfloat16", "random"],
)
def test_pieces_that_it_would_get_wrong_run_as_fx_and_say_so(
    fn: Callable[..., Any], x: torch.Tensor, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = x.clone(), x.clone()
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        torch.testing.assert_close(with_openvino(fn)(ours), fn(theirs), rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert why in caplog.text


def test_dynamo_keeps_its_settings() -> None:
    """Importing OpenVINO's backend switches one of Dynamo's off for the whole process."""
    from torch._dynamo import config

    before = config.get_config_copy()
    with_openvino(lambda x: x + 1)(X)
    assert config.get_config_copy() == before


def test_failure_inside_it_is_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It only tells its debug log that it gave up and runs the piece as PyTorch does."""
    from openvino.frontend.pytorch.torchdynamo import execute

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no plugin")

    monkeypatch.setattr(execute, "openvino_compile", broken)
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        torch.testing.assert_close(with_openvino(lambda x: x * 3 + 1)(X), X * 3 + 1)
    assert "no plugin" in caplog.text
