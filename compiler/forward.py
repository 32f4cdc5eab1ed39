"""A compiled forward whose entry is ours: equal layers traced once, all sizes at once, and frozen on request."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sgl_piecewise.runtime import torch_private, tree
from sgl_piecewise.runtime.errors import ConfigError, nearest

from .backend import compile_graph
from .layer_runner import LayerRunner
from .layer_sharing import compile_layers_once, repeated_layers
from .options import options_from
from .traced_function import CompileCounts, CompileState, OnRecompile, TracedFunction, ready_to_trace

_ON_RECOMPILE: tuple[OnRecompile, ...] = ("error", "eager")


class CompiledForward:
    """A function or module, compiled; called like it.

    Traces at its first call, or when `trace` is called. Has ``__self__`` and the signature of what it was made
    from, so that a capture of it checks the same parameters.

    Args:
        fn: A module, a method of one, or a function. Equal layers of the module are prepared for sharing.
        options: As for backend ``sgl_piecewise``.
        shares_layers: Whether equal layers are traced once.

    Raises:
        ConfigError: ``fn`` is not callable, or an option cannot be accepted.
    """

    def __init__(
        self, fn: Callable[..., Any], *, options: Mapping[str, Any] | None = None, shares_layers: bool = True
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"A function or module can be compiled, not a {type(fn).__name__}.")
        owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
        self.__self__ = owner if isinstance(owner, torch.nn.Module) else None
        self.__wrapped__ = fn.forward if isinstance(fn, torch.nn.Module) else fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        is_shared = False
        if shares_layers and self.__self__ is not None and repeated_layers(self.__self__):
            compile_layers_once(self.__self__)
            is_shared = True
        self._fn = fn
        self._state = CompileState(has_repeats=not is_shared)
        backend = functools.partial(compile_graph, options=options_from(options))
        runner = LayerRunner(backend, self._state)
        self._function = TracedFunction(
            _call_forward, backend, name=self.__qualname__, state=self._state, is_layer=False
        )
        self._run = runner.around(self._call)
        self._dynamic_dims: Mapping[int, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, compiled.

        Raises:
            RecompileError: Frozen, and called as it was never compiled for.
            CompileError: It cannot be traced in one graph, or a piece cannot be compiled.
        """
        # Guards tell tensors of inference mode from others.
        args = tuple(map(_normal, args))
        kwargs = {name: _normal(value) for name, value in kwargs.items()}
        return self._run(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._function(self._fn, args, kwargs, before_trace=self._with_dynamic_dims)

    def _with_dynamic_dims(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        leaves, spec = tree.flatten((args, kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                dims = (self._dynamic_dims[index],) if index in self._dynamic_dims else ()
                leaves[index] = ready_to_trace(leaf, dims, self._state)
        args, kwargs = tree.unflatten(spec, leaves)
        return fn, args, kwargs

    def trace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_dims: Mapping[int, int]
    ) -> None:
        """Traces and compiles now, by one call.

        Args:
            args: Positional arguments, at the size to trace with.
            kwargs: Keyword arguments likewise.
            dynamic_dims: Index of a tensor among the leaves of ``(args, kwargs)`` to its dimension that this
                trace must not bake in; later ones bake it in only if they have to.

        Raises:
            CompileError: It cannot be traced in one graph, or it bakes such a dimension in.
        """
        self._dynamic_dims = dict(dynamic_dims)
        self._state.must_be_dynamic = True
        try:
            self(*args, **kwargs)
        finally:
            self._state.must_be_dynamic = False

    def freeze(self, on_recompile: str = "error") -> None:
        """From now on nothing is traced or compiled any more.

        Args:
            on_recompile: What a call does that was not compiled for: ``error`` raises `RecompileError` with the
                guards that it does not meet; ``eager`` runs the function, or just the layer, uncompiled,
                counts that in `fallbacks` and logs the first.

        Raises:
            ConfigError: Another word.
        """
        if on_recompile not in _ON_RECOMPILE:
            raise ConfigError(
                f"Unknown on_recompile {on_recompile!r}. {nearest(on_recompile, _ON_RECOMPILE)}"
            )
        self._state.on_recompile = "error" if on_recompile == "error" else "eager"

    def trusting(self) -> contextlib.AbstractContextManager[None]:
        """Lets calls in the block skip the guards where an earlier call in it was like them; for builds."""
        return self._state.trusting()

    @property
    def counts(self) -> CompileCounts:
        """What was traced and compiled so far."""
        return self._state.counts

    @property
    def phases_s(self) -> dict[str, float]:
        """Wall seconds of all compiles so far: ``trace``, ``compile_pieces``, ``first_run``."""
        return dict(self._state.clock.phases_s)

    @property
    def fallbacks(self) -> collections.Counter[str]:
        """Calls since `freeze` that ran uncompiled, by the function or layer."""
        return self._state.fallbacks

    def __repr__(self) -> str:
        return f"<compiled {self.__qualname__}>"


def _normal(value: Any) -> Any:
    """Returns a value whose tensors were not made in inference mode, over the same memory."""
    if isinstance(value, torch.Tensor):
        return torch_private.as_normal_tensors([value])[0] if value.layout is torch.strided else value
    if type(value) in tree.PLAIN_LEAVES:
        return value
    leaves, spec = tree.flatten(value)
    if spec == tree.LEAF:
        return value
    normal = list(map(_normal, leaves))
    # The container itself where nothing in it had to be replaced: the function may write into it.
    is_same = all(one is other for one, other in zip(leaves, normal, strict=True))
    return value if is_same else tree.unflatten(spec, normal)


def _call_forward(forward: Any, args: Any, kwargs: Any) -> Any:
    """What Dynamo traces."""
    return forward(*args, **kwargs)
