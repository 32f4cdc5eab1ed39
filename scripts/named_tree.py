"""Makes ``build/named/sgl_piecewise``: links to every file, laid out as the package installs.

mypy and import-linter read packages from folders and cannot follow setuptools' ``package-dir`` map. Run
inside ``build/named`` they see each module under the name by which users import it. With that folder on
``PYTHONPATH`` the package also runs without being installed: the tree holds the metadata by which PyTorch
finds the backend.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "named"


def main() -> None:
    """Replaces the tree; caches that tools left beside it stay."""
    with open(ROOT / "pyproject.toml", "rb") as config:
        config_tree = tomllib.load(config)
    package_dir = config_tree["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(TREE / "sgl_piecewise", ignore_errors=True)
    for name, folder in package_dir.items():
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_dir() or "__pycache__" in file.parts:
                continue
            link = TREE.joinpath(*name.split("."), file.relative_to(ROOT / folder))
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(file, link.parent))
    _write_metadata(config_tree["project"])


def _write_metadata(project: dict[str, Any]) -> None:
    """Writes name, version and entry points as an installed package has them."""
    for old in TREE.glob("*.dist-info"):
        shutil.rmtree(old)
    folder = TREE / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    (folder / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in groups.items()
        )
    )


if __name__ == "__main__":
    main()
