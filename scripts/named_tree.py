"""Makes ``build/named/sgl_piecewise``: links to every file, laid out as the package installs.

mypy and import-linter read packages from folders and cannot follow setuptools' ``package-dir`` map. Run
inside ``build/named`` they see each module under the name by which users import it. With that folder on
``PYTHONPATH`` the package also runs without being installed.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "named"


def main() -> None:
    """Replaces the tree; caches that tools left beside it stay."""
    with open(ROOT / "pyproject.toml", "rb") as config:
        package_dir = tomllib.load(config)["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(TREE / "sgl_piecewise", ignore_errors=True)
    for name, folder in package_dir.items():
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_dir() or "__pycache__" in file.parts:
                continue
            link = TREE.joinpath(*name.split("."), file.relative_to(ROOT / folder))
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(file, link.parent))


if __name__ == "__main__":
    main()
