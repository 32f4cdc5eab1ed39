"""The optional package FlashInfer: imported when something of it is asked for.

Source: flashinfer-python 0.6.6, whose Python API this library is written against.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..errors import MissingExtraError


def has_flashinfer() -> bool:
    """Tells whether FlashInfer is installed; does not import it."""
    return importlib.util.find_spec("flashinfer") is not None


def import_flashinfer(*, purpose: str) -> Any:
    """Imports FlashInfer.

    Args:
        purpose: What it is needed for, completing "is needed to ...".

    Returns:
        The package.

    Raises:
        MissingExtraError: It is not installed.
    """
    if not has_flashinfer():
        raise MissingExtraError(
            f"The package 'flashinfer' is needed to {purpose} and is not installed. Install it with: "
            "pip install 'sgl-piecewise[flashinfer]', or choose Triton instead."
        )
    return importlib.import_module("flashinfer")
