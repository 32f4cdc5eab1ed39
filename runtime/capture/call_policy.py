"""When a compiled forward that is called like any other gets graphs, and how many."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ConfigError, nearest
from .session import CaptureMode
from .sizes import validate_capture_sizes
from .static_outputs import OUTPUT_MODES

CaptureChoice = Literal["auto", "none", "full", "breakable"]
PADDED_ROWS = ("checked", "trusted")
CAPTURE_CHOICES: tuple[CaptureChoice, ...] = ("auto", "none", "full", "breakable")


@dataclass(frozen=True, kw_only=True)
class CallPolicy:
    """What is captured while a compiled forward is being called.

    Attributes:
        capture: ``none``; ``full`` or ``breakable`` as for `capture`, on a CPU emulated; ``auto`` is
            ``breakable`` on CUDA and ``none`` elsewhere.
        capture_after: Calls of a shape that run without a graph before one captures it, at least one.
        capture_sizes: Values of the varying size that get a graph; None for every one that is met.
        dynamic_dims: Argument of the traced function to the dimension that follows the size, for example
            ``{"input_ids": 1}``. A call between capture sizes runs at the next larger one, its inputs padded and its
            outputs cut back, where that is sound; needs ``capture_sizes``. None pads nothing.
        pad_values: Such an argument to what padded rows hold; 0 where not named.
        padded_rows: ``checked`` pads only where the trace shows that padded rows reach no other row, no output
            without rows and no state; ``trusted`` takes the caller's word for that, as masks and marked functions need.
        max_graphs: The most recordings that one compiled forward holds.
        outputs: ``copy`` returns fresh tensors; ``view`` returns graph-owned ones, which the next replay of
            the same shape overwrites.

    Raises:
        ConfigError: A value that cannot be accepted.
    """

    capture: str = "auto"
    capture_after: int = 1
    capture_sizes: Sequence[int] | None = None
    dynamic_dims: Mapping[str, int] | None = None
    pad_values: Mapping[str, int | float | bool] | None = None
    padded_rows: str = "checked"
    max_graphs: int = 32
    outputs: str = "copy"

    def __post_init__(self) -> None:
        if self.capture not in CAPTURE_CHOICES:
            raise ConfigError(f"capture is {self.capture!r}. {nearest(self.capture, CAPTURE_CHOICES)}")
        if self.outputs not in OUTPUT_MODES:
            raise ConfigError(f"outputs is {self.outputs!r}. {nearest(self.outputs, OUTPUT_MODES)}")
        for name, value in (("capture_after", self.capture_after), ("max_graphs", self.max_graphs)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1.")
        if self.capture_sizes is not None:
            validate_capture_sizes(self.capture_sizes)
        self._check_padding()
        for one in dataclasses.fields(self):
            if self.capture == "none" and one.name != "capture" and getattr(self, one.name) != one.default:
                raise ConfigError(
                    f"{one.name} is given, but capture is 'none' and nothing would use it: leave one of them out."
                )

    def _check_padding(self) -> None:
        for name, value in (("dynamic_dims", self.dynamic_dims), ("pad_values", self.pad_values)):
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} must map argument names to values, as in {{'x': 0}}, got {type(value).__name__}."
                )
        for path, dim in (self.dynamic_dims or {}).items():
            if type(path) is not str or type(dim) is not int:
                raise ConfigError(
                    f"dynamic_dims[{path!r}] is {dim!r}; it maps an argument's name to an integer."
                )
        if self.padded_rows not in PADDED_ROWS:
            raise ConfigError(
                f"padded_rows is {self.padded_rows!r}. {nearest(str(self.padded_rows), PADDED_ROWS)}"
            )
        if self.padded_rows != "checked" and self.dynamic_dims is None:
            raise ConfigError("padded_rows needs dynamic_dims: without them nothing is padded.")
        if self.dynamic_dims is not None and self.capture_sizes is None:
            raise ConfigError("dynamic_dims needs capture_sizes: without them nothing is padded.")
        if self.dynamic_dims is not None and not self.dynamic_dims:
            raise ConfigError("dynamic_dims is empty; name a dimension, as in {'x': 0}, or leave it out.")
        for path in self.pad_values or {}:
            if path not in (self.dynamic_dims or {}):
                raise ConfigError(
                    f"pad_values[{path!r}] is never used: dynamic_dims does not name it. "
                    f"{nearest(path, self.dynamic_dims or ())}"
                )

    def mode_on(self, devices: Sequence[torch.device]) -> CaptureMode | None:
        """Returns how a forward with tensors on these devices is captured, or None if it is not."""
        is_on_cuda = any(device.type == "cuda" for device in devices)
        if self.capture == "auto":
            return "breakable" if is_on_cuda else None
        if not is_on_cuda and not any(device.type == "cpu" for device in devices):
            return None
        return {"full": "full", "breakable": "breakable"}.get(self.capture)  # type: ignore[return-value]
