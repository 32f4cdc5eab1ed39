"""One leaf of a captured callable's arguments: what was captured, and the check of what a call passes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError, InputMismatchError


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


def refuse_unusual(path: str, value: torch.Tensor) -> None:
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


def check_pad_value(path: str, pad_value: int | float | bool, dtype: torch.dtype) -> None:
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


def new_buffer(value: torch.Tensor) -> torch.Tensor:
    """Returns a flat buffer with the tensor's elements; a normal tensor, also in inference mode."""
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


def check_leaf(leaf: InputLeaf, value: Any) -> int | None:
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
