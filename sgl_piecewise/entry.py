"""``capture`` with a compiler in front: the one place that joins the two axes of the grid.

Compiling makes a callable and capturing takes one; neither knows the other, so what knows both stands above.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sgl_piecewise.runtime.build_profile import profiled
from sgl_piecewise.runtime.capture.arguments import ArgumentBinder
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.entry import capture as capture_plain
from sgl_piecewise.runtime.capture.session import refuse_nested_capture
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.garbage import full_collections_put_off
from sgl_piecewise.runtime.records import IMPORT, PhaseClock

if TYPE_CHECKING:
    from sgl_piecewise.compiler.forward import CompiledForward

SUFFIXES = {"none": "", "full": "_full", "breakable": "_piecewise"}
"""What a capture strategy adds to the name of a compiler in the names of cells."""

CELLS = {
    "eager": ("none", "none"),
    "full": ("none", "full"),
    "breakable": ("none", "breakable"),
    "fx": ("fx", "none"),
    "fx_full": ("fx", "full"),
    "fx_piecewise": ("fx", "breakable"),
    "tc": ("inductor", "none"),
    "tc_full": ("inductor", "full"),
    "tc_piecewise": ("inductor", "breakable"),
}
"""Compiler and capture strategy of the named cells of the grid."""

BIT_KEEPING_COMPILERS = frozenset({"none", "fx"})
"""Compilers whose pieces run the operators of eager in eager's order."""


def capture(
    fn: Callable[..., Any],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    compile: str | Callable[..., Any] | None = None,  # noqa: A002 - the axis of the grid has this name
    compile_options: Mapping[str, Any] | None = None,
    shares_layers: bool = True,
    on_recompile: str | None = None,
    **options: Any,
) -> CapturedCallable:
    """Captures a function or module, compiled first if asked.

    Args:
        fn: Any callable; run without autograd.
        example_args: Positional arguments, at the largest capture size. Tensors are copied.
        example_kwargs: Keyword arguments likewise.
        compile: None or ``none``, or what compiles the pieces between marks: ``inductor``, ``fx`` (runs
            them as they are), the name of any Dynamo backend, or a callable. One trace and one compile serve
            all capture sizes.
        compile_options: More options of backend ``sgl_piecewise``.
        shares_layers: Whether equal layers of the module are traced and compiled once.
        on_recompile: What a call without a graph does if it was not compiled for: None compiles, ``error``
            raises, ``eager`` runs it uncompiled and counts that.
        **options: Of `runtime.capture.entry.capture`: ``strategy`` (the capture strategy), ``outputs``, ...

    Returns:
        A callable with ``fn``'s signature. Its ``build`` has the compiler's phases too.

    Raises:
        ConfigError: An option that cannot be accepted.
        CompileError: The function cannot be compiled; the message says where, and what to do.
        CaptureError: It cannot be captured; nothing is left half-captured.
    """
    if compile is None or compile == "none":
        for name, given in (("compile_options", compile_options), ("on_recompile", on_recompile)):
            if given is not None:
                raise ConfigError(f"{name} is given, but nothing is compiled: say with what in compile=.")
        return capture_plain(fn, example_args, example_kwargs, **options)
    refuse_nested_capture()
    cell = cell_name(compile, options.get("strategy", "breakable"))
    report = options.get("on_progress") or (lambda phase, done, total: None)
    profile = options.pop("profile", None)
    with profiled(profile, "build", strategy=cell) as facts, full_collections_put_off():
        clock = PhaseClock()
        with clock.phase(IMPORT):
            import_compiler(compile)
        compiled = compiled_forward(fn, compile, compile_options, shares_layers=shares_layers)
        args, kwargs = ArgumentBinder(compiled).canonical(tuple(example_args), dict(example_kwargs or {}))
        report("compile", 0, 1)
        with compiled.trusting():
            trace_for_all_sizes(
                compiled, args, kwargs, options.get("capture_sizes"), options.get("dynamic_dims")
            )
            report("compile", 1, 1)
            captured = capture_plain(compiled, example_args, example_kwargs, **options)
        facts.update(device=captured.pool.device.name, emulated=str(captured.pool.device.is_emulated))
    if on_recompile is not None:
        compiled.freeze(on_recompile)
    _add_compile_phases(captured, compiled, cell, import_s=clock.phases_s[IMPORT])
    return captured


