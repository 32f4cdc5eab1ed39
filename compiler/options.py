"""Options of the backend, as ``torch.compile(..., options={...})`` gives them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_piecewise.passes.fusions import FUSIONS
from sgl_piecewise.runtime.capture.call_policy import CallPolicy
from sgl_piecewise.runtime.errors import ConfigError, nearest

DEFAULT_PIECE_COMPILER = "inductor"
# One compile serves all sizes, and tuning at the one of the trace chooses for none of the others: pointwise kernels
# and reductions are compiled once, where Inductor would compile and time several block sizes of each.
_INDUCTOR_SETTINGS = {
    "triton.autotune_pointwise": False,
    "test_configs.force_filter_reduction_configs": True,
}
_OUTSIDE_LAYERS = ("auto", "compile", "fx")


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How a forward is compiled.

    Attributes:
        piece_compiler: What turns a piece into a callable: ``fx`` (runs the graph as it is), ``inductor``, the
            name of any registered Dynamo backend, or a callable ``(gm, example_inputs) -> callable``.
        outside_layers: What becomes of the few pieces around many equal layers, which run once a forward where those
            of a layer run as often as there are layers: ``compile`` them too, run them as ``fx``, or ``auto``, which
            runs small ones as FX if Inductor is the piece compiler.
        inductor_config: Settings of Inductor for the pieces; its CUDA graphs stay off, capture is ours.
        cache_folder: Where pieces that Inductor compiled are kept, and looked for; None is the folder that
            ``SGL_PIECEWISE_CACHE`` names, or ``~/.cache/sgl-piecewise``.
        profile: File for the profile of this process's compiles as JSON; written anew after each.
        fusions: Names of passes that change numerics, such as ``join_linears``; none unless asked.
        dump_folder: Where every trace is written as text, before and after each pass, and its pieces; None
            writes nothing.
        capture: Whether calls capture, and how; this and all that follows as in `CallPolicy`.
        capture_after: Calls of a shape before one captures it.
        capture_sizes: Which values of the varying size get a graph.
        dynamic_dims: Argument to the dimension that follows the size; calls between sizes are then padded.
        pad_values: What padded rows of such arguments hold.
        padded_rows: Whether that they reach nothing else is checked or trusted.
        max_graphs: The most recordings of one compiled forward.
        outputs: Whether calls return copies or views of graph memory.
    """

    piece_compiler: str | Callable[..., Any] = DEFAULT_PIECE_COMPILER
    outside_layers: str = "auto"
    inductor_config: Mapping[str, Any] = field(default_factory=dict)
    cache_folder: str | os.PathLike[str] | None = None
    profile: str | os.PathLike[str] | None = None
    fusions: Sequence[str] = ()
    dump_folder: str | os.PathLike[str] | None = None
    capture: str = CallPolicy.capture
    capture_after: int = CallPolicy.capture_after
    capture_sizes: Sequence[int] | None = CallPolicy.capture_sizes
    dynamic_dims: Mapping[str, int] | None = CallPolicy.dynamic_dims
    pad_values: Mapping[str, int | float | bool] | None = CallPolicy.pad_values
    padded_rows: str = CallPolicy.padded_rows
    max_graphs: int = CallPolicy.max_graphs
    outputs: str = CallPolicy.outputs

    def __post_init__(self) -> None:
        if not isinstance(self.piece_compiler, str) and not callable(self.piece_compiler):
            raise ConfigError(
                "piece_compiler must be a name or a callable (gm, example_inputs) -> callable, got "
                f"{type(self.piece_compiler).__name__}."
            )
        if self.outside_layers not in _OUTSIDE_LAYERS:
            raise ConfigError(
                f"Unknown outside_layers {self.outside_layers!r}. {nearest(self.outside_layers, _OUTSIDE_LAYERS)}"
            )
        if not isinstance(self.inductor_config, Mapping):
            raise ConfigError(
                f"inductor_config must be a mapping of names to values, got {type(self.inductor_config).__name__}."
            )
        if self.inductor_config and self.piece_compiler != "inductor":
            raise ConfigError(
                f"inductor_config is given, but piece_compiler is {self.piece_compiler!r}: leave one of them out."
            )
        _check_path("cache_folder", self.cache_folder)
        if self.cache_folder is not None and self.piece_compiler != "inductor":
            raise ConfigError(
                f"cache_folder is given, but piece_compiler is {self.piece_compiler!r}: only what Inductor compiled is "
                "kept on disk. Leave one of them out."
            )
        _check_path("profile", self.profile)
        if self.inductor_config.get("triton.cudagraphs"):
            raise ConfigError(
                "inductor_config turns Inductor's own CUDA graphs on. Capture has one owner: leave it out and "
                "capture the compiled forward."
            )

        if isinstance(self.fusions, str) or not isinstance(self.fusions, Sequence):
            raise ConfigError(f"fusions must be a list of names, got {self.fusions!r}.")
        for name in self.fusions:
            if not isinstance(name, str) or name not in FUSIONS:
                raise ConfigError(f"Unknown fusion {name!r}. {nearest(name, FUSIONS)}")
            if list(self.fusions).count(name) > 1:
                raise ConfigError(f"fusions names {name!r} more than once; a fusion runs once. Name it once.")
        _check_path("dump_folder", self.dump_folder)
        self.call_policy()

    def call_policy(self) -> CallPolicy:
        """Returns what is captured while the compiled forward is called.

        Raises:
            ConfigError: An option that cannot be accepted.
        """
        return CallPolicy(**{one.name: getattr(self, one.name) for one in dataclasses.fields(CallPolicy)})

    def inductor_settings(self) -> dict[str, Any]:
        """Returns what Inductor is told: ours where nothing else was asked, and no CUDA graphs of its own."""
        return {**_INDUCTOR_SETTINGS, **self.inductor_config, "triton.cudagraphs": False}

    def key_text(self) -> str:
        """Returns what of the options decides how a piece is compiled, as text."""
        given = self.inductor_settings() if self.piece_compiler == "inductor" else {}
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(given.items()))
        fusions = f" fusions={sorted(self.fusions)}" if self.fusions else ""
        return f"piece_compiler={self.piece_compiler!r} {settings}".rstrip() + fusions


def _check_path(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str | os.PathLike) or not os.fspath(value)):
        raise ConfigError(f"{name} must be a path, got {value!r}. Leave it out for none.")


def options_from(given: Mapping[str, Any] | None) -> CompileOptions:
    """Returns typed options.

    Args:
        given: Names and values, or None for the defaults.

    Raises:
        ConfigError: A name is unknown (the nearest one is named), or a value cannot be accepted.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            "options of backend 'sgl_piecewise' must be a mapping of names to values, as in {'piece_compiler': 'fx'}, "
            f"got {given!r}."
        )
    known = {option.name for option in dataclasses.fields(CompileOptions)}
    for name in given or {}:
        if name not in known:
            raise ConfigError(
                f"Unknown option {name!r} of backend 'sgl_piecewise'. {nearest(str(name), known)}"
            )
    return CompileOptions(**(given or {}))
