"""Compiles the pieces of a split forward and links them and its marks into one callable.

One invariant: what runs, runs in the order of the split module. A piece whose inputs share memory, and
which may write one of them, runs as FX whatever was asked: compilers take inputs for distinct memory.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.passes.split_at_marks import pieces_of
from sgl_piecewise.passes.writes import may_write
from sgl_piecewise.runtime import torch_private_compiling
from sgl_piecewise.runtime.errors import CompileError
from sgl_piecewise.runtime.mark_operator import body_of, is_marked_call

from .piece_compilers import PieceCompiler, run_as_fx

_logger = logging.getLogger(__name__)


def compile_and_stitch(
    split: GraphModule, piece_compiler: PieceCompiler, *, dump_folder: Path | None = None
) -> Callable[..., Any]:
    """Compiles each piece once and returns the forward that calls them.

    Args:
        split: Pieces and marks; changed in place.
        piece_compiler: Compiles one piece.
        dump_folder: Where the pieces were written, for the message of a failure.

    Returns:
        A callable with the inputs and outputs of the forward that was split.

    Raises:
        CompileError: The piece compiler failed; its error is the cause, and the message holds the piece.
    """
    compiled: dict[str, Callable[..., Any]] = {}
    pieces = pieces_of(split)
    for node in split.graph.nodes:
        if node.op == "call_module" and node.target not in compiled:
            name = str(node.target)
            # Dynamo is off for all that a backend returns.
            compiled[name] = torch_private_compiling.with_dynamo_as_it_is(
                _compile(name, pieces[name], node, piece_compiler, dump_folder)
            )
    for node in split.graph.nodes:
        if is_marked_call(node.target):
            node.target = body_of(node.target)
        elif node.op == "call_module":
            name = str(node.target)
            node.op, node.target = "call_function", _named(name, compiled[name])
    for name in compiled:
        delattr(split, name)
    split.graph.lint()
    split.recompile()
    forward: Callable[..., Any] = split.forward
    return forward


def _compile(
    name: str, piece: GraphModule, call: Node, piece_compiler: PieceCompiler, dump_folder: Path | None
) -> Callable[..., Any]:
    values = [value.meta.get("example_value") if isinstance(value, Node) else value for value in call.args]
    examples = torch_private_compiling.example_inputs(values)
    is_shared = torch_private_compiling.share_memory(examples)
    if is_shared and _writes_inputs(piece, values):
        _logger.warning(
            "%s writes an input that shares memory with another: it runs as FX, uncompiled.", name
        )
        return run_as_fx(piece, examples)
    # A compiler may change the piece, before it fails or when it is done.
    text = str(piece.graph)
    kept = _copied(piece) if not is_shared and any(map(may_write, piece.graph.nodes)) else None
    try:
        with torch_private_compiling.separate_compile():
            result = piece_compiler(piece, examples)
    except torch_private_compiling.RESTARTS:
        raise
    except Exception as err:
        where = (
            f"its text is in {dump_folder / 'pieces'}"
            if dump_folder is not None
            else "options={'dump_folder': ...} writes every graph and piece as text"
        )
        raise CompileError(
            f"The piece compiler failed on {name} ({type(err).__name__}: {err}). Run the pieces as they are with "
            f"options={{'piece_compiler': 'fx'}}, or report it with this piece ({where}):\n{text}"
        ) from err
    if not callable(result):
        raise CompileError(
            f"The piece compiler returned a {type(result).__name__} for {name}, not a callable."
        )
    return result if kept is None else _unless_memory_is_shared(name, result, kept, examples)


def _copied(piece: GraphModule) -> GraphModule:
    """Returns a piece of its own graph, without what was noted at the nodes."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(piece.graph, {}))
    for node in graph.nodes:
        node.meta.clear()
    return GraphModule(piece, graph)


def _unless_memory_is_shared(
    name: str, compiled: Callable[..., Any], piece: GraphModule, examples: Sequence[Any]
) -> Callable[..., Any]:
    """Returns a compiled piece that runs as FX where a call's inputs share memory, as those of the trace did not.

    Dynamo does not guard on that; the piece may write one of them.
    """
    tensors = {index: value for index, value in enumerate(examples) if isinstance(value, torch.Tensor)}
    places = [index for index, value in tensors.items() if value.layout is torch.strided]
    if len(places) < 2:
        return compiled
    chosen, is_shared = operator.itemgetter(*places), torch_private_compiling.memory_is_shared
    has_warned = False

    def call(*args: Any) -> Any:
        nonlocal has_warned
        if not is_shared(chosen(args)):
            return compiled(*args)
        if not has_warned:
            has_warned = True
            _logger.warning("%s may write one of its inputs, which share memory: it runs as FX.", name)
        return piece(*args)

    return call


def _writes_inputs(piece: GraphModule, values: Sequence[Any]) -> bool:
    """Tells whether a run of the piece changes a tensor that it was given."""
    examples = torch_private_compiling.example_inputs(values)
    tensors = [value for value in examples if isinstance(value, torch.Tensor)]
    before = [tensor._version for tensor in tensors]
    with torch_private_compiling.on_fake_tensors_of(examples) as fakes:
        piece(*fakes)
    return [tensor._version for tensor in tensors] != before


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a callable a name that generated code can use."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call