def cell_name(compiler: str | Callable[..., Any], strategy: str) -> str:
    """Returns the name of a cell of the grid, for example ``tc_piecewise``."""
    name = compiler if isinstance(compiler, str) else getattr(compiler, "__name__", type(compiler).__name__)
    return f"{'tc' if name == 'inductor' else name}{SUFFIXES.get(strategy, '')}"


def start_compile_workers(compilers: Iterable[object]) -> None:
    """Starts what compilers have of worker processes, and returns at once: they come up while a model is loaded.

    Args:
        compilers: Names or callables that will compile; of others than Inductor nothing is started.
    """
    if any(compiler == "inductor" for compiler in compilers):
        from sgl_piecewise.runtime.torch_private_workers import start_workers

        start_workers()


def import_compiler(compiler: str | Callable[..., Any]) -> None:
    """Imports the compiler and what compiles its pieces, here and not before; a build does not count it."""
    with full_collections_put_off():
        from sgl_piecewise.compiler import forward, layer_tracing, trace_size  # noqa: F401 - for what they import
        from sgl_piecewise.compiler.piece_compilers import import_piece_compiler

        import_piece_compiler(compiler)


def compiled_forward(
    fn: Callable[..., Any],
    piece_compiler: str | Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    *,
    shares_layers: bool = True,
) -> CompiledForward:
    """Returns a compiled forward, not traced yet."""
    from sgl_piecewise.compiler.forward import CompiledForward

    if "piece_compiler" in (options or {}):
        raise ConfigError(
            "compile_options names a piece_compiler, which is what compile= says: leave it out."
        )
    return CompiledForward(
        fn, options={**(options or {}), "piece_compiler": piece_compiler}, shares_layers=shares_layers
    )


def trace_for_all_sizes(
    compiled: CompiledForward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    capture_sizes: Sequence[int] | None,
    dynamic_dims: Mapping[str, int] | None,
) -> None:
    """Traces and compiles at a size that is equal to no other dimension, where sizes vary at all.

    Args:
        compiled: What is traced.
        args: Positional arguments at the largest size, as calls will pass them.
        kwargs: Keyword arguments likewise.
        capture_sizes: Ascending; None where all shapes are fixed.
        dynamic_dims: As for `capture`.

    Raises:
        CompileError: It cannot be traced in one graph, or bakes its size in.
    """
    from sgl_piecewise.compiler.trace_size import arguments_to_trace

    if capture_sizes is None:
        compiled.trace(args, kwargs, {})
        return
    compiled.trace(*arguments_to_trace(compiled, args, kwargs, capture_sizes, dynamic_dims))


def _add_compile_phases(
    captured: CapturedCallable, compiled: CompiledForward, cell: str, *, import_s: float
) -> None:
    """Makes the compiler's time part of the build's."""
    build = captured.build
    assert build is not None, "capture() returns with its record"
    phases_s = compiled.phases_s
    captured.build = dataclasses.replace(
        build,
        strategy=cell,
        total_s=build.total_s + sum(phases_s.values()),
        phases_s={**phases_s, **build.phases_s},
        import_s=import_s,
    )


# Editors and ``help`` show the options by name.
capture.__signature__ = inspect.signature(capture).replace(  # type: ignore[attr-defined]
    parameters=[
        *(one for one in inspect.signature(capture).parameters.values() if one.kind is not one.VAR_KEYWORD),
        *(
            one
            for one in inspect.signature(capture_plain).parameters.values()
            if one.kind is one.KEYWORD_ONLY
        ),
    ]
)
