"""Dataclasses to plain JSON values and back, typed by their annotations.

One invariant: ``from_plain(type(x), to_plain(x)) == x`` for every report. It must not know what a
report means.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from sgl_piecewise.runtime.errors import ConfigError


def to_plain(value: Any) -> Any:
    """Returns ``value`` as dicts, lists and scalars that strict JSON can hold.

    Raises:
        ValueError: A float is not finite: JSON has no word for it, so reports hold None instead.
        TypeError: Something is no dataclass, container or scalar.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"A report holds the number {value}, which JSON cannot.")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"A report holds a {type(value).__name__}, which JSON cannot.")


def from_plain(kind: Any, value: Any, path: str = "report") -> Any:
    """Rebuilds a value of type ``kind`` from what ``to_plain`` made.

    Args:
        kind: A dataclass, scalar type, or tuple, dict, union or literal of those.
        value: Plain JSON value.
        path: Where in the file it stands, for errors.

    Returns:
        The typed value; unknown keys of a newer writer are dropped.

    Raises:
        ConfigError: The value does not fit; the message names the path and both sides.
    """
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _from_union(arguments, value, path)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{path}: {value!r} is none of {', '.join(map(repr, arguments))}.")
    if dataclasses.is_dataclass(kind):
        return _dataclass_from_plain(kind, _expect(dict, value, path), path)
    if origin is tuple:
        items = _expect(list, value, path)
        kinds = [arguments[0]] * len(items) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(items):
            raise ConfigError(f"{path}: expected {len(kinds)} items, found {len(items)}.")
        return tuple(
            from_plain(item_kind, item, f"{path}[{index}]")
            for index, (item_kind, item) in enumerate(zip(kinds, items, strict=True))
        )
    if origin is list:
        items = _expect(list, value, path)
        return [from_plain(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(items)]
    if origin is dict:
        pairs = _expect(dict, value, path).items()
        return {key: from_plain(arguments[1], item, f"{path}.{key}") for key, item in pairs}
    if kind is float and type(value) is int:
        return float(value)
    return _expect(kind, value, path)


def _expect(kind: type, value: Any, path: str) -> Any:
    """Returns ``value`` if it is exactly of ``kind`` (a bool is no int here)."""
    if type(value) is kind:
        return value
    raise ConfigError(f"{path}: expected {kind.__name__}, found {type(value).__name__} {value!r:.60}.")


def _from_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """The kind is the only one beside None, or the one that JSON's type tells."""
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    fitting = [kind for kind in others if (typing.get_origin(kind) or kind) is type(value)]
    if len(others) > 1 and not fitting:
        names = ", ".join(getattr(kind, "__name__", str(kind)) for kind in others)
        raise ConfigError(f"{path}: expected one of {names}, found {type(value).__name__} {value!r:.60}.")
    return from_plain((fitting or others)[0], value, path)


def _dataclass_from_plain(kind: Any, value: dict[str, Any], path: str) -> Any:
    """Fields with a default may be missing, others may not."""
    hints = typing.get_type_hints(kind)
    arguments = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            arguments[field.name] = from_plain(hints[field.name], value[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}: the field {field.name!r} is missing.")
    return kind(**arguments)
