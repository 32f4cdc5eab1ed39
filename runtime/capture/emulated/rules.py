"""What CUDA refuses while a stream is being captured, told by the operator and its arguments.

Host and device tensors look alike on the emulated device, so the rules go by what an operator
must do on CUDA: give a value to the host, choose a shape from values, copy from pageable memory.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from ...errors import CaptureForbiddenError

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_RUNTIME_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_REMEDY = "Put it into a function marked @eager_on_graph, or do it before the capture."


def user_line() -> str:
    """Returns ``file:line`` of the nearest frame that is neither PyTorch's nor this runtime's."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH_FOLDER, _RUNTIME_FOLDER)) and not filename.startswith("<"):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def forbidden(what: str, why: str, remedy: str = _REMEDY) -> CaptureForbiddenError:
    """Makes the error for something that a graph cannot hold."""
    return CaptureForbiddenError(f"{what} at {user_line()} cannot be captured: {why}. {remedy}")


def check_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises CaptureForbiddenError for an operator that CUDA refuses to capture."""
