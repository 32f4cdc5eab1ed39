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
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.passes.run_on_fakes import run_on_fakes
from sgl_piecewise.runtime import torch_private, torch_private_compiling, tree
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
    profile = _Profile()
    results = run_on_fakes(piece, example_inputs, profile.note)
    tensors = [value for value in [*example_inputs, *results] if isinstance(value, torch.Tensor)]
    dtypes = profile.dtypes | {one.dtype for one in tensors}
    unknown = sorted(str(one) for one in dtypes.difference(_DTYPES))
    if unknown:
        return _as_fx(piece, f"it does not know {', '.join(unknown)}")
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return _as_fx(piece, "it runs on the CPU only")
    if profile.written & {torch_private.storage_key(one) for one in tensors[: len(example_inputs)]}:
        return _as_fx(piece, "it changes no input, and the piece writes one")
    if profile.draws_random:
        return _as_fx(piece, "it does not follow PyTorch's random numbers")
    if any(not isinstance(one, torch.Tensor) for one in results):
        return _as_fx(piece, "it returns tensors only")
    return _PieceByShape(backend, piece)


class _Profile:
    """What the operators of a piece do that OpenVINO may not."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.written: set[int] = set()
        self.draws_random = False

    def note(self, node: Node, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.dtypes.update(one.dtype for one in tree.flatten(result)[0] if isinstance(one, torch.Tensor))
        if torch_private.is_overload(func):
            self.written.update(
                map(torch_private.storage_key, torch_private.written_arguments(func, args, kwargs))
            )
            self.draws_random |= torch.Tag.nondeterministic_seeded in func.tags


@dataclass(frozen=True, kw_only=True)
class _Output:
    """How one output lies in memory.

    Attributes:
        argument: The argument that it is a view of, or None where it is fresh.
        group: Which fresh storage it lies in.
        shape: Its sizes.
        stride: Its strides.
        offset: Its first element, counted from the argument's first, or in the fresh storage.
        dtype: Its dtype.
    """

    argument: int | None
    group: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of_argument(self, argument: torch.Tensor) -> torch.Tensor:
        """Returns the view of an argument, or the argument where it is that."""
        view = argument.as_strided(self.shape, self.stride, argument.storage_offset() + self.offset)
        if self.offset == 0 and argument.shape == self.shape and _strides(argument) == _strides(view):
            return argument
        return view

    def fresh(self, storage: torch.Tensor) -> torch.Tensor:
        """Returns its place in new memory (uint8[bytes])."""
        return storage.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


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
            (value.shape, _strides(value)) if isinstance(value, torch.Tensor) else value for value in args
        )
        known = self._compiled.get(key)
        if known is None:
            known = self._compiled[key] = self._compile(args)
        return record_opaque(lambda inputs: known(*inputs), list(args), name="OpenVINO graph", mutated=())

    def _compile(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        if any(value.numel() == 0 for value in args if isinstance(value, torch.Tensor)):
            return self._piece.forward  # Nothing to compute, and OpenVINO refuses it.
        plan, num_bytes = _plan(self._piece, args)
        with torch_private_compiling.outside_of_traces(), _heard_failures() as failures:
            run = self._backend(copy.deepcopy(self._piece), list(args), options=_OPTIONS)
            run(*args)  # Only the first run compiles.
        if failures:
            return _as_fx(self._piece, failures[0])
        return functools.partial(_run, run, plan, num_bytes)


def _plan(piece: GraphModule, args: Sequence[Any]) -> tuple[list[_Output], list[int]]:
    """Returns how the outputs for these arguments lie in memory, and the sizes of the fresh storages."""
    with torch_private_compiling.on_fake_tensors_of(args) as fakes:
        results = piece(*fakes)
    owners = {
        torch_private.storage_key(one): i for i, one in enumerate(fakes) if isinstance(one, torch.Tensor)
    }
    groups: dict[int, int] = {}
    num_bytes: list[int] = []
    plan = []
    for one in results:
        key = torch_private.storage_key(one)
        if key not in owners and key not in groups:
            groups[key] = len(groups)
            num_bytes.append(one.untyped_storage().nbytes())
        owner = owners.get(key)
        offset = one.storage_offset() - (0 if owner is None else fakes[owner].storage_offset())
        plan.append(
            _Output(
                argument=owner,
                group=groups.get(key, 0),
                shape=tuple(one.shape),
                stride=one.stride(),
                offset=offset,
                dtype=one.dtype,
            )
        )
    return plan, num_bytes


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that count: where there is one element, any stride leads to it."""
    return tuple(
        0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _run(run: Callable[..., Any], plan: list[_Output], num_bytes: list[int], *args: Any) -> Any:
    """Runs a compiled piece; what it gives is copied before the next call overwrites it."""
    bases = [torch.empty(size, dtype=torch.uint8) for size in num_bytes]
    results = []
    for output, value in zip(plan, run(*args), strict=True):
        if output.argument is not None:
            results.append(output.of_argument(args[output.argument]))
        else:
            results.append(output.fresh(bases[output.group]).copy_(value))
    return tuple(results)


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
