"""One build twice, each in a fresh process: on an empty cache folder, then on the one that the first filled."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sgl_piecewise.runtime.build_profile import BuildProfile
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.errors import CompileError, ConfigError

from .reading import read_profile

COLD, WARM = "cold", "warm"


def profile_cold_and_warm(
    arguments: Sequence[str],
    cache_folder: Path | None = None,
    on_progress: ProgressCallback | None = None,
    *,
    keeps_pieces: bool = True,
) -> dict[str, BuildProfile]:
    """Runs ``sgl-piecewise profile`` twice, in turn.

    Args:
        arguments: The command's, without files to write.
        cache_folder: Must be empty or not exist, and stays; None makes one that is deleted afterwards.
        on_progress: Called with (phase, done, total).
        keeps_pieces: Whether the strategy's compiler keeps pieces on disk, so that it takes a folder for them.

    Returns:
        The two profiles.

    Raises:
        ConfigError: The folder is not empty.
        CompileError: A process failed; the message ends with what it wrote.
    """
    if cache_folder is not None and cache_folder.exists() and any(cache_folder.iterdir()):
        raise ConfigError(
            f"The cache folder {cache_folder} is not empty, so the first build would not be cold."
        )
    report = on_progress or (lambda phase, done, total: None)
    profiles = {}
    with tempfile.TemporaryDirectory(prefix="sgl-piecewise-") as scratch:
        folder = cache_folder or Path(scratch) / "cache"
        for index, title in enumerate((COLD, WARM)):
            report(f"{title} build", index, 2)
            file = Path(scratch) / f"{title}.json"
            kept_in = ("--cache-folder", str(folder)) if keeps_pieces else ()
            _run([*arguments, *kept_in, "--json", str(file)], Path(scratch), title)
            profiles[title] = read_profile(file)
        report("warm build", 2, 2)
    return profiles


def _run(arguments: Sequence[str], scratch: Path, title: str) -> None:
    """Runs the command in a process whose other compile caches are empty or as the first process left them."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sgl_piecewise", "profile", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        raise CompileError(f"The {title} build failed (exit code {done.returncode}):\n{done.stderr.strip()}")
