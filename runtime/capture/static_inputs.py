"""Static input buffers: fixed addresses into which the inputs of every call are copied.

One buffer per tensor leaf serves all capture sizes: a size uses its prefix, contiguous in that
size's own shape. Rows past the real ones hold the declared pad value at every call, so nothing of an
earlier, larger batch is left (`sglang#10892`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from .. import tree
from ..errors import CaptureError, ConfigError, InputMismatchError, nearest
from .arguments import ArgumentBinder
from .copiers import copier_for
from .input_leaf import InputLeaf, check_leaf, check_pad_value, new_buffer, refuse_unusual
from .input_writes import InputWrites

# So many pairs of real and capture size have their targets remembered; then all are forgotten.
_MAX_TARGETS = 4096


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
        buffers = {index: leaf.buffer for index, leaf in enumerate(self.leaves) if leaf.buffer is not None}
        self._tensors = list(buffers)
        self._writes = InputWrites(buffers)
        self.written = self._writes.written
        self._storage_of = {index: one.untyped_storage().data_ptr() for index, one in buffers.items()}
        self._storages = set(self._storage_of.values()) - {0}
        self._may_come_back = False
        self._copy_each = copier_for(buffers.values())
        self._seen_by_marks: set[int] = set()
        # Rows along dimension 0 lie in one place whatever the capture size; those along another move with it.
        self._has_moving_rows = any(self.leaves[index].dynamic_dim != 0 for index in self._dynamic)
        self._targets_by_size: dict[tuple[int | None, int | None], list[torch.Tensor]] = {}
        self._padded_buffers = [buffers[index] for index in self._dynamic]
        # Rows along dimension 0 from this one on hold their pad values, as long as the buffers have these versions: a
        # write from outside, to an output that is an input, raises one.
        self._num_dirty_rows = 0
        self._padded_versions: list[int] = []

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
        refuse_unusual(path, value)
        dim = self._dynamic_dim(path, value, dynamic_dims)
        check_pad_value(path, pad_value, value.dtype)
        return InputLeaf(
            path=path,
            dynamic_dim=dim,
            pad_value=pad_value,
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            # Normal tensors even under inference_mode, so that in-place writes bump their version.
            buffer=new_buffer(value),
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
            extent = check_leaf(leaf, value)
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
        """Copies checked leaves into the buffers of one size, and pads rows that do not hold their pad value yet.

        Nothing is copied where every leaf is the very memory that it would be copied to.

        Args:
            values: The caller's leaves, from `real_size`.
            real_size: Their size.
            padded_size: The capture size whose buffers they go to.
        """
        targets = self._targets(real_size, padded_size)
        if not targets:
            return
        if [buffer._version for buffer in self._padded_buffers] != self._padded_versions:
            self._num_dirty_rows = self._max_size or 0  # Somebody wrote to one.
        sources = [values[index] for index in self._tensors]
        if self._may_come_back:
            sources = [self._apart(*pair) for pair in zip(sources, targets, strict=True)]
        if [one.data_ptr() for one in sources] != [one.data_ptr() for one in targets]:
            self._copy_each(targets, sources)
        if real_size is not None and padded_size is not None:
            if real_size < padded_size:
                self._pad(real_size, padded_size)
            self._num_dirty_rows = max(self._num_dirty_rows, real_size)
            self._padded_versions = [buffer._version for buffer in self._padded_buffers]

    def _apart(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns a source that no copy overwrites: a copy of one that lies in a buffer other than as its target."""
        if source.untyped_storage().data_ptr() not in self._storages:
            return source
        is_target = source.data_ptr() == target.data_ptr() and source.stride() == target.stride()
        return source if is_target else source.clone()

    def note_views(self, outputs: Any) -> None:
        """Takes note of what calls get without a copy: some of it may lie in a buffer, and come back as an input."""
        for leaf in tree.flatten(outputs)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._may_come_back |= leaf.untyped_storage().data_ptr() in self._storages

    def _targets(self, real_size: int | None, padded_size: int | None) -> list[torch.Tensor]:
        """Returns where the real rows of each tensor leaf go."""
        key = real_size, padded_size if self._has_moving_rows else None
        found = self._targets_by_size.get(key)
        if found is None:
            if len(self._targets_by_size) >= _MAX_TARGETS:
                self._targets_by_size.clear()
            found = [
                _rows(self._leaf_view(self.leaves[index], padded_size), self.leaves[index], 0, real_size)
                for index in self._tensors
            ]
            self._targets_by_size[key] = found
        return found

    def _pad(self, real_size: int, padded_size: int) -> None:
        """Fills rows past the real ones, except those that hold their pad value since an earlier call.

        Rows along another dimension than 0, and buffers that the forward itself writes to, are filled at every call.
        """
        is_dirty = real_size < self._num_dirty_rows
        for index in self._dynamic:
            leaf = self.leaves[index]
            if leaf.dynamic_dim != 0 or index in self.written or index in self._seen_by_marks:
                stop = padded_size
            elif is_dirty:
                stop = self._num_dirty_rows  # All of them, so that the next call finds nothing to do.
            else:
                continue
            fill_tail(_rows(self._leaf_view(leaf, stop), leaf, real_size, stop), leaf.pad_value)
        self._num_dirty_rows = min(self._num_dirty_rows, real_size)

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

    def note_seen_by_marks(self, storages: Collection[int]) -> None:
        """Remembers buffers that marked functions are given: they may write to padded rows, and nobody counts it.

        Args:
            storages: Addresses of the storages of marked calls' arguments.
        """
        self._seen_by_marks.update(index for index, one in self._storage_of.items() if one in storages)

    def writes_noted(self, size: int | None) -> contextlib.AbstractContextManager[None]:
        """Notes which buffers a forward on the `views` of a size writes to; ask `settle_written` afterwards."""
        views = self._leaf_views(size)
        return self._writes.noted([views[index].nbytes for index in self._tensors])

    def settle_written(self) -> None:
        """Makes ``written`` complete; may wait for the device."""
        self._writes.settle()

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


def _rows(view: torch.Tensor, leaf: InputLeaf, start: int, stop: int | None) -> torch.Tensor:
    """Returns a part of a buffer along the leaf's dynamic dimension, if it has one; all of it to no stop."""
    if leaf.dynamic_dim is None or stop is None:
        return view
    return view.narrow(leaf.dynamic_dim, start, stop - start)


def fill_tail(tail: torch.Tensor, pad_value: int | float | bool) -> None:
    """Fills the padded part of an input."""
    tail.fill_(pad_value)
