"""What turns a piece into a callable: FX as it is, Inductor, any Dynamo backend by name, any callable."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from sgl_piecewise.runtime import torch_private_compiling, torch_private_inductor
from sgl_piecewise.runtime.errors import ConfigError, PieceCompilerUnavailable, nearest, nearest_word

from .openvino_pieces import compile_with_openvino
from .options import CompileOptions

PieceCompiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""Takes a piece and fake inputs; returns what is called with real ones and gives the piece's tuple."""

# Backends of other packages: name, module whose import registers it, extra that installs it.
_EXTRAS = {
    "openvino": ("openvino", "openvino"),
    "torch_tensorrt": ("torch_tensorrt", "tensorrt"),
}
BACKEND_NAME = "sgl_piecewise"


def run_as_fx(piece: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Returns the piece's own code: the same operators in the same order as eager."""
    return piece.forward


def import_piece_compiler(chosen: str | PieceCompiler) -> None:
    """Imports what a piece compiler needs, and lets it set up what it does once a process.

    Both would otherwise count as compiling. Unknown names are left alone.
    """
    torch_private_inductor.import_dynamo()
    if chosen == "inductor":
        torch_private_inductor.set_up_inductor()
    elif isinstance(chosen, str) and chosen in _EXTRAS and importlib.util.find_spec(_EXTRAS[chosen][0]):
        importlib.import_module(_EXTRAS[chosen][0])


def piece_compiler_for(options: CompileOptions) -> PieceCompiler:
    """Returns the piece compiler that the options name.

    Raises:
        PieceCompilerUnavailable: It belongs to a package that is not installed; the message names the extra.
        ConfigError: No backend has this name.
    """
    chosen = options.piece_compiler
    if not isinstance(chosen, str):
        return chosen
    if chosen == "fx":
        return run_as_fx
    if chosen == "cudagraphs":
        raise ConfigError(
            "piece_compiler is 'cudagraphs', which captures by itself. Capture has one owner: compile the pieces with "
            "'inductor' or 'fx', and let the option capture, or capture(), make the graphs."
        )
    if chosen == BACKEND_NAME:
        raise ConfigError(
            f"piece_compiler is {chosen!r} itself; name what compiles the pieces, such as 'inductor'."
        )
    if chosen in _EXTRAS:
        module, extra = _EXTRAS[chosen]
        if importlib.util.find_spec(module) is None:
            raise PieceCompilerUnavailable(
                f"Piece compiler {chosen!r} is not installed. Install it with: pip install 'sgl-piecewise[{extra}]'."
            )
        importlib.import_module(module)
    # Without those that PyTorch keeps for debugging and its own tests; they are accepted all the same.
    known = {"fx", *_EXTRAS, *torch.compiler.list_backends()} - {BACKEND_NAME, "cudagraphs"}
    backend = torch_private_compiling.registered_backend(chosen)
    if backend is None:
        raise ConfigError(f"Unknown piece compiler {chosen!r}. {nearest(chosen, known)}")
    if chosen == "inductor":
        names = torch_private_inductor.inductor_settings()
        _check_inductor_names(options.inductor_config, names)
        # Of our own settings a version of PyTorch may lack one.
        settings = {name: value for name, value in options.inductor_settings().items() if name in names}
        return partial(_compile_with_inductor, backend, settings)
    if chosen == "openvino":
        return partial(compile_with_openvino, backend)
    if chosen == "torch_tensorrt":
        # Without this it logs that it failed and runs the piece as it is.
        return partial(backend, options={"pass_through_build_failures": True})
    return backend


def _compile_with_inductor(
    inductor: Callable[..., Callable[..., Any]],
    settings: Mapping[str, Any],
    piece: GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    with torch_private_inductor.kernels_in_threads():
        return inductor(piece, example_inputs, config_patches=dict(settings))


def _check_inductor_names(names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            near = nearest_word(name, known)
            hint = f"did you mean {near!r}? " if near is not None else ""
            raise ConfigError(
                f"inductor_config names {name!r}, which Inductor does not have. {hint}"
                "torch._inductor.list_options() gives all names."
            )
