"""Outputs of a captured callable: which dimension follows the size, and the cut back to real rows."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .. import tree
from ..errors import CaptureError

OutputMode = Literal["copy", "view"]
OUTPUT_MODES: tuple[OutputMode, ...] = ("copy", "view")


class OutputCut:
    """Learns from the shapes at several sizes where padding shows in the outputs.

    Sizes are given one by one (`learn`); a dimension follows the size if its extent was the size
    every time. An extent that changes in another way cannot be cut: such calls need an exact size.

    Attributes:
        can_cut: False once `dims` found an output whose extents follow the size in another way.
    """

    def __init__(self) -> None:
        self._spec: tree.Spec | None = None
        self._shapes: dict[int, list[torch.Size | None]] = {}
        self._dims: list[int | None] | None = None
        self.can_cut = True

    def learn(self, size: int, outputs: Any) -> None:
        """Takes the outputs of a forward at one size.

        Args:
            size: The size.
            outputs: What the forward returned; only shapes are kept.

        Raises:
            CaptureError: The outputs' structure depends on the size.
        """
        leaves, spec = tree.flatten(outputs)
        if self._spec is not None and spec != self._spec:
            raise CaptureError(
                "The outputs' structure depends on the capture size: "
                f"{tree.difference(self._spec, spec, 'output')}. Return the same structure at every size."
            )
        self._spec = spec
        self._shapes[size] = [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        self._dims = None

    @property
    def num_sizes(self) -> int:
        """Sizes seen so far; one alone cannot tell a size from a constant."""
        return len(self._shapes)

    def dims(self) -> list[int | None]:
        """Returns the dynamic dimension of every output leaf, or None."""
        if self._dims is None:
            per_leaf = list(zip(*self._shapes.values(), strict=True))
            sizes = list(self._shapes)
            self._dims = [self._dim_of(sizes, list(shapes)) for shapes in per_leaf]
        return self._dims

    def _dim_of(self, sizes: list[int], shapes: list[torch.Size | None]) -> int | None:
        if any(shape is None for shape in shapes):
            return None
        known = [shape for shape in shapes if shape is not None]
        if len({len(shape) for shape in known}) != 1:
            self.can_cut = False
            return None
        changing = [dim for dim in range(len(known[0])) if len({shape[dim] for shape in known}) > 1]
        if not changing:
            return None
        if len(changing) > 1 or any(
            shape[changing[0]] != size for size, shape in zip(sizes, known, strict=True)
        ):
            self.can_cut = False
            return None
        return changing[0]

    def apply(self, outputs: Any, real_size: int | None, padded_size: int | None, *, copy: bool) -> Any:
        """Cuts outputs to the real size.

        Args:
            outputs: What the forward returned at the padded size.
            real_size: Rows that are real; None where all shapes are fixed.
            padded_size: The capture size that ran; None likewise.
            copy: Whether tensors are cloned.

        Returns:
            The same structure; tensors are fresh copies, or views of what was given.
        """
        if type(outputs) is torch.Tensor:
            return _cut(outputs, self.dims()[0] if real_size != padded_size else None, real_size, copy)
        if not copy and real_size == padded_size and type(outputs) is tuple:
            if all(type(leaf) is torch.Tensor for leaf in outputs):
                return outputs
        leaves, spec = tree.flatten(outputs)
        dims = self.dims() if real_size != padded_size else [None] * len(leaves)
        cut = [
            _cut(leaf, dim, real_size, copy) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        return tree.unflatten(spec, cut)


def _cut(output: torch.Tensor, dim: int | None, real_size: int | None, copy: bool) -> torch.Tensor:
    real = output if dim is None or real_size is None else output.narrow(dim, 0, real_size)
    return real.clone() if copy else real
