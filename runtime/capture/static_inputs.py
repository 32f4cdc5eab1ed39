"""Static input buffers: fixed addresses into which the inputs of every call are copied.

One buffer per tensor leaf serves all capture sizes: a size uses its prefix, contiguous in that
size's own shape. Rows past the real ones get the declared pad value at every call, so nothing of an
earlier, larger batch is left (`sglang#10892`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import tree
from ..errors import CaptureError, ConfigError, InputMismatchError, nearest


@dataclass(frozen=True, kw_only=True)
class InputLeaf:
    """One leaf of the arguments, as at capture.

    Attributes:
        path: Name for options and errors, for example ``input_ids`` or ``batch.tokens``.
        dynamic_dim: The dimension that follows the capture size; None where the shape is fixed.
        pad_value: What rows past the real ones hold.
        shape: Shape of the example.
        dtype: Element type.
        device: Device.
        buffer: Flat storage for the largest size; None for a leaf that is not a device tensor.
        value: The baked value of such a leaf.
    """

    path: str
    dynamic_dim: int | None = None
    pad_value: int | float | bool = 0
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    buffer: torch.Tensor | None = None
    value: Any = None


class ArgumentBinder:
    """Maps a call's arguments to a canonical nested value with readable paths.

    Args:
        fn: The function; one without a signature (some builtins) has its arguments taken as they come.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        target = fn.forward if isinstance(fn, torch.nn.Module) else fn
        try:
            self._signature: inspect.Signature | None = inspect.signature(target)
        except (TypeError, ValueError):
            self._signature = None

    def canonical(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments as the function will get them.

        However a parameter was passed, it stands in the same place: positional where it can be.

        Raises:
            InputMismatchError: The call does not fit the signature.
        """
        if self._signature is None:
            return args, dict(kwargs)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputMismatchError(
                f"The call does not fit the captured function: {error}. Its signature is {self._signature}."
            ) from error
        return bound.args, bound.kwargs

    def leaf_paths(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """Names the leaves of canonical arguments in flattening order."""
        paths: list[str] = []
        for name, spec in self.named(*tree.flatten((args, dict(kwargs)))[1].children).items():
            paths += tree.paths(spec, name)
        return paths

    def named(self, args: tree.Spec, kwargs: tree.Spec) -> dict[str, tree.Spec]:
        """Names the structures of canonical positional and keyword arguments, in order."""
        names = [f"args[{index}]" for index in range(len(args.children))]
        if self._signature is not None:
            for index, parameter in enumerate(self._signature.parameters.values()):
                if parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY) or index >= len(
                    names
                ):
                    break
                names[index] = parameter.name
        return dict(zip([*names, *kwargs.keys], [*args.children, *kwargs.children], strict=True))


class StaticInputs:
    """The input buffers of a captured callable.

    Args:
        fn: The function, for its parameter names.
        args: Example positional arguments, at the largest size.
        kwargs: Example keyword arguments.
        device: Device of the capture.
        sizes: Ascending capture sizes; None where all shapes are fixed.
        dynamic_dims: Leaf path to dynamic dimension; None for the default: dimension 0 of every
            device tensor whose extent there is the largest size.
        pad_values: Leaf path to pad value; 0 where not named.

    Attributes:
        leaves: One entry per leaf of the arguments, in flattening order.
        written: Indices of the leaves that a warm-up wrote to.

    Raises:
        ConfigError: An option names no leaf or one that it cannot apply to, or the example does not
            fit the sizes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        device: torch.device,
        sizes: Sequence[int] | None,
        dynamic_dims: Mapping[str, int] | None,
        pad_values: Mapping[str, int | float | bool] | None,
    ) -> None:
        self._binder = ArgumentBinder(fn)
        self._device = device
        self._max_size = sizes[-1] if sizes else None
        args, kwargs = self._binder.canonical(args, kwargs)
        values, self._spec = tree.flatten((args, dict(kwargs)))
        paths = self._binder.leaf_paths(args, kwargs)
        for option, given in (("dynamic_dims", dynamic_dims), ("pad_values", pad_values)):
            _check_paths(option, given, paths, has_sizes=bool(sizes))
        self.leaves = [
            self._make_leaf(path, value, dynamic_dims, (pad_values or {}).get(path, 0))
            for path, value in zip(paths, values, strict=True)
        ]
        self._refuse_unused(dynamic_dims or {}, pad_values or {})
        self._are_plain = self._spec.children[0].children == (tree.LEAF,) * len(self.leaves)
        self._dynamic = [index for index, leaf in enumerate(self.leaves) if leaf.dynamic_dim is not None]
        if sizes and not self._dynamic:
            raise ConfigError(
                f"capture_sizes were given, but no argument has {self._max_size} (the largest size) in dimension 0. "
                "Give example arguments at the largest size, or name the dimension with dynamic_dims={'name': dim}."
            )
        self._views: dict[int | None, list[Any]] = {}
        self.written: set[int] = set()

    def _refuse_unused(self, dynamic_dims: Mapping[str, int], pad_values: Mapping[str, Any]) -> None:
        """Raises for a dynamic dimension, or a pad value, of an argument without a dynamic dimension."""
        for leaf in self.leaves:
            if leaf.dynamic_dim is not None:
                continue
            if leaf.path in dynamic_dims:
                raise ConfigError(
                    f"dynamic_dims names {leaf.path!r}, but that argument is not a tensor on {self._device}: it is "
                    "baked into the graphs. Pass it as such a tensor, or leave it out of dynamic_dims."
                )
            if leaf.path in pad_values:
                raise ConfigError(
                    f"pad_values[{leaf.path!r}] is never used: no dimension of {leaf.path} follows the size. "
                    "Name the dimension with dynamic_dims, or leave it out of pad_values."
                )

    def _make_leaf(
        self, path: str, value: Any, dynamic_dims: Mapping[str, int] | None, pad_value: int | float | bool
    ) -> InputLeaf:
        if not isinstance(value, torch.Tensor) or value.device.type != self._device.type:
            return InputLeaf(path=path, value=value.clone() if isinstance(value, torch.Tensor) else value)
        _refuse_unusual(path, value)
        dim = self._dynamic_dim(path, value, dynamic_dims)
        _check_pad_value(path, pad_value, value.dtype)
        return InputLeaf(
            path=path,
            dynamic_dim=dim,
            pad_value=pad_value,
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            # Normal tensors even under inference_mode, so that in-place writes bump their version.
            buffer=_new_buffer(value),
        )

    def _dynamic_dim(
        self, path: str, value: torch.Tensor, dynamic_dims: Mapping[str, int] | None
    ) -> int | None:
        if self._max_size is None:
            return None
        if dynamic_dims is None:
            return 0 if value.dim() and value.shape[0] == self._max_size else None
        if path not in dynamic_dims:
            return None
        dim = dynamic_dims[path]
        if type(dim) is not int:
            raise ConfigError(f"dynamic_dims[{path!r}] is {dim!r}; a dimension is an integer.")
        if not -value.dim() <= dim < value.dim():
            raise ConfigError(
                f"dynamic_dims[{path!r}] is {dim}, but its shape is {tuple(value.shape)}. "
                "Dimensions count from 0, or backwards from -1."
            )
        if value.shape[dim] != self._max_size:
            raise ConfigError(
                f"Argument {path} has {value.shape[dim]} in dynamic dimension {dim}, but the largest capture size is "
                f"{self._max_size}. Give example arguments at the largest size."
            )
        return dim % value.dim()

    def views(self, size: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments that the forward is captured with at one size."""
        args, kwargs = tree.unflatten(self._spec, self._leaf_views(size))
        return args, kwargs

    def refuse_reshaped(self, size: int | None) -> None:
        """Call after a forward on `views`.

        Raises:
            CaptureError: It gave an argument another shape or other memory in place (``unsqueeze_``,
                ``resize_``, ``.data =``), which a replay cannot do to the caller's tensor.
        """
        for leaf, view in zip(self.leaves, self._leaf_views(size), strict=True):
            if leaf.buffer is None:
                continue
            fresh = self._leaf_view(leaf, size)
            if (
                view.data_ptr() != fresh.data_ptr()
                or view.stride() != fresh.stride()
                or view.shape != fresh.shape
            ):
                del self._views[size]
                raise CaptureError(
                    f"The function changed the shape or the memory of argument {leaf.path} in place: from "
                    f"{tuple(fresh.shape)} to {tuple(view.shape)}. A replay cannot do that to the caller's tensor; "
                    "use what gives a new tensor (`unsqueeze`, `transpose`, `x = x * 2`)."
                )

    def _leaf_views(self, size: int | None) -> list[Any]:
        found = self._views.get(size)
        if found is None:
            found = [self._leaf_view(leaf, size) for leaf in self.leaves]
            self._views[size] = found
        return found

    def _leaf_view(self, leaf: InputLeaf, size: int | None) -> Any:
        if leaf.buffer is None or leaf.shape is None:
            return leaf.value
        shape = list(leaf.shape)
        if leaf.dynamic_dim is not None and size is not None:
            shape[leaf.dynamic_dim] = size
        num_elements = torch.Size(shape).numel()
        return leaf.buffer[:num_elements].view(shape)

    def real_size(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | None, Sequence[Any]]:
        """Checks a call's arguments and finds their size.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            The extent along the dynamic dimensions (None where there are none), and the leaves.

        Raises:
            InputMismatchError: Structure, dtype, device, a fixed dimension or a baked value differs.
        """
        values = self._leaves_of(args, kwargs)
        size: int | None = None
        sized_by = ""
        for leaf, value in zip(self.leaves, values, strict=True):
            extent = _check_leaf(leaf, value)
            if extent is None:
                continue
            if size is None:
                size, sized_by = extent, leaf.path
            elif extent != size:
                raise InputMismatchError(
                    f"Arguments disagree about the size: {sized_by} has {size}, {leaf.path} has {extent}. All that "
                    "follow the capture size must have one size; capture with dynamic_dims if one does not follow it."
                )
        return size, values

    def _leaves_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        # Binding and flattening cost tens of microseconds; positional leaves need neither.
        if not kwargs and self._are_plain and len(args) == len(self.leaves):
            if all(type(value) in tree.PLAIN_LEAVES for value in args):
                return args
        args, kwargs = self._binder.canonical(args, kwargs)
        values, spec = tree.flatten((args, dict(kwargs)))
        if spec != self._spec:
            raise InputMismatchError(
                f"Arguments have another structure than at capture: {self._difference(spec)}. Pass what was passed "
                "at capture, or capture again."
            )
        return values

    def _difference(self, spec: tree.Spec) -> str:
        """Says which argument of a call has another structure, or is there on one side only."""
        captured, now = (self._binder.named(*one.children) for one in (self._spec, spec))
        for name in {**captured, **now}:
            if name not in now:
                return f"{name} was given at capture, and is left out now"
            if name not in captured:
                return f"{name} was left out at capture, and is given now"
            found = tree.difference(captured[name], now[name], name)
            if found is not None:
                return found
        return f"keyword arguments came as {list(captured)}, now as {list(now)}"

    def copy_in(self, values: Sequence[Any], real_size: int | None, padded_size: int | None) -> None:
        """Copies checked leaves into the buffers of one size and pads the tail.

        Args:
            values: The caller's leaves, from `real_size`.
            real_size: Their size.
            padded_size: The capture size whose buffers they go to.
        """
        for leaf, value, view in zip(self.leaves, values, self._leaf_views(padded_size), strict=True):
            if leaf.buffer is None:
                continue
            if (
                leaf.dynamic_dim is None
                or real_size is None
                or padded_size is None
                or real_size == padded_size
            ):
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                continue
            view.narrow(leaf.dynamic_dim, 0, real_size).copy_(value)
            fill_tail(view.narrow(leaf.dynamic_dim, real_size, padded_size - real_size), leaf.pad_value)

    def copy_back(
        self,
        values: Sequence[Any],
        real_size: int | None,
        padded_size: int | None,
        left_alone: Collection[int] = (),
    ) -> None:
        """Writes inputs that the forward changes in place back to the caller's tensors.

        Args:
            values: The caller's leaves.
            real_size: Their size.
            padded_size: The capture size that ran.
            left_alone: Indices of leaves that are not written to.
        """
        views = self._leaf_views(padded_size)
        for index in self.written.difference(left_alone):
            leaf, view = self.leaves[index], views[index]
            if leaf.dynamic_dim is not None and real_size is not None:
                view = view.narrow(leaf.dynamic_dim, 0, real_size)
            values[index].copy_(view)

    def versions(self) -> list[int]:
        """Returns the version counter of every buffer, to tell which a forward writes to."""
        return [0 if leaf.buffer is None else leaf.buffer._version for leaf in self.leaves]

    def note_written(self, before: list[int]) -> None:
        """Remembers the buffers whose version changed since ``before``."""
        for index, (old, new) in enumerate(zip(before, self.versions(), strict=True)):
            if old != new:
                self.written.add(index)

    def share_memory(self, values: Sequence[Any]) -> bool:
        """Whether two tensor inputs of a call lie in one storage (separate buffers would part them)."""
        seen: set[int] = set()
        for leaf, value in zip(self.leaves, values, strict=True):
            if leaf.buffer is None or not value.numel():
                continue
            storage = value.untyped_storage().data_ptr()
            if storage in seen:
                return True
            seen.add(storage)
        return False


def _check_paths(option: str, given: Any, paths: Sequence[str], *, has_sizes: bool) -> None:
    """Refuses an option by argument path that names no argument, or that nothing would use."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{option} must map argument paths to values, as in {{'x': 0}}, got {type(given).__name__}."
        )
    for path in given:
        if path not in paths:
            raise ConfigError(f"{option} names {path!r}, which is no argument. {nearest(path, paths)}")
    if given and not has_sizes:
        raise ConfigError(
            f"{option} needs capture_sizes: without them every shape is fixed and nothing is padded."
        )


