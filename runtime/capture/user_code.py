"""Which source line is the user's own: errors name that, not a line of PyTorch's or of this runtime's."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType

import torch

# Not resolved: code names its file as it was found, which may be by a link. "<" begins code without a file.
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<",
)
_UNKNOWN = "an unknown line"


def current_user_line() -> str:
    """Returns ``file:line`` of the innermost frame of the user's that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_NOT_THE_USERS):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return _UNKNOWN


def raising_user_line(error: BaseException) -> str:
    """Returns ``file:line (code)`` of the innermost frame of the user's that an error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return _UNKNOWN
