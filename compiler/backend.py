"""The Dynamo backend ``sgl_piecewise``: split at marks, compile each distinct piece once, link.

PyTorch finds it by the entry point ``torch_dynamo_backends``, so ``torch.compile(f, backend="sgl_piecewise")``
needs no import of ours. What it returns is a plain forward: capture does not know that it was compiled.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from sgl_piecewise.passes.dump import new_dump_folder
from sgl_piecewise.passes.pipeline import pipeline, run_passes
from sgl_piecewise.passes.split_at_marks import pieces_of
from sgl_piecewise.passes.validate import FINDINGS
from sgl_piecewise.runtime import torch_private_entries, torch_private_graph_inputs
from sgl_piecewise.runtime.build_profile import SPLIT_SPAN
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.garbage import collection_paused
from sgl_piecewise.runtime.mark_operator import is_marked_call
from sgl_piecewise.runtime.time_line import NotedSpan, span

from .dropin import DropIn
from .inference_only import refuse_autograd, refusing_autograd
from .layer_runner import with_layer_runner
from .layer_tracing import is_layer_call
from .options import CompileOptions, options_from
from .piece_builds import compiler_outside_layers, num_operators, recorded_compiler
from .piece_compilers import piece_compiler_for
from .profiling import profile_of_backend
from .stitching import compile_and_stitch
from .traced_function import current_counts
from .tracing_errors import warn_of_stopped_trace
from .uncapturable import refusing_capture

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
    if torch_private_entries.is_last_compile():
        _logger.warning(
            "This function was compiled as often as torch._dynamo.config.recompile_limit allows: PyTorch will run "
            "any other call of it uncompiled, and say so only here. TORCH_LOGS=recompiles names what differs; equal "
            "layers that differ in numbers are shared by sgl_piecewise.compile_layers_once(model)."
        )
    given = options_from(options)
    if given.capture != "none":
        torch_private_entries.bake_numbers_of_modules(gm.graph)
    with collection_paused():
        return compile_graph(gm, example_inputs, given, captures_calls=True)


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], options: CompileOptions, *, captures_calls: bool = False
) -> Callable[..., Any]:
    """Compiles one traced forward or layer.

    Args:
        gm: What Dynamo traced.
        example_inputs: What it was traced with.
        options: How.
        captures_calls: Whether the option ``capture`` counts: no for what is captured by who asked for the compile,
            and for layers.

    Returns:
        A callable with the inputs and outputs of ``gm``; shared layers that it calls are compiled when first run.

    Raises:
        PieceCompilerUnavailable: The piece compiler is not installed.
        ConfigError: There is no such piece compiler.
        CompileError: Autograd records, or a piece cannot be split off or compiled.
    """
    with profile_of_backend(options.profile):
        with span("import piece compiler", "import"):
            piece_compiler = recorded_compiler(piece_compiler_for(options), options)
        held = [*gm.parameters(), *gm.buffers()]
        refuse_autograd([*example_inputs, *held])
        warn_of_stopped_trace(gm)
        with span(SPLIT_SPAN, "graph passes") as noted:
            dump_folder = None if options.dump_folder is None else new_dump_folder(options.dump_folder)
            passes = pipeline(
                options_text=options.key_text(), fusions=options.fusions, dump_folder=dump_folder
            )
            split = run_passes(gm, example_inputs, passes)
        _count_pieces(split, noted)
        num_layers = sum(is_layer_call(node) for node in split.graph.nodes)
        piece_compiler = compiler_outside_layers(piece_compiler, options, num_layers)
        # Inductor writes small tensors of numbers into its kernels; where it does not, the capture refuses them.
        is_inductor = options.piece_compiler == "inductor"
        findings = [one for one in split.meta[FINDINGS] if not (is_inductor and one.is_host_data)]
        drop_in = DropIn(split, options.call_policy()) if captures_calls else None
        with span("link pieces", "link pieces"):
            forward = compile_and_stitch(split, piece_compiler, dump_folder=dump_folder)
        forward = refusing_capture(forward, findings)
        runner = None
        if num_layers:
            forward, runner = with_layer_runner(forward, partial(compile_graph, options=options))
        if drop_in is not None:
            forward = drop_in.wrap(forward, split, runner)
        torch_private_graph_inputs.forget_traced_inputs(split.graph)
        return refusing_autograd(forward, example_inputs, held)


def _count_pieces(split: GraphModule, noted: NotedSpan) -> None:
    """Says what the trace was split into."""
    uses = collections.Counter(str(node.target) for node in split.graph.nodes if node.op == "call_module")
    num_marks = sum(is_marked_call(node.target) for node in split.graph.nodes)
    num_pieces, num_distinct = sum(uses.values()), len(pieces_of(split))
    _logger.info(
        "%d pieces, %d of them distinct, around %d marked calls", num_pieces, num_distinct, num_marks
    )
    counts = current_counts()
    counts.num_pieces += num_pieces
    counts.num_compiled_pieces += num_distinct
    if not noted.is_heard:
        return
    sizes = {name: num_operators(piece) for name, piece in pieces_of(split).items()}
    noted.note(
        num_pieces=num_pieces,
        num_distinct_pieces=num_distinct,
        num_marked_calls=num_marks - sum(is_layer_call(node) for node in split.graph.nodes),
        num_layer_calls=sum(is_layer_call(node) for node in split.graph.nodes),
        num_operators=sum(sizes[name] * count for name, count in uses.items()),
        num_repeated_operators=sum(sizes[name] * (count - 1) for name, count in uses.items()),
        most_uses=max(uses.values(), default=0),
        uses=[f"{name}={count}" for name, count in uses.items()],
    )
