"""Equal layers: found in a model, and made one node each to Dynamo, so that one trace serves all of them.

A shared layer's class is replaced by a subclass that only Dynamo notices: eager calls run the original
forward, and copies and pickles are of the original class.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from sgl_piecewise.runtime.errors import ConfigError

Model = TypeVar("Model", bound=torch.nn.Module)

_SHARED_CLASSES: dict[type, type] = {}
_ORIGINALS: dict[type, type] = {}


def compile_layers_once(model: Model) -> Model:
    """Prepares a model so that ``torch.compile(model, backend="sgl_piecewise")`` traces equal layers once.

    Takes the layers of every ``nn.ModuleList`` that holds more than one of a class, the outermost list
    where they nest. Which of them are equal is decided by Dynamo's guards on what a trace has read, so
    layers that differ are traced apart. Nothing else changes: eager calls, parameters, ``state_dict``,
    ``deepcopy`` and pickles are as before.

    Args:
        model: Changed in place.

    Returns:
        The same model.

    Raises:
        ConfigError: It is no module, for example a function or a class.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"compile_layers_once takes a model (a torch.nn.Module), got {_shown(model)}. Give it the model, "
            "and what it returns to torch.compile or capture."
        )
    from . import layer_tracing  # noqa: F401 - Dynamo learns what to do with them

    for layer in repeated_layers(model):
        layer.__class__ = _shared_class(type(layer))
    return model


def _shown(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def restore_layers(model: Model) -> Model:
    """Undoes `compile_layers_once`; what was compiled before is traced again when called."""
    for module in model.modules():
        original = _ORIGINALS.get(type(module))
        if original is not None:
            module.__class__ = original
    return model


@contextlib.contextmanager
def layers_shared(model: torch.nn.Module, is_shared: bool) -> Iterator[None]:
    """Has the layers of a model shared, or not, for the block; afterwards they are as before."""
    before = [(layer, type(layer)) for layer in repeated_layers(model)]
    try:
        if is_shared:
            compile_layers_once(model)
        else:
            restore_layers(model)
        yield
    finally:
        for layer, kind in before:
            layer.__class__ = kind


def original_class(layer: torch.nn.Module) -> type:
    """Returns a layer's class as its author wrote it."""
    return _ORIGINALS.get(type(layer), type(layer))


def repeated_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the layers that can be shared, in the order of the model, each once."""
    return list(dict.fromkeys(_repeated_layers(model)))


def _repeated_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    counts: collections.Counter[type] = collections.Counter()
    if isinstance(module, torch.nn.ModuleList):
        counts.update(original_class(child) for child in module)
    for child in module.children():
        if counts[original_class(child)] > 1 and _can_be_shared(child):
            yield child
        else:
            yield from _repeated_layers(child)


def _can_be_shared(layer: torch.nn.Module) -> bool:
    """Tells whether a layer is worth a node of its own, and has a forward that a subclass can stand in for."""
    if type(layer) in _ORIGINALS:
        return True
    has_parts = any(True for _ in layer.children())
    is_plain = isinstance(inspect.getattr_static(type(layer), "forward", None), types.FunctionType)
    is_ours_to_change = not isinstance(layer, torch.jit.ScriptModule | torch.fx.GraphModule)
    return has_parts and is_plain and is_ours_to_change and "forward" not in vars(layer)


def _shared_class(kind: type) -> type:
    """Returns the subclass whose forward Dynamo takes for one node."""
    if kind in _ORIGINALS:
        return kind
    if kind not in _SHARED_CLASSES:
        original: Any = kind

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_node, result = call_as_node(self, args, kwargs)
            return result if is_node else original.forward(self, *args, **kwargs)

        def reduce_ex(self: Any, protocol: Any) -> Any:
            return _with_original_class(original.__reduce_ex__(self, protocol), shared, original)

        namespace = {
            "forward": forward,
            "__reduce_ex__": reduce_ex,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
        }
        forward.__wrapped__ = original.forward  # type: ignore[attr-defined]  # for inspect.signature
        shared = type(kind)(kind.__name__, (kind,), namespace)
        _SHARED_CLASSES[kind] = shared
        _ORIGINALS[shared] = kind
    return _SHARED_CLASSES[kind]


def _with_original_class(reduced: Any, shared: type, original: type) -> Any:
    """Lets copies and pickles be of the class that can be imported."""
    if not isinstance(reduced, tuple):
        return reduced
    function, arguments, *rest = reduced
    if getattr(function, "__name__", "") == "__newobj__" and arguments == (shared,):
        # The usual way asks for an object of just that class; the older one does not.
        return (copyreg._reconstructor, (original, object, None), *rest)  # type: ignore[attr-defined]
    return (function, tuple(original if one is shared else one for one in arguments), *rest)


def call_as_node(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Outside Dynamo does nothing; `layer_tracing` says what Dynamo does with a call of this.

    Returns:
        Whether the call became a node of the graph, and its result if so.
    """
    return False, None


def forward_of(layer: torch.nn.Module) -> Callable[..., Any]:
    """Returns the original forward of a layer's class (not bound)."""
    forward: Callable[..., Any] = original_class(layer).forward  # type: ignore[attr-defined]
    return forward
