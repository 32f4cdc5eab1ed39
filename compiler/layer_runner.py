"""Runs shared layers: a class's forward is traced once, and again only where Dynamo's guards tell layers apart.

Which runner serves a layer's call is that of the compiled forward that is running.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_piecewise.runtime import tree
from sgl_piecewise.runtime.capture.autocast import without_autocast_cache
from sgl_piecewise.runtime.capture.session import is_session_open
from sgl_piecewise.runtime.errors import CaptureForbiddenError, CompileError
from sgl_piecewise.runtime.mark import active_capture

from .layer_sharing import forward_of, original_class
from .layer_watch import RecordedLayer
from .traced_function import NOT_KNOWN, Backend, CompileState, TracedFunction, ready_to_trace

_RUNNER: contextvars.ContextVar[LayerRunner | None] = contextvars.ContextVar(
    "sgl_piecewise_layer_runner", default=None
)


class LayerRunner:
    """Compiles and runs the shared layers of one compiled forward.

    Args:
        backend: Compiles a trace of a layer.
        state: Shared with the compiled forward; one of its own if None.

    Attributes:
        is_watching: Whether layers in recordings are noted, for `are_layers_as_recorded`.
    """

    def __init__(self, backend: Backend, state: CompileState | None = None) -> None:
        self._backend = backend
        self.is_watching = False
        self._state = CompileState() if state is None else state
        self._functions: dict[Callable[..., Any], TracedFunction] = {}
        self._layers: dict[int, weakref.ref[torch.nn.Module]] = {}
        # Layers in recordings, by what runs them.
        self._recorded: dict[tuple[int, Callable[..., Any]], RecordedLayer] = {}

    @property
    def skips_guards(self) -> bool:
        """Whether calls go by `run_known` first: in the captures of a build, each of which a warm-up came before.

        Outside inference mode the tensors of a call are as guards would have them, and nothing is saved.
        """
        return self._state.is_trusting and torch.is_inference_mode_enabled() and is_session_open()

    def run_known(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one layer as in an earlier call of the build that was like this one; `NOT_KNOWN` if there was none."""
        forward = forward_of(layer)
        function = self._functions.get(forward)
        return NOT_KNOWN if function is None else function.run_known((forward, layer, args, kwargs))

    def run(
        self,
        layer: torch.nn.Module,
        dynamic_dims: Sequence[Sequence[int]],
        tensors: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs one layer.

        Args:
            layer: Which.
            dynamic_dims: Of each tensor, the dimensions that no trace may bake in.
            tensors: The tensors among the arguments.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            CaptureForbiddenError: A recording that goes on would leave out what the layer does besides computing.
        """
        if id(layer) not in self._layers:
            self._layers[id(layer)] = weakref.ref(
                layer, functools.partial(_forget, weakref.ref(self), id(layer))
            )
        forward = forward_of(layer)
        function = self._functions.get(forward)
        if function is None:
            function = self._functions[forward] = TracedFunction(
                _call_layer,
                self._backend,
                name=original_class(layer).__qualname__,
                state=self._state,
                is_layer=True,
            )
        is_recorded = self.is_watching and active_capture() is not None
        if is_recorded:
            _refuse_python_effects(function)
        before_trace = functools.partial(_with_dynamic_dims, self._state, dynamic_dims, tensors)
        result = function(forward, layer, args, kwargs, before_trace=before_trace)
        if is_recorded:
            self._note(layer, forward, function, args, kwargs)
        return result

    def _note(
        self,
        layer: torch.nn.Module,
        forward: Callable[..., Any],
        function: TracedFunction,
        args: Any,
        kwargs: Any,
    ) -> None:
        """Notes a layer that is being recorded, and what ran it."""
        _refuse_python_effects(function)  # It may have been traced for this call.
        entry = function.entry_for((forward, layer, args, kwargs))
        if entry is None:
            raise CaptureForbiddenError(
                f"Layer {function.name} would be traced anew at every call, so a recording of it could not be told "
                "from one that is out of date. Compile the model without compile_layers_once."
            )
        recorded = self._recorded.setdefault((id(layer), forward), RecordedLayer())
        recorded.add(entry, {"forward": forward, "layer": layer}, {"args": args, "kwargs": kwargs})

    def are_layers_as_recorded(self) -> bool:
        """Tells whether every layer that a recording holds would run again what was recorded of it."""
        if not self._recorded:
            return True
        with without_autocast_cache():  # As around all that the guards were made for.
            for (layer_id, forward), recorded in list(self._recorded.items()):  # Another thread may capture.
                alive = self._layers.get(layer_id)
                layer = None if alive is None else alive()
                if layer is None:
                    continue
                if forward_of(layer) is not forward:
                    return False
                if not recorded.is_unchanged({"forward": forward, "layer": layer}):
                    return False
        return True

    def forget_recordings(self) -> None:
        """Drops what was noted of layers while recordings were made; those are gone."""
        self._recorded.clear()

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a compiled forward whose shared layers this runs.

        Always without autocast's cache: captures switch it off, and guards would tell a capture's call from others,
        so that each layer would be traced once more, in the middle of the capture.
        """

        def run(*args: Any) -> Any:
            token = _RUNNER.set(self)
            try:
                with without_autocast_cache():
                    return forward(*args)
            finally:
                _RUNNER.reset(token)

        return run

    def forget(self, layer_id: int) -> None:
        """Drops what was traced when the last layer that this ran is gone.

        Dynamo's guards of a layer hold the stack that they were made on, and with it the compiled forward that holds
        this runner: without the layers' death to go by, all would live for ever.
        """
        del self._layers[layer_id]
        for key in [key for key in self._recorded if key[0] == layer_id]:
            del self._recorded[key]
        if not self._layers:
            self._functions.clear()


def _forget(runner: weakref.ref[LayerRunner], layer_id: int, _: object) -> None:
    alive = runner()
    if alive is not None:
        alive.forget(layer_id)


def current_layer_runner() -> LayerRunner:
    """Returns the runner of the compiled forward that is running.

    Raises:
        CompileError: None is: a graph of ours was taken out of what compiled it.
    """
    runner = _RUNNER.get()
    if runner is None:
        raise CompileError(
            "A graph that calls a shared layer ran outside the forward that it was compiled for."
        )
    return runner


def with_layer_runner(
    forward: Callable[..., Any], backend: Backend
) -> tuple[Callable[..., Any], LayerRunner | None]:
    """Returns a forward, compiled now, whose shared layers have a runner; and the runner, if it is the forward's own.

    One that is present now will be present at every call, and the forward must not hold it: guards of layers hold
    the stack that they were made on, with the code of the forward in it, and all would live for ever.
    """
    if _RUNNER.get() is not None:
        return forward, None
    runner = LayerRunner(backend)
    return runner.around(forward), runner


def watching_layers(
    captured: Callable[..., Any], runner: LayerRunner, forget_recordings: Callable[[], None]
) -> Callable[..., Any]:
    """Returns a forward that captures itself, without a replay of layers that have changed since.

    Args:
        captured: Runs the forward that the runner is around, or replays it.
        runner: Of its shared layers.
        forget_recordings: Makes ``captured`` record anew.
    """
    runner.is_watching = True

    def call(*args: Any) -> Any:
        if active_capture() is None and not runner.are_layers_as_recorded():
            forget_recordings()
            runner.forget_recordings()
            forget_recordings()  # What another thread recorded meanwhile has lost what was noted of its layers.
        return captured(*args)

    return call


def _refuse_python_effects(function: TracedFunction) -> None:
    if function.python_effects:
        raise CaptureForbiddenError(
            f"Layer {function.name} changes {', '.join(dict.fromkeys(function.python_effects))} whenever it runs, "
            "and a replay runs no Python. Keep such a value in a buffer and write it in place, change it in a "
            "function marked @eager_on_graph, or compile the model without compile_layers_once."
        )


def _call_layer(forward: Any, layer: Any, args: Any, kwargs: Any) -> Any:
    """What Dynamo traces."""
    return forward(layer, *args, **kwargs)


def _with_dynamic_dims(
    state: CompileState,
    dynamic_dims: Sequence[Sequence[int]],
    tensors: Sequence[torch.Tensor],
    forward: Any,
    layer: Any,
    args: Any,
    kwargs: Any,
) -> tuple[Any, ...]:
    """Returns the arguments ready to be traced with."""
    dims = {id(tensor): one for tensor, one in zip(tensors, dynamic_dims, strict=True)}
    leaves, spec = tree.flatten((args, kwargs))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[index] = ready_to_trace(leaf, dims.get(id(leaf), ()), state)
    args, kwargs = tree.unflatten(spec, leaves)
    return forward, layer, args, kwargs
