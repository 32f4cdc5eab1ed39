"""Python objects put back as they were: for code that runs only to see what it would return.

Covers what can be reached from given values and from a function's closure and globals through containers
and attributes. Tensor contents are not its business: such code runs on fake tensors.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Of these nothing is kept: they hold no state of a call, or lead everywhere.
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.Tensor, str, bytes)
_MAX_OBJECTS = 100_000


@contextlib.contextmanager
def unchanged_objects(values: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Undoes at the end what the block did to containers and attributes.

    Args:
        values: What the function is called with.
        function: Whose closure and globals are watched too.
    """
    roots = [values]
    code: types.CodeType | None = getattr(function, "__code__", None)
    restores: list[Callable[[], Any]] = []
    if code is not None:
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # An empty cell.
                roots.append(cell.cell_contents)
                restores.append(lambda cell=cell, value=cell.cell_contents: setattr(cell, "cell_contents", value))
        namespace: dict[str, Any] = getattr(function, "__globals__", {})
        used = {name: namespace[name] for name in code.co_names if name in namespace}
        roots.extend(used.values())
        restores.append(lambda: namespace.update(used))
    restores.extend(_restores(roots))
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _restores(roots: list[Any]) -> list[Callable[[], Any]]:
    """Returns what puts every reachable container and attribute dict back."""
    restores: list[Callable[[], Any]] = []
    seen: dict[int, Any] = {}
    todo = list(roots)
    while todo and len(seen) < _MAX_OBJECTS:
        value = todo.pop()
        if id(value) in seen or value is None or isinstance(value, (int, float, complex, *_OPAQUE)):
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            restores.append(_restore_dict(value))
            todo.extend(dict.values(value))
        elif isinstance(value, list):
            restores.append(lambda value=value, kept=list(value): list.__setitem__(value, slice(None), kept))
            todo.extend(list.__iter__(value))
        elif isinstance(value, set):
            restores.append(lambda value=value, kept=set(value): (set.clear(value), set.update(value, kept)))
        elif isinstance(value, collections.deque):
            restores.append(lambda value=value, kept=list(value): (value.clear(), value.extend(kept)))
            todo.extend(value)
        elif isinstance(value, tuple):
            todo.extend(tuple.__iter__(value))
        attributes: Any = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and attributes is not value:
            todo.append(attributes)
        if isinstance(value, types.MethodType):
            todo.append(value.__self__)
    return restores


def _restore_dict(value: dict[Any, Any]) -> Callable[[], Any]:
    kept = dict(value)

    def restore() -> None:
        if len(value) == len(kept) and all(
            key in kept and kept[key] is item for key, item in dict.items(value)
        ):
            return
        dict.clear(value)
        dict.update(value, kept)

    return restore
