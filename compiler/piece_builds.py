"""Compiles a piece as asked, and keeps the facts: from disk or not, how long, and which kernels came of it.

Around any piece compiler stands the same frame: a span on the build's time line and a `PieceBuild`. Around
Inductor stands the cache on disk too. This module must not know how pieces are called.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.runtime import torch_private_cache, torch_private_compiling, torch_private_events
from sgl_piecewise.runtime.build_profile import PIECE_SPAN
from sgl_piecewise.runtime.config import cache_folder
from sgl_piecewise.runtime.records import PhaseClock, PieceBuild
from sgl_piecewise.runtime.time_line import CONTAINER, NotedSpan, span

from .cache import CacheEntry, CompileCache
from .options import CompileOptions
from .piece_compilers import PieceCompiler, run_as_fx
from .piece_key import environment_key, environment_of, piece_key

_logger = logging.getLogger(__name__)

_NUM_NAMED_OPERATORS = 6
_MANY_LAYERS = 8
_FEW_OPERATORS = 48
_KERNEL = re.compile(r"^(\w+) = async_compile\.|\b(extern_kernels\.\w+)\(", re.MULTILINE)

_watchers: list[list[PieceBuild]] = []


@contextlib.contextmanager
def watch_piece_builds() -> Iterator[list[PieceBuild]]:
    """Collects the pieces that are compiled during the block, by any thread."""
    builds: list[PieceBuild] = []
    _watchers.append(builds)
    try:
        yield builds
    finally:
        _watchers[:] = [other for other in _watchers if other is not builds]


def recorded_compiler(piece_compiler: PieceCompiler, options: CompileOptions) -> PieceCompiler:
    """Returns the piece compiler of some options with its work recorded, and Inductor's kept on disk."""
    if options.piece_compiler == "inductor":
        cache = CompileCache(Path(options.cache_folder or cache_folder()))
        return CachedCompiler(piece_compiler, cache, options.key_text())
    return _recorded(piece_compiler)