def _refuse_unusual(path: str, value: torch.Tensor) -> None:
    """Refuses a tensor that a plain buffer cannot stand in for."""
    if value.is_nested:
        raise ConfigError(f"Argument {path} is nested; only strided tensors can be captured.")
    if value.layout is not torch.strided:
        raise ConfigError(f"Argument {path} has layout {value.layout}; only strided tensors can be captured.")
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or value.is_quantized:
        kind = value.dtype if value.is_quantized else type(value).__name__
        raise ConfigError(
            f"Argument {path} is {kind}; only plain tensors can be captured. Pass its parts, or make it inside."
        )


def _check_pad_value(path: str, pad_value: int | float | bool, dtype: torch.dtype) -> None:
    """Refuses a pad value that the dtype cannot hold: the fill would round it or fail at a padded call."""
    if not isinstance(pad_value, int | float | complex):
        raise ConfigError(f"pad_values[{path!r}] is {pad_value!r}; a pad value is a number.")
    if dtype.is_floating_point or dtype.is_complex:
        return
    limits = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not limits[0] <= pad_value <= limits[1] or int(pad_value) != pad_value:
        raise ConfigError(
            f"pad_values[{path!r}] is {pad_value!r}, which {dtype} cannot hold; name one that it can."
        )


def fill_tail(tail: torch.Tensor, pad_value: int | float | bool) -> None:
    """Fills the padded part of an input."""
    tail.fill_(pad_value)


