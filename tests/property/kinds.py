"""What the generator knows of a value without running anything: shape, element type, whose memory it is.

Invariant: whatever these rules accept runs eager without an error at every size from ``SMALLEST`` to
``LARGEST``, so no program is thrown away after it was made.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

SMALLEST, LARGEST = 1, 9
"""Sizes that a program may be called with; state has ``LARGEST`` rows, so that every size fits into it."""

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "c64": torch.complex64,
    "i64": torch.int64,
    "bool": torch.bool,
}


class IllegalError(Exception):
    """A step that eager execution would refuse, or that the contract of capture leaves open."""


@dataclass(frozen=True)
class Dim:
    """An extent that is ``per_size * size + constant``."""

    per_size: int
    constant: int

    def at(self, size: int) -> int:
        return self.per_size * size + self.constant

    @property
    def smallest(self) -> int:
        return min(self.at(SMALLEST), self.at(LARGEST))

    @property
    def is_constant(self) -> bool:
        return self.per_size == 0

    def plus(self, constant: int) -> Dim:
        return require_dim(Dim(self.per_size, self.constant + constant))

    def times(self, other: Dim) -> Dim:
        if not self.is_constant and not other.is_constant:
            raise IllegalError("the extent is no longer linear in the size")
        constant, dim = (self.constant, other) if self.is_constant else (other.constant, self)
        return require_dim(Dim(constant * dim.per_size, constant * dim.constant))

    def fits_in(self, other: Dim) -> bool:
        """Whether this is never more than ``other``."""
        return all(self.at(size) <= other.at(size) for size in (SMALLEST, LARGEST))


def require_dim(dim: Dim) -> Dim:
    if dim.smallest < 0 or dim.at(LARGEST) > 64:
        raise IllegalError("the extent is negative or large")
    return dim


def const(extent: int) -> Dim:
    return Dim(0, extent)


SIZE = Dim(1, 0)
Shape = tuple[Dim, ...]


def num_elements(shape: Shape) -> Dim:
    product = const(1)
    for dim in shape:
        product = product.times(dim)
    return product


def broadcast(first: Shape, second: Shape) -> Shape:
    """Returns the shape of an elementwise result."""
    rank = max(len(first), len(second))
    padded = [(const(1),) * (rank - len(shape)) + shape for shape in (first, second)]
    result = []
    for one, other in zip(*padded, strict=True):
        if one != other and const(1) not in (one, other):
            raise IllegalError("shapes do not broadcast")
        result.append(other if one == const(1) else one)
    return tuple(result)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One tensor, abstractly.

    Attributes:
        shape: Extents.
        dtype: Key of ``DTYPES``.
        bound: For i64, values lie in [0, bound).
        is_unique: No two elements are equal (an index that may be written through).
        overlaps: Two indices may name one element, so it cannot be written in place.
        roots: Memory that it may lie in; empty in a rule's answer for memory of its own.
        is_exact: Surely lies in ``roots``; ``reshape`` and the like leave it open.
        is_conj: Lazily conjugated (c64), or lazily negated (f32, the imaginary part of such).
        copied_at: Captured code holds a copy of outside memory, made at this time; None for any other value.
    """

    shape: Shape
    dtype: str = "f32"
    bound: Dim | None = None
    is_unique: bool = False
    overlaps: bool = False
    roots: frozenset[str] = frozenset()
    is_exact: bool = True
    is_conj: bool = False
    copied_at: int | None = None

    def view(self, *shape: Dim, **changes: object) -> Kind:
        """A view of this value."""
        changes.setdefault("is_unique", False)
        return dataclasses.replace(self, shape=shape, **changes)  # type: ignore[arg-type]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in {"f32", "bf16"}

    @property
    def is_never_empty(self) -> bool:
        return all(dim.smallest >= 1 for dim in self.shape)

    @property
    def can_be_output(self) -> bool:
        """Whether padding can be cut off: at most one extent follows the size, and is the size."""
        moving = [dim for dim in self.shape if not dim.is_constant]
        return not moving or moving == [SIZE]


def fresh(shape: Shape, dtype: str = "f32", **rest: object) -> Kind:
    """A value in memory of its own."""
    return Kind(shape=shape, dtype=dtype, **rest)  # type: ignore[arg-type]
