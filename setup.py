"""Package list of the wheel: the folders of ``package-dir`` in pyproject.toml with all below them.

Everything else stands in pyproject.toml. This file exists because setuptools' own finder cannot put a
prefix before what it finds, and a list kept by hand would forget the next subpackage.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def packages() -> list[str]:
    """Returns every package by the name under which it installs."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        package_dir = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    found = []
    for name, folder in package_dir.items():
        found.append(name)
        found += [f"{name}.{below}" for below in find_packages(str(ROOT / folder))]
    return found


setup(packages=packages())
