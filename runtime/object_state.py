"""Python objects put back as they were: for code that runs only to see what it would return.

Covers what can be reached from given values and from a function's closure and globals through containers
and attributes. Tensor contents are not its business: such code runs on fake tensors.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from functools import partial
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
                restores.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
        namespace: dict[str, Any] = getattr(function, "__globals__", {})
        used = {name: namespace[name] for name in code.co_names if name in namespace}
        roots.extend(used.values())
        restores.append(partial(_put_back_names, namespace, used))
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
            restores.append(_restore(value, dict(value), _put_back_dict))
            todo.extend(dict.values(value))
        elif isinstance(value, list):
            restores.append(_restore(value, list(value), _put_back_list))
            todo.extend(list.__iter__(value))
        elif isinstance(value, set):
            restores.append(_restore(value, set(value), _put_back_set))
        elif isinstance(value, collections.deque):
            restores.append(_restore(value, collections.deque(value), _put_back_deque))
            todo.extend(value)
        elif isinstance(value, tuple):
            todo.extend(tuple.__iter__(value))
        attributes: Any = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and attributes is not value:
            todo.append(attributes)
        if isinstance(value, types.MethodType):
            todo.append(value.__self__)
    return restores


def _restore(value: Any, kept: Any, put_back: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Writes only where something changed: other threads may hold the same container."""

    def restore() -> None:
        now = list(value.items()) if isinstance(value, dict) else list(value)
        before = list(kept.items()) if isinstance(kept, dict) else list(kept)
        if len(now) != len(before) or any(
            not _is_same(one, other) for one, other in zip(now, before, strict=True)
        ):
            put_back(value, kept)

    return restore


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == 2 and len(other) == 2:
        return one is other or (one[0] is other[0] and one[1] is other[1])
    return one is other


def _put_back_names(namespace: dict[str, Any], kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        if namespace.get(name, namespace) is not value:
            namespace[name] = value


def _put_back_dict(value: dict[Any, Any], kept: dict[Any, Any]) -> None:
    dict.clear(value)
    dict.update(value, kept)


def _put_back_list(value: list[Any], kept: list[Any]) -> None:
    list.__setitem__(value, slice(None), kept)


def _put_back_set(value: set[Any], kept: set[Any]) -> None:
    set.intersection_update(value, kept)
    set.update(value, kept)


def _put_back_deque(value: collections.deque[Any], kept: collections.deque[Any]) -> None:
    collections.deque.clear(value)
    collections.deque.extend(value, kept)
