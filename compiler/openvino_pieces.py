"""OpenVINO's torch.compile backend as a piece compiler, made to keep what pieces promise.

The backend specialises on shapes, hands out memory that its next call overwrites, computes in bfloat16 where
the processor can, changes no input, and falls back to other compilers without saying so. So here a piece is
compiled once per shape of its inputs, results are copied into memory of their own with the strides of the
trace, computing stays in the piece's dtypes, and what OpenVINO cannot run runs as FX, with a warning. It must
not know who calls the pieces.

Source: openvino 2026.4, ``openvino/frontend/pytorch/torchdynamo``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from sgl_piecewise.runtime import torch_private_compiling
from sgl_piecewise.runtime.capture.emulated.opaque import record_opaque

Backend = Callable[..., Callable[..., Any]]

_logger = logging.getLogger(__name__)

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
)
_OPTIONS = {"config": {"INFERENCE_PRECISION_HINT": "f32"}, "model_caching": False, "aot_autograd": False}
_REPORTS = tuple(f"openvino.frontend.pytorch.torchdynamo.{name}" for name in ("backend", "execute"))


def compile_with_openvino(
    backend: Backend, piece: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Returns the piece as OpenVINO runs it, or as FX where OpenVINO would give other results.

    Args:
        backend: The registered backend.
        piece: What to compile; OpenVINO gets copies.
        example_inputs: Fake inputs.
    """
    plan = torch_private_compiling.fake_run(piece, example_inputs)
    tensors = [value for value in [*example_inputs, *plan.outputs] if isinstance(value, torch.Tensor)]
    tensors += plan.intermediates
    others = sorted({str(one.dtype) for one in tensors if one.dtype not in _DTYPES})
    if others:
        return _as_fx(piece, f"it does not know {', '.join(others)}")
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return _as_fx(piece, "it runs on the CPU only")
    if plan.written:
        return _as_fx(piece, "it changes no input, and the piece writes one")
    if plan.draws_random:
        return _as_fx(piece, "it does not follow PyTorch's random numbers")
    return _PieceByShape(backend, piece)


def _as_fx(piece: GraphModule, reason: str) -> Callable[..., Any]:
    _logger.warning("OpenVINO does not run a piece (%s): the piece runs as FX.", reason)
    return piece.forward


class _PieceByShape:
    """A piece that is compiled at the first call with new shapes."""

    def __init__(self, backend: Backend, piece: GraphModule) -> None:
        self._backend = backend
        self._piece = piece
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(
            (tuple(value.shape), value.stride(), value.storage_offset())
            if isinstance(value, torch.Tensor)
            else value
            for value in args
        )
        known = self._compiled.get(key)
        if known is None:
            known = self._compiled[key] = self._compile(args)
        return record_opaque(lambda inputs: known(*inputs), list(args), name="OpenVINO graph", mutated=())

    def _compile(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        results = torch_private_compiling.fake_run(self._piece, args).results
        if any(0 in value.shape for value in args if isinstance(value, torch.Tensor)):
            return self._piece.forward  # Nothing to compute, and OpenVINO refuses it.
        with torch_private_compiling.outside_of_traces(), _heard_failures() as failures:
            # A first run on copies: only then does the backend compile.
            run = self._backend(copy.deepcopy(self._piece), list(args), options=_OPTIONS)
            run(*args)
        if failures:
            return _as_fx(self._piece, failures[0])
        return lambda *inputs: results.own(inputs, run(*inputs))


@contextlib.contextmanager
def _heard_failures() -> Iterator[list[str]]:
    """Collects what the backend only tells its debug log: that it gave up and runs something else."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "failed" in text.lower():
                heard.append(text)

    listener = Listener()
    loggers = [logging.getLogger(name) for name in _REPORTS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(listener)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    try:
        yield heard
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(listener)
            logger.setLevel(level)
            logger.propagate = propagate
