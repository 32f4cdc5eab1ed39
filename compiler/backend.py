"""The Dynamo backend ``sgl_piecewise``: split at marks, compile each distinct piece once, link.

PyTorch finds it by the entry point ``torch_dynamo_backends``, so ``torch.compile(f, backend="sgl_piecewise")``
needs no import of ours. What it returns is a plain forward: capture does not know that it was compiled.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from sgl_piecewise.passes.pipeline import pipeline, run_passes
from sgl_piecewise.passes.split_at_marks import pieces_of
from sgl_piecewise.runtime.build_profile import SPLIT_SPAN
from sgl_piecewise.runtime.errors import CompileError, ConfigError
from sgl_piecewise.runtime.mark_operator import is_marked_call
from sgl_piecewise.runtime.time_line import NotedSpan, span

from .options import options_from
from .piece_builds import num_operators, recorded_compiler
from .piece_compilers import piece_compiler_for
from .profiling import profile_of_backend
from .stitching import compile_and_stitch

_logger = logging.getLogger(__name__)


def sgl_piecewise(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles one traced forward.

    Args:
        gm: What Dynamo traced; marked calls in it are single nodes.
        example_inputs: What it was traced with.
        options: See `CompileOptions`.
        mode: Must be None: modes choose Inductor's CUDA graphs and tuning.

    Returns:
        A callable with the inputs and outputs of ``gm``.

    Raises:
        ConfigError: An option is unknown or cannot be met.
        PieceCompilerUnavailable: The piece compiler is not installed.
        CompileError: Autograd records, or a piece cannot be split off or compiled.
    """
    if mode is not None:
        raise ConfigError(
            f"Backend 'sgl_piecewise' has no modes (got mode={mode!r}). Capture the compiled forward for CUDA "
            "graphs; for Inductor's tuning use options={'inductor_config': {...}}."
        )
    typed = options_from(options)
    with profile_of_backend(typed.profile):
        with span("import piece compiler", "import"):
            piece_compiler = recorded_compiler(piece_compiler_for(typed), typed)
        _refuse_autograd(gm, example_inputs)
        with span(SPLIT_SPAN, "graph passes") as noted:
            split = run_passes(gm, example_inputs, pipeline(options_text=typed.key_text()))
            _note_pieces(split, noted)
        with span("link pieces", "link pieces"):
            return compile_and_stitch(split, piece_compiler)


def _note_pieces(split: GraphModule, noted: NotedSpan) -> None:
    """Says what the trace was split into."""
    calls = [str(node.target) for node in split.graph.nodes if node.op == "call_module"]
    num_marks = sum(is_marked_call(node.target) for node in split.graph.nodes)
    pieces = pieces_of(split)
    _logger.info("%d pieces, %d of them distinct, around %d marked calls", len(calls), len(pieces), num_marks)
    if not noted.is_heard:
        return
    uses = collections.Counter(calls)
    sizes = {name: num_operators(piece) for name, piece in pieces.items()}
    noted.note(
        num_pieces=len(calls),
        num_distinct_pieces=len(pieces),
        num_marked_calls=num_marks,
        num_operators=sum(sizes[name] * count for name, count in uses.items()),
        num_repeated_operators=sum(sizes[name] * (count - 1) for name, count in uses.items()),
        most_uses=max(uses.values(), default=0),
        uses=[f"{name}={count}" for name, count in uses.items()],
    )


def _refuse_autograd(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    if not torch.is_grad_enabled():
        return
    tensors = [*example_inputs, *gm.parameters(), *gm.buffers()]
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in tensors):
        raise CompileError(
            "Backend 'sgl_piecewise' compiles for inference, and autograd is recording. Call the compiled function "
            "under torch.inference_mode() or torch.no_grad(), from the first call on."
        )
