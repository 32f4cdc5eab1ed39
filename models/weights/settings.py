"""What the readers of both kinds of checkpoint check in settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sgl_piecewise.runtime.errors import CheckpointError, nearest


def known_architecture(word: Any, known: Collection[str], origin: str) -> str:
    """Returns a checkpoint's word for its architecture.

    Raises:
        CheckpointError: It is missing, or none of ``known``.
    """
    if word in known:
        return str(word)
    if word is None:
        raise CheckpointError(f"{origin}: names no architecture. Known: {', '.join(known)}.")
    raise CheckpointError(f"{origin}: architecture {word!r} is not supported. {nearest(str(word), known)}")


def required(settings: Mapping[str, Any], key: str, origin: str) -> Any:
    """Returns a setting.

    Raises:
        CheckpointError: It is missing or null.
    """
    value = settings.get(key)
    if value is None:
        raise CheckpointError(
            f"{origin}: the setting {key!r} is missing, and the model cannot be built without it."
        )
    return value


def shortest_period(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns the shortest beginning that gives the whole pattern when repeated and cut."""
    for length in range(1, len(pattern)):
        if all(value == pattern[index % length] for index, value in enumerate(pattern)):
            return pattern[:length]
    return pattern
