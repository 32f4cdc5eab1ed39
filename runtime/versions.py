"""Versions of what a build or a measurement was made with."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

_PACKAGES = ("sgl-piecewise", "torch", "triton", "numpy", "transformers", "tokenizers")


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that matter; what is not installed is left out."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # The build ("2.13.0+cpu") says more than the package's version.
    versions["torch"] = str(torch.__version__)
    if torch.version.cuda is not None:
        versions["cuda"] = str(torch.version.cuda)
    return versions
