"""Profiles as files: read back, and refused where they are of another form."""

from __future__ import annotations

import json
from pathlib import Path

from sgl_piecewise.runtime.build_profile import SCHEMA, SCHEMA_VERSION, BuildProfile
from sgl_piecewise.runtime.errors import ConfigError

from ..comparison.plain import from_plain


def read_profile(path: Path) -> BuildProfile:
    """Reads a profile that the option ``profile`` or the command wrote.

    Raises:
        ConfigError: There is no such file, it is no profile, or a newer version wrote it.
    """
    try:
        return profile_from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"The profile {path} cannot be read: {err}") from err


def profile_from_json(text: str, where: str = "the text") -> BuildProfile:
    """Reads a profile from JSON.

    Args:
        text: The document.
        where: Where it is from, for errors.

    Raises:
        ConfigError: It is no profile, or a newer version wrote it.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{where} is no profile of a build: {err}.") from err
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise ConfigError(f"{where} is no profile of a build: schema {found!r}, expected {SCHEMA!r}.")
    version = document.get("schema_version")
    if type(version) is not int or version > SCHEMA_VERSION:
        raise ConfigError(
            f"{where} was written by a newer version: form {version!r}, and this one reads up to {SCHEMA_VERSION}. "
            "Update sgl-piecewise, or profile again."
        )
    profile: BuildProfile = from_plain(BuildProfile, document, "profile")
    return profile
