"""Segments: what replay executes in order.

A graph segment launches a device graph; an eager segment calls a marked function with the
arguments of capture and hands its result to the boundary buffers. Both are made ready once
(`bind`), so that replay is a loop over callables.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private, tree
from ..errors import CaptureError, ReplayError
from ..mark import MarkedFunction
from .autocast import AutocastState
from .boundary import BreakOutputs
from .device import DeviceGraph, GraphPool

_SCALARS = frozenset({int, float, bool, str, type(None)})


@dataclass(frozen=True, kw_only=True)
class GraphSegment:
    """A stretch of captured device work.

    Attributes:
        graph: The device's graph.
    """

    graph: DeviceGraph

    def bind(self) -> Callable[[], None] | None:
        """Returns what replay calls, or None if the graph holds no work."""
        return None if self.graph.num_ops == 0 else self.graph.launcher()


class FrozenArguments:
    """Arguments of a marked call as at capture, without keeping pool memory alive.

    Tensors in the pool are held as non-owning aliases: the recording's graphs pin the pool, and
    later segments may reuse the memory after this call, in replay as in capture. Tensors outside
    the pool are held. Lists and dicts are taken as they were at the call and handed out fresh at
    every replay, so a body that fills one starts from the same contents each time.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments.
        pool: The pool being captured on.
        is_borrowed: Tells which objects are only referred to; None for none.

    Attributes:
        storages: Addresses of the storages of all strided tensors among them.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pool: GraphPool,
        is_borrowed: Callable[[Any], bool] | None = None,
    ) -> None:
        self.storages: set[int] = set()
        self._pool = pool
        self._is_borrowed = is_borrowed
        self._has_mutable = False
        self._args = tuple(self._freeze(value) for value in args)
        self._kwargs = {name: self._freeze(value) for name, value in kwargs.items()}

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return value
            self.storages.add(value.untyped_storage().data_ptr())
            return torch_private.alias_without_owning(value) if self._pool.owns(value) else value
        kind = type(value)
        if kind is tuple:
            return tuple(self._freeze(item) for item in value)
        if isinstance(value, tuple):
            make = tree.named_tuple_maker(kind)
            return value if make is None else make([self._freeze(item) for item in value])
        if kind is list:
            self._has_mutable = True
            return [self._freeze(item) for item in value]
        if kind is dict:
            self._has_mutable = True
            return {key: self._freeze(item) for key, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_all_scalars(value):
            # Objects keep their identity, so they are held, and what they hold with them.
            self.storages.update(
                leaf.untyped_storage().data_ptr()
                for leaf in tree.flatten(value)[0]
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            )
        if self._is_borrowed is not None and self._is_borrowed(value):
            self._has_mutable = True
            return _Borrowed(value)
        return value

    def bind(self, fn: Callable[..., Any], receive: Callable[[Any], None]) -> Callable[[], None]:
        """Returns a callable that calls ``fn`` with these arguments and hands on its result."""
        args, kwargs = self._args, self._kwargs
        if self._has_mutable and not kwargs:
            changing = [index for index, value in enumerate(args) if _must_be_renewed(value)]

            def call() -> None:
                given = list(args)
                for index in changing:
                    given[index] = _fresh_containers(given[index])
                receive(fn(*given))

            return call
        if self._has_mutable:
            return lambda: receive(
                fn(*_fresh_containers(args), **{k: _fresh_containers(v) for k, v in kwargs.items()})
            )
        if kwargs:
            return lambda: receive(fn(*args, **kwargs))
        return lambda: receive(fn(*args))


class _Borrowed(weakref.ref[Any]):
    """An object argument that its owner keeps alive."""

    __slots__ = ()


def _is_all_scalars(value: Any) -> bool:
    """Tells quickly that a dataclass, such as a layer's description, holds nothing but numbers and strings."""
    return all(type(getattr(value, one.name)) in _SCALARS for one in dataclasses.fields(value))


def _must_be_renewed(value: Any) -> bool:
    """Tells whether a frozen argument is, or may hold, what each replay gets anew."""
    return type(value) is _Borrowed or isinstance(value, (tuple, list, dict))


def _fresh_containers(value: Any) -> Any:
    kind = type(value)
    if kind is _Borrowed:
        found = value()
        if found is None:
            raise ReplayError(
                "A graph was replayed for a marked call whose argument no longer exists. Keep the module that was "
                "compiled as long as what was captured of it."
            )
        return found
    if kind is list:
        return [_fresh_containers(item) for item in value]
    if kind is dict:
        return {key: _fresh_containers(item) for key, item in value.items()}
    if kind is tuple:
        return tuple(_fresh_containers(item) for item in value)
    if isinstance(value, tuple):
        make = tree.named_tuple_maker(kind)
        return value if make is None else make([_fresh_containers(item) for item in value])
    return value


class ContainerWatch:
    """Notices a body that hands tensors back by filling a list or dict it was given.

    Captured code would go on with what it found there while capturing, for ever.

    Args:
        args: Positional arguments, before the call.
        kwargs: Keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before: list[tuple[Any, Any]] = []
        self._note((args, kwargs))

    def _note(self, value: Any) -> None:
        kind = type(value)
        if kind is dict:
            self._before.append((value, dict(value)))
            for item in value.values():
                self._note(item)
        elif kind is list or kind is tuple:
            if kind is list:
                self._before.append((value, list(value)))
            for item in value:
                self._note(item)

    def check(self, mark_name: str, where: str) -> None:
        """Raises if a container argument holds other objects than before the call.

        Raises:
            CaptureError: Names the mark.
        """
        for container, before in self._before:
            now = list(container.values()) if type(container) is dict else container
            old = list(before.values()) if type(before) is dict else before
            if len(now) != len(old) or any(x is not y for x, y in zip(now, old, strict=True)):
                raise CaptureError(
                    f"Break {mark_name!r} ({where}) changed a {type(container).__name__} argument. Captured code "
                    "would keep what it found there while capturing; return the values instead."
                )


@dataclass(frozen=True, kw_only=True)
class EagerSegment:
    """One marked call between two graph segments.

    Attributes:
        mark: The marked function.
        arguments: Its arguments as at capture.
        outputs: Where its results go.
        autocast: What surrounded the call.
    """

    mark: MarkedFunction
    arguments: FrozenArguments
    outputs: BreakOutputs
    autocast: AutocastState

    def bind(self) -> Callable[[], None]:
        """Returns what replay calls."""
        return self.arguments.bind(self.autocast.around(self.mark.fn), self.outputs.receiver())


def is_raised_by_break(error: BaseException) -> bool:
    """Tells whether an error that a replay raised came out of a marked call, so after the first graph was launched."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals is globals():
            return True
        traceback = traceback.tb_next
    return False


Segment = GraphSegment | EagerSegment
