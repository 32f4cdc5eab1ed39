"""Which source line is the user's own: errors name that, not a line of PyTorch's or of this runtime's."""

from __future__ import annotations

import os
import re
import sys
import traceback
from dataclasses import dataclass
from types import FrameType

import torch

# Not resolved: code names its file as it was found, which may be by a link. "<" begins code without a file.
_RUNTIME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(os.path.dirname(_RUNTIME), name, "") for name in ("runtime", "compiler", "passes")),
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


@dataclass(frozen=True, kw_only=True)
class UserLine:
    """A source line of the user's.

    Attributes:
        place: ``file:line``.
        code: The line's text; empty where it is not known.
        function: The function that it stands in.
    """

    place: str
    code: str = ""
    function: str = ""

    def __str__(self) -> str:
        return f"{self.place} ({self.code})" if self.code else self.place


def traced_user_line(stack_trace: str | None) -> UserLine:
    """Returns the innermost line of the user's in the text of a stack, as a traced graph keeps it for each node."""
    found = UserLine(place=_UNKNOWN)
    for match in _STACK_ENTRY.finditer(stack_trace or ""):
        filename, number, function, code = match.groups()
        if not filename.startswith(_NOT_THE_USERS):
            found = UserLine(place=f"{filename}:{number}", code=(code or "").strip(), function=function)
    return found


_STACK_ENTRY = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$(?:\n^ {3,}(?!File ")(.*)$)?', re.MULTILINE)