def compiler_outside_layers(
    compiler: PieceCompiler, options: CompileOptions, num_layers: int
) -> PieceCompiler:
    """Returns what compiles the pieces of a forward around its shared layers.

    A piece that runs once a forward takes as long to compile as one that runs in every layer, and gives a fraction.

    Args:
        compiler: What compiles the pieces of layers.
        options: How.
        num_layers: Calls of shared layers in the forward.
    """
    if not num_layers or options.outside_layers == "compile":
        return compiler
    as_fx = _recorded(run_as_fx)
    if options.outside_layers == "fx":
        return as_fx
    if options.piece_compiler != "inductor" or num_layers < _MANY_LAYERS:
        return compiler

    def compile_large(piece: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        is_small = num_operators(piece) <= _FEW_OPERATORS
        return (as_fx if is_small else compiler)(piece, example_inputs)

    return compile_large


def _recorded(piece_compiler: PieceCompiler) -> PieceCompiler:
    """Returns the piece compiler with its work recorded, and nothing kept on disk."""

    def compile_piece(piece: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        clock = PhaseClock()
        with span(PIECE_SPAN, "piece compiler", piece=_name_of(piece)) as noted:
            result = piece_compiler(piece, example_inputs)
            _record(piece, noted, key="", cache="uncached", compile_s=clock.total_s())
        return result

    return compile_piece


class CachedCompiler:
    """Inductor, with its artefacts on disk.

    Args:
        piece_compiler: Inductor as a piece compiler.
        cache: Where artefacts go.
        options_text: What else decides how a piece is compiled.
    """

    def __init__(self, piece_compiler: PieceCompiler, cache: CompileCache, options_text: str) -> None:
        self._compile = piece_compiler
        self._cache = cache
        self._options_text = options_text

    def __call__(self, piece: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with span(PIECE_SPAN, CONTAINER, piece=_name_of(piece)) as noted:
            with span("piece key", "cache check"):
                facts = environment_of(example_inputs)
                environment, key = environment_key(facts), piece_key(piece, self._options_text)
            with _noted_kernels(noted):
                if self._cache.can_hold(environment, facts):
                    self._probe_host(environment, example_inputs)
                    result, cache, compile_s = self._through_cache(piece, example_inputs, environment, key)
                else:
                    result, cache, compile_s = self._timed(piece, example_inputs)
            _record(piece, noted, key=key, cache=cache, compile_s=compile_s)
        return result

    def _through_cache(
        self, piece: GraphModule, example_inputs: Sequence[Any], environment: str, key: str
    ) -> tuple[Callable[..., Any], Literal["hit", "miss", "uncached"], float]:
        folder = self._cache.folder_of(environment, key)
        with span("check cache entry", "cache check"):
            is_whole = self._cache.is_whole(environment, key)
            was_there = folder.exists()
        try:
            with _artefacts_in(folder):
                result, cache, compile_s = self._timed(piece, example_inputs)
        except torch_private_compiling.RESTARTS:
            raise
        except Exception as err:
            # Files of a process that was ended midway are in no entry: compile once more without them. If the fault
            # is not theirs it comes again, and is the one that the caller sees.
            if not was_there:
                raise
            _logger.warning("Cached files in %s could not be used (%s): they are compiled anew.", folder, err)
            self._cache.set_aside(environment, key)
            with _artefacts_in(folder):
                result, cache, compile_s = self._timed(piece, example_inputs)
            is_whole = False
        if cache == "miss" or (cache == "hit" and not is_whole):
            with span("write cache entry", "cache write"):
                self._store(piece, environment, key, compile_s)
        return result, cache, compile_s

    def _timed(
        self, piece: GraphModule, example_inputs: Sequence[Any]
    ) -> tuple[Callable[..., Any], Literal["hit", "miss", "uncached"], float]:
        before, clock = torch_private_cache.cache_counts(), PhaseClock()
        with span("inductor", CONTAINER):
            result = self._compile(piece, example_inputs)
        counts = torch_private_cache.cache_counts().since(before)
        if counts.num_misses:
            return result, "miss", clock.total_s()
        return result, "hit" if counts.num_hits else "uncached", clock.total_s()

    def _store(self, piece: GraphModule, environment: str, key: str, compile_s: float) -> None:
        operators = [_operator_name(node) for node in _operators(piece)]
        entry = CacheEntry(
            key=key,
            environment=environment,
            options=self._options_text,
            operators=operators[:_NUM_NAMED_OPERATORS],
            num_operators=len(operators),
            compile_s=compile_s,
            files={},
        )
        try:
            self._cache.store(entry)
        except OSError as err:
            _logger.warning("Piece %s was compiled and could not be put into the cache: %s", key, err)

    def _probe_host(self, environment: str, example_inputs: Sequence[Any]) -> None:
        """Inductor asks once a process, also to load a library, and would else keep it in some piece's folder."""
        if any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in example_inputs):
            _probe_host_once(self._cache.host_folder(environment))


@contextlib.contextmanager
def _artefacts_in(folder: Path) -> Iterator[None]:
    """Keeps artefacts in a folder; that Inductor forgets those of others takes milliseconds, and has a name."""
    with contextlib.ExitStack() as kept:
        with span("enter the cache's folder", "cache check"):
            kept.enter_context(torch_private_cache.artefacts_in(folder))
        try:
            yield
        finally:
            with span("leave the cache's folder", "cache check"):
                kept.close()


@functools.cache
def _probe_host_once(folder: Path) -> None:
    with span("probe the host's compiler", "host compiler probe"), _artefacts_in(folder):
        torch_private_cache.probe_host_compiler()


def _record(
    piece: GraphModule,
    noted: NotedSpan,
    *,
    key: str,
    cache: Literal["hit", "miss", "uncached"],
    compile_s: float,
) -> None:
    build = PieceBuild(
        key=key, piece=_name_of(piece), cache=cache, compile_s=compile_s, num_operators=num_operators(piece)
    )
    noted.note(key=key, cache=cache, num_operators=build.num_operators)
    for builds in _watchers:
        builds.append(build)


@contextlib.contextmanager
def _noted_kernels(noted: NotedSpan) -> Iterator[None]:
    """Notes the kernels that generated code calls, where someone listens."""
    if not noted.is_heard:
        yield
        return
    names: dict[str, None] = {}

    def hear(code: str) -> None:
        names.update(dict.fromkeys(compiled or library for compiled, library in _KERNEL.findall(code)))

    with torch_private_events.inductor_heard(hear):
        yield
    noted.note(kernels=list(names))


def _name_of(piece: GraphModule) -> str:
    return type(piece).__name__


def num_operators(piece: GraphModule) -> int:
    """Returns how many nodes of a piece compute something."""
    return len(_operators(piece))


def _operators(piece: GraphModule) -> list[Node]:
    return [node for node in piece.graph.nodes if node.op not in ("placeholder", "output")]


def _operator_name(node: Node) -> str:
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))
