"""Environment variables: read here and nowhere else.

| variable | meaning | default |
|---|---|---|
| ``SGL_PIECEWISE_CACHE`` | Folder for what is downloaded or compiled once. | ``~/.cache/sgl-piecewise`` |
| ``CUBLAS_WORKSPACE_CONFIG`` | cuBLAS's own. Without it PyTorch's deterministic mode refuses matrix products. | none |

What is read is a value for the edge to pass on as an argument; nothing below the edge asks again.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder for files that may be deleted and made again; it need not exist yet."""
    given = os.environ.get("SGL_PIECEWISE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "sgl-piecewise"


def has_cublas_workspace_config() -> bool:
    """Returns whether cuBLAS is told which workspaces to use."""
    return "CUBLAS_WORKSPACE_CONFIG" in os.environ
