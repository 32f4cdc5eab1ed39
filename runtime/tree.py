"""Nested values as leaves with paths: tuples, named tuples, lists, dicts and dataclasses.

``torch.utils._pytree`` is not used because dataclasses need registration there and errors need
the path of a leaf. A spec holds structure only, never a leaf, so it keeps no tensor alive.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Spec:
    """The structure of one node.

    Attributes:
        kind: The container's type, or None for a leaf.
        keys: Dict keys or field names; indices for sequences.
        children: One spec per key.
    """

    kind: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()


LEAF = Spec(None)

# Seen without asking whether they are containers; every other type is asked.
PLAIN_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


def _children(value: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Returns keys and children of a container, or None for a leaf."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        return names, [getattr(value, name) for name in names]
    if isinstance(value, dict):
        return tuple(value), list(value.values())
    if isinstance(value, tuple | list):
        return tuple(range(len(value))), list(value)
    return None


# No closures below: one that calls itself is a reference cycle, and would keep leaves (and their graph
# memory) alive until the next garbage collection, which is off while capturing.


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """Splits a nested value into its leaves, depth first, and its structure."""
    if type(value) in PLAIN_LEAVES:
        return [value], LEAF
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves)


def _flatten_into(node: Any, leaves: list[Any]) -> Spec:
    if type(node) in PLAIN_LEAVES:
        leaves.append(node)
        return LEAF
    found = _children(node)
    if found is None:
        leaves.append(node)
        return LEAF
    keys, children = found
    return Spec(type(node), keys, tuple(_flatten_into(child, leaves) for child in children))


def leaves_of(spec: Spec, value: Any) -> list[Any] | None:
    """Returns the leaves of a value that has this structure, None if it has another; faster than `flatten`."""
    leaves: list[Any] = []
    return leaves if _add_leaves(spec, value, leaves) else None


def _add_leaves(spec: Spec, value: Any, leaves: list[Any]) -> bool:
    kind: Any = spec.kind
    if kind is None:
        leaves.append(value)
        return type(value) in PLAIN_LEAVES or _children(value) is None
    if type(value) is not kind:
        return False
    if kind is tuple or kind is list:
        children: Iterable[Any] = value
        is_same = len(value) == len(spec.children)
    else:
        found = _children(value)
        keys, children = ((), ()) if found is None else found
        is_same = keys == spec.keys
    return is_same and all(
        _add_leaves(child, item, leaves) for child, item in zip(spec.children, children, strict=True)
    )


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Rebuilds a nested value from new leaves."""
    return _build(spec, iter(leaves))


def _build(node: Spec, leaves: Iterator[Any]) -> Any:
    if node.kind is None:
        return next(leaves)
    return _rebuild(node, [_build(child, leaves) for child in node.children])


def _rebuild(node: Spec, children: list[Any]) -> Any:
    kind: Any = node.kind
    if kind is tuple:
        return tuple(children)
    if kind is dict:
        return dict(zip(node.keys, children, strict=True))
    if dataclasses.is_dataclass(kind):
        return _rebuild_dataclass(kind, dict(zip(node.keys, children, strict=True)))
    if issubclass(kind, dict):
        pairs = zip(node.keys, children, strict=True)
        return collections.defaultdict(None, pairs) if kind is collections.defaultdict else kind(pairs)
    if issubclass(kind, tuple) and kind is not tuple:
        make = named_tuple_maker(kind)
        return kind(children) if make is None else make(children)
    return kind(children)


def is_named_tuple(kind: type) -> bool:
    """Tells whether a type is a named tuple, which is made from its fields and not from one iterable."""
    return named_tuple_maker(kind) is not None


def named_tuple_maker(kind: type) -> Callable[[Iterable[Any]], Any] | None:
    """Returns what makes a named tuple of this type from its items; None for other types."""
    make: Callable[[Iterable[Any]], Any] | None = getattr(kind, "_make", None)
    return make


def _rebuild_dataclass(kind: Any, values: dict[str, Any]) -> Any:
    fields = dataclasses.fields(kind)
    instance = kind(**{field.name: values[field.name] for field in fields if field.init})
    for field in fields:
        if not field.init:
            object.__setattr__(instance, field.name, values[field.name])
    return instance


def paths(spec: Spec, root: str, *, by_field: bool = False) -> list[str]:
    """Names every leaf, for example ``result.kv[0]``, in the order of ``flatten``.

    Args:
        spec: The structure.
        root: What the value is called.
        by_field: Whether items of named tuples are called by their names and not by their places.
    """
    return list(_walk_paths(spec, root, by_field))


def _walk_paths(spec: Spec, path: str, by_field: bool) -> Iterator[str]:
    if spec.kind is None:
        yield path
        return
    fields = getattr(spec.kind, "_fields", None) if by_field and issubclass(spec.kind, tuple) else None
    for key, child in zip(spec.keys, spec.children, strict=True):
        joined = _join(spec, path, key) if fields is None else f"{path}.{fields[key]}"
        yield from _walk_paths(child, joined, by_field)


def _join(spec: Spec, path: str, key: Any) -> str:
    return f"{path}.{key}" if dataclasses.is_dataclass(spec.kind) else f"{path}[{key!r}]"


def difference(captured: Spec, now: Spec, root: str) -> str | None:
    """Says where two structures differ first, with both sides; None where they are equal."""
    if captured == now:
        return None
    if captured.kind is not now.kind:
        return f"{root}: captured {_kind_name(captured)}, now {_kind_name(now)}"
    if captured.keys != now.keys:
        return f"{root}: captured keys {list(captured.keys)}, now {list(now.keys)}"
    for key, one, other in zip(captured.keys, captured.children, now.children, strict=True):
        found = difference(one, other, _join(captured, root, key))
        if found is not None:
            return found
    raise AssertionError("specs differ but no child does")


def _kind_name(spec: Spec) -> str:
    return "a single value" if spec.kind is None else spec.kind.__name__
