"""How long work says where it stands."""

from __future__ import annotations

from sgl_piecewise.runtime.capture.captured import ProgressCallback


def prefixed(progress: ProgressCallback, prefix: str) -> ProgressCallback:
    """Returns a callback that puts ``prefix`` before the names of phases."""
    return lambda phase, done, total: progress(f"{prefix}: {phase}", done, total)


def no_progress(phase: str, done: int, total: int) -> None:
    """For callers who do not watch."""