def _new_buffer(value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
        if value.numel():
            buffer.view(value.shape).copy_(value.detach())
    return buffer


def _is_same_value(captured: Any, now: Any) -> bool:
    """Tells whether a baked argument is the captured one; what cannot be compared is another."""
    if isinstance(captured, torch.Tensor) and isinstance(now, torch.Tensor):
        return captured.shape == now.shape and torch.equal(captured, now.to(captured.device))
    if captured is now:
        return True
    if type(captured) is not type(now):
        return False
    if isinstance(captured, float):
        return captured == now or (math.isnan(captured) and math.isnan(now))
    try:
        return bool(captured == now)
    except (RuntimeError, ValueError):  # Arrays and objects that hold tensors have no one answer.
        return False


def _check_leaf(leaf: InputLeaf, value: Any) -> int | None:
    """Checks one leaf of a call; returns its extent along the dynamic dimension, if it has one."""
    if leaf.shape is None:
        if not _is_same_value(leaf.value, value):
            raise InputMismatchError(
                f"Argument {leaf.path} is {value!r}, but was {leaf.value!r} at capture and is baked into the graphs. "
                "Pass it as a device tensor, or capture again for the new value."
            )
        return None
    if not isinstance(value, torch.Tensor):
        raise InputMismatchError(
            f"Argument {leaf.path} is a {type(value).__name__}, but was a tensor at capture. "
            "Pass it as a tensor, or capture again."
        )
    if value.dtype != leaf.dtype or value.device != leaf.device:
        raise InputMismatchError(
            f"Argument {leaf.path} is {value.dtype} on {value.device}, "
            f"but was {leaf.dtype} on {leaf.device} at capture. Convert it before the call, or capture again."
        )
    shape = value.shape
    if shape == leaf.shape:
        return None if leaf.dynamic_dim is None else value.shape[leaf.dynamic_dim]
    if leaf.dynamic_dim == 0 and shape[1:] == leaf.shape[1:] and len(shape) == len(leaf.shape):
        return shape[0]
    expected = ["*" if dim == leaf.dynamic_dim else size for dim, size in enumerate(leaf.shape)]
    if value.dim() != len(leaf.shape) or any(
        want != "*" and want != have for want, have in zip(expected, value.shape, strict=True)
    ):
        raise InputMismatchError(
            f"Argument {leaf.path} has shape {tuple(value.shape)}, but was captured with "
            f"({', '.join(str(size) for size in expected)}). Only a dimension marked * may differ; give it that "
            "shape, or capture again."
        )
    assert leaf.dynamic_dim is not None
    return value.shape[leaf.dynamic_dim]
