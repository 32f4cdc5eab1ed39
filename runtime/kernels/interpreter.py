"""Triton's interpreter on the CPU: whether a kernel was made for it, and repairs that it needs.

Triton reads ``TRITON_INTERPRET=1`` when a kernel is defined, so it must be set before our kernel
modules are imported. Only tests and emulated runs come here; nothing of it is used on a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np


def is_interpreted(kernel: Any) -> bool:
    """Tells whether a kernel was defined for the interpreter."""
    return isinstance(kernel, _interpreter().InterpretedFunction)


@functools.cache
def repair_interpreter() -> None:
    """Repairs two things in the interpreter of Triton 3.6; harmless when done again.

    It keeps a scalar as an array of one element and calls ``int`` on it, which numpy 2.4 made an
    error: loop bounds. And it keeps bfloat16 as 16-bit integers, which its dot multiplies as such.
    """
    interpreter = _interpreter()
    original = vars(interpreter).get("_patch_lang_tensor")
    if original is not None:
        interpreter._patch_lang_tensor = functools.partial(_patch_tensor, original)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot_of_bfloat16(builder.create_dot)


def _patch_tensor(original: Callable[[Any, Any], None], tensor: Any, scope: Any) -> None:
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot_of_bfloat16(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a dot that widens bfloat16 operands to float32 first, which is exact."""
    interpreter, language = _interpreter(), importlib.import_module("triton.language")

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, language.float32)

    @functools.wraps(original)
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widened(a), widened(b), *rest)

    return create_dot


def _interpreter() -> Any:
    return importlib.import_module("triton.runtime.interpreter")
