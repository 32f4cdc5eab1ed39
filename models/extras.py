"""Optional packages, imported where they are used and named when they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from sgl_piecewise.runtime.errors import MissingExtraError


def import_extra(module: str, *, purpose: str) -> Any:
    """Imports a module of a package that the extra ``models`` installs.

    Args:
        module: Its dotted name.
        purpose: What it is needed for, completing "is needed to ...".

    Returns:
        The module.

    Raises:
        MissingExtraError: The package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name != package:
            raise  # the package is there, and broken in its own way
        raise MissingExtraError(
            f"The package {package!r} is needed to {purpose} and is not installed. "
            "Install it with: pip install 'sgl-piecewise[models]'"
        ) from err
