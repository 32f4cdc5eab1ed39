"""Every error the library raises, in one small hierarchy.

Each class is also a built-in kind, so callers may catch either. A message says what happened,
where (mark name, shape key, segment number, path in a tree) and what to do, with both sides of a
mismatch. This module imports nothing of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SglPiecewiseError(Exception):
    """Base of all errors raised on purpose by this library."""


class ConfigError(SglPiecewiseError, ValueError):
    """A setting, option or size that cannot be accepted."""


class CaptureError(SglPiecewiseError, RuntimeError):
    """Capture could not go on; nothing half-captured is left behind."""


class CaptureForbiddenError(CaptureError):
    """Captured code did what a graph cannot hold: a host sync, a data-dependent shape."""


class UnjoinedStreamError(CaptureError):
    """A stream that left or entered the capture was not (or cannot be) joined."""


class OutsideWriteError(CaptureError):
    """Captured code would write into memory of which it only holds a copy."""


class ReplayError(SglPiecewiseError, RuntimeError):
    """A replay found something other than what was captured."""


class BreakMismatchError(ReplayError):
    """A marked function returned another structure, shape, dtype, device or scalar at replay."""


class MovedAddressError(ReplayError):
    """A tensor that the graphs read at a fixed address lives somewhere else now."""


class InputMismatchError(SglPiecewiseError, ValueError):
    """Inputs of a captured callable do not fit the buffers it was captured with."""


class CompileError(SglPiecewiseError, RuntimeError):
    """A forward could not be compiled, or met what it was not compiled for."""


class MarkResultError(CompileError):
    """A marked function gave compiled code another result than tracing was told it would."""


class RecompileError(CompileError):
    """A frozen forward was called as it was never compiled for."""


class BatchError(SglPiecewiseError, ValueError):
    """A batch whose fields contradict each other, or that something was asked of that it has not."""


class PoolError(SglPiecewiseError, RuntimeError):
    """KV slots were used in a way that would lose or mix requests' tokens."""


class SamplingError(SglPiecewiseError, RuntimeError):
    """No token can be chosen for a request: its logits hold NaN."""


class CheckpointError(SglPiecewiseError, ValueError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class DeviceUnavailableError(SglPiecewiseError, RuntimeError):
    """The device asked for is not on this machine."""


class MissingExtraError(SglPiecewiseError, ImportError):
    """An optional dependency is needed and not installed."""


class PieceCompilerUnavailable(MissingExtraError):  # noqa: N818 - says what it is, as the design names it
    """The compiler chosen for the pieces is not on this machine."""


def nearest(word: object, choices: Iterable[str]) -> str:
    """Returns the tail of an error message for an unknown word.

    Args:
        word: What was given; a word, or something that should have been one.
        choices: What would have been accepted.

    Returns:
        A sentence that names the nearest choice (if any is near) and lists all.
    """
    options = sorted(choices)
    near = nearest_word(word, options)
    hint = f"did you mean {near!r}? " if near is not None else ""
    return f"{hint}Known: {', '.join(options) or 'none'}."


def nearest_word(word: object, choices: Iterable[str]) -> str | None:
    """Returns the choice that an unknown word is nearest to, whatever its case; None if none is near."""
    by_lower = {one.lower(): one for one in choices}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None
