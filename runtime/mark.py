"""The mark: ``@eager_on_graph`` says that a call cannot, or should not, be inside a graph.

Holds the decorator, ``break_graph`` and the one place that knows whether this thread is
capturing. A mark outside capture is an ordinary call, and one node to Dynamo. It must not know how
capture works: an active capture is anything with a ``call_marked`` method.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, overload

import torch

from .errors import ConfigError, ReplayError


class ActiveCapture(Protocol):
    """What a mark needs of the capture it is called under."""

    def call_marked(self, mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one marked call under this capture and returns its result."""


_ACTIVE: ContextVar[ActiveCapture | None] = ContextVar("sgl_piecewise_active_capture", default=None)


def active_capture() -> ActiveCapture | None:
    """Returns the capture of this thread, or None: the one way to ask "are we capturing?"."""
    return _ACTIVE.get()


def active_capture_getter() -> Callable[[], ActiveCapture | None]:
    """Returns what `active_capture` calls: a function in C, for code that asks at every replay."""
    return _ACTIVE.get


@contextlib.contextmanager
def use_capture(capture: ActiveCapture | None) -> Iterator[None]:
    """Makes ``capture`` the active one of this thread; None while an eager segment runs."""
    token = _ACTIVE.set(capture)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class _NotedMarks:
    """Stands in for a capture and notes the marks that it is asked to run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def call_marked(self, mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(mark.name)
        with use_capture(None):
            return mark.fn(*args, **kwargs)


@contextlib.contextmanager
def noted_marks() -> Iterator[list[str]]:
    """Notes the names of the marked calls that the block makes, in order; the list is filled while it runs."""
    noted = _NotedMarks()
    with use_capture(noted):
        yield noted.names


class MarkedFunction:
    """A function whose calls end the graph segment that is being captured.

    Attributes:
        fn: The function as the user wrote it.
        name: Its qualified name; break lists, reports and errors use it.
        fake: Gives results of the right structure, shapes and dtypes without computing, or None.
        capture_stub: Runs instead of the body while capturing only, or None.

    Raises:
        ConfigError: Something that should be callable is not, or ``fn`` is a staticmethod or
            classmethod object.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        fake: Callable[..., Any] | None = None,
        capture_stub: Callable[..., Any] | None = None,
    ) -> None:
        if isinstance(fn, (staticmethod, classmethod)):
            kind = type(fn).__name__
            raise ConfigError(
                f"eager_on_graph cannot mark a {kind} object: put @{kind} above @eager_on_graph."
            )
        if isinstance(fn, type):
            raise ConfigError(
                f"eager_on_graph cannot mark the class {fn.__qualname__}: that would be a break where one is made. "
                "Mark the method that should stay outside graphs, for a module its forward."
            )
        if isinstance(fn, torch.nn.Module):
            kind = type(fn).__qualname__
            raise ConfigError(
                f"eager_on_graph cannot mark an instance of {kind}: a mark is no module, and its parent would lose "
                f"the parameters. Mark the class's forward, or this one's: module.forward = "
                "eager_on_graph(module.forward)."
            )
        for label, value in (("the marked object", fn), ("fake", fake), ("capture_stub", capture_stub)):
            if value is not None and not callable(value):
                raise ConfigError(f"eager_on_graph: {label} must be callable, got {type(value).__name__}.")
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.fake = fake
        self.capture_stub = capture_stub
        self.name: str = getattr(fn, "__qualname__", type(fn).__qualname__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; under a capture, the capture decides what that means."""
        if torch.compiler.is_dynamo_compiling():
            # True only where Dynamo reads this line; it imports at trace time, so nobody else pays.
            from .mark_tracing import trace_marked_call

            return trace_marked_call(self, args, kwargs)
        return self.call_untraced(*args, **kwargs)

    def call_untraced(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as code does that no compiler is reading, whatever Dynamo thinks."""
        capture = _ACTIVE.get()
        if capture is None:
            return self.fn(*args, **kwargs)
        return capture.call_marked(self, args, kwargs)

    def call_compiled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], stand_in: Callable[[], Callable[..., Any]]
    ) -> Any:
        """Calls the function from compiled code, which was told what results look like.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            stand_in: Makes what a capture may run in place of the body; asked under a capture only.
        """
        capture = _ACTIVE.get()
        if capture is None:
            return self.fn(*args, **kwargs)
        return capture.call_marked(_CompiledCall(self, stand_in()), args, kwargs)

    def body(self) -> Callable[..., Any]:
        """Returns the function as the user wrote it."""
        return self.fn

    def run_eager(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function without a break, whatever is being captured."""
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundMark(self, instance)

    def __repr__(self) -> str:
        return f"<eager_on_graph {self.name}>"

    def __reduce__(self) -> str:
        # Like a function: pickled by where it is found, so modules that hold one stay picklable.
        return self.name

    def __copy__(self) -> MarkedFunction:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MarkedFunction:
        return self


class _CompiledCall(MarkedFunction):
    """A marked function as compiled code calls it under a capture.

    Compiled code outlives the models that it was compiled for, and recordings with it, so this does not keep
    the marked function (whose closure may hold a model) alive.

    Args:
        mark: The marked function.
        stand_in: Gives results of the traced shapes; takes the place of ``fake``.
    """

    def __init__(self, mark: MarkedFunction, stand_in: Callable[..., Any]) -> None:
        self._mark = weakref.ref(mark)
        self.fn = functools.partial(_call_body, self._mark)
        self.name = mark.name
        self.fake = stand_in
        self.capture_stub = mark.capture_stub

    def body(self) -> Callable[..., Any]:
        return _body_of(self._mark)


def _call_body(reference: weakref.ref[MarkedFunction], *args: Any, **kwargs: Any) -> Any:
    return _body_of(reference)(*args, **kwargs)


def _body_of(reference: weakref.ref[MarkedFunction]) -> Callable[..., Any]:
    mark = reference()
    if mark is None:
        raise ReplayError(
            "A graph was replayed whose marked function no longer exists. Keep the module or function that was "
            "compiled as long as what was captured of it."
        )
    return mark.fn


class BoundMark:
    """A marked method bound to its object.

    Without slots: Dynamo 2.11 reads those from an object that it has not filled yet.
    """

    def __init__(self, mark: MarkedFunction, instance: Any) -> None:
        self.mark = mark
        self.__self__ = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the marked method of the bound object."""
        return self.mark(self.__self__, *args, **kwargs)

    def run_eager(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method without a break, whatever is being captured."""
        return self.mark.run_eager(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Protocol methods are not passed on: the mark's __deepcopy__ would return the mark, unbound. And Dynamo
        # asks an object that it has not initialised for its slot.
        if name == "mark" or (name.startswith("__") and name not in {"__name__", "__qualname__"}):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.mark, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundMark):
            return NotImplemented
        return self.mark is other.mark and self.__self__ is other.__self__

    def __hash__(self) -> int:
        # Dynamo 2.11 hashes an object whose attributes it has only noted down so far.
        return hash((id(self.__dict__.get("mark")), id(self.__dict__.get("__self__"))))

    def __reduce__(self) -> tuple[Any, ...]:
        # What copy and pickle do by default asks an empty object for its attributes.
        return BoundMark, (self.mark, self.__self__)

    def __repr__(self) -> str:
        return f"<bound eager_on_graph {self.mark.name} of {self.__self__!r}>"


@overload
def eager_on_graph(fn: Callable[..., Any], /) -> MarkedFunction: ...
@overload
def eager_on_graph(
    fn: bool | None = None,
    *,
    fake: Callable[..., Any] | None = None,
    capture_stub: Callable[..., Any] | None = None,
    enable: bool = True,
) -> Callable[[Callable[..., Any]], Any]: ...
def eager_on_graph(
    fn: Callable[..., Any] | bool | None = None,
    *,
    fake: Callable[..., Any] | None = None,
    capture_stub: Callable[..., Any] | None = None,
    enable: bool = True,
) -> Any:
    """Marks a function or method as eager: it runs between graph segments, not inside one.

    Works bare (``@eager_on_graph``) and called (``@eager_on_graph(capture_stub=...)``). The older
    SGLang spelling ``eager_on_graph(True)(fn)`` is accepted.

    Args:
        fn: The function, or (older spelling) a bool that means ``enable``.
        fake: Called with the same arguments; returns results of the same structure, shapes,
            dtypes and strides without computing them. Stands in where a body must not run.
        capture_stub: Called instead of the body while capturing only; warm-up and replay run the
            body. Must return the same structure, shapes and dtypes.
        enable: With False the function is returned as it is: no break, no ``run_eager``.

    Returns:
        The marked function, with ``run_eager`` to bypass breaking.

    Raises:
        ConfigError: Something that should be callable is not.

    Source: SGLang 0.5 ``eager_on_graph`` (name, ``enable``, ``capture_stub``); differs: ``fake``,
    and a marked function may return tensors.
    """
    if isinstance(fn, bool):
        enable, fn = fn, None

    def mark(target: Callable[..., Any]) -> Any:
        if not enable:
            return target
        return MarkedFunction(target, fake=fake, capture_stub=capture_stub)

    return mark if fn is None else mark(fn)


def _nothing() -> None:
    """The body of ``break_graph``."""


_nothing.__qualname__ = _nothing.__name__ = "break_graph"
break_graph = MarkedFunction(_nothing, fake=_nothing, capture_stub=_nothing)
"""Ends the current graph segment and begins the next one; does nothing outside capture."""
