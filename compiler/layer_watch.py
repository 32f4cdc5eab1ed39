"""Whether a shared layer is still what a recording holds of it: asked at every call, since a replay runs no Python.

The guards of the forward around shared layers do not look into them, and those of a layer are asked where it is
run. So what could make a layer run otherwise is looked at here: guards of its traces, where the tensors lie that
these read, and integers that no guard compares since the traces take them as inputs. This module must not know
what is done about a change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_piecewise.runtime import torch_private, torch_private_entries, tree


class RecordedLayer:
    """What was seen of a layer while it was recorded. It holds neither the layer, nor what it was called with."""

    def __init__(self) -> None:
        self._traces: list[_RecordedTrace] = []

    def add(
        self,
        entry: torch_private_entries.CompiledEntry,
        values: dict[str, Any],
        arguments: dict[str, Any],
    ) -> None:
        """Notes one call of the layer.

        Args:
            entry: What ran it.
            values: What is the same at every call, by the parameters of what ran it: the layer is in there.
            arguments: The others; the tensors among them are others at every call.
        """
        one = _RecordedTrace(entry, values, arguments)
        if not any(one.is_implied_by(other) for other in self._traces):
            self._traces.append(one)

    def is_unchanged(self, values: dict[str, Any]) -> bool:
        """Tells whether the layer would run as it was recorded.

        Args:
            values: As of `add`.
        """
        return all(one.is_unchanged(values) for one in self._traces)


class _RecordedTrace:
    """One trace of a layer, and the tensors and numbers that it read.

    Sizes of one recording stand for those of all: how a layer's own tensors are is guarded on by itself.
    """

    def __init__(
        self,
        entry: torch_private_entries.CompiledEntry,
        values: dict[str, Any],
        arguments: dict[str, Any],
    ) -> None:
        self._entry = entry
        self._stand_ins = _StandIns(arguments)
        known = {**values, **self._stand_ins.objects()}
        self._read, self._read_numbers = entry.tensor_reader(known), entry.number_reader(known)
        recorded = {**values, **arguments}
        self._numbers: list[int] = self._read_numbers(recorded)
        self._addresses: list[int | None] = [one.data_ptr() for one in self._read(recorded)]
        self._places = list(range(len(self._addresses)))
        self._lie_at = torch_private.address_check()

    @functools.cached_property
    def _holds(self) -> Callable[[dict[str, Any]], bool]:
        return self._entry.check_without(self._stand_ins.tensor_sources)

    def is_implied_by(self, other: _RecordedTrace) -> bool:
        """Tells whether this is unchanged whenever the other is."""
        return (
            self._entry is other._entry
            and self._addresses == other._addresses
            and self._numbers == other._numbers
            and self._stand_ins.object_ids == other._stand_ins.object_ids
        )

    def is_unchanged(self, values: dict[str, Any]) -> bool:
        found = {**values, **self._stand_ins.arguments()}
        if not self._holds(found):
            return False
        try:
            return self._read_numbers(found) == self._numbers and self._lie_at(
                self._read(found), self._addresses, self._places
            )
        except (AttributeError, LookupError, TypeError, RuntimeError):
            return False  # No guard says that it is there: what was read with a tensor was not found again.


class _StandIns:
    """Arguments with the sizes of those of a call, for guards that compare sizes: they cannot be left out.

    Args:
        arguments: Of the call, by name.

    Attributes:
        object_ids: Identities of the objects among them, which are not held.
        tensor_sources: Where the tensors among them lie, as Dynamo writes it.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        leaves, self._spec = tree.flatten(arguments)
        forms = {id(leaf): _form(leaf) for leaf in leaves}
        self._leaves = [forms[id(leaf)] for leaf in leaves]
        self.object_ids = [
            id(leaf) for leaf, form in zip(leaves, self._leaves, strict=True) if isinstance(form, weakref.ref)
        ]
        self.tensor_sources = tuple(
            path
            for paths in (tree.paths(self._spec, "L"), tree.paths(self._spec, "L", by_field=True))
            for path, form in zip(paths, self._leaves, strict=True)
            if isinstance(form, _Form)
        )
        self._made: dict[str, Any] | None = None

    def objects(self) -> dict[str, Any]:
        """Returns the arguments without tensors."""
        leaves = [None if isinstance(leaf, _Form) else leaf for leaf in self._leaves]
        return self._with_objects(leaves)

    def _with_objects(self, leaves: list[Any]) -> dict[str, Any]:
        found = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in leaves]
        arguments: dict[str, Any] = tree.unflatten(self._spec, found)
        return arguments

    def arguments(self) -> dict[str, Any]:
        """Returns them; not while something is captured, since they are made when first asked for."""
        if self._made is not None:
            return self._made
        # A tensor that was given twice is one again: guards look at that too.
        tensors = {leaf: leaf.make() for leaf in self._leaves if isinstance(leaf, _Form)}
        self._leaves = [tensors[leaf] if isinstance(leaf, _Form) else leaf for leaf in self._leaves]
        made = self._with_objects(self._leaves)
        if not self.object_ids:  # Kept, it would hold them.
            self._made = made
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class _Form:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _Form(shape=tuple(leaf.shape), stride=tuple(leaf.stride()), dtype=leaf.dtype)
    if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
        return leaf
    try:
        return weakref.ref(leaf)
    except TypeError:
        return leaf
